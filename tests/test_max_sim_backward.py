"""Backward of max-sim at the edges, over blocks, threads and memory: against the float64 reference."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops.max_sim import max_sim, max_sim_pairs
from tests.max_sim_oracle import BACKENDS, DTYPES, INF, INTERPRETED, NAN, forced
from tests.tolerances import assert_close

COMPILED = [name for name in BACKENDS if name != "reference"]
# Triton's interpreter is slow: fewer and smaller blocks.
MANY, LONG = (3, 20) if INTERPRETED else (19, 150)
PARTS = ("scores", "reverse_scores", "values", "reverse_values")


def gradients(backend: str, q: Tensor, d: Tensor, upstream: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """Gradients of q and d for gradients of the named parts of the result."""
    op = max_sim_pairs if options.pop("pairs", False) else max_sim
    q, d = q.detach().requires_grad_(), d.detach().requires_grad_()
    with forced(backend) as name:
        out = op(q, d, symmetric=True, return_alignment=True, backend=name, **options)
        return list(torch.autograd.grad([getattr(out, part) for part in upstream], (q, d), list(upstream.values())))


def check(backend: str, q: Tensor, d: Tensor, *parts: str, scale: float = 1.0, **options: Any) -> list[Tensor]:
    """Compare with the reference on the same numbers in float64; `parts` of the result get gradients."""
    grid = (q.shape[0],) if options.get("pairs") else (q.shape[0], d.shape[0])
    length = {"values": q.shape[1:2], "reverse_values": d.shape[1:2]}
    upstream = {part: torch.randn(*grid, *length.get(part, ())) for part in parts or PARTS}
    got = gradients(backend, q, d, upstream, **options)
    exact = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in options.items()}
    wanted = gradients(
        "reference", q.double(), d.double(), {name: x.double() for name, x in upstream.items()}, **exact
    )
    for name, actual, expected in zip(("q", "d"), got, wanted, strict=True):
        assert actual.dtype == q.dtype, name
        # The sizes of sums differ: what is small against the largest has lost its digits with it.
        finite = expected[expected.isfinite()].abs()
        largest = max(1.0, finite.max().item() if finite.numel() else 1.0)
        assert_close(actual / largest, expected / largest, dtype=q.dtype, scale=scale, what=name)
    return got


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("temperature", [None, 0.2])
@pytest.mark.parametrize("parts", [PARTS, ("scores",), ("reverse_scores",), ("values",), ("reverse_values", "scores")])
def test_parts_that_get_gradients(backend: str, temperature: float | None, parts: tuple[str, ...]) -> None:
    check(backend, torch.randn(3, 5, 17), torch.randn(4, 7, 17), *parts, temperature=temperature)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("temperature", [None, 0.2])
@pytest.mark.parametrize("sizes", [
    (1, 1, 1, 1, 1), (1, 3, 5, 2, 33), (MANY, 2, 4, 7, 31), (2, MANY, 7, 4, 32), (MANY, MANY, 3, 3, 5),
    (2, 2, 5, LONG, 9), (2, 2, LONG, 5, 9), (2, 3, 13, 65, 70), (2, 3, 4, 5, 0),
])  # fmt: skip
def test_sizes_around_blocks(backend: str, temperature: float | None, sizes: tuple[int, ...]) -> None:
    n_q, n_d, l_q, l_d, dim = sizes
    masks = {"q_mask": torch.rand(n_q, l_q) < 0.8, "d_mask": torch.rand(n_d, l_d) < 0.8}
    weights = {"q_weights": torch.rand(n_q, l_q), "d_weights": torch.rand(n_d, l_d)}
    q, d = torch.randn(n_q, l_q, dim), torch.randn(n_d, l_d, dim)
    check(backend, q, d, temperature=temperature, scale=5, **masks, **weights)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("temperature", [None, 0.2])
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (3, 2, 7, 5, 33), (2, 3, 13, 65, 70), (2, 2, 5, LONG, 47)])
def test_narrow_dtypes(
    backend: str, temperature: float | None, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    n_q, n_d, l_q, l_d, dim = sizes
    q, d = torch.randn(n_q, l_q, dim).to(dtype), torch.randn(n_d, l_d, dim).to(dtype)
    check(backend, q, d, temperature=temperature, d_mask=torch.rand(n_d, l_d) < 0.8)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 1e4, 1e30])
def test_temperatures(backend: str, temperature: float) -> None:
    # Numbers of a quarter have exact similarities: at the smallest temperatures a last digit would decide.
    q, d = (torch.randint(-4, 5, (2, 6, 8)) / 4 for _ in range(2))
    check(backend, q, d, temperature=temperature)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("temperature", [None, 0.01, 0.5])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("side", ["q", "d"])
def test_what_is_not_finite_stays_where_it_belongs(
    backend: str, temperature: float | None, bad: float, side: str
) -> None:
    q, d = torch.rand(3, 4, 5) + 0.1, torch.rand(2, 6, 5) + 0.1
    {"q": q, "d": d}[side][1, 2, 3] = bad
    grads = check(backend, q, d, "scores", "values", temperature=temperature)
    # Documents and queries that never met it.
    if side == "q":
        assert grads[0][[0, 2]].isfinite().all()
    else:
        assert grads[1][0].isfinite().all()


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("temperature", [None, 0.5])
def test_everything_infinite(backend: str, temperature: float | None) -> None:
    q, d = torch.ones(1, 2, 1), torch.full((1, 3, 1), -INF)
    check(backend, q, d, "scores", temperature=temperature)
    check(backend, q, -d, "scores", temperature=temperature)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("temperature", [None, 0.5])
@pytest.mark.parametrize("sizes", [(0, 3, 4, 5), (3, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0), (0, 0, 0, 0)])
def test_empty(backend: str, temperature: float | None, sizes: tuple[int, ...]) -> None:
    n_q, n_d, l_q, l_d = sizes
    grads = check(backend, torch.randn(n_q, l_q, 3), torch.randn(n_d, l_d, 3), temperature=temperature)
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("temperature", [None, 0.5])
@pytest.mark.parametrize("pairs", [False, True])
def test_strided_and_masked(backend: str, temperature: float | None, pairs: bool) -> None:
    q = torch.randn(3, 16, 4).mT[:, ::2, ::2]
    d = torch.randn(9, 3, 8).transpose(0, 1)
    q_mask, d_mask = torch.rand(3, 2) < 0.8, torch.rand(3, 9) < 0.6
    d_mask[1] = False
    q_mask[2] = False
    grads = check(backend, q, d, q_mask=q_mask, d_mask=d_mask, pairs=pairs, temperature=temperature)
    assert (grads[0][~q_mask] == 0).all() and (grads[1][~d_mask] == 0).all()


@pytest.mark.parametrize("backend", COMPILED)
def test_tied_tokens_share_the_soft_gradient(backend: str) -> None:
    q = torch.ones(1, 1, 2)
    d = torch.tensor([[[1.0, 2], [2, 1], [0, 0]]])
    grads = gradients(backend, q, d, {"scores": torch.ones(1, 1)}, temperature=1e-3)
    assert grads[1].tolist() == [[[0.5, 0.5], [0.5, 0.5], [0, 0]]]
    assert grads[0].tolist() == [[[1.5, 1.5]]]


@pytest.mark.parametrize("backend", [name for name in COMPILED if name.startswith("cpp")])
@pytest.mark.parametrize("temperature", [None, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_and_repetition_change_no_bit(backend: str, temperature: float | None, dtype: torch.dtype) -> None:
    q, d = torch.randn(33, 16, 64).to(dtype), torch.randn(17, 24, 64).to(dtype)
    upstream = {part: torch.randn(33, 17) for part in PARTS[:2]}
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5, 2):
        torch.set_num_threads(threads)
        try:
            results.append(gradients(backend, q, d, upstream, temperature=temperature))
        finally:
            torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0]) and torch.equal(results[0][1], other[1])


@pytest.mark.skipif(INTERPRETED, reason="measures the CPU kernels")
def test_memory_stays_within_gradients_and_winners() -> None:
    """Backward of 256 × 256 pairs in a process of its own: far below the 400 MB of similarities."""
    program = """
import torch
from engine.ops.max_sim import max_sim
torch.set_num_threads(2)
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
q, d = (torch.randn(256, 40, 64, requires_grad=True) for _ in range(2))
small = max_sim(q[:2], d[:2], temperature=0.1); small.sum().backward()
for temperature in (0.1, None):
    q.grad = d.grad = None
    before = peak()
    out = max_sim(q, d, symmetric=True, temperature=temperature)
    (out.scores + out.reverse_scores).logsumexp(1).sum().backward()
    print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=600, capture_output=True, text=True)
    soft, hard = map(float, done.stdout.split())
    assert soft < 30  # gradients are 5 MB
    assert hard < 50  # and each argmax 10 MB
