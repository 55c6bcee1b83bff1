"""Linear alignment: one matrix between the text's and the image's global embeddings.

    score(I, T) = ⟨f_I, normalise(A f_T)⟩,   A (D, D), the identity at first

Source: Koishigarina, Uselis and Oh 2026 (arXiv 2502.03566, LABCLIP).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.choices import check_numbers
from engine.features import ImageFeatures, Needs, TextFeatures
from engine.heads.base import EncoderFacts, Head, HeadConfig
from engine.heads.inputs import encoder_sizes, unit


@dataclass(frozen=True)
class LinearAlignmentConfig(HeadConfig):
    """Size of a `LinearAlignment`."""

    embed_dim: int = 0
    """Width of the encoder's embeddings; 0 takes its own."""
    initial_scale: float = 1.0
    """Scale of the contrastive logits at the start; learned. The paper starts at 1."""

    def __post_init__(self) -> None:
        check_numbers(self, above_zero=("initial_scale",), integers={"embed_dim": 0})

    def fitted(self, encoder: EncoderFacts) -> LinearAlignmentConfig:
        return replace(self, **encoder_sizes(LinearAlignment.name, encoder, self, {"embed_dim": encoder.embed_dim}))


class LinearAlignment(Head):
    """cos(f_I, A f_T): it can be indexed as global embeddings are, for A is applied to the text alone."""

    name: ClassVar[str] = "linear"
    config_type = LinearAlignmentConfig
    config: LinearAlignmentConfig

    def __init__(self, config: LinearAlignmentConfig, *, encoder: str = "", fingerprint: str = "") -> None:
        super().__init__(config, encoder=encoder, fingerprint=fingerprint)
        self.a = nn.Parameter(torch.eye(config.embed_dim))
        self.log_scale = nn.Parameter(torch.tensor(config.initial_scale).log())

    def needs(self) -> Needs:
        """Nothing but the embeddings every encoder gives."""
        return Needs()

    def encode_texts(self, texts: TextFeatures) -> Tensor:
        """Aligned text embeddings `(B, D)`, unit norm, float32."""
        return unit(texts.embedding.to(self.a) @ self.a.T)

    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Cosines `(n_images, n_texts)`."""
        self.check(images, texts)
        return unit(images.embedding) @ self.encode_texts(texts).T

    def pairs(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Cosines `(n,)` of image i with text i."""
        self.check_pairs(images, texts)
        return (unit(images.embedding) * self.encode_texts(texts)).sum(dim=-1)

    def scale(self) -> Tensor:
        """The learned scale of the contrastive logits, at most 200."""
        return self.log_scale.exp().clamp(max=200.0)
