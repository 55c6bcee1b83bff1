"""Max-sim of a batch of queries, document-stationary: a tile of patches stays on the chip while all queries pass.

The contract: `engine.reference.max_sim`. Here query tokens are rows and patches are columns, so that a maximum lies
within few threads. Tokens of all queries are one list of rows. What a token found in the tiles of a document so far
lies in a scratch row of each program, which runs over many documents; the scratch stays in the L2 cache.
"""

# The arguments of kernels are Triton's values, which have no types to write.
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.max_sim_plan import Side, StationaryPlan
from engine.kernels.max_sim_tile import LOG2_E, NOTHING, _of_either, _of_row, _span


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _finish_document(
    best_ptr, place_ptr, q_mask_ptr, q_weights_ptr, q_scales_ptr, scores_ptr, argmax_ptr, values_ptr,
    j, any_patch, n_queries, n_documents, n_tokens,
    SCALED: tl.constexpr, Q_MASK: tl.constexpr, Q_WEIGHTS: tl.constexpr, ARGMAX: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Scores of all queries, and results of their tokens as far as they are wanted, from the scratch."""
    for first in range(0, n_queries, BLOCK_Q):
        i = (first + tl.arange(0, BLOCK_Q)).to(tl.int64)
        cell = i * n_documents + j
        score = tl.zeros((BLOCK_Q,), tl.float32)
        for begin in range(0, n_tokens, BLOCK_U):
            u = begin + tl.arange(0, BLOCK_U)
            exists = (i < n_queries)[:, None] & (u < n_tokens)[None, :]
            at = (i * n_tokens)[:, None] + u[None, :]
            to = (cell * n_tokens)[:, None] + u[None, :]
            found = exists & any_patch
            if Q_MASK:
                found = found & (tl.load(q_mask_ptr + at, mask=exists, other=0) != 0)
            value = tl.load(best_ptr + at, mask=found, other=0.0)
            if SCALED:
                value = value * tl.load(q_scales_ptr + at, mask=found, other=0.0)
            if ARGMAX:
                place = tl.load(place_ptr + at, mask=found, other=-1)
                tl.store(argmax_ptr + to, place, mask=exists)
            if VALUES:
                tl.store(values_ptr + to, value, mask=exists)
            if Q_WEIGHTS:
                value = value * tl.load(q_weights_ptr + at, mask=found, other=0.0)
                value = tl.where(found, value, 0.0)
            score += tl.sum(value, 1)
        tl.store(scores_ptr + cell, score, mask=i < n_queries)


@triton.jit
def _max_sim_stationary_kernel(
    q_ptr, d_ptr, d_cu_ptr, q_mask_ptr, d_mask_ptr, q_weights_ptr, q_scales_ptr, d_scales_ptr,
    scores_ptr, argmax_ptr, values_ptr, best_ptr, place_ptr,
    stride_qu, stride_dj, stride_dt, n_queries, n_documents, n_tokens, n_rows, n_patches, dim, temperature, rate,
    SOFT: tl.constexpr, SCALED: tl.constexpr, D_PACKED: tl.constexpr, Q_MASK: tl.constexpr, D_MASK: tl.constexpr,
    Q_WEIGHTS: tl.constexpr, ARGMAX: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """All queries against every so many-th document. `n_rows` = n_queries · n_tokens; BLOCK_K holds all of D."""
    # Columns beyond the last patch repeat it, which changes no maximum, but sums.
    MASK: tl.constexpr = D_MASK or SOFT
    number: tl.constexpr = tl.int32 if SCALED else tl.float32
    # 64 bits before any product with a stride: collections pass 2^31 elements.
    program = tl.program_id(0).to(tl.int64)
    best_ptr += program * n_rows
    place_ptr += program * n_rows
    at = tl.arange(0, BLOCK_K)
    inside = at < dim
    for j in range(program, n_documents, tl.num_programs(0)):
        d_first, d_at, patches = _span(d_cu_ptr, j, n_patches, stride_dj, stride_dt, D_PACKED)
        seen = tl.zeros((BLOCK_T,), tl.int32)
        for start in range(0, patches, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            keep = t < patches
            if D_MASK:
                keep = keep & (tl.load(d_mask_ptr + d_first + t, mask=keep, other=0) != 0)
                seen = seen | keep.to(tl.int32)
            there = t if MASK else tl.minimum(t, patches - 1)
            columns = d_ptr + d_at + there.to(tl.int64) * stride_dt
            x = tl.load(columns[None, :] + at[:, None], mask=inside[:, None] & (there < patches)[None, :], other=0)
            if SCALED:
                d_scale = tl.load(d_scales_ptr + d_first + there, mask=there < patches, other=0.0)
            for base in range(0, n_rows, BLOCK_R):
                c = base + tl.arange(0, BLOCK_R)
                exists = c < n_rows
                rows = q_ptr + c.to(tl.int64) * stride_qu
                # Before the product, which hides how long it takes.
                so_far = exists & (start > 0)
                best = tl.load(best_ptr + c, mask=so_far, other=float("-inf"))
                y = tl.load(rows[:, None] + at[None, :], mask=exists[:, None] & inside[None, :], other=0)
                s = tl.dot(y, x, out_dtype=number).to(tl.float32)
                if SCALED:
                    s = s * d_scale[None, :]
                if SOFT or ARGMAX:
                    value, place, top = _of_row(s, keep, there, temperature, rate, SOFT, ARGMAX)
                    old_place = tl.full((BLOCK_R,), NOTHING, tl.int32)
                    if ARGMAX:
                        old_place = tl.load(place_ptr + c, mask=so_far, other=NOTHING)
                    best, place = _of_either(best, old_place, best, value, place, top, temperature, rate, SOFT)
                    if ARGMAX:
                        tl.store(place_ptr + c, place, mask=exists)
                else:
                    if MASK:
                        s = tl.where(keep[None, :], s, float("-inf"))
                    best = _greater(best, tl.reduce(s, 1, _greater))
                tl.store(best_ptr + c, best, mask=exists)
            # The next tile and the end read what other threads may have written.
            tl.debug_barrier()
        any_patch = tl.max(seen, 0) > 0 if D_MASK else patches > 0
        _finish_document(
            best_ptr, place_ptr, q_mask_ptr, q_weights_ptr, q_scales_ptr, scores_ptr, argmax_ptr, values_ptr,
            j, any_patch, n_queries, n_documents, n_tokens,
            SCALED, Q_MASK, Q_WEIGHTS, ARGMAX, VALUES, BLOCK_Q, BLOCK_U,
        )  # fmt: skip
        tl.debug_barrier()


def launch_stationary(
    plan: StationaryPlan, q: Side, d: Side, outputs: tuple[Tensor, ...], temperature: float | None
) -> None:
    """Fill `outputs` for dense queries, some at a time; one direction."""
    length, dim = q.length, q.tokens.shape[-1]
    tokens = q.tokens.reshape(-1, dim)  # copies queries that are not one list of rows
    d_mask = None if d.mask is None else d.mask.contiguous().view(torch.uint8)
    q_mask = None if q.mask is None else q.mask.contiguous().view(torch.uint8)
    q_weights = None if q.weights is None else q.weights.contiguous()
    argmax, values = outputs[2:4]
    programs = min(d.number, plan.programs)
    scratch = tokens.new_empty(programs, min(q.number, plan.queries) * length, dtype=torch.float32)
    places = scratch.new_empty(scratch.shape if argmax.ndim > 1 else 0, dtype=torch.int32)
    tau = 1.0 if temperature is None else temperature
    for first in range(0, q.number, plan.queries):
        span = slice(first, first + plan.queries)
        count = min(plan.queries, q.number - first)
        per_token = [None if x is None else x[span] for x in (q_mask, q_weights, q.scales)]
        # Unused pointers still need something to point at.
        mask, weights, scales = (scratch if x is None else x for x in per_token)
        _max_sim_stationary_kernel[(programs,)](
            tokens[first * length :], d.tokens, scratch if d.cu_seqlens is None else d.cu_seqlens,
            mask, scratch if d_mask is None else d_mask, weights, scales, scratch if d.scales is None else d.scales,
            outputs[0][span], argmax[span] if argmax.ndim > 1 else argmax, values[span] if values.ndim > 1 else values,
            scratch, places, tokens.stride(0), *d.strides, count, d.number, length, count * length,
            d.tokens.shape[-2] if d.cu_seqlens is None else d.tokens.shape[0], dim, tau, LOG2_E.value / tau,
            SOFT=temperature is not None, SCALED=q.scales is not None, D_PACKED=d.cu_seqlens is not None,
            Q_MASK=q.mask is not None, D_MASK=d.mask is not None, Q_WEIGHTS=q.weights is not None,
            ARGMAX=argmax.ndim > 1, VALUES=values.ndim > 1,
            BLOCK_R=plan.block_r, BLOCK_T=plan.block_t, BLOCK_K=plan.block_k, BLOCK_Q=plan.block_q,
            BLOCK_U=plan.block_u, num_warps=plan.num_warps, num_stages=plan.num_stages, maxnreg=plan.max_registers,
        )  # fmt: skip
