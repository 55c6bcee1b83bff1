"""Laws of window attention: what must not change when its arguments are rearranged."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerances import assert_close
from tests.window_attention_oracle import BACKENDS, boxes, random_case, run

sizes = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 3), st.integers(1, 40),
                  st.tuples(st.integers(1, 6), st.integers(1, 6)))  # fmt: skip
per_backend = pytest.mark.parametrize("backend", BACKENDS)


def cases(shape: tuple, own: bool, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return random_case(*shape, own=own)


@per_backend
@settings(max_examples=15)
@given(shape=sizes, own=st.booleans(), seed=st.integers(0, 99))
def test_windows_are_independent_and_keep_their_order(backend: str, shape: tuple, own: bool, seed: int) -> None:
    case = cases(shape, own, seed)
    order = torch.randperm(shape[1])
    of_windows = {name: x[:, order] for name, x in case.items() if name in ("q", "own_k", "own_v")}
    got = run(backend, case | of_windows | {"windows": case["windows"][order]})
    assert torch.equal(got, run(backend, case)[:, order])


@per_backend
@settings(max_examples=15)
@given(shape=sizes, own=st.booleans(), seed=st.integers(0, 99))
def test_turning_the_grid_over_turns_the_windows_over(backend: str, shape: tuple, own: bool, seed: int) -> None:
    """Rows become columns: cells (y, x) to (x, y), boxes x0, y0, x1, y1 to y0, x0, y1, x1."""
    case = cases(shape, own, seed)
    rows, columns = shape[4]
    turned = {n: case[n].unflatten(1, (rows, columns)).transpose(1, 2).flatten(1, 2) for n in ("k", "v")}
    turned |= {"windows": case["windows"][:, [1, 0, 3, 2]].contiguous(), "grid": (columns, rows)}
    assert_close(run(backend, case | turned), run(backend, case), scale=3)


@per_backend
@settings(max_examples=15)
@given(shape=sizes, own=st.booleans(), seed=st.integers(0, 99), shift=st.floats(-50, 50), factor=st.floats(0.1, 4))
def test_moving_and_stretching(backend: str, shape: tuple, own: bool, seed: int, shift: float, factor: float) -> None:
    """Values moved by a constant move the result; queries stretched are a greater scale."""
    case = cases(shape, own, seed)
    if own:
        moved = {n: case[n] + shift for n in ("v", "own_v")}
        assert_close(run(backend, case | moved), run(backend, case) + shift, scale=20)
    stretched = run(backend, case | {"q": factor * case["q"]}, scale=0.5)
    assert_close(stretched, run(backend, case, scale=0.5 * factor), scale=20)


@per_backend
@settings(max_examples=15)
@given(shape=sizes, seed=st.integers(0, 99))
def test_the_whole_grid_equals_every_order_of_its_cells(backend: str, shape: tuple, seed: int) -> None:
    case = cases(shape, True, seed)
    rows, columns = shape[4]
    case["windows"] = boxes(*[(0, 0, columns, rows)] * shape[1])
    order = torch.randperm(rows * columns)
    mixed = {name: case[name][:, order] for name in ("k", "v")}
    assert_close(run(backend, case | mixed), run(backend, case), scale=3)
    # A cell more is a cell less of the own kind: the own key moved onto the grid as one more row.
    first = {n: case[n][:, :1] for n in ("q", "own_k", "own_v")}
    n = rows * columns + 1
    joined = {name: torch.cat([case[name], first["own_" + name]], 1) for name in ("k", "v")}
    longer = {"q": first["q"], "windows": boxes((0, 0, n, 1)), "grid": (1, n), **joined}
    assert_close(run(backend, longer), run(backend, case)[:, :1], scale=3)


@per_backend
@settings(max_examples=10)
@given(shape=sizes, seed=st.integers(0, 99))
def test_a_result_lies_between_the_values(backend: str, shape: tuple, seed: int) -> None:
    case = cases(shape, True, seed)
    values = torch.cat([case["v"], case["own_v"]], 1)
    got = run(backend, case)
    assert (got <= values.amax(1, keepdim=True) + 1e-4).all() and (got >= values.amin(1, keepdim=True) - 1e-4).all()


MEASURED = """
import torch
from engine.ops.window_attention import window_attention
def peak():
    # Not ru_maxrss: that begins with what the parent had.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
torch.manual_seed(0)
x, y = (torch.randint(0, 33, (4000, 2)).sort(1).values for _ in range(2))
windows = torch.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], 1).to(torch.int32)
q, own_k, own_v = (torch.randn(1, 4000, 2, 16) for _ in range(3))
k, v = (torch.randn(1, 1024, 2, 16, requires_grad=True) for _ in range(2))
def forward(n):
    own = {'own_k': own_k[:, :n], 'own_v': own_v[:, :n]}
    return window_attention(q[:, :n], k, v, windows[:n], grid=(32, 32), **own)
forward(1).sum().backward()
before = peak()
with torch.no_grad(): forward(4000)
print((peak() - before) * 1024)
forward(4000).sum().backward()
print((peak() - before) * 1024)
"""


def test_memory_stays_far_below_a_buffer_of_scores() -> None:
    """Forward and backward hold one head of one image at a time, nothing of W · P · H numbers."""
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, timeout=120, check=True)
    scores_bytes = 4000 * 1024 * 2 * 4
    forward, both = map(int, done.stdout.split())
    assert forward < scores_bytes / 16  # the result is 1/64
    assert both < scores_bytes / 3
