"""Window attention as plain Python loops in float64, and the ways to run it, for the tests of window attention.

The loops share no code with the reference: they are what the reference itself is checked against.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from engine.ops.native import instruction_sets
from engine.ops.window_attention import window_attention
from tests.max_sim_oracle import forced
from tests.tolerances import assert_close

# A run under Triton's interpreter (see test_window_attention_triton.py) repeats the tests with that backend alone.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The kernels for bfloat16 products belong to max-sim; the name limits window attention to AVX-512 as well.
ISAS = [isa for isa in instruction_sets() if isa != "avx512_bf16"]
BACKENDS = ["triton"] if INTERPRETED else ["reference", *(f"cpp:{isa}" for isa in ISAS)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = math.nan, math.inf


def boxes(*rows: tuple[int, int, int, int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 4)


def random_boxes(n: int, grid: tuple[int, int]) -> Tensor:
    """Boxes with edges anywhere from one cell outside the grid to the other side; some of them are empty."""
    rows, columns = grid
    x = torch.randint(-1, columns + 2, (n, 2)).sort(1).values
    y = torch.randint(-1, rows + 2, (n, 2)).sort(1).values
    return torch.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], 1).to(torch.int32)


def random_case(
    n_images: int,
    n_windows: int,
    n_heads: int,
    dim: int,
    grid: tuple[int, int],
    *,
    dtype: torch.dtype = torch.float32,
    own: bool = True,
    shared: bool = True,
) -> dict[str, Any]:
    """Arguments of `window_attention`: normal numbers, random windows, the first over the whole grid."""
    of_windows, of_cells = (n_images, n_windows, n_heads, dim), (n_images, grid[0] * grid[1], n_heads, dim)
    names = {"q": of_windows, "k": of_cells, "v": of_cells}
    names |= {"own_k": of_windows, "own_v": of_windows} if own else {}
    case: dict[str, Any] = {name: torch.randn(shape).to(dtype) for name, shape in names.items()}
    windows = torch.stack([random_boxes(n_windows, grid) for _ in range(1 if shared else n_images)])
    windows[:, :1] = boxes((0, 0, grid[1], grid[0]))
    return case | {"windows": windows[0] if shared else windows, "grid": grid}


def run(backend: str, case: dict[str, Any], **options: Any) -> Tensor:
    """window_attention on an entry of BACKENDS."""
    with forced(backend) as name:
        return window_attention(**case, backend=name, **options)


def attend(query: list[float], seen: list[tuple[list[float], list[float]]], scale: float) -> list[float]:
    """Attention of one query over (key, value) pairs."""
    if not seen:
        return [0.0] * len(query)
    scores = [scale * sum(a * b for a, b in zip(query, key, strict=True)) for key, _ in seen]
    top = NAN if any(map(math.isnan, scores)) else max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = sum(weights)
    return [sum(w / total * value[c] for w, (_, value) in zip(weights, seen, strict=True)) for c in range(len(query))]


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Tensor,
    *,
    grid: tuple[int, int],
    own_k: Tensor | None = None,
    own_v: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The contract in float64."""
    n_images, n_windows, n_heads, dim = q.shape
    given = {"q": q, "k": k, "v": v, "u": own_k, "z": own_v}
    lists = {name: x.double().tolist() for name, x in given.items() if x is not None}
    scale = dim**-0.5 if scale is None else scale
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(n_images):
        for w in range(n_windows):
            x0, y0, x1, y1 = (windows if windows.ndim == 2 else windows[b])[w].tolist()
            cells = [(y, x) for y in range(grid[0]) for x in range(grid[1]) if x0 <= x < x1 and y0 <= y < y1]
            for h in range(n_heads):
                seen = [(lists["k"][b][y * grid[1] + x][h], lists["v"][b][y * grid[1] + x][h]) for y, x in cells]
                if own_k is not None:
                    seen.append((lists["u"][b][w][h], lists["z"][b][w][h]))
                out[b, w, h] = torch.tensor(attend(lists["q"][b][w][h], seen, scale), dtype=torch.float64)
    return out


def check(backend: str, case: dict[str, Any], *, scale: float | None = None, tolerance: float = 1.0) -> Tensor:
    """Run, compare with the oracle, return the result."""
    got = run(backend, case, scale=scale)
    assert got.dtype == case["q"].dtype and got.is_contiguous()
    assert_close(got, oracle(**case, scale=scale), dtype=got.dtype, scale=tolerance)
    return got


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Tensor,
    *,
    grid: tuple[int, int],
    own_k: Tensor | None = None,
    own_v: Tensor | None = None,
) -> Tensor:
    """The same by one product with a mask, for finite numbers; differentiable."""
    n_images, n_windows = q.shape[:2]
    x0, y0, x1, y1 = windows.expand(n_images, n_windows, 4)[..., None].unbind(2)
    y, x = torch.arange(grid[0] * grid[1]) // max(grid[1], 1), torch.arange(grid[0] * grid[1]) % max(grid[1], 1)
    mask = (x0 <= x) & (x < x1) & (y0 <= y) & (y < y1)  # (B, W, P)
    if own_k is not None and own_v is not None:
        k, v = torch.cat([k, own_k], 1), torch.cat([v, own_v], 1)
        mask = torch.cat([mask, torch.eye(n_windows, dtype=torch.bool).expand(n_images, -1, -1)], 2)
    scores = torch.einsum("bwhd,bphd->bhwp", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask[:, None], -1e30).softmax(-1) * mask[:, None]
    return torch.einsum("bhwp,bphd->bwhd", weights, v)
