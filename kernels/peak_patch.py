"""PeakPatch's caption features on the GPU: one program walks one caption.

The contract stands in `engine.reference.peak_patch`. A caption's tokens (77 × 512 in half precision: 79 kB) are
read for the scores and once more for the pooled vectors, by then from the cache. Nothing of size T · W is written;
the scores (heads × T numbers) pass through memory between the two, where they become the attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Registers a thread may use. Left alone, the assembler aims at more blocks per processor and spills for them.
MAX_REGISTERS = 128


@dataclass(frozen=True)
class Plan:
    """Shape of a launch: heads, tokens and elements of W per block, warps, pipeline stages."""

    block_h: int
    block_t: int
    block_w: int
    num_warps: int
    num_stages: int


def plan_peak_patch(heads: int, length: int, width: int) -> Plan:
    """The launch for captions of `length` tokens; plain arithmetic, no tuning."""
    # tl.dot takes at least 16 of each, and powers of two. Products in full float32 hold their operands in registers:
    # larger blocks, or loads ahead of time, would spill.
    block_h = max(16, triton.next_power_of_2(max(heads, 1)))
    block_w = min(64 if block_h == 16 else 32, max(16, triton.next_power_of_2(max(width, 1))))
    return Plan(block_h, block_t=16, block_w=block_w, num_warps=4, num_stages=1)


@triton.jit
def _statistics(rows, here, width, eps, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr):
    """Mean and 1 / standard deviation of the rows that are here."""
    total = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, width, BLOCK_W):
        w = start + tl.arange(0, BLOCK_W)
        there = here[:, None] & (w < width)[None, :]
        total += tl.sum(tl.load(rows[:, None] + w[None, :], mask=there, other=0.0).to(tl.float32), 1)
    mean = total / width
    squares = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, width, BLOCK_W):
        w = start + tl.arange(0, BLOCK_W)
        there = here[:, None] & (w < width)[None, :]
        x = tl.load(rows[:, None] + w[None, :], mask=there, other=0.0).to(tl.float32)
        centred = tl.where(there, x - mean[:, None], 0.0)
        squares += tl.sum(centred * centred, 1)
    return mean, 1.0 / tl.sqrt(squares / width + eps)


@triton.jit
def _tokens(rows, here, w, inside, mean, scale, norm_weight_ptr, norm_bias_ptr, NORM: tl.constexpr):
    """Tokens after the norm, float32; zeros where there are none."""
    there = here[:, None] & inside[None, :]
    x = tl.load(rows[:, None] + w[None, :], mask=there, other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(norm_weight_ptr + w, mask=inside, other=0.0)
        bias = tl.load(norm_bias_ptr + w, mask=inside, other=0.0)
        x = (x - mean[:, None]) * scale[:, None] * weight[None, :] + bias[None, :]
        x = tl.where(there, x, 0.0)
    return x


@triton.jit
def _kept(mask_ptr, b, start, length, BLOCK_T: tl.constexpr):
    t = start + tl.arange(0, BLOCK_T)
    inside = t < length
    return t, inside & (tl.load(mask_ptr + b * length + t, mask=inside, other=0) != 0)


@triton.jit
def _end_row(
    row, found, to, width, eps, norm_weight_ptr, norm_bias_ptr, NORM: tl.constexpr, BLOCK_W: tl.constexpr
):  # fmt: skip
    """Copy one token, after the norm, or zeros."""
    rows = row + tl.arange(0, 1)
    here = (tl.arange(0, 1) == 0) & found
    mean = tl.zeros((1,), tl.float32)
    scale = mean
    if NORM:
        mean, scale = _statistics(rows, here, width, eps, 1, BLOCK_W)
    for start in range(0, width, BLOCK_W):
        w = start + tl.arange(0, BLOCK_W)
        x = _tokens(rows, here, w, w < width, mean, scale, norm_weight_ptr, norm_bias_ptr, NORM)
        tl.store(to + w, tl.sum(x, 0), mask=w < width)


@triton.jit
def _peak_patch_fwd_kernel(
    peak_ptr, anchor_ptr, keys_ptr, mask_ptr, end_ptr, factors_ptr, norm_weight_ptr, norm_bias_ptr,
    pooled_ptr, attention_ptr, statistics_ptr,
    stride_pb, stride_pt, stride_ab, stride_at, length, width, heads, eps,
    NORM: tl.constexpr, FACTORS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One caption. `statistics (B, 2, T)` and `attention` carry numbers from one step to the next."""
    # 64 bits before any product with a stride.
    b = tl.program_id(0).to(tl.int64)
    peak = peak_ptr + b * stride_pb
    h = tl.arange(0, BLOCK_H).to(tl.int64)
    is_head = h < heads
    weights = attention_ptr + (b * heads + h) * length
    most = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    count = 0.0
    for start in range(0, length, BLOCK_T):
        t, kept = _kept(mask_ptr, b, start, length, BLOCK_T)
        count += tl.sum(kept.to(tl.float32), 0)
        rows = peak + t.to(tl.int64) * stride_pt
        mean = tl.zeros((BLOCK_T,), tl.float32)
        scale = mean
        if NORM:
            mean, scale = _statistics(rows, kept, width, eps, BLOCK_T, BLOCK_W)
            to = statistics_ptr + 2 * b * length + t
            tl.store(to, mean, mask=t < length)
            tl.store(to + length, scale, mask=t < length)
        scores = tl.zeros((BLOCK_H, BLOCK_T), tl.float32)
        for at in range(0, width, BLOCK_W):
            w = at + tl.arange(0, BLOCK_W)
            inside = w < width
            x = _tokens(rows, kept, w, inside, mean, scale, norm_weight_ptr, norm_bias_ptr, NORM)
            keys = tl.load(
                keys_ptr + h[:, None] * width + w[None, :], mask=is_head[:, None] & inside[None, :], other=0.0
            )
            scores = tl.dot(keys, tl.trans(x), scores, input_precision="ieee")
        tl.store(weights[:, None] + t[None, :], scores, mask=is_head[:, None] & kept[None, :])
        most = tl.maximum(most, tl.max(tl.where(kept[None, :], scores, float("-inf")), 1))
    tl.debug_barrier()
    total = tl.zeros((BLOCK_H,), tl.float32)
    for start in range(0, length, BLOCK_T):
        t, kept = _kept(mask_ptr, b, start, length, BLOCK_T)
        ours = is_head[:, None] & kept[None, :]
        scores = tl.load(weights[:, None] + t[None, :], mask=ours, other=0.0)
        total += tl.sum(tl.where(ours, tl.exp(scores - most[:, None]), 0.0), 1)
    for start in range(0, length, BLOCK_T):
        t, kept = _kept(mask_ptr, b, start, length, BLOCK_T)
        ours = is_head[:, None] & kept[None, :]
        scores = tl.load(weights[:, None] + t[None, :], mask=ours, other=0.0)
        attention = tl.where(ours, tl.exp(scores - most[:, None]) / total[:, None], 0.0)
        tl.store(weights[:, None] + t[None, :], attention, mask=is_head[:, None] & (t < length)[None, :])
    tl.debug_barrier()
    pooled = pooled_ptr + b * (heads + 3) * width
    for at in range(0, width, BLOCK_W):
        w = at + tl.arange(0, BLOCK_W)
        inside = w < width
        acc = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
        sums = tl.zeros((BLOCK_W,), tl.float32)
        for start in range(0, length, BLOCK_T):
            t, kept = _kept(mask_ptr, b, start, length, BLOCK_T)
            ours = is_head[:, None] & kept[None, :]
            share = tl.load(weights[:, None] + t[None, :], mask=ours, other=0.0)
            if FACTORS:
                share *= tl.load(factors_ptr + (b * heads + h)[:, None] * length + t[None, :], mask=ours, other=0.0)
            mean = tl.zeros((BLOCK_T,), tl.float32)
            scale = mean
            if NORM:
                mean = tl.load(statistics_ptr + 2 * b * length + t, mask=kept, other=0.0)
                scale = tl.load(statistics_ptr + (2 * b + 1) * length + t, mask=kept, other=0.0)
            rows = peak + t.to(tl.int64) * stride_pt
            x = _tokens(rows, kept, w, inside, mean, scale, norm_weight_ptr, norm_bias_ptr, NORM)
            acc = tl.dot(share, x, acc, input_precision="ieee")
            sums += tl.sum(x, 0)
        tl.store(pooled + h[:, None] * width + w[None, :], acc, mask=is_head[:, None] & inside[None, :])
        tl.store(pooled + tl.cast(heads, tl.int64) * width + w, sums / tl.maximum(count, 1.0), mask=inside)
    end = tl.load(end_ptr + b)
    found = (end >= 0) & (end < length)
    end = tl.where(found, end, 0)
    for which in tl.static_range(2):
        row = peak + end * stride_pt if which == 0 else anchor_ptr + b * stride_ab + end * stride_at
        to = pooled + (tl.cast(heads, tl.int64) + 1 + which) * width
        _end_row(row, found, to, width, eps, norm_weight_ptr, norm_bias_ptr, NORM, BLOCK_W)


