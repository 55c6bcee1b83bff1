"""Figures on items of one's own that a training does not see, for its log."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.datasets.base import spread
from engine.heads.base import Head
from engine.metrics import group_scores
from engine.training.captioned_data import CaptionedData

# Pictures among which a caption has to find its own; a head that scores every pair can do no more.
AMONG = 32


def held_out(data: CaptionedData, items: int) -> tuple[CaptionedData, CaptionedData | None]:
    """The data without `items` of them (spread evenly, at most a tenth), and those; None where that is none."""
    count = min(items, len(data) // 10)
    if count < 1:
        return data, None
    chosen = set(spread(len(data), count))

    def part(kept: list[int]) -> CaptionedData:
        rows = tuple(data.image_rows[item] for item in kept), tuple(data.caption_rows[item] for item in kept)
        return replace(data, image_rows=rows[0], caption_rows=rows[1])

    return part([item for item in range(len(data)) if item not in chosen]), part(sorted(chosen))


class HeldOutFigures:
    """How a head does on held-out items.

    Args:
        data: the items. Of several captions each has one, the same in every evaluation.
    """

    def __init__(self, data: CaptionedData) -> None:
        self.data = data

    def __call__(self, head: Head) -> dict[str, float]:
        """Shares in 0..1: `found` (caption and picture each find the other first, among up to 32), with negatives
        `over_negative` (the caption above its negative), with negative pictures `group` (all four comparisons)."""
        device = next(head.parameters()).device
        found, over, group = [], [], []
        for start in range(0, len(self.data), AMONG):
            items = torch.arange(start, min(start + AMONG, len(self.data)))
            images, texts = self.data.batch(items)
            images, texts = images.to(device), texts.to(device)
            pair = torch.arange(len(items))
            matrix = head.matrix(images[pair], texts[pair])
            own = matrix.diagonal()
            # Strict: a tie is never a win.
            best = [(matrix >= own.unsqueeze(axis)).sum(axis) == 1 for axis in (0, 1)]
            found += torch.cat(best).float().tolist()
            if self.data.texts_per_item == 2:
                over += (own > head.pairs(images[pair], texts[pair + len(items)])).float().tolist()
            if self.data.images_per_item == self.data.texts_per_item == 2:
                rows = torch.stack([pair, pair, pair + len(items), pair + len(items)], dim=1).flatten()
                columns = torch.stack([pair, pair + len(items)] * 2, dim=1).flatten()
                quads = head.chosen(images, texts, rows, columns).view(-1, 2, 2)
                group += group_scores(quads.cpu()).group.tolist()
        shares = {"found": found, "over_negative": over, "group": group}
        return {name: sum(values) / len(values) for name, values in shares.items() if values}
