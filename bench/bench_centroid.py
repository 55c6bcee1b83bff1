"""Cosine to class centroids against torch, side by side: `pytest bench/bench_centroid.py`.

Siblings of one group are ours and its baseline; the table gives their ratio. Each result is checked against float64
before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor
from torch.nn import functional as F

from engine.ops.centroid import centroid

# images, tokens of each from and to, D: a question with two sides of six images, a probe over a collection.
SHAPES = {"question": (12, 250, 320, 2048), "probe": (400, 40, 60, 512)}
CLASSES = {"question": 2, "probe": 10}
DTYPES = [torch.float32, torch.bfloat16]


def ours(queries: Tensor, tokens: Tensor, cu_seqlens: Tensor, classes: Tensor, n_classes: int) -> Tensor:
    return centroid(queries, tokens, cu_seqlens, classes=classes, n_classes=n_classes)


def torch_sums(queries: Tensor, tokens: Tensor, cu_seqlens: Tensor, classes: Tensor, n_classes: int) -> Tensor:
    """What one writes in torch: a scatter of all tokens to their classes, in float32."""
    tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    labels = classes.repeat_interleave(cu_seqlens.diff())
    sums = tokens.new_zeros(n_classes, tokens.shape[1]).index_add_(0, labels, tokens)
    counts = torch.bincount(labels, minlength=n_classes)[:, None]
    return F.normalize(queries.to(tokens.dtype), dim=-1) @ F.normalize(sums / counts, dim=-1).T


def inputs(shape: str) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    n, least, most, dim = SHAPES[shape]
    make = torch.Generator().manual_seed(7)
    lengths = torch.randint(least, most, (n,), generator=make)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    classes = torch.arange(n) % CLASSES[shape]
    # Tokens share a direction, as those of encoders do: means of random ones would be all rounding.
    tokens = torch.randn(int(cu_seqlens[-1]), dim, generator=make) + torch.randn(dim, generator=make)
    return torch.randn(16, dim, generator=make), tokens, cu_seqlens, classes, CLASSES[shape]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", [ours, torch_sums])
def bench_centroid(
    benchmark: BenchmarkFixture, shape: str, dtype: torch.dtype, implementation: Callable[..., Tensor]
) -> None:
    """The forward pass."""
    queries, tokens, *rest = inputs(shape)
    queries, tokens = queries.to(dtype), tokens.to(dtype)
    wanted = torch_sums(queries.double(), tokens.double(), *rest)
    torch.testing.assert_close(implementation(queries, tokens, *rest).double(), wanted, rtol=1e-4, atol=1e-5)
    benchmark.group = f"{shape}, {str(dtype).removeprefix('torch.')}"
    benchmark.pedantic(implementation, (queries, tokens, *rest), rounds=7, warmup_rounds=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", [ours, torch_sums])
def bench_centroid_training(
    benchmark: BenchmarkFixture, shape: str, implementation: Callable[..., Tensor]
) -> None:
    """Forward and backward to queries and tokens."""
    queries, tokens, *rest = inputs(shape)

    def step(queries: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        leaves = queries.detach().requires_grad_(), tokens.detach().requires_grad_()
        return torch.autograd.grad((implementation(*leaves, *rest) / 0.07).logsumexp(1).sum(), leaves)

    for actual, expected in zip(step(queries, tokens), step(queries.double(), tokens.double()), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-6)
    benchmark.group = f"{shape}, forward and backward"
    benchmark.pedantic(step, (queries, tokens), rounds=7, warmup_rounds=1)
