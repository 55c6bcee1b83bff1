"""Max-sim on the GPU: document patches on the rows of each product, query tokens on its columns.

The contract stands in `engine.reference.max_sim`. Patches go on M because a tensor-core instruction wants M in
steps of 64, but N in steps of 8 only, and queries are the short side. One program scores one query against one
document: it keeps the greatest similarity of each token while blocks of patches pass, and writes a single number
(and, where asked for, the alignment). Programs of one document are neighbours, so that it stays in the cache.
"""

# The arguments of kernels are Triton's values, which have no types to write.
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs in one launch: the grid's first axis takes no more.
MAX_PROGRAMS = 2**31 - 1
NOTHING = tl.constexpr(2**31 - 1)  # greater than any place


@dataclass(frozen=True)
class Plan:
    """Shape of a launch: patches, tokens and elements of D per block, warps, pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def plan_max_sim(n_tokens: int, n_patches: int, dim: int, dtype: torch.dtype, *, soft: bool, extra: bool) -> Plan:
    """The launch for queries of `n_tokens` against documents of `n_patches`; plain arithmetic, no tuning.

    Args:
        soft: soft maximum. extra: the alignment or the reverse direction is wanted too: both keep more
            numbers per similarity in registers, so that blocks are smaller.
    """
    # tl.dot takes at least 16 of each, and powers of two.
    block_n = min(128, max(16, triton.next_power_of_2(max(n_tokens, 1))))
    block_m = 128 if n_patches > 64 and block_n <= 64 and not (soft or extra) else 64
    narrow = dtype == torch.float32
    block_k = min(32 if narrow else 64, max(16, triton.next_power_of_2(max(dim, 1))))
    num_warps = 8 if block_m * block_n >= 128 * 64 else 4
    return Plan(block_m, block_n, block_k, num_warps, num_stages=3)


@triton.jit
def _similarities(
    d_rows, q_rows, keep_m, keep_n, dim,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Inner products (BLOCK_M, BLOCK_N) of kept rows; a row that is not kept is read as zeros."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, dim, BLOCK_K):
        at = k + tl.arange(0, BLOCK_K)
        inside = at < dim
        x = tl.load(d_rows[:, None] + at[None, :], mask=keep_m[:, None] & inside[None, :], other=0.0)
        y = tl.load(q_rows[None, :] + at[:, None], mask=inside[:, None] & keep_n[None, :], other=0.0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _pool(s, keep, place, AXIS: tl.constexpr):
    """Greatest kept similarity along an axis (NaN counts as greatest) and the lowest place it has.

    Returns value, place and whether anything is kept; NOTHING is the place, -inf the value of nothing.
    """
    is_nan = keep & (s != s)
    value = tl.max(tl.where(keep & (s == s), s, float("-inf")), AXIS)
    has_nan = tl.max(is_nan.to(tl.int32), AXIS) > 0
    wins = tl.where(tl.expand_dims(has_nan, AXIS), is_nan, keep & (s == tl.expand_dims(value, AXIS)))
    first = tl.min(tl.where(wins, place, NOTHING), AXIS)
    return tl.where(has_nan, float("nan"), value), first


@triton.jit
def _shift(value):
    """What log-sum-exp subtracts: the maximum, unless it is infinite, since inf - inf would be NaN."""
    return tl.where(tl.abs(value) == float("inf"), 0.0, value)


@triton.jit
def _exp_sum(s, keep, shift, temperature, AXIS: tl.constexpr):
    return tl.sum(tl.where(keep, tl.exp((s - tl.expand_dims(shift, AXIS)) / temperature), 0.0), AXIS)


@triton.jit
def _max_sim_fwd_kernel(
    q_ptr, d_ptr, q_mask_ptr, d_mask_ptr, q_weights_ptr, d_weights_ptr,
    scores_ptr, reverse_scores_ptr, argmax_ptr, values_ptr, reverse_argmax_ptr, reverse_values_ptr,
    stride_qi, stride_qu, stride_dj, stride_dt,
    n_queries, first_document, n_documents, n_tokens, n_patches, dim, temperature,
    PAIRS: tl.constexpr, SOFT: tl.constexpr, REVERSE: tl.constexpr,
    HAS_Q_MASK: tl.constexpr, HAS_D_MASK: tl.constexpr, HAS_Q_WEIGHTS: tl.constexpr, HAS_D_WEIGHTS: tl.constexpr,
    WRITE_ARGMAX: tl.constexpr, WRITE_VALUES: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One query against one document. REVERSE needs all tokens in one block (the launcher sees to it)."""
    # 64 bits before any product with a stride: collections pass 2^31 elements.
    program = tl.program_id(0).to(tl.int64)
    if PAIRS:
        i = first_document + program
        j = i
        cell = i
    else:
        i = program % n_queries
        j = first_document + program // n_queries
        cell = i * n_documents + j
    q_row, d_row = q_ptr + i * stride_qi, d_ptr + j * stride_dj
    score = 0.0
    reverse_score = 0.0
    for block in range(0, n_tokens, BLOCK_N):
        u = block + tl.arange(0, BLOCK_N)
        keep_n = u < n_tokens
        if HAS_Q_MASK:
            keep_n = keep_n & (tl.load(q_mask_ptr + i * n_tokens + u, mask=keep_n, other=0) != 0)
        best = tl.full((BLOCK_N,), float("-inf"), tl.float32)
        best_place = tl.full((BLOCK_N,), NOTHING, tl.int32)
        total = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, n_patches, BLOCK_M):
            t = start + tl.arange(0, BLOCK_M)
            keep_m = t < n_patches
            if HAS_D_MASK:
                keep_m = keep_m & (tl.load(d_mask_ptr + j * n_patches + t, mask=keep_m, other=0) != 0)
            s = _similarities(
                d_row + t.to(tl.int64) * stride_dt, q_row + u.to(tl.int64) * stride_qu,
                keep_m, keep_n, dim, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
            keep = keep_m[:, None] & keep_n[None, :]
            value, place = _pool(s, keep, t[:, None], 0)
            # The first block that has something wins over nothing, even with -inf.
            wins = (place != NOTHING) & ((best_place == NOTHING) | (value > best) | ((value != value) & (best == best)))
            before = _shift(best)
            had = best_place != NOTHING
            best = tl.where(wins, value, best)
            best_place = tl.where(wins, place, best_place)
            if SOFT:
                now = _shift(best)
                # A total of nothing, or of exp(-inf) alone, is 0 and needs no scale, which might be infinite.
                scale = tl.where(had & (total != 0.0), tl.exp((before - now) / temperature), 0.0)
                total = total * scale + _exp_sum(s, keep, now, temperature, 0)
            if REVERSE:
                back, back_place = _pool(s, keep, u[None, :], 1)
                if SOFT:
                    shift = _shift(back)
                    back = shift + temperature * tl.log(_exp_sum(s, keep, shift, temperature, 1))
                found = back_place != NOTHING
                back = tl.where(found, back, 0.0)
                weighted = back
                if HAS_D_WEIGHTS:
                    weight = tl.load(d_weights_ptr + j * n_patches + t, mask=found, other=0.0)
                    weighted = tl.where(found, weight * back, 0.0)
                reverse_score += tl.sum(weighted, 0)
                if WRITE_ARGMAX:
                    to = reverse_argmax_ptr + cell * n_patches + t
                    tl.store(to, tl.where(found, back_place, -1), mask=t < n_patches)
                if WRITE_VALUES:
                    tl.store(reverse_values_ptr + cell * n_patches + t, back, mask=t < n_patches)
        found = best_place != NOTHING
        if SOFT:
            best = _shift(best) + temperature * tl.log(total)
        best = tl.where(found, best, 0.0)
        weighted = best
        if HAS_Q_WEIGHTS:
            weight = tl.load(q_weights_ptr + i * n_tokens + u, mask=found, other=0.0)
            weighted = tl.where(found, weight * best, 0.0)
        score += tl.sum(weighted, 0)
        if WRITE_ARGMAX:
            tl.store(argmax_ptr + cell * n_tokens + u, tl.where(found, best_place, -1), mask=u < n_tokens)
        if WRITE_VALUES:
            tl.store(values_ptr + cell * n_tokens + u, best, mask=u < n_tokens)
    tl.store(scores_ptr + cell, score)
    if REVERSE:
        tl.store(reverse_scores_ptr + cell, reverse_score)


def max_sim_forward(
    q: Tensor,
    d: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    d_weights: Tensor | None,
    outputs: tuple[Tensor, ...],
    *,
    temperature: float | None,
    pairs: bool,
    precision: str,
) -> None:
    """Fill `outputs` for checked arguments; q and d are dense in their last axis.

    Args:
        outputs: as `engine.reference.max_sim.empty_outputs` makes them; shape (0,) = not wanted.
    """
    _, reverse_scores, argmax, values, reverse_argmax, reverse_values = outputs
    symmetric = reverse_scores.ndim == 2
    plan = plan_max_sim(
        q.shape[1], d.shape[1], q.shape[2], q.dtype,
        soft=temperature is not None, extra=symmetric or argmax.ndim == 3,
    )  # fmt: skip
    one_tile = symmetric and 0 < q.shape[1] <= plan.block_n
    _launch(plan, q, d, (q_mask, d_mask, q_weights, d_weights), outputs, temperature, pairs, precision, one_tile)
    if symmetric and not one_tile:
        # Long queries: the reverse direction by itself, as documents looking for queries.
        to = [
            x.transpose(0, 1).contiguous() if x.ndim >= 2 and not pairs else x
            for x in (reverse_scores, reverse_argmax, reverse_values)
        ]
        turned = (to[0], reverse_scores.new_empty(0), to[1], to[2], argmax.new_empty(0), values.new_empty(0))
        plan = plan_max_sim(
            d.shape[1], q.shape[1], q.shape[2], q.dtype, soft=temperature is not None, extra=argmax.ndim == 3
        )
        _launch(plan, d, q, (d_mask, q_mask, d_weights, q_weights), turned, temperature, pairs, precision, False)
        if not pairs:
            for x, result in zip((reverse_scores, reverse_argmax, reverse_values), to, strict=True):
                if x.ndim >= 2:
                    x.copy_(result.transpose(0, 1))


def _launch(
    plan: Plan,
    q: Tensor,
    d: Tensor,
    per_token: tuple[Tensor | None, ...],
    outputs: tuple[Tensor, ...],
    temperature: float | None,
    pairs: bool,
    precision: str,
    reverse: bool,
) -> None:
    n_queries, n_documents = q.shape[0], d.shape[0]
    q_mask, d_mask, q_weights, d_weights = (None if x is None else x.contiguous() for x in per_token)
    masks = [None if x is None else x.view(torch.uint8) for x in (q_mask, d_mask)]
    # Unused pointers still need something to point at.
    pointers = [outputs[0] if x is None else x for x in (*masks, q_weights, d_weights)]
    documents = MAX_PROGRAMS if pairs else max(1, MAX_PROGRAMS // n_queries)
    for first in range(0, n_documents, documents):
        count = min(documents, n_documents - first)
        _max_sim_fwd_kernel[(count if pairs else count * n_queries,)](
            q, d, *pointers, *outputs, *q.stride()[:2], *d.stride()[:2],
            n_queries, first, n_documents, q.shape[1], d.shape[1], q.shape[2], temperature or 1.0,
            PAIRS=pairs, SOFT=temperature is not None, REVERSE=reverse,
            HAS_Q_MASK=q_mask is not None, HAS_D_MASK=d_mask is not None,
            HAS_Q_WEIGHTS=q_weights is not None, HAS_D_WEIGHTS=d_weights is not None,
            WRITE_ARGMAX=outputs[2].ndim == 3, WRITE_VALUES=outputs[3].ndim == 3, PRECISION=precision,
            BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
            num_warps=plan.num_warps, num_stages=plan.num_stages,
        )  # fmt: skip
