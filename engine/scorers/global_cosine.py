"""The global score: cosine of the image's and the caption's embedding, as the encoder was trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.features import ImageFeatures, Needs, TextFeatures
from engine.scorers.base import Match, Scorer, caption, whole_image
from engine.scorers.late import LateQueries


@dataclass(frozen=True)
class GlobalCosine(Scorer):
    """`score(I, T) = ⟨f(I), g(T)⟩` of the unit-norm global embeddings: one vector a side, no parts.

    Example:
        >>> import torch
        >>> from engine.features import ImageFeatures, TextFeatures
        >>> images = ImageFeatures(torch.eye(2))
        >>> GlobalCosine().matrix(images, TextFeatures(torch.tensor([[0.6, 0.8]]))).tolist()
        [[0.6000000238418579], [0.800000011920929]]
    """

    name: ClassVar[str] = "global"

    def needs(self) -> Needs:
        """Nothing beyond the global embeddings, which all features hold."""
        return Needs()

    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Cosines `(n_images, n_texts)`, float32."""
        self.check(images, texts)
        return images.embedding.float() @ texts.embedding.float().T

    def pairs(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Cosines `(n,)` of image i with text i, float32."""
        self.check_pairs(images, texts)
        return (images.embedding.float() * texts.embedding.float()).sum(dim=1)

    def late_queries(self, texts: TextFeatures) -> LateQueries:
        """One vector a text."""
        return LateQueries("global", texts.embedding[:, None], torch.ones(len(texts), 1))

    def matches(self, images: ImageFeatures, texts: TextFeatures) -> list[Match]:
        """One match: the whole caption with the whole image."""
        return [Match(caption(texts), whole_image(images), float(self.pairs(images, texts)[0]), 1.0)]
