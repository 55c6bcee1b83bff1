"""Max-sim over trained projections of frozen patches and frozen tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from engine.choices import Backend, check_choice
from engine.features import ImageFeatures, TextFeatures
from engine.heads.base import check_belongs
from engine.heads.max_sim_head import MaxSimHead
from engine.scorers.base import Match
from engine.scorers.late import LateQueries
from engine.scorers.learned import HeadScorer
from engine.scorers.max_sim import patch_box

Maximum = Literal["soft", "hard"]


@dataclass(frozen=True)
class MaxSimHeadScorer(HeadScorer):
    """`score(I, T) = Σ_u g_u · max_p ⟨q_u, d_p⟩` over words u with gates g and patches p, both projected by a head.

    The two sides do not see each other, so that patch vectors can be indexed.

    Attributes:
        head: see `HeadScorer`.
        maximum: `"soft"`, `τ·logsumexp(s/τ)` with the head's last temperature, or `"hard"`, what an index scores.
        backend: of the max-sim op; None chooses by device.
    """

    name: ClassVar[str] = "max_sim_head"
    maximum: Maximum = "soft"
    backend: Backend | None = None

    def __post_init__(self) -> None:
        check_choice(self.name, "maximum", self.maximum, get_args(Maximum))
        if self.backend is not None:
            check_choice(self.name, "backend", self.backend, get_args(Backend))

    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Scores `(n_images, n_texts)`, float32."""
        self.check(images, texts)
        return self._scores(images, texts, pairs=False).T

    def pairs(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Scores `(n,)` of image i with text i, float32."""
        self.check_pairs(images, texts)
        return self._scores(images, texts, pairs=True)

    def late_queries(self, texts: TextFeatures) -> LateQueries:
        """The projected words with their gates."""
        check_belongs(f"{self.name}: the texts", self.module, texts.fingerprint)
        head = self._head(texts.embedding.device)
        with torch.no_grad():
            vectors, gates, words = head.encode_texts(texts)
        soft = head.temperature if self.maximum == "soft" else None
        return LateQueries("head", vectors, gates.masked_fill(~words, 0), soft)

    def matches(self, images: ImageFeatures, texts: TextFeatures) -> list[Match]:
        """Every word with its best patch; the weights are the gates."""
        self.check_pairs(images, texts)
        head = self._head(images.embedding.device)
        with torch.no_grad():
            d, (q, gates, words) = head.encode_images(images), head.encode_texts(texts)
        similarity = q[0] @ d[0].T  # (T, P)
        best = similarity.argmax(dim=1).tolist()
        rows, columns = head.config.grid
        placed = replace(images, grid=(rows, columns))
        names = texts.token_texts[0] if texts.token_texts else ()
        return [
            Match(
                names[u] if u < len(names) else f"token {u}",
                patch_box(placed, best[u]),
                float(similarity[u, best[u]]),
                float(gates[0, u]),
            )
            for u in words[0].nonzero().flatten().tolist()
        ]

    def _scores(self, images: ImageFeatures, texts: TextFeatures, *, pairs: bool) -> Tensor:
        """Scores `(n_texts, n_images)`, or `(n,)` of pairs."""
        head = self._head(images.embedding.device)
        temperature = head.temperature if self.maximum == "soft" else None
        with torch.no_grad():
            return head.compare(
                head.encode_images(images),
                head.encode_texts(texts),
                temperature,
                pairs=pairs,
                backend=self.backend,
            )

    def _head(self, device: torch.device) -> MaxSimHead:
        head = self.on(device)
        assert isinstance(head, MaxSimHead)  # `on` has seen to its name
        return head
