"""TFGlobal: TFLocal's transformer over the two global embeddings alone; what it cannot do shows what patches are for.

Source: Miranda, Salaberria, Agirre and Azkune 2026 (arXiv 2604.11496). The layout is ours, see
`engine.heads.tflocal`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from engine.choices import check_numbers
from engine.features import ImageFeatures, Needs, TextFeatures
from engine.heads.base import EncoderFacts, Head, HeadConfig
from engine.heads.inputs import encoder_sizes
from engine.heads.pair_transformer import PairSizes, PairTransformer, Side, head_count


@dataclass(frozen=True)
class TFGlobalConfig(HeadConfig):
    """Sizes of a `TFGlobal`."""

    layers: int = 4
    """Transformer layers."""
    width: int = 0
    """Width of the layers; 0 takes that of the text tower."""
    heads: int = 0
    """Attention heads; 0 gives each 64 numbers."""
    mlp: int = 0
    """Width of the MLPs; 0 takes four times the width."""
    embed_dim: int = 0
    """Width of the encoder's embeddings; 0 takes its own."""

    def __post_init__(self) -> None:
        check_numbers(self, integers=dict.fromkeys(("layers", "width", "heads", "mlp", "embed_dim"), 0))

    def fitted(self, encoder: EncoderFacts) -> TFGlobalConfig:
        width = self.width or encoder.text_width
        return replace(
            self,
            width=width,
            heads=self.heads or head_count(width),
            mlp=self.mlp or 4 * width,
            **encoder_sizes(TFGlobal.name, encoder, self, {"embed_dim": encoder.embed_dim}),
        )


class TFGlobal(Head):
    """One transformer over the global embeddings of each pair."""

    name: ClassVar[str] = "tfglobal"
    config_type = TFGlobalConfig
    config: TFGlobalConfig

    def __init__(self, config: TFGlobalConfig, *, encoder: str = "", fingerprint: str = "") -> None:
        super().__init__(config, encoder=encoder, fingerprint=fingerprint)
        if config.layers < 1 or config.heads < 1 or config.width % config.heads:
            raise ValueError(
                "TFGlobalConfig: needs at least one layer and a width that is a multiple of heads, got "
                f"{config.layers} layers, width {config.width}, {config.heads} heads"
            )
        sizes = PairSizes(config.embed_dim, config.embed_dim, config.width, config.layers, config.heads, config.mlp)
        self.transformer = PairTransformer(sizes)

    def needs(self) -> Needs:
        """Nothing but the embeddings every encoder gives."""
        return Needs()

    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Scores `(n_images, n_texts)`, in blocks of pairs over cached projections."""
        self.check(images, texts)
        return self.transformer.matrix(*self._sides(images, texts))

    def pairs(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Scores `(n,)` of image i with text i."""
        self.check_pairs(images, texts)
        return self.transformer.pairs(*self._sides(images, texts))

    def _sides(self, images: ImageFeatures, texts: TextFeatures) -> tuple[Side, Side]:
        like = self.transformer.score_token
        image, text = (features.embedding.to(like)[:, None] for features in (images, texts))
        there = [torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) for x in (image, text)]
        return self.transformer.image_side(image, there[0]), self.transformer.text_side(text, there[1])
