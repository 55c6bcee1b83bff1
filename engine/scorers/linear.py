"""Linear alignment: the cosine after one trained matrix on the text's side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.features import ImageFeatures, TextFeatures
from engine.scorers.base import Match, caption, whole_image
from engine.scorers.learned import HeadScorer


@dataclass(frozen=True)
class LinearScorer(HeadScorer):
    """`score(I, T) = cos(f_I, A f_T)` (Koishigarina, Uselis and Oh 2026).

    Attributes:
        head: see `HeadScorer`.
    """

    name: ClassVar[str] = "linear"

    def matches(self, images: ImageFeatures, texts: TextFeatures) -> list[Match]:
        """The caption and the whole image: there are no parts."""
        return [Match(caption(texts), whole_image(images), float(self.pairs(images, texts)[0]), 1.0)]
