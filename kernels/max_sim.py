"""Max-sim on the GPU: document patches on the rows of each product, query tokens on its columns.

The contracts: `engine.reference.max_sim`, packed tokens `engine.reference.max_sim_varlen`, int8 codes
`engine.reference.max_sim_int8`. Patches go on M because a tensor-core instruction wants M in steps of 64, but N in
steps of 8 only, and queries are the short side. One program scores one document against one query, or a group of
short ones that share a tile. While tiles of patches pass, each place of the tile keeps the greatest similarity it has
seen; maxima across the rows are taken once a document. Programs of one document are neighbours, so that it is read from
memory once.
"""

# The arguments of kernels are Triton's values, which have no types to write.
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.max_sim_plan import Plan, Side, architecture, plan_max_sim, plan_stationary, processors
from engine.kernels.max_sim_stationary import launch_stationary
from engine.kernels.max_sim_tile import LOG2_E, NOTHING, _across, _of_either, _of_row, _span

# Programs in one launch: the grid's first axis takes no more.
MAX_PROGRAMS = 2**31 - 1


@triton.jit
def _similarities(
    d_rows, q_rows, e_rows, d_scale, keep_m, keep_n, keep_e, dim,
    MASK_M: tl.constexpr, SCALED: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Inner products of a tile's rows with both parts of its columns; what is not kept is read as zeros."""
    number: tl.constexpr = tl.int32 if SCALED else tl.float32
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=number)
    more = acc
    if BLOCK_E > 0:
        more = tl.zeros((BLOCK_M, BLOCK_E), dtype=number)
    for k in range(0, dim, BLOCK_K):
        at = k + tl.arange(0, BLOCK_K)
        inside = at < dim
        if MASK_M:
            x = tl.load(d_rows[:, None] + at[None, :], mask=keep_m[:, None] & inside[None, :], other=0)
        elif EVEN_K:
            x = tl.load(d_rows[:, None] + at[None, :])
        else:
            x = tl.load(d_rows[:, None] + at[None, :], mask=inside[None, :], other=0)
        y = tl.load(q_rows[None, :] + at[:, None], mask=inside[:, None] & keep_n[None, :], other=0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION, out_dtype=number)
        if BLOCK_E > 0:
            z = tl.load(e_rows[None, :] + at[:, None], mask=inside[:, None] & keep_e[None, :], other=0)
            more = tl.dot(x, z, more, input_precision=PRECISION, out_dtype=number)
    s, e = acc.to(tl.float32), more.to(tl.float32)
    if SCALED:
        s = s * d_scale[:, None]
        e = e * d_scale[:, None]
    return s, e


@triton.jit
def _update(s, best, place, total, keep, t, rate, SOFT: tl.constexpr, ARGMAX: tl.constexpr, MASK_M: tl.constexpr):
    """Take a tile of similarities into what each place of it has seen: greatest, its patch, sum of exponentials.

    NaN is the greatest. Without ARGMAX a soft maximum needs no care for it: the sum is NaN for good.
    """
    if SOFT:
        # Equal before the difference: inf - inf would be NaN. Of the two exponentials one is always exp(0).
        low = tl.where(s == best, 1.0, tl.exp2(-tl.abs(s - best) * rate))
        after = tl.where(s > best, total * low + 1.0, total + low)
        if MASK_M:
            after = tl.where(keep[:, None], after, total)
        total = after
    if ARGMAX:
        wins = (s > best) | ((s != s) & (best == best)) | (place == NOTHING)
        if MASK_M:
            wins = wins & keep[:, None]
        best = tl.where(wins, s, best)
        place = tl.where(wins, t[:, None], place)
    else:
        if MASK_M:
            s = tl.where(keep[:, None], s, float("-inf"))
        best = tl.maximum(best, s) if SOFT else tl.maximum(best, s, propagate_nan=tl.PropagateNan.ALL)
    return best, place, total


