"""What a narrower precision costs: group scores of a source and its export beside each other, and their speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from engine.encoders.base import Encoder


@dataclass(frozen=True)
class CostRow:
    """Group score of one scorer on one category, shares in 0..1: the source's with its 95 % interval, the export's."""

    scorer: str
    category: str
    source: float
    low: float
    high: float
    export: float

    @property
    def within_interval(self) -> bool:
        """Whether the export's score lies in the source's interval, or above it."""
        return self.export >= self.low


def stated_cost(benchmark: str, rows: Sequence[CostRow], milliseconds: Mapping[str, float]) -> dict[str, Any]:
    """What a manifest states as `cost`: all rows, whether each is within its interval, the worst, the speed.

    Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("export: the cost needs at least one score, got none")
    worst = min(rows, key=lambda row: row.export - row.low)
    return {
        "benchmark": benchmark,
        "within_interval": all(row.within_interval for row in rows),
        "worst": asdict(worst),
        "rows": [asdict(row) for row in rows],
        "milliseconds": dict(milliseconds),
    }


def batch_milliseconds(source: Encoder, export: Encoder, *, batch: int = 8, rounds: int = 7) -> dict[str, float]:
    """Median milliseconds of global embeddings of a batch of pictures, the two taking turns."""
    size = source.spec.image_size
    pixels = torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
    taken: dict[str, list[float]] = {"source": [], "export": []}
    for turn in range(rounds + 1):
        for name, encoder in (("source", source), ("export", export)):
            began = time.perf_counter()
            encoder.encode_pixels(pixels)
            # The first turn warms up.
            if turn:
                taken[name].append(time.perf_counter() - began)
    return {name: 1e3 * statistics.median(times) for name, times in taken.items()}
