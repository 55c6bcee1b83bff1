"""PeakPatch's features and corrections against torch, in turn: `pytest bench/bench_peak_patch.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.paired import Paired
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


def close_to(wanted: tuple[Tensor, ...], rtol: float, atol: float) -> Callable[[Any], None]:
    """A check of a tuple of results against float64."""

    def check(got: tuple[Tensor, ...]) -> None:
        for actual, expected in zip(got, wanted, strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)

    return check


@pytest.mark.parametrize("n", BATCHES)
def bench_features(paired: Paired, n: int) -> None:
    """From hidden states to features, forward."""
    case = captions(n)
    with torch.inference_mode():
        check = close_to((torch_modules(case.to(torch.float64)),), rtol=1e-4, atol=1e-4)
        narrow = case.to(torch.float32)
        baselines = {"torch": lambda: (torch_modules(narrow),), "torch, folded": lambda: (torch_folded(narrow),)}
        paired("peak_patch_features", f"{n} captions", lambda: (ours(narrow),), baselines, expected=check)


def bench_features_training(paired: Paired) -> None:
    """Forward and backward to the pool's parameters, tokens frozen as in training the correction."""
    n = BATCHES[-1]
    weight = torch.randn(n, 4 * WIDTH, generator=torch.Generator().manual_seed(8))

    def step(implementation: Callable[[Captions], Tensor], c: Captions) -> tuple[Tensor, ...]:
        query = c.query.clone().requires_grad_()
        leaves = (query, *c.attention.parameters())
        loss = (implementation(c._replace(query=query)) * weight.to(c.peak.dtype)).sum()
        return torch.autograd.grad(loss, leaves)

    def frozen(dtype: torch.dtype) -> Captions:
        case = captions(n).to(dtype)
        case.norm.requires_grad_(False)
        return case

    check = close_to(step(torch_modules, frozen(torch.float64)), rtol=1e-3, atol=2e-3)
    case = frozen(torch.float32)
    baselines = {"torch": lambda: step(torch_modules, case), "torch, folded": lambda: step(torch_folded, case)}
    paired("peak_patch, backward", f"{n} captions", lambda: step(ours, case), baselines, expected=check)


def ours_corrected(f: Tensor, delta: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    text = peak_patch_correct(f.flatten(0, 1), delta.flatten(0, 1), 0.5).view(f.shape).to(f.dtype)
    sims, cross = peak_patch_pairs(image, text, f)
    return sims, cross


def torch_corrected(f: Tensor, delta: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    text, early, v = F.normalize(f + 0.5 * delta, dim=-1), F.normalize(f, dim=-1), F.normalize(image, dim=-1)[:, None]
    return torch.stack([(v * early).sum(-1), (v * text).sum(-1)], -1), v * text


def bench_corrections(paired: Paired) -> None:
    """Correct the answers of 1024 questions and pair them with their images."""
    make = torch.Generator().manual_seed(7)
    f, delta = (torch.randn(1024, ANSWERS, WIDTH, generator=make) for _ in range(2))
    image = torch.randn(1024, WIDTH, generator=make)
    with torch.inference_mode():
        check = close_to(torch_corrected(f.double(), delta.double(), image.double()), rtol=1e-5, atol=1e-5)
        baselines = {"torch": lambda: torch_corrected(f, delta, image)}
        paired("peak_patch_pairs", "1024 questions", lambda: ours_corrected(f, delta, image), baselines, expected=check)
