"""Max-sim against torch, side by side: `pytest bench/bench_max_sim.py` prints both with their ratio.

Each case checks both results against float64 before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from engine.ops.max_sim import max_sim

# queries, tokens, documents, patches, D: one query over a collection, a batch, short segments over crops.
SHAPES = {
    "one query": (1, 32, 1024, 50, 512),
    "batch": (32, 32, 64, 196, 512),
    "segments": (200, 4, 64, 35, 512),
}
DTYPES = [torch.float32, torch.bfloat16]


def ours(q: Tensor, d: Tensor) -> Tensor:
    return max_sim(q, d)


def torch_products(q: Tensor, d: Tensor) -> Tensor:
    """What one writes in torch: one large product, a maximum, a sum; needs all similarities at once."""
    sims = q.flatten(0, 1) @ d.flatten(0, 1).T
    return sims.view(*q.shape[:2], *d.shape[:2]).amax(-1).float().sum(1)


def inputs(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    n_q, l_q, n_d, l_d, dim = SHAPES[name]
    make = torch.Generator().manual_seed(7)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(shape, generator=make), dim=-1).to(dtype)

    return unit(n_q, l_q, dim), unit(n_d, l_d, dim)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", [ours, torch_products])
def bench_max_sim(
    benchmark: BenchmarkFixture, shape: str, dtype: torch.dtype, implementation: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """The forward pass; siblings of one group are ours and its baseline."""
    q, d = inputs(shape, dtype)
    wanted = max_sim(q.double(), d.double(), backend="reference")
    # torch rounds each similarity to the dtype, ours does not.
    exact = implementation is ours or dtype == torch.float32
    torch.testing.assert_close(
        implementation(q, d).double(), wanted, rtol=1e-5 if exact else 1e-2, atol=1e-4 if exact else 5e-2
    )
    benchmark.group = f"{shape}, {str(dtype).removeprefix('torch.')}"
    benchmark.pedantic(implementation, (q, d), rounds=7, warmup_rounds=2)
