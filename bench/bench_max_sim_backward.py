"""Backward of max-sim against torch's autograd, in turn: `pytest bench/bench_max_sim_backward.py` prints the ratios.

Both gradients are checked against float64 before anything is timed. The peaks of memory over the whole step
stand in `extra_info`: torch keeps all similarities for its backward, ours computes them again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.paired import Paired, name_of
from bench.peak_memory import peak_mib
from engine.ops.max_sim import max_sim

# items a side, tokens, patches, D
SHAPES = [(64, 32, 49, 128), (64, 32, 49, 512), (128, 32, 49, 128)]
Scores = Callable[[Tensor, Tensor, "float | None"], Tensor]


def ours(q: Tensor, d: Tensor, temperature: float | None) -> Tensor:
    return max_sim(q, d, temperature=temperature)


def torch_products(q: Tensor, d: Tensor, temperature: float | None) -> Tensor:
    """What one writes in torch: one large product, a maximum, a sum; needs all similarities at once."""
    sims = (q.flatten(0, 1) @ d.flatten(0, 1).T).view(*q.shape[:2], *d.shape[:2])
    if temperature is None:
        return sims.amax(-1).float().sum(1)
    return (temperature * (sims.float() / temperature).logsumexp(-1)).sum(1)


def inputs(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    n, tokens, patches, dim = shape
    make = torch.Generator().manual_seed(7)

    def unit(*size: int) -> Tensor:
        rows = torch.nn.functional.normalize(torch.randn(size, generator=make), dim=-1)
        return rows.to(dtype).requires_grad_()

    return unit(n, tokens, dim), unit(n, patches, dim), torch.randn(n, n, generator=make)


def check(gradients: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Few tokens may find another winner where rounding makes a tie; nearly all of the gradient is there.

    In float32 one of half a million does, two of whose patches are 7e-8 apart: the error is 1.4e-4 there, and below
    1e-6 elsewhere.
    """
    for actual, expected in zip(gradients, wanted, strict=True):
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < (1e-3 if actual.dtype == torch.float32 else 0.2), error


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("temperature", [None, 0.1], ids=["hard", "soft"])
def bench_max_sim_backward(
    paired: Paired, shape: tuple[int, int, int, int], dtype: torch.dtype, temperature: float | None
) -> None:
    """The backward pass alone."""
    q, d, upstream = inputs(shape, dtype)
    exact = [x.detach().double().requires_grad_() for x in (q, d)]
    reference = max_sim(*exact, temperature=temperature, backend="reference")
    wanted = torch.autograd.grad(reference, exact, upstream.double())

    def backward(scores: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(scores, (q, d), upstream, retain_graph=True)

    paired.benchmark.extra_info["step_peak_mib"] = {
        "ours": peak_mib(lambda: backward(ours(q, d, temperature))),
        "torch": peak_mib(lambda: backward(torch_products(q, d, temperature))),
    }
    our_scores, torch_scores = ours(q, d, temperature), torch_products(q, d, temperature)
    paired(
        "max_sim, backward",
        f"{'hard' if temperature is None else 'soft'} {words(shape)}",
        lambda: backward(our_scores),
        {"torch": lambda: backward(torch_scores)},
        expected=lambda gradients: check(gradients, wanted),
        dtype=dtype,
    )


def words(shape: tuple[int, int, int, int]) -> str:
    """A shape as the table names it."""
    n, tokens, patches, dim = shape
    return f"B {n} T {tokens} P {patches} D {dim}"
