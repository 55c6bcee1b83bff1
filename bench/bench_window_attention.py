"""Window attention against torch's attention with a mask, in turn: `pytest bench/bench_window_attention.py`.

Windows are the ones of a sliding grid, as structure-guided inference uses them; the baseline gets the best that the
mask allows: heads first, dense tensors, the mask ready made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.paired import Paired
from engine.ops.window_attention import window_attention


@dataclass(frozen=True)
class Shape:
    """Windows of 1/1 … 1/n of the grid's side, sliding by half their size."""

    side: int
    levels: tuple[int, ...]
    images: int
    heads: int
    dim: int
    own: bool = True
    dtype: torch.dtype = torch.float32

    def windows(self) -> Tensor:
        """`(W, 4)`: the whole grid, then the sliding windows of each level."""
        found = [(0, 0, self.side, self.side)]
        for level in self.levels:
            size = max(1, round(self.side / level))
            places = [round(i * (self.side - size) / (2 * level - 2)) for i in range(2 * level - 1)]
            found += [(x, y, x + size, y + size) for y in places for x in places]
        return torch.tensor(found, dtype=torch.int32)

    def __str__(self) -> str:
        n = len(self.windows())
        kind = "own key" if self.own else "no own key"
        return f"W {n:3d}  P {self.side**2:3d}  H {self.heads:2d}  hd {self.dim:2d}  {str(self.dtype)[6:]:8s}  {kind}"


# W 35–286, P 36–256. On one thread of a machine at rest, ours should be at least twice as fast at each.
SHAPES = [
    Shape(6, (2, 3), images=32, heads=4, dim=32),
    Shape(7, (2, 3), images=8, heads=12, dim=64),
    Shape(7, (2, 3), images=8, heads=12, dim=64, own=False),
    Shape(7, (2, 3), images=8, heads=12, dim=64, dtype=torch.bfloat16),
    Shape(14, (2, 3), images=4, heads=12, dim=64),
    Shape(14, (2, 3, 4), images=2, heads=12, dim=64),
    Shape(16, (2, 3), images=2, heads=16, dim=96, own=False),
    Shape(16, (2, 3, 4, 5, 6), images=1, heads=16, dim=64),
    Shape(16, (2, 3, 4, 5, 6), images=1, heads=16, dim=72, own=False),
    Shape(16, (2, 3, 4, 5, 6), images=1, heads=16, dim=64, dtype=torch.bfloat16),
]


def mask_of(windows: Tensor, side: int, own: bool) -> Tensor:
    """Bool `(W, P)`, or `(W, P + W)` with one own key per window."""
    x0, y0, x1, y1 = windows[:, :, None].unbind(1)
    y, x = torch.arange(side * side) // side, torch.arange(side * side) % side
    mask = (x0 <= x) & (x < x1) & (y0 <= y) & (y < y1)
    return torch.cat([mask, torch.eye(len(windows), dtype=torch.bool)], 1) if own else mask


def pair(shape: Shape) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Ours and the baseline on the same random numbers, once their results agree with float64."""
    windows = shape.windows()
    n_windows, cells = len(windows), shape.side**2

    def random(rows: int) -> Tensor:
        return torch.randn(shape.images, rows, shape.heads, shape.dim).to(shape.dtype)

    q, k, v, own_k, own_v = random(n_windows), random(cells), random(cells), random(n_windows), random(n_windows)
    own = {"own_k": own_k, "own_v": own_v} if shape.own else {}
    keys, values = (torch.cat([k, own_k], 1), torch.cat([v, own_v], 1)) if shape.own else (k, v)
    first = [x.transpose(1, 2).contiguous() for x in (q, keys, values)]
    mask = mask_of(windows, shape.side, shape.own)

    def ours() -> Tensor:
        return window_attention(q, k, v, windows, grid=(shape.side, shape.side), **own)

    def baseline() -> Tensor:
        return scaled_dot_product_attention(*first, attn_mask=mask)

    exact = scaled_dot_product_attention(*(x.double() for x in first), attn_mask=mask)
    tolerance = 2e-5 if shape.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours().double(), exact.transpose(1, 2), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(baseline().double(), exact, rtol=tolerance, atol=tolerance)
    return ours, baseline


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_window_attention(paired: Paired, shape: Shape) -> None:
    """The forward pass; `pair` has checked both."""
    torch.manual_seed(0)
    with torch.inference_mode():
        ours, baseline = pair(shape)
        case = " ".join(str(shape).split())
        paired("window_attention", case, ours, {"torch": baseline}, expected=lambda got: None, dtype=shape.dtype)
