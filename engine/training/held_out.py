"""Figures on items of one's own that a training does not see, for its log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.datasets.base import spread
from engine.heads.base import Head
from engine.metrics import group_scores
from engine.training.captioned_data import CaptionedData
from engine.training.losses import quad_rows

# Pictures among which a caption has to find its own; a head that scores every pair can do no more.
AMONG = 32


class Scored(NamedTuple):
    """Scores of B held-out items."""

    # Images (rows) against texts.
    matrix: Tensor  # (B, B)
    # Of each image with its hard negative caption; None where there are none.
    negatives: Tensor | None  # (B,)
    # Of the image and the negative one (rows) with both captions; None where there are no negative images.
    quads: Tensor | None  # (B, 2, 2)


def shares(scored: Iterable[Scored]) -> dict[str, float]:
    """Shares in 0..1: `found` (caption and picture each find the other first), with negatives `over_negative` (the
    caption above its negative), with negative pictures `group` (all four comparisons). Strict: a tie is never a win."""
    found, over, group = [], [], []
    for matrix, negatives, quads in scored:
        own = matrix.diagonal()
        best = [(matrix >= own.unsqueeze(axis)).sum(axis) == 1 for axis in (0, 1)]
        found += torch.cat(best).float().tolist()
        if negatives is not None:
            over += (own > negatives).float().tolist()
        if quads is not None:
            group += group_scores(quads.cpu()).group.tolist()
    named = {"found": found, "over_negative": over, "group": group}
    return {name: sum(values) / len(values) for name, values in named.items() if values}


def apart(count: int, items: int) -> tuple[list[int], list[int]]:
    """Rows of so many items that are trained on, and those of `items` held out, spread evenly, at most a tenth."""
    chosen = set(spread(count, held)) if (held := min(items, count // 10)) > 0 else set()
    return [row for row in range(count) if row not in chosen], sorted(chosen)


def held_out(data: CaptionedData, items: int) -> tuple[CaptionedData, CaptionedData | None]:
    """The data without `items` of them (spread evenly, at most a tenth), and those; None where that is none."""
    seen, unseen = apart(len(data), items)
    if not unseen:
        return data, None

    def part(kept: list[int]) -> CaptionedData:
        rows = tuple(data.image_rows[item] for item in kept), tuple(data.caption_rows[item] for item in kept)
        return replace(data, image_rows=rows[0], caption_rows=rows[1])

    return part(seen), part(unseen)


class HeldOutFigures:
    """How a head does on held-out items.

    Args:
        data: the items. Of several captions each has one, the same in every evaluation.
    """

    def __init__(self, data: CaptionedData) -> None:
        self.data = data

    def __call__(self, head: Head) -> dict[str, float]:
        """The `shares` of a head as it is now; of `found`, among up to 32."""
        return shares(self._scored(head))

    def _scored(self, head: Head) -> Iterator[Scored]:
        device = next(head.parameters()).device
        for start in range(0, len(self.data), AMONG):
            items = torch.arange(start, min(start + AMONG, len(self.data)))
            images, texts = self.data.batch(items)
            images, texts = images.to(device), texts.to(device)
            pair, hard = torch.arange(len(items)), torch.arange(len(items)) + len(items)
            negatives = quads = None
            if self.data.texts_per_item == 2:
                negatives = head.pairs(images[pair], texts[hard])
            if self.data.images_per_item == self.data.texts_per_item == 2:
                quads = head.chosen(images, texts, *quad_rows(pair, hard)).view(-1, 2, 2)
            yield Scored(head.matrix(images[pair], texts[pair]), negatives, quads)
