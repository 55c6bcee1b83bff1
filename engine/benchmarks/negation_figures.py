"""Negation figures of a head while it trains: items are encoded once, the head scores them again and again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from engine.engine import Engine
from engine.features import ImageFeatures, Needs, TextFeatures
from engine.heads.base import Head
from engine.metrics import multiple_choice, rank_counts, recall_credit
from engine.scenes.negation import NEGATION_TEMPLATES, negation_items, retrieval_items

OPTIONS = 4
K = 5


@dataclass(frozen=True)
class _Encoded:
    """Features of the questions and of the pictures to be found, and what is right."""

    images: ImageFeatures
    options: TextFeatures
    right: list[int]
    kinds: list[str]
    pictures: ImageFeatures
    captions: TextFeatures
    denied: TextFeatures


class NegationFigures:
    """Multiple choice by kind of the right answer and recall among pictures, for the log of a training.

    Args:
        engine: whose encoder the head belongs to.
        items: of the multiple choice, and pictures of the retrieval.
        split, wording: of `engine.scenes.negation.negation_items`.
        seed: of the items; another than the benchmark's, so that watching the log does not choose by its items.
    """

    def __init__(
        self, engine: Engine, *, items: int = 150, split: str = "held_out", wording: str = "benchmark", seed: int = 7
    ) -> None:
        self.engine = engine
        self.items = items
        self.split = split
        self.wording = wording
        self.seed = seed
        self._encoded: tuple[Needs, _Encoded] | None = None

    def __call__(self, head: Head) -> dict[str, float]:
        """Shares in 0..1: `choice`, `choice_<kind>`, `r@5` and `r-neg@5`."""
        held = self._features(head.needs())
        device = next(head.parameters()).device
        with torch.no_grad():
            rows = torch.arange(len(held.images)).repeat_interleave(OPTIONS)
            scores = head.pairs(held.images[rows].to(device), held.options.to(device)).view(-1, OPTIONS)
            credit = torch.from_numpy(multiple_choice(scores.cpu(), held.right).credit)
            found = {"choice": float(credit.mean())}
            for kind in NEGATION_TEMPLATES:
                mine = [row for row, other in enumerate(held.kinds) if other == kind]
                if mine:
                    found[f"choice_{kind}"] = float(credit[mine].mean())
            for name, captions in (("r@5", held.captions), ("r-neg@5", held.denied)):
                found[name] = _recall(head.matrix(held.pictures.to(device), captions.to(device)).T.cpu())
        return found

    def _features(self, needs: Needs) -> _Encoded:
        if self._encoded is not None and self._encoded[0] == needs:
            return self._encoded[1]
        items = negation_items(self.items, seed=self.seed, split=self.split, wording=self.wording)
        scenes = retrieval_items(self.items, seed=self.seed, split=self.split)
        images = [Image.fromarray(item.image()) for item in items]
        pictures = [Image.fromarray(scene.image()) for scene in scenes]
        made = _Encoded(
            self.engine.encode_images(images, scorer=needs),
            self.engine.encode_texts([option for item in items for option in item.captions], scorer=needs),
            [item.correct for item in items],
            [item.template for item in items],
            self.engine.encode_images(pictures, scorer=needs),
            self.engine.encode_texts([scene.caption for scene in scenes], scorer=needs),
            self.engine.encode_texts([scene.negated_caption for scene in scenes], scorer=needs),
        )
        self._encoded = needs, made
        return made


def _recall(scores: Tensor) -> float:
    """Share of the captions (rows) whose own picture is among the first five."""
    counts = rank_counts(scores, [[row] for row in range(len(scores))])
    return float(recall_credit(counts, K).mean())
