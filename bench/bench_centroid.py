"""Cosine to class centroids against torch, in turn: `pytest bench/bench_centroid.py` prints the table of ratios."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.paired import Paired, name_of
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


def close_to(wanted: Any, rtol: float, atol: float) -> Callable[[Any], None]:
    """A check of a result against float64, of a tensor or several."""

    def check(got: Any) -> None:
        pairs = [(got, wanted)] if isinstance(got, Tensor) else zip(got, wanted, strict=True)
        for actual, expected in pairs:
            torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)

    return check


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def bench_centroid(paired: Paired, shape: str, dtype: torch.dtype) -> None:
    """The forward pass."""
    queries, tokens, *rest = inputs(shape)
    narrow = queries.to(dtype), tokens.to(dtype), *rest
    check = close_to(torch_sums(narrow[0].double(), narrow[1].double(), *rest), rtol=1e-4, atol=1e-5)
    baselines = {"torch": lambda: torch_sums(*narrow)}
    paired("centroid", shape, lambda: ours(*narrow), baselines, expected=check, dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
def bench_centroid_training(paired: Paired, shape: str) -> None:
    """Forward and backward to queries and tokens."""
    queries, tokens, *rest = inputs(shape)

    def step(implementation: Callable[..., Tensor], queries: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        leaves = queries.detach().requires_grad_(), tokens.detach().requires_grad_()
        return torch.autograd.grad((implementation(*leaves, *rest) / 0.07).logsumexp(1).sum(), leaves)

    check = close_to(step(torch_sums, queries.double(), tokens.double()), rtol=1e-3, atol=1e-6)
    baselines = {"torch": lambda: step(torch_sums, queries, tokens)}
    paired("centroid, backward", shape, lambda: step(ours, queries, tokens), baselines, expected=check)
