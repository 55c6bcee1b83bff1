"""PeakPatch's features and corrections against torch, side by side: `pytest bench/bench_peak_patch.py`.

Siblings of one group are ours and its baselines; the table gives their ratios. Each result is checked against float64
before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn
from torch.nn import functional as F

from engine.ops.peak_patch import AttentionPool, TokenNorm, folded_keys, peak_patch_features, projected
from engine.ops.peak_patch_correct import peak_patch_correct, peak_patch_pairs

BATCHES = [1, 256]
TOKENS, WIDTH, HEADS = 77, 512, 8  # the text tower of ViT-B/32
ANSWERS = 4


class Captions(NamedTuple):
    peak: Tensor
    anchor: Tensor
    mask: Tensor
    norm: nn.LayerNorm
    attention: nn.MultiheadAttention
    query: Tensor
    out_norm: nn.LayerNorm

    def to(self, dtype: torch.dtype) -> Captions:
        return Captions(*(x if x is self.mask else x.to(dtype) for x in self))


def captions(n: int) -> Captions:
    make = torch.Generator().manual_seed(7)
    lengths = torch.randint(8, 30, (n,), generator=make)
    peak, anchor = (torch.randn(n, TOKENS, WIDTH, generator=make) for _ in range(2))
    torch.manual_seed(7)
    modules = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.LayerNorm(WIDTH)
    query = torch.randn(1, WIDTH, generator=make)
    mask = torch.arange(TOKENS) < lengths[:, None]
    return Captions(peak, anchor, mask, modules[0], modules[1], query, modules[2])


def ours(c: Captions) -> Tensor:
    norm = TokenNorm(c.norm.weight, c.norm.bias, c.norm.eps)
    return peak_patch_features(
        c.peak, c.anchor, AttentionPool.of(c.query, c.attention, c.out_norm), mask=c.mask, norm=norm
    )


def gathered(c: Captions, peak: Tensor, anchor: Tensor, attended: Tensor) -> Tensor:
    rows, last = torch.arange(peak.shape[0]), c.mask.sum(1) - 1
    mean = (peak * c.mask[..., None]).sum(1) / c.mask.sum(1, keepdim=True)
    return torch.cat([peak[rows, last], attended, anchor[rows, last], mean], 1)


def torch_modules(c: Captions) -> Tensor:
    """What one writes in torch: keys and values of all tokens."""
    peak, anchor = c.norm(c.peak), c.norm(c.anchor)
    query = c.query.expand(peak.shape[0], 1, -1)
    attended, _ = c.attention(query, peak, peak, key_padding_mask=~c.mask, need_weights=False)
    return gathered(c, peak, anchor, c.out_norm(attended[:, 0]))


def torch_folded(c: Captions) -> Tensor:
    """The same folding of the query as ours, in torch."""
    peak, anchor = c.norm(c.peak), c.norm(c.anchor)
    pool = AttentionPool.of(c.query, c.attention, c.out_norm)
    scores = torch.einsum("btw,hw->bht", peak, folded_keys(pool, peak.dtype))
    attention = scores.masked_fill(~c.mask[:, None], -torch.inf).softmax(-1)
    pooled = torch.einsum("bht,btw->bhw", attention, peak)
    return gathered(c, peak, anchor, projected(pool, pooled, attention.sum(-1)))


@pytest.mark.parametrize("n", BATCHES)
@pytest.mark.parametrize("implementation", [ours, torch_modules, torch_folded])
def bench_features(benchmark: BenchmarkFixture, n: int, implementation: Callable[[Captions], Tensor]) -> None:
    """From hidden states to features, forward."""
    case = captions(n)
    with torch.inference_mode():
        wanted = torch_modules(case.to(torch.float64))
        torch.testing.assert_close(implementation(case.to(torch.float32)).double(), wanted, rtol=1e-4, atol=1e-4)
        benchmark.group = f"features of {n} captions"
        benchmark.pedantic(implementation, (case.to(torch.float32),), rounds=7, warmup_rounds=1)


@pytest.mark.parametrize("implementation", [ours, torch_modules, torch_folded])
def bench_features_training(benchmark: BenchmarkFixture, implementation: Callable[[Captions], Tensor]) -> None:
    """Forward and backward to the pool's parameters, tokens frozen as in training the correction."""
    n = BATCHES[-1]
    weight = torch.randn(n, 4 * WIDTH, generator=torch.Generator().manual_seed(8))

    def step(c: Captions) -> tuple[Tensor, ...]:
        query = c.query.clone().requires_grad_()
        leaves = (query, *c.attention.parameters())
        loss = (implementation(c._replace(query=query)) * weight.to(c.peak.dtype)).sum()
        return torch.autograd.grad(loss, leaves)

    def frozen(dtype: torch.dtype) -> Captions:
        case = captions(n).to(dtype)
        case.norm.requires_grad_(False)
        return case

    for actual, expected in zip(step(frozen(torch.float32)), step(frozen(torch.float64)), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=2e-3)
    benchmark.group = f"features of {n} captions, forward and backward"
    benchmark.pedantic(step, (frozen(torch.float32),), rounds=7, warmup_rounds=1)


def ours_corrected(f: Tensor, delta: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    text = peak_patch_correct(f.flatten(0, 1), delta.flatten(0, 1), 0.5).view(f.shape).to(f.dtype)
    sims, cross = peak_patch_pairs(image, text, f)
    return sims, cross


def torch_corrected(f: Tensor, delta: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    text, early, v = F.normalize(f + 0.5 * delta, dim=-1), F.normalize(f, dim=-1), F.normalize(image, dim=-1)[:, None]
    return torch.stack([(v * early).sum(-1), (v * text).sum(-1)], -1), v * text


@pytest.mark.parametrize("implementation", [ours_corrected, torch_corrected])
def bench_corrections(
    benchmark: BenchmarkFixture, implementation: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    """Correct the answers of 1024 questions and pair them with their images."""
    make = torch.Generator().manual_seed(7)
    f, delta = (torch.randn(1024, ANSWERS, WIDTH, generator=make) for _ in range(2))
    image = torch.randn(1024, WIDTH, generator=make)
    with torch.inference_mode():
        wanted = torch_corrected(f.double(), delta.double(), image.double())
        for actual, expected in zip(implementation(f, delta, image), wanted, strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
        benchmark.group = "corrections of 1024 questions"
        benchmark.pedantic(implementation, (f, delta, image), rounds=7, warmup_rounds=1)
