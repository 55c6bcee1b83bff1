"""TFLocal: a trained transformer that reads patches and words of each pair together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from engine.features import ImageFeatures, TextFeatures
from engine.heads.inputs import kept_tokens, shortened
from engine.heads.tflocal import TFLocal
from engine.scorers.base import Match
from engine.scorers.learned import HeadScorer
from engine.scorers.max_sim import patch_box


@dataclass(frozen=True)
class TFLocalScorer(HeadScorer):
    """`score(I, T)` = the head's number for the pair; a logit, not a cosine (Miranda et al. 2026).

    Attributes:
        head: see `HeadScorer`.
    """

    name: ClassVar[str] = "tflocal"

    def matches(self, images: ImageFeatures, texts: TextFeatures) -> list[Match]:
        """Every word with the patch it looks at most; the scores are shares of its attention.

        Mean over heads and layers. Attention is no part of the score, so the weights are 0.
        """
        self.check_pairs(images, texts)
        head = self.on(images.embedding.device)
        assert isinstance(head, TFLocal)  # `on` has seen to its name
        with torch.no_grad():
            attention = head.attention(images, texts)[0]  # (T, P)
        texts = shortened(texts)
        _, words = kept_tokens(texts)
        best = attention.argmax(dim=1).tolist()
        rows, columns = head.config.grid
        placed = replace(images, grid=(rows, columns))
        names = texts.token_texts[0] if texts.token_texts else ()
        return [
            Match(
                names[u] if u < len(names) else f"token {u}",
                patch_box(placed, best[u]),
                float(attention[u, best[u]]),
                0.0,
            )
            for u in words[0].nonzero().flatten().tolist()
        ]
