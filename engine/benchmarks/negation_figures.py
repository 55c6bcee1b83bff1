"""Negation figures of many heads, or of one while it trains: items are encoded once and scored again and again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.benchmarks.baselines import BLIND
from engine.engine import Engine
from engine.features import ImageFeatures, Needs, TextFeatures
from engine.heads.base import Head
from engine.metrics import Floats, multiple_choice, rank_counts, recall_credit
from engine.scenes.negation import NEGATION_TEMPLATES, NegationItem, negation_items, retrieval_items

OPTIONS = 4
K = 5


class Scoring(Protocol):
    """A head in evaluation mode, or a scorer."""

    def needs(self) -> Needs: ...
    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor: ...
    def pairs(self, images: ImageFeatures, texts: TextFeatures) -> Tensor: ...


@dataclass(frozen=True)
class NegationOutcomes:
    """What became of every item, float64.

    Attributes:
        choice: `(n,)` 1 where the right caption won; ties are wrong.
        kinds: `(n,)` that of the right caption.
        margins: `(n,)` the right caption's score minus the best other's.
        recall, negated: `(m,)` 1 where a caption, plain or behind a true denial, has its own picture among the first
            five.
    """

    choice: Floats
    kinds: tuple[str, ...]
    margins: Floats
    recall: Floats
    negated: Floats

    def columns(self) -> dict[str, Floats]:
        """`choice`, `choice_<kind>`, `r@5` and `r-neg@5`, one number for each item that counts."""
        kinds = np.array(self.kinds)
        found = {"choice": self.choice}
        found |= {f"choice_{kind}": self.choice[kinds == kind] for kind in NEGATION_TEMPLATES if kind in self.kinds}
        return found | {"r@5": self.recall, "r-neg@5": self.negated}


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
    """Multiple choice by kind of the right answer and recall among pictures, for a log or a table of many heads.

    Args:
        engine: whose encoder the heads belong to.
        items: of the multiple choice, and pictures of the retrieval.
        split, wording: of `engine.scenes.negation.negation_items`.
        seed: of the items; another than the benchmark's, so that watching the log does not choose by its items.
        layers: text layers that are kept beside those that the first head needs, so that other heads share them.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        items: int = 150,
        split: str = "held_out",
        wording: str = "benchmark",
        seed: int = 7,
        layers: tuple[int, ...] = (),
    ) -> None:
        self.engine = engine
        self.items = items
        self.split = split
        self.wording = wording
        self.seed = seed
        self.layers = layers
        self._encoded: tuple[Needs, _Encoded] | None = None

    def __call__(self, head: Head) -> dict[str, float]:
        """Shares in 0..1: `choice`, `choice_<kind>`, `r@5` and `r-neg@5`."""
        return {name: float(values.mean()) for name, values in self.outcomes(head).columns().items()}

    def outcomes(self, scoring: Scoring) -> NegationOutcomes:
        """What became of every item under a head in evaluation mode, or a scorer."""
        held = self._features(scoring.needs())
        rows = torch.arange(len(held.images)).repeat_interleave(OPTIONS)
        device = self.engine.encoder.device
        with torch.no_grad():
            scores = scoring.pairs(held.images[rows].to(device), held.options.to(device)).view(-1, OPTIONS)
            found = multiple_choice(scores.cpu(), held.right)
            recalls = [
                _recalled(scoring.matrix(held.pictures.to(device), captions.to(device)).T.cpu())
                for captions in (held.captions, held.denied)
            ]
        return NegationOutcomes(found.credit, tuple(held.kinds), found.margin, *recalls)

    def blind(self) -> dict[str, dict[str, Floats]]:
        """For each scorer that reads the captions alone its credits `choice` and `choice_<kind>`, ties shared.

        It finds no picture by its caption, so it has no recall.
        """
        items = self._items()
        found = {}
        for name, worth in BLIND.items():
            scores = np.array([[worth(caption) for caption in item.captions] for item in items])
            credit = multiple_choice(scores, [item.correct for item in items], ties="share").credit
            nothing = np.zeros(0)
            outcomes = NegationOutcomes(credit, tuple(item.template for item in items), nothing, nothing, nothing)
            found[name] = {column: values for column, values in outcomes.columns().items() if len(values)}
        return found

    def _items(self) -> list[NegationItem]:
        return negation_items(self.items, seed=self.seed, split=self.split, wording=self.wording)

    def _features(self, needs: Needs) -> _Encoded:
        if self._encoded is not None and _covers(self._encoded[0], needs):
            return self._encoded[1]
        needs = replace(needs, text_layers=tuple(sorted({*needs.text_layers, *self.layers})))
        items = self._items()
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


def _covers(held: Needs, needs: Needs) -> bool:
    """Whether features made for one serve the other: alike but for text layers, of which more may be held."""
    alike = replace(held, text_layers=needs.text_layers) == needs
    return alike and set(needs.text_layers) <= set(held.text_layers)


def _recalled(scores: Tensor) -> Floats:
    """For each caption (row) whether its own picture is among the first five."""
    counts = rank_counts(scores, [[row] for row in range(len(scores))])
    return recall_credit(counts, K)
