"""TFGlobal: a trained transformer over the two global embeddings of each pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.features import ImageFeatures, TextFeatures
from engine.scorers.base import Match, caption, whole_image
from engine.scorers.learned import HeadScorer


@dataclass(frozen=True)
class TFGlobalScorer(HeadScorer):
    """`score(I, T)` = the head's number for the pair; a logit, not a cosine (Miranda et al. 2026).

    Attributes:
        head: see `HeadScorer`.
    """

    name: ClassVar[str] = "tfglobal"

    def matches(self, images: ImageFeatures, texts: TextFeatures) -> list[Match]:
        """The caption and the whole image: there are no parts."""
        return [Match(caption(texts), whole_image(images), float(self.pairs(images, texts)[0]), 1.0)]
