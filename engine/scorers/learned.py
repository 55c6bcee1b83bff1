"""What scorers with a trained head have in common: where the head comes from, and that it fits the features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from engine.features import ImageFeatures, Needs, TextFeatures
from engine.heads.base import Head, check_belongs, shipped_head
from engine.heads.registry import load_head
from engine.scorers.base import Scorer


@dataclass(frozen=True)
class HeadScorer(Scorer):
    """A scorer whose numbers come from a trained head of the same name.

    Attributes:
        head: a file that `peaksim train` wrote, or a `Head` object; None takes the head shipped for `scenes`.
    """

    head: str | Head | None = None

    @property
    def module(self) -> Head:
        """The head on the CPU, or the object that was given.

        Raises FileNotFoundError for a file that is not there, ValueError for one that holds something else.
        """
        if isinstance(self.head, Head):
            return self._of_this_kind(self.head)
        return self._of_this_kind(_stored(*self._file(), "cpu"))

    def needs(self) -> Needs:
        """What the head reads."""
        return self.module.needs()

    def check_encoder(self, fingerprint: str) -> None:
        """Raise ValueError when the head belongs to another encoder."""
        check_belongs(f"{self.name}: features", self.module, fingerprint)

    def check(self, images: ImageFeatures, texts: TextFeatures, *, aligned_taps: Sequence[str] = ()) -> None:
        """As every scorer's, and the features must come from the encoder the head was trained on."""
        super().check(images, texts, aligned_taps=aligned_taps)
        for what, features in (("images", images), ("texts", texts)):
            check_belongs(f"{self.name}: the {what}", self.module, features.fingerprint)

    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Scores `(n_images, n_texts)`, float32."""
        self.check(images, texts)
        with torch.no_grad():
            return self.on(images.embedding.device).matrix(images, texts)

    def pairs(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Scores `(n,)` of image i with text i, float32."""
        self.check_pairs(images, texts)
        with torch.no_grad():
            return self.on(images.embedding.device).pairs(images, texts)

    def on(self, device: torch.device) -> Head:
        """The head where the features are. Raises ValueError for an object that is elsewhere."""
        if not isinstance(self.head, Head):
            return self._of_this_kind(_stored(*self._file(), str(device)))
        held = next(self.head.parameters()).device
        if held != device:
            raise ValueError(f"{self.name}: the head must be on {device}, where the features are, got {held}; move it")
        return self.head

    def _file(self) -> tuple[str, int]:
        """Path of the head and when it was written: a file that was replaced is read again."""
        assert not isinstance(self.head, Head)
        path = Path(self.head) if self.head else shipped_head(self.name)
        return str(path), path.stat().st_mtime_ns if path.is_file() else 0

    def _of_this_kind(self, head: Head) -> Head:
        if head.name != self.name:
            raise ValueError(f"{self.name}: head must be a {self.name}, got a {head.name}")
        return head


@lru_cache(maxsize=16)
def _stored(path: str, written_ns: int, device: str) -> Head:
    return load_head(path).to(device)