@triton.jit
def _columns(
    base, length, count, first, stride_i, stride_u, mask_ptr, scales_ptr,
    MEMBERS: tl.constexpr, HAS_MASK: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a part of the columns: the query of the group, its token, where its row begins, which there are and are
    kept, scales."""
    c = base + tl.arange(0, BLOCK)
    owner = tl.zeros((BLOCK,), tl.int32)
    u = c
    if MEMBERS > 1:
        owner = c // length
        u = c % length
    exists = c < count
    keep = exists
    if HAS_MASK:
        keep = exists & (tl.load(mask_ptr + first + c, mask=exists, other=0) != 0)
    scale = tl.zeros((BLOCK,), tl.float32)
    if SCALED:
        scale = tl.load(scales_ptr + first + c, mask=keep, other=0.0)
    return owner, u, owner.to(tl.int64) * stride_i + u.to(tl.int64) * stride_u, exists, keep, scale


@triton.jit
def _finish(
    best, place, total, any_patch, base, owner, exists, keep, scale, first, to, temperature, rate,
    weights_ptr, argmax_ptr, values_ptr,
    SOFT: tl.constexpr, ARGMAX: tl.constexpr, VALUES: tl.constexpr, WEIGHTS: tl.constexpr, SCALED: tl.constexpr,
    MEMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maxima of a part's tokens, written to `to` if wanted, and the weighted sum of each query (MEMBERS,)."""
    value, found_at, _ = _across(best, place, total, temperature, rate, 0, SOFT, ARGMAX)
    found = keep & any_patch
    if SCALED:
        value = scale * value
    value = tl.where(found, value, 0.0)
    if ARGMAX:
        tl.store(argmax_ptr + to, tl.where(found, found_at, -1), mask=exists)
    if VALUES:
        tl.store(values_ptr + to, value, mask=exists)
    if WEIGHTS:
        weight = tl.load(weights_ptr + first + base + tl.arange(0, BLOCK), mask=found, other=0.0)
        value = tl.where(found, weight * value, 0.0)
    member = tl.arange(0, MEMBERS)
    return tl.sum(tl.where(member[:, None] == owner[None, :], value[None, :], 0.0), 1)


@triton.jit
def _max_sim_fwd_kernel(
    q_ptr, d_ptr, q_cu_ptr, d_cu_ptr, q_mask_ptr, d_mask_ptr, q_weights_ptr, d_weights_ptr, q_scales_ptr, d_scales_ptr,
    scores_ptr, reverse_scores_ptr, argmax_ptr, values_ptr, reverse_argmax_ptr, reverse_values_ptr,
    stride_qi, stride_qu, stride_dj, stride_dt,
    n_queries, first_document, n_documents, n_tokens, n_patches, dim, group, temperature, rate,
    PAIRS: tl.constexpr, SOFT: tl.constexpr, REVERSE: tl.constexpr, SCALED: tl.constexpr,
    Q_PACKED: tl.constexpr, D_PACKED: tl.constexpr, Q_MASK: tl.constexpr, D_MASK: tl.constexpr,
    Q_WEIGHTS: tl.constexpr, D_WEIGHTS: tl.constexpr, ARGMAX: tl.constexpr, VALUES: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_K: tl.constexpr, MEMBERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A group of queries against one document. REVERSE needs a single query with all its tokens in the tile.

    Packed items: `n_tokens`, `n_patches` are the numbers of all rows. `rate` is log2(e) / temperature.
    """
    # Rows beyond the last one repeat it, which changes no maximum, but sums and the other direction.
    MASK_M: tl.constexpr = D_MASK or SOFT or REVERSE
    # 64 bits before any product with a stride: collections pass 2^31 elements.
    program = tl.program_id(0).to(tl.int64)
    groups = (n_queries + group - 1) // group
    i = first_document + program if PAIRS else program % groups * group
    j = i if PAIRS else first_document + program // groups
    cell = i if PAIRS else i * n_documents + j
    q_first, q_at, length = _span(q_cu_ptr, i, n_tokens, stride_qi, stride_qu, Q_PACKED)
    d_first, d_at, patches = _span(d_cu_ptr, j, n_patches, stride_dj, stride_dt, D_PACKED)
    count = (length * tl.minimum(n_queries - i, group)).to(tl.int32)
    # Results of a query's tokens: among those of all tokens where they are packed, else by query and document.
    q_to = j * n_tokens + q_first if Q_PACKED else cell * length
    q_step = tl.cast(n_documents, tl.int64) * length
    d_to = i * n_patches + d_first if D_PACKED else cell * patches
    score = tl.zeros((MEMBERS,), tl.float32)
    reverse = tl.zeros((BLOCK_M,), tl.float32)
    # A query of no tokens has results in the other direction, too.
    for base in range(0, tl.maximum(count, 1) if REVERSE else count, BLOCK_N + BLOCK_E):
        owner, u, rows, exists, keep, scale = _columns(
            base, length, count, q_first, stride_qi, stride_qu, q_mask_ptr, q_scales_ptr,
            MEMBERS, Q_MASK, SCALED, BLOCK_N,
        )  # fmt: skip
        best = tl.full((BLOCK_M, BLOCK_N), float("-inf"), tl.float32)
        place = tl.full((BLOCK_M, BLOCK_N), NOTHING, tl.int32)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        e_owner, e_u, e_rows, e_exists, e_keep, e_scale = owner, u, rows, exists, keep, scale
        if BLOCK_E > 0:
            e_owner, e_u, e_rows, e_exists, e_keep, e_scale = _columns(
                base + BLOCK_N, length, count, q_first, stride_qi, stride_qu, q_mask_ptr, q_scales_ptr,
                MEMBERS, Q_MASK, SCALED, BLOCK_E,
            )  # fmt: skip
            e_best = tl.full((BLOCK_M, BLOCK_E), float("-inf"), tl.float32)
            e_place = tl.full((BLOCK_M, BLOCK_E), NOTHING, tl.int32)
            e_total = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
        seen = tl.zeros((BLOCK_M,), tl.int32)
        any_token = tl.maximum(tl.max(keep.to(tl.int32), 0), tl.max(e_keep.to(tl.int32), 0)) > 0
        for start in range(0, patches, BLOCK_M):
            t = start + tl.arange(0, BLOCK_M)
            keep_m = t < patches
            if D_MASK:
                keep_m = keep_m & (tl.load(d_mask_ptr + d_first + t, mask=keep_m, other=0) != 0)
                seen = seen | keep_m.to(tl.int32)
            there = t if MASK_M else tl.minimum(t, patches - 1)
            d_scale = tl.zeros((BLOCK_M,), tl.float32)
            if SCALED:
                d_scale = tl.load(d_scales_ptr + d_first + there, mask=there < patches, other=0.0)
            s, e = _similarities(
                d_ptr + d_at + there.to(tl.int64) * stride_dt, q_ptr + q_at + rows, q_ptr + q_at + e_rows,
                d_scale, keep_m, keep, e_keep, dim,
                MASK_M, SCALED, EVEN_K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_E, BLOCK_K,
            )  # fmt: skip
            best, place, total = _update(s, best, place, total, keep_m, there, rate, SOFT, ARGMAX, MASK_M)
            if BLOCK_E > 0:
                e_best, e_place, e_total = _update(
                    e, e_best, e_place, e_total, keep_m, there, rate, SOFT, ARGMAX, MASK_M
                )
            if REVERSE:
                back, back_u, top = _of_row(s, keep, u, temperature, rate, SOFT, ARGMAX)
                if BLOCK_E > 0:
                    more, more_u, e_top = _of_row(e, e_keep, e_u, temperature, rate, SOFT, ARGMAX)
                    back, back_u = _of_either(back, back_u, top, more, more_u, e_top, temperature, rate, SOFT)
                found = keep_m & any_token
                back = tl.where(found, back, 0.0)
                if ARGMAX:
                    tl.store(reverse_argmax_ptr + d_to + t, tl.where(found, back_u, -1), mask=t < patches)
                if VALUES:
                    tl.store(reverse_values_ptr + d_to + t, back, mask=t < patches)
                if D_WEIGHTS:
                    weight = tl.load(d_weights_ptr + d_first + t, mask=found, other=0.0)
                    back = tl.where(found, weight * back, 0.0)
                reverse += back
        any_patch = tl.max(seen, 0) > 0 if D_MASK else patches > 0
        score += _finish(
            best, place, total, any_patch, base, owner, exists, keep, scale, q_first, q_to + owner * q_step + u,
            temperature, rate, q_weights_ptr, argmax_ptr, values_ptr,
            SOFT, ARGMAX, VALUES, Q_WEIGHTS, SCALED, MEMBERS, BLOCK_N,
        )  # fmt: skip
        if BLOCK_E > 0:
            score += _finish(
                e_best, e_place, e_total, any_patch, base + BLOCK_N, e_owner, e_exists, e_keep, e_scale, q_first,
                q_to + e_owner * q_step + e_u, temperature, rate, q_weights_ptr, argmax_ptr, values_ptr,
                SOFT, ARGMAX, VALUES, Q_WEIGHTS, SCALED, MEMBERS, BLOCK_E,
            )  # fmt: skip
    member = tl.arange(0, MEMBERS)
    wanted = (member < group) & (member < n_queries - i)
    tl.store(scores_ptr + cell + member.to(tl.int64) * n_documents, score, mask=wanted)
    if REVERSE:
        tl.store(reverse_scores_ptr + cell, tl.sum(reverse, 0))


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
    score_sides(Side(q, q_mask, q_weights), Side(d, d_mask, d_weights), outputs, temperature, pairs, precision)


def score_sides(
    q: Side, d: Side, outputs: tuple[Tensor, ...], temperature: float | None, pairs: bool, precision: str
) -> None:
    """Fill `outputs`, whose per-token results are by query and document, or by all tokens of a packed side."""
    _, reverse_scores, argmax, values, reverse_argmax, reverse_values = outputs
    symmetric = reverse_scores.ndim == 2
    stationary = plan_stationary(
        q, d, soft=temperature is not None, argmax=argmax.ndim > 1, aligned=_aligned(q, d),
        single=pairs or symmetric or q.cu_seqlens is not None, wgmma=architecture(q.tokens.device) >= 90,
        processors=processors(q.tokens.device),
    )  # fmt: skip
    if stationary is not None:
        launch_stationary(stationary, q, d, outputs, temperature)
        return
    plan = _plan(q, d, temperature, pairs, precision, argmax.ndim > 1, symmetric)
    _launch(plan, q, d, outputs, temperature, pairs, precision)
    if not symmetric or plan.reverse:
        return
    # Long queries: the reverse direction by itself, as documents looking for queries. Where results go by query and
    # document, they come out the other way round.
    results = (reverse_scores, reverse_argmax, reverse_values)
    turn = [not pairs and (k == 0 or (x.ndim > 1 and d.cu_seqlens is None)) for k, x in enumerate(results)]
    to = [x.transpose(0, 1).contiguous() if t else x for x, t in zip(results, turn, strict=True)]
    turned = (to[0], reverse_scores.new_empty(0), to[1], to[2], argmax.new_empty(0), values.new_empty(0))
    plan = _plan(d, q, temperature, pairs, precision, argmax.ndim > 1, False)
    _launch(plan, d, q, turned, temperature, pairs, precision)
    for x, result, t in zip(results, to, turn, strict=True):
        if t:
            x.copy_(result.transpose(0, 1))


def _aligned(q: Side, d: Side) -> bool:
    return all(stride * q.tokens.itemsize % 16 == 0 for stride in (*q.strides, *d.strides))


def _plan(
    q: Side, d: Side, temperature: float | None, pairs: bool, precision: str, argmax: bool, symmetric: bool
) -> Plan:
    single = pairs or q.cu_seqlens is not None
    return plan_max_sim(
        1 if single else q.number, q.length, d.length, q.tokens.shape[-1], q.tokens.dtype,
        soft=temperature is not None, argmax=argmax, symmetric=symmetric, exact=precision == "ieee",
        aligned=_aligned(q, d),
        wgmma=architecture(q.tokens.device) >= 90,
    )  # fmt: skip


def _launch(
    plan: Plan, q: Side, d: Side, outputs: tuple[Tensor, ...], temperature: float | None, pairs: bool, precision: str
) -> None:
    masks = [None if x.mask is None else x.mask.contiguous().view(torch.uint8) for x in (q, d)]
    weights = [None if x.weights is None else x.weights.contiguous() for x in (q, d)]
    bounds, scales = (q.cu_seqlens, d.cu_seqlens), (q.scales, d.scales)
    # Unused pointers still need something to point at.
    pointers = [outputs[0] if x is None else x for x in (*bounds, *masks, *weights, *scales)]
    dim, groups = q.tokens.shape[-1], triton.cdiv(q.number, plan.group)
    documents = MAX_PROGRAMS if pairs else max(1, MAX_PROGRAMS // groups)
    tau = 1.0 if temperature is None else temperature
    for first in range(0, d.number, documents):
        count = min(documents, d.number - first)
        _max_sim_fwd_kernel[(count if pairs else count * groups,)](
            q.tokens, d.tokens, *pointers, *outputs, *q.strides, *d.strides,
            q.number, first, d.number, q.tokens.shape[-2] if q.cu_seqlens is None else q.tokens.shape[0],
            d.tokens.shape[-2] if d.cu_seqlens is None else d.tokens.shape[0], dim, plan.group,
            tau, LOG2_E.value / tau,
            PAIRS=pairs, SOFT=temperature is not None, REVERSE=plan.reverse, SCALED=q.scales is not None,
            Q_PACKED=q.cu_seqlens is not None, D_PACKED=d.cu_seqlens is not None,
            Q_MASK=q.mask is not None, D_MASK=d.mask is not None,
            Q_WEIGHTS=q.weights is not None, D_WEIGHTS=d.weights is not None,
            ARGMAX=outputs[2].ndim > 1, VALUES=outputs[3].ndim > 1, PRECISION=precision,
            EVEN_K=dim % plan.block_k == 0, MEMBERS=triton.next_power_of_2(plan.group),
            BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_E=plan.block_e, BLOCK_K=plan.block_k,
            num_warps=plan.num_warps, num_stages=plan.num_stages, maxnreg=plan.max_registers,
        )  # fmt: skip