def pool_forward(
    peak: Tensor,
    anchor: Tensor,
    keys: Tensor,
    mask: Tensor,
    end: Tensor,
    factors: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    outputs: tuple[Tensor, Tensor],
) -> None:
    """Fill `pooled` and, unless its shape is (0,), `attention`.

    Args:
        peak, anchor: dense in the last axis; all else dense, and float32 where it is floating.
        outputs: as `engine.reference.peak_patch.empty_outputs` makes them.
    """
    pooled, attention = outputs
    n, length, width = peak.shape
    heads = keys.shape[0]
    if attention.ndim != 3:
        attention = pooled.new_empty((n, heads, length))
    plan = plan_peak_patch(heads, length, width)
    statistics = pooled if norm_weight is None else pooled.new_empty((n, 2, length))
    # Unused pointers still need something to point at.
    factors_or, weight_or, bias_or = (keys if x is None else x for x in (factors, norm_weight, norm_bias))
    _peak_patch_fwd_kernel[(n,)](
        peak, anchor, keys, mask.view(torch.uint8), end, factors_or, weight_or, bias_or,
        pooled, attention, statistics, *peak.stride()[:2], *anchor_strides(anchor), length, width, heads, eps,
        NORM=norm_weight is not None, FACTORS=factors is not None,
        BLOCK_H=plan.block_h, BLOCK_T=plan.block_t, BLOCK_W=plan.block_w,
        num_warps=plan.num_warps, num_stages=plan.num_stages, maxnreg=MAX_REGISTERS,
    )  # fmt: skip


def anchor_strides(anchor: Tensor) -> tuple[int, int]:
    """Strides of captions and tokens; single vectors are the same at every place."""
    return anchor.stride(0), anchor.stride(1) if anchor.ndim == 3 else 0
