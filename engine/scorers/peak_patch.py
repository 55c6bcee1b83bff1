"""The global cosine, corrected for what a text tower drops on its last layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from engine.choices import Backend, check_choice
from engine.features import ImageFeatures, TextFeatures
from engine.heads.base import check_belongs
from engine.heads.peak_patch import PeakPatch
from engine.scorers.base import Match, caption, whole_image
from engine.scorers.late import LateQueries
from engine.scorers.learned import HeadScorer


@dataclass(frozen=True)
class PeakPatchScorer(HeadScorer):
    """`score(I, T) = ⟨f(I), ecn(T)⟩ + scn(I, T)`: a corrected caption, and a bounded step for each pair.

    What the head was trained for is scored: the embedding correction alone, which can be indexed, the score
    correction alone, or both. Paper: Lu, Chen and Chaterji 2026, "PeakPatch", arXiv 2607.23271.

    Attributes:
        head: see `HeadScorer`.
        backend: of the ops; None chooses by device.
    """

    name: ClassVar[str] = "peakpatch"
    backend: Backend | None = None

    def __post_init__(self) -> None:
        if self.backend is not None:
            check_choice(self.name, "backend", self.backend, get_args(Backend))

    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Scores `(n_images, n_texts)`, float32."""
        self.check(images, texts)
        with torch.no_grad():
            return self._head(images.embedding.device).score_all(images, texts, backend=self.backend)

    def pairs(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Scores `(n,)` of image i with text i, float32."""
        self.check_pairs(images, texts)
        with torch.no_grad():
            return self._head(images.embedding.device).score_pairs(images, texts, backend=self.backend)

    def late_queries(self, texts: TextFeatures) -> LateQueries | None:
        """The corrected embedding; None with a correction of the score, which needs the image."""
        head = self._head(texts.embedding.device)
        if head.scn is not None:
            return None
        check_belongs(f"{self.name}: the texts", head, texts.fingerprint)
        with torch.no_grad():
            corrected = head.captions(texts, backend=self.backend).text
        return LateQueries("global", corrected[:, None], torch.ones(len(texts), 1))

    def matches(self, images: ImageFeatures, texts: TextFeatures) -> list[Match]:
        """The parts of the score: the encoder's cosine, then what each correction of the head adds to it."""
        self.check_pairs(images, texts)
        head, place = self._head(images.embedding.device), whole_image(images)
        with torch.no_grad():
            found = head.correct_pairs(images, texts, backend=self.backend)
        before = float((images.embedding.float() * texts.embedding.float()).sum())
        parts = [Match(caption(texts), place, before, 1.0)]
        if head.ecn is not None:
            parts.append(Match("correction of the caption", place, float(found.cosine) - before, 1.0))
        if head.scn is not None:
            parts.append(Match("correction of the score", place, float(found.correction), 1.0))
        return parts

    def _head(self, device: torch.device) -> PeakPatch:
        head = self.on(device)
        assert isinstance(head, PeakPatch)  # `on` has seen to its name
        return head
