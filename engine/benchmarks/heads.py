"""Group scores of a head while it trains: the items are encoded once, the head scores them again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from engine.engine import Engine
from engine.features import ImageFeatures, Needs, TextFeatures
from engine.heads.base import Trainable
from engine.heads.window_head import WindowHead
from engine.metrics import group_scores
from engine.scenes.items import CATEGORIES, controlled_items
from engine.scorers.base import Scorer
from engine.scorers.sgi import SGI


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
            images = self._seen_by(head, images)
            scores = self.engine.score(images[image_rows], texts[text_rows], scorer=scorer, pairs=True)
            found[category] = group_scores(scores.view(-1, 2, 2)).group
        return found

    def _seen_by(self, head: Trainable, images: ImageFeatures) -> ImageFeatures:
        """The images as the scorer is to find them; most heads read them as they were encoded."""
        return images

    def _needs(self, scorer: Scorer) -> Needs:
        return self.engine.scorer(scorer).needs()

    def _encoded(self, category: str, scorer: Scorer) -> tuple[ImageFeatures, TextFeatures]:
        # Heads that read other layers have features of their own.
        key = category, scorer.needs()
        if key not in self._features:
            items = controlled_items(category, self.items, seed=self.seed, split=self.split)
            pictures = [Image.fromarray(pixels) for item in items for pixels in item.images()]
            captions = [caption for item in items for caption in item.captions]
            self._features[key] = (
                self.engine.encode_images(pictures, scorer=self._needs(scorer)),
                self.engine.encode_texts(captions, scorer=scorer),
            )
        return self._features[key]


class WindowFigures(GroupFigures):
    """The same of a window head: the regions are made anew each time, from states that were encoded once.

    Arguments as of `GroupFigures`, but the scorer is SGI over windows, and combinations that training may show are the
    default: what is held out stays unseen until the head is done.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        items: int = 100,
        categories: tuple[str, ...] = ("color", "size", "material"),
        split: str = "in_domain",
        seed: int = 7,
    ) -> None:
        super().__init__(
            engine,
            lambda head: SGI(crops="windows", head=head, full_image=False),
            items=items,
            categories=categories,
            split=split,
            seed=seed,
        )

    def _seen_by(self, head: Trainable, images: ImageFeatures) -> ImageFeatures:
        assert isinstance(head, WindowHead) and images.boxes is not None
        plan = self.scorer(head).needs().regions
        return replace(images, regions=head.regions(images, images.boxes), region_plan=str(plan))

    def _needs(self, scorer: Scorer) -> Needs:
        needs = scorer.needs()
        assert needs.regions is not None and needs.regions.head is not None
        return replace(needs, image_layers=needs.regions.head.layers)
