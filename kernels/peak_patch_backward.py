"""The backward of PeakPatch's caption features on the GPU; formulas and contract: `engine.reference.peak_patch`.

Sums over captions go in chunks of fixed size and then over the chunks, so that they have one order and no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.peak_patch import _kept, _statistics, _tokens, anchor_strides, plan_peak_patch

# Captions whose gradients of the keys one program sums.
CHUNK = 16
# As in the forward, whose blocks are held several times here.
MAX_REGISTERS = 255


@triton.jit
def _end_gradient(
    row, found, grad, to, width, eps, norm_weight_ptr, NORM: tl.constexpr, BLOCK_W: tl.constexpr
):  # fmt: skip
    """Gradient of one token, given that of what `_end_row` made of it; writes nothing where there is none."""
    rows = row + tl.arange(0, 1)
    here = (tl.arange(0, 1) == 0) & found
    mean = tl.zeros((1,), tl.float32)
    scale = mean + 1.0
    level = 0.0
    along = 0.0
    if NORM:
        mean, scale = _statistics(rows, here, width, eps, 1, BLOCK_W)
        for start in range(0, width, BLOCK_W):
            w = start + tl.arange(0, BLOCK_W)
            inside = (w < width) & found
            g = tl.load(grad + w, mask=inside, other=0.0) * tl.load(norm_weight_ptr + w, mask=inside, other=0.0)
            x = (tl.load(row + w, mask=inside, other=0.0).to(tl.float32) - mean) * scale
            level += tl.sum(g, 0)
            along += tl.sum(tl.where(inside, g * x, 0.0), 0)
    for start in range(0, width, BLOCK_W):
        w = start + tl.arange(0, BLOCK_W)
        inside = (w < width) & found
        g = tl.load(grad + w, mask=inside, other=0.0)
        if NORM:
            x = (tl.load(row + w, mask=inside, other=0.0).to(tl.float32) - mean) * scale
            g = g * tl.load(norm_weight_ptr + w, mask=inside, other=0.0)
            g = scale * (g - level / width - x * along / width)
        tl.store(to + w, g, mask=inside)


@triton.jit
def _peak_patch_bwd_scores_kernel(
    peak_ptr, keys_ptr, mask_ptr, factors_ptr, norm_weight_ptr, norm_bias_ptr,
    grad_pooled_ptr, grad_attention_ptr, attention_ptr, to_scores_ptr, statistics_ptr,
    stride_pb, stride_pt, length, width, heads, eps,
    NORM: tl.constexpr, FACTORS: tl.constexpr, OF_ATTENTION: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Gradients of one caption's scores, `to_scores (B, heads, T)`, and the statistics of its tokens."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H).to(tl.int64)
    is_head = h < heads
    of_head = (b * heads + h)[:, None] * length
    mean_of_all = tl.zeros((BLOCK_H,), tl.float32)
    for start in range(0, length, BLOCK_T):
        t, kept = _kept(mask_ptr, b, start, length, BLOCK_T)
        rows = peak_ptr + b * stride_pb + t.to(tl.int64) * stride_pt
        mean = tl.zeros((BLOCK_T,), tl.float32)
        scale = mean
        if NORM:
            mean, scale = _statistics(rows, kept, width, eps, BLOCK_T, BLOCK_W)
            to = statistics_ptr + 2 * b * length + t
            tl.store(to, mean, mask=t < length)
            tl.store(to + length, scale, mask=t < length)
        d = tl.zeros((BLOCK_H, BLOCK_T), tl.float32)
        for at in range(0, width, BLOCK_W):
            w = at + tl.arange(0, BLOCK_W)
            inside = w < width
            x = _tokens(rows, kept, w, inside, mean, scale, norm_weight_ptr, norm_bias_ptr, NORM)
            grad = tl.load(
                grad_pooled_ptr + (b * (heads + 3) + h)[:, None] * width + w[None, :],
                mask=is_head[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            d = tl.dot(grad, tl.trans(x), d, input_precision="ieee")
        ours = is_head[:, None] & kept[None, :]
        if FACTORS:
            d *= tl.load(factors_ptr + of_head + t[None, :], mask=ours, other=0.0)
        if OF_ATTENTION:
            d += tl.load(grad_attention_ptr + of_head + t[None, :], mask=ours, other=0.0)
        d = tl.where(ours, d, 0.0)
        attention = tl.load(attention_ptr + of_head + t[None, :], mask=ours, other=0.0)
        mean_of_all += tl.sum(attention * d, 1)
        tl.store(to_scores_ptr + of_head + t[None, :], d, mask=is_head[:, None] & (t < length)[None, :])
    tl.debug_barrier()
    for start in range(0, length, BLOCK_T):
        t, kept = _kept(mask_ptr, b, start, length, BLOCK_T)
        ours = is_head[:, None] & kept[None, :]
        d = tl.load(to_scores_ptr + of_head + t[None, :], mask=ours, other=0.0)
        attention = tl.load(attention_ptr + of_head + t[None, :], mask=ours, other=0.0)
        d = tl.where(ours, attention * (d - mean_of_all[:, None]), 0.0)
        tl.store(to_scores_ptr + of_head + t[None, :], d, mask=is_head[:, None] & (t < length)[None, :])


@triton.jit
def _peak_patch_bwd_keys_kernel(
    peak_ptr, mask_ptr, norm_weight_ptr, norm_bias_ptr, to_scores_ptr, statistics_ptr, parts_ptr,
    stride_pb, stride_pt, n, length, width, heads,
    NORM: tl.constexpr, CAPTIONS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """A chunk of captions' part of the gradient of the keys, `parts (chunks, heads, W)`, for a block of W."""
    chunk = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = w < width
    h = tl.arange(0, BLOCK_H).to(tl.int64)
    is_head = h < heads
    acc = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    for i in range(0, tl.minimum(CAPTIONS, n - tl.program_id(0) * CAPTIONS)):
        b = chunk * CAPTIONS + i
        for start in range(0, length, BLOCK_T):
            t, kept = _kept(mask_ptr, b, start, length, BLOCK_T)
            mean = tl.zeros((BLOCK_T,), tl.float32)
            scale = mean
            if NORM:
                mean = tl.load(statistics_ptr + 2 * b * length + t, mask=kept, other=0.0)
                scale = tl.load(statistics_ptr + (2 * b + 1) * length + t, mask=kept, other=0.0)
            rows = peak_ptr + b * stride_pb + t.to(tl.int64) * stride_pt
            x = _tokens(rows, kept, w, inside, mean, scale, norm_weight_ptr, norm_bias_ptr, NORM)
            d = tl.load(
                to_scores_ptr + (b * heads + h)[:, None] * length + t[None, :],
                mask=is_head[:, None] & kept[None, :], other=0.0,
            )  # fmt: skip
            acc = tl.dot(d, x, acc, input_precision="ieee")
    to = parts_ptr + (chunk * heads + h)[:, None] * width + w[None, :]
    tl.store(to, acc, mask=is_head[:, None] & inside[None, :])


