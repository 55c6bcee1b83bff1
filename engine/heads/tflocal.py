"""TFLocal: a small transformer over the frozen patches of an image and the frozen tokens of a text, one score a pair.

Source: Miranda, Salaberria, Agirre and Azkune 2026 (arXiv 2604.11496), which gives 13.3 M trainable parameters on
ViT-B/32 and no layout. The layout here (width of the text tower, 4 pre-norm layers, MLPs four times as wide, a learned
score token, two side embeddings) is ours; at those widths it has 13,268,993.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from engine.choices import check_numbers
from engine.features import ImageFeatures, Needs, TextFeatures
from engine.heads.base import EncoderFacts, Head, HeadConfig
from engine.heads.inputs import (
    check_grid,
    check_reach,
    chosen_layers,
    encoder_sizes,
    grid_of,
    kept_tokens,
    patch_states,
    shortened,
    token_states,
)
from engine.heads.neighbourhood import Neighbourhood
from engine.heads.pair_transformer import PairSizes, PairTransformer, Side, head_count


@dataclass(frozen=True)
class TFLocalConfig(HeadConfig):
    """Sizes of a `TFLocal`; fitted to ViT-B/32 they give 13.3 M parameters."""

    layers: int = 4
    """Transformer layers."""
    width: int = 0
    """Width of the layers; 0 takes that of the text tower."""
    heads: int = 0
    """Attention heads; 0 gives each 64 numbers."""
    mlp: int = 0
    """Width of the MLPs; 0 takes four times the width."""
    reach: int = 0
    """Patches on every side that one is read with, by a small convolution; 0 reads it alone, as in the paper."""
    image_layers: tuple[int, ...] = ()
    """Image blocks, from 1, whose patches are read; none takes the last."""
    text_layers: tuple[int, ...] = ()
    """Text blocks, from 1, whose tokens are read; none takes the last."""
    image_width: int = 0
    """Width of the encoder's image states; 0 takes its own."""
    text_width: int = 0
    """Width of the encoder's text states; 0 takes its own."""
    grid: tuple[int, ...] = ()
    """Rows and columns of the encoder's patches; none takes its own."""

    def __post_init__(self) -> None:
        sizes = ("layers", "width", "heads", "mlp", "reach", "image_width", "text_width")
        check_numbers(self, integers=dict.fromkeys(sizes, 0) | {"image_layers": 1, "text_layers": 1, "grid": 1})
        check_grid("TFLocalConfig", self.grid)

    def fitted(self, encoder: EncoderFacts) -> TFLocalConfig:
        who, grid = TFLocal.name, grid_of(TFLocal.name, encoder)
        check_reach(who, self.reach, grid)
        sizes = {"image_width": encoder.image_width, "text_width": encoder.text_width, "grid": grid}
        last_image, last_text = (encoder.image_layers,), (encoder.text_layers,)
        width = self.width or encoder.text_width
        return replace(
            self,
            width=width,
            heads=self.heads or head_count(width),
            mlp=self.mlp or 4 * width,
            image_layers=chosen_layers(who, "image", self.image_layers, last_image, encoder.image_layers),
            text_layers=chosen_layers(who, "text", self.text_layers, last_text, encoder.text_layers),
            **encoder_sizes(who, encoder, self, sizes),
        )

    @property
    def sizes(self) -> PairSizes:
        """Sizes of the transformer. Raises ValueError for a width that its heads do not divide."""
        if self.layers < 1 or self.heads < 1 or self.width % self.heads:
            raise ValueError(
                "TFLocalConfig: needs at least one layer and a width that is a multiple of heads, got "
                f"{self.layers} layers, width {self.width}, {self.heads} heads"
            )
        text = len(self.text_layers) * self.text_width
        image = self.width if self.reach else self.patch_width
        return PairSizes(image, text, self.width, self.layers, self.heads, self.mlp)

    @property
    def patch_width(self) -> int:
        """Width of the patch states, all layers side by side."""
        return len(self.image_layers) * self.image_width


class TFLocal(Head):
    """One transformer over patches and tokens of each pair: it cannot be indexed, but sees both sides at once."""

    name: ClassVar[str] = "tflocal"
    config_type = TFLocalConfig
    config: TFLocalConfig

    def __init__(self, config: TFLocalConfig, *, encoder: str = "", fingerprint: str = "") -> None:
        super().__init__(config, encoder=encoder, fingerprint=fingerprint)
        self.transformer = PairTransformer(config.sizes)
        self.around: Neighbourhood | None = None
        if config.reach:
            self.around = Neighbourhood(
                config.patch_width, config.grid, width=config.width, reach=config.reach, out=config.width
            )

    def needs(self) -> Needs:
        """Hidden states of the layers it was configured with."""
        return Needs(image_layers=self.config.image_layers, text_layers=self.config.text_layers)

    def sides(self, images: ImageFeatures, texts: TextFeatures) -> tuple[Side, Side]:
        """Both sides projected, each row once."""
        like = self.transformer.score_token
        patches = patch_states(images, self.config.image_layers, math.prod(self.config.grid), like)
        if self.around is not None:
            patches = self.around(patches)
        texts = shortened(texts)
        seen, _ = kept_tokens(texts)
        whole = torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
        tokens = token_states(texts, self.config.text_layers, like)
        return self.transformer.image_side(patches, whole), self.transformer.text_side(tokens, seen)

    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Scores `(n_images, n_texts)`, in blocks of pairs over cached projections."""
        self.check(images, texts)
        return self.transformer.matrix(*self.sides(images, texts))

    def pairs(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Scores `(n,)` of image i with text i."""
        self.check_pairs(images, texts)
        return self.transformer.pairs(*self.sides(images, texts))

    def chosen(self, images: ImageFeatures, texts: TextFeatures, image_rows: Tensor, text_rows: Tensor) -> Tensor:
        """Scores `(n,)` of image `image_rows[k]` with text `text_rows[k]`; every row is projected once."""
        self.check(images, texts)
        image_side, text_side = self.sides(images, texts)
        return self.transformer.pairs(image_side.rows(image_rows), text_side.rows(text_rows))

    def attention(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Where each text position looks, `(n, T, P)`, mean over heads and layers, of image i with text i."""
        self.check_pairs(images, texts)
        return self.transformer.attention(*self.sides(images, texts))
