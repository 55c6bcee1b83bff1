"""Group scores of a head while it trains: the items are encoded once, the head scores them again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from engine.engine import Engine
from engine.features import ImageFeatures, Needs, TextFeatures
from engine.heads.base import Trainable
from engine.metrics import group_scores
from engine.scenes.items import CATEGORIES, controlled_items
from engine.scorers.base import Scorer


class GroupFigures:
    """Group score of a head on items of rendered scenes, for the log of its training.

    Args:
        engine: whose encoder the head belongs to.
        scorer: makes the scorer of a head.
        items: of each category.
        categories, split, seed: of the items, as for `ScenesBenchmark`; the seed is another, so that watching the log
            does not choose by the benchmark's own items.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: Callable[[Any], Scorer],
        *,
        items: int = 100,
        categories: tuple[str, ...] = CATEGORIES,
        split: str = "held_out",
        seed: int = 7,
    ) -> None:
        self.engine = engine
        self.scorer = scorer
        self.items = items
        self.categories = categories
        self.split = split
        self.seed = seed
        self._features: dict[tuple[str, Needs], tuple[ImageFeatures, TextFeatures]] = {}

    def __call__(self, head: Trainable) -> dict[str, float]:
        """`group_<category>` in 0..1."""
        return {f"group_{category}": float(outcome.mean()) for category, outcome in self.outcomes(head).items()}

    def outcomes(self, head: Trainable) -> dict[str, NDArray[np.bool_]]:
        """Of each category, which items are right: 1 or 0, `(items,)`."""
        scorer = self.scorer(head)
        first = torch.arange(0, 2 * self.items, 2)
        # Four aligned pairs an item: images 0 0 1 1 with texts 0 1 0 1.
        image_rows = torch.stack([first, first, first + 1, first + 1], dim=1).flatten()
        text_rows = torch.stack([first, first + 1, first, first + 1], dim=1).flatten()
        found = {}
        for category in self.categories:
            images, texts = self._encoded(category, scorer)
            scores = self.engine.score(images[image_rows], texts[text_rows], scorer=scorer, pairs=True)
            found[category] = group_scores(scores.view(-1, 2, 2)).group
        return found

    def _encoded(self, category: str, scorer: Scorer) -> tuple[ImageFeatures, TextFeatures]:
        # Heads that read other layers have features of their own.
        key = category, scorer.needs()
        if key not in self._features:
            items = controlled_items(category, self.items, seed=self.seed, split=self.split)
            pictures = [Image.fromarray(pixels) for item in items for pixels in item.images()]
            captions = [caption for item in items for caption in item.captions]
            self._features[key] = (
                self.engine.encode_images(pictures, scorer=scorer),
                self.engine.encode_texts(captions, scorer=scorer),
            )
        return self._features[key]