@triton.jit
def _token_gradients(
    b, t, share, d, mean_share, is_end, w, inside, heads, width, h, is_head, grad_pooled_ptr, keys_ptr
):  # fmt: skip
    """Gradients (BLOCK_T, BLOCK_W) of tokens after the norm: from pooling, scores, mean and end."""
    there = is_head[:, None] & inside[None, :]
    grads = grad_pooled_ptr + b * (heads + 3) * width
    g = tl.load(grads + h[:, None] * width + w[None, :], mask=there, other=0.0)
    keys = tl.load(keys_ptr + h[:, None] * width + w[None, :], mask=there, other=0.0)
    x = tl.dot(tl.trans(share), g, input_precision="ieee")
    x = tl.dot(tl.trans(d), keys, x, input_precision="ieee")
    of_mean = tl.load(grads + tl.cast(heads, tl.int64) * width + w, mask=inside, other=0.0)
    of_end = tl.load(grads + (tl.cast(heads, tl.int64) + 1) * width + w, mask=inside, other=0.0)
    x += tl.where(mean_share[:, None] > 0, mean_share[:, None] * of_mean[None, :], 0.0)
    return x + tl.where(is_end[:, None], of_end[None, :], 0.0)


@triton.jit
def _peak_patch_bwd_tokens_kernel(
    peak_ptr, anchor_ptr, keys_ptr, mask_ptr, end_ptr, factors_ptr, norm_weight_ptr,
    grad_pooled_ptr, attention_ptr, to_scores_ptr, grad_peak_ptr, grad_anchor_ptr,
    stride_pb, stride_pt, stride_ab, stride_at, stride_gb, stride_gt, length, width, heads, eps,
    NORM: tl.constexpr, FACTORS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Gradients of one caption's tokens. That of the anchor is zeroed before; its end is written here."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H).to(tl.int64)
    is_head = h < heads
    end = tl.load(end_ptr + b)
    found = (end >= 0) & (end < length)
    count = 0.0
    for start in range(0, length, BLOCK_T):
        _, kept = _kept(mask_ptr, b, start, length, BLOCK_T)
        count += tl.sum(kept.to(tl.float32), 0)
    for start in range(0, length, BLOCK_T):
        t, kept = _kept(mask_ptr, b, start, length, BLOCK_T)
        is_end = (t == end) & found
        # A masked token at the end has a gradient, too.
        live = kept | is_end
        ours = is_head[:, None] & kept[None, :]
        place = (b * heads + h)[:, None] * length + t[None, :]
        share = tl.load(attention_ptr + place, mask=ours, other=0.0)
        if FACTORS:
            share *= tl.load(factors_ptr + place, mask=ours, other=0.0)
        d = tl.load(to_scores_ptr + place, mask=ours, other=0.0)
        mean_share = tl.where(kept, 1.0 / tl.maximum(count, 1.0), 0.0)
        rows = peak_ptr + b * stride_pb + t.to(tl.int64) * stride_pt
        mean = tl.zeros((BLOCK_T,), tl.float32)
        scale = mean
        level = mean
        along = mean
        if NORM:
            mean, scale = _statistics(rows, live, width, eps, BLOCK_T, BLOCK_W)
            for at in range(0, width, BLOCK_W):
                w = at + tl.arange(0, BLOCK_W)
                inside = w < width
                g = _token_gradients(
                    b, t, share, d, mean_share, is_end, w, inside, heads, width, h, is_head, grad_pooled_ptr, keys_ptr
                )
                g *= tl.load(norm_weight_ptr + w, mask=inside, other=0.0)[None, :]
                there = live[:, None] & inside[None, :]
                x = tl.load(rows[:, None] + w[None, :], mask=there, other=0.0).to(tl.float32)
                x = tl.where(there, (x - mean[:, None]) * scale[:, None], 0.0)
                level += tl.sum(g, 1)
                along += tl.sum(g * x, 1)
        for at in range(0, width, BLOCK_W):
            w = at + tl.arange(0, BLOCK_W)
            inside = w < width
            there = live[:, None] & inside[None, :]
            g = _token_gradients(
                b, t, share, d, mean_share, is_end, w, inside, heads, width, h, is_head, grad_pooled_ptr, keys_ptr
            )
            if NORM:
                g *= tl.load(norm_weight_ptr + w, mask=inside, other=0.0)[None, :]
                x = tl.load(rows[:, None] + w[None, :], mask=there, other=0.0).to(tl.float32)
                x = (x - mean[:, None]) * scale[:, None]
                g = scale[:, None] * (g - (level / width)[:, None] - x * (along / width)[:, None])
            to = grad_peak_ptr + (b * length + t)[:, None] * width + w[None, :]
            tl.store(to, tl.where(there, g, 0.0), mask=(t < length)[:, None] & inside[None, :])
    end = tl.where(found, end, 0)
    _end_gradient(
        anchor_ptr + b * stride_ab + end * stride_at, found, grad_pooled_ptr + (b * (heads + 3) + heads + 2) * width,
        grad_anchor_ptr + b * stride_gb + end * stride_gt, width, eps, norm_weight_ptr, NORM, BLOCK_W,
    )  # fmt: skip


def pool_backward(
    peak: Tensor,
    anchor: Tensor,
    keys: Tensor,
    mask: Tensor,
    end: Tensor,
    factors: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    incoming: list[Tensor | None],
    grads: tuple[Tensor, ...],
) -> None:
    """Fill the gradients of keys, peak and anchor, the last two unless their shape is (0,).

    Args:
        peak, anchor: dense in the last axis; all else dense, and float32 where it is floating.
        incoming: gradients of pooled and of attention (or None), and the attention.
    """
    grad_pooled, grad_attention, attention = incoming
    assert grad_pooled is not None and attention is not None
    to_keys, to_peak, to_anchor = grads
    n, length, width = peak.shape
    heads = keys.shape[0]
    plan = plan_peak_patch(heads, length, width)
    to_scores = torch.empty_like(attention)
    statistics = attention if norm_weight is None else attention.new_empty((n, 2, length))
    # Unused pointers still need something to point at.
    factors_or, weight_or, bias_or, of_attention = (
        keys if x is None else x for x in (factors, norm_weight, norm_bias, grad_attention)
    )
    kept = mask.view(torch.uint8)
    launch = {
        "NORM": norm_weight is not None, "BLOCK_H": plan.block_h, "BLOCK_T": plan.block_t, "BLOCK_W": plan.block_w,
        "num_warps": plan.num_warps, "num_stages": plan.num_stages, "maxnreg": MAX_REGISTERS,
    }  # fmt: skip
    _peak_patch_bwd_scores_kernel[(n,)](
        peak, keys, kept, factors_or, weight_or, bias_or, grad_pooled, of_attention, attention, to_scores, statistics,
        *peak.stride()[:2], length, width, heads, eps,
        FACTORS=factors is not None, OF_ATTENTION=grad_attention is not None, **launch,
    )  # fmt: skip
    chunks = triton.cdiv(n, CHUNK)
    parts = to_keys.new_empty((chunks, heads, width))
    _peak_patch_bwd_keys_kernel[(chunks, triton.cdiv(width, plan.block_w))](
        peak, kept, weight_or, bias_or, to_scores, statistics, parts,
        *peak.stride()[:2], n, length, width, heads, CAPTIONS=CHUNK, **launch,
    )  # fmt: skip
    torch.sum(parts, 0, out=to_keys)
    if to_peak.ndim == 1:
        return
    to_anchor.zero_()
    _peak_patch_bwd_tokens_kernel[(n,)](
        peak, anchor, keys, kept, end, factors_or, weight_or, grad_pooled, attention, to_scores, to_peak, to_anchor,
        *peak.stride()[:2], *anchor_strides(anchor), *anchor_strides(to_anchor), length, width, heads, eps,
        FACTORS=factors is not None, **{**launch, "num_warps": 2 * plan.num_warps},
    )  # fmt: skip
