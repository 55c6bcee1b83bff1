"""The backward of max-sim on the GPU, reproducible bit by bit. Formulas, contract: `engine.reference.max_sim`, packed
tokens `engine.reference.max_sim_varlen`.

The owner computes: one program per block of rows of one item (a query or a document) and slice of D holds their
gradient in registers and adds what each item of the other side contributes, in order. No atomics. Queries and documents
take the same way: both directions of the forward appear as "own" (this item's tokens looked for others') and "other"
(others' tokens looked for this item's).

Hard maxima: own tokens gather their winners' rows; others' tokens reach their winners through a product with a matrix
that holds each coefficient in the row of its winner. Soft maxima: similarities are made again, tile by tile.

Of packed items, a table says which item and rows a program has, so that short items leave no programs without work.
Lengths given to the kernels are then the numbers of all rows, and results of tokens lie by item of the other side and
row among all rows.
"""

# The arguments of kernels are Triton's values, which have no types to write.
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.max_sim import MAX_PROGRAMS, score_sides
from engine.kernels.max_sim_plan import Side, check_backward_temperature, plan_max_sim_backward
from engine.kernels.max_sim_tile import LOG2_E, _span


@triton.jit
def _coefficients(
    scores_ptr, values_ptr, weights_ptr, cell, at, token, there, HAS_VALUES: tl.constexpr, HAS_WEIGHTS: tl.constexpr
):  # fmt: skip
    """d(loss) / d(maximum) of tokens: gradient of the score times weight, plus gradient of the value."""
    c = tl.load(scores_ptr + cell, mask=there, other=0.0)
    if HAS_WEIGHTS:
        c = c * tl.load(weights_ptr + token, mask=there, other=0.0)
    if HAS_VALUES:
        c += tl.load(values_ptr + at, mask=there, other=0.0)
    return c


@triton.jit
def _place(
    first, length, stride_item, stride_row, dim, blocks_ptr, cu_ptr,
    PACKED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The program's item, its first row among all rows and first element; rows of it and which there are; elements of
    D."""
    program = first + tl.program_id(0).to(tl.int64)
    slices = (dim + BLOCK_D - 1) // BLOCK_D
    block = program // slices
    if PACKED:
        own = tl.load(blocks_ptr + 2 * block)
        start = tl.load(blocks_ptr + 2 * block + 1).to(tl.int32)
    else:
        blocks = (length + BLOCK_R - 1) // BLOCK_R
        own = block // blocks
        start = (block % blocks).to(tl.int32) * BLOCK_R
    r = start + tl.arange(0, BLOCK_R)
    k = (program % slices).to(tl.int32) * BLOCK_D + tl.arange(0, BLOCK_D)
    own_first, own_at, count = _span(cu_ptr, own, length, stride_item, stride_row, PACKED)
    return own, own_first, own_at, r, r < count, k


@triton.jit
def _finders(
    f, total, own, begin, owners_ptr, length, stride_item, stride_row, step_own, step_other,
    PAIRS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Of tokens numbered through all other items: the place of their item's score and of their results, their number
    among all tokens, their first element."""
    if PACKED:
        packed_item = tl.load(owners_ptr + f, mask=f < total, other=0)
        return own * step_own + packed_item * step_other, own * length + f, f, f * stride_row
    item = begin + f // length
    row = f % length
    cell = item if PAIRS else own * step_own + item * step_other
    return cell, cell * length + row, item * length + row, item * stride_item + row * stride_row


@triton.jit
def _max_sim_bwd_hard_kernel(
    others_ptr, grad_ptr, blocks_ptr, own_cu_ptr, other_cu_ptr, owners_ptr, finite_ptr,
    own_scores_ptr, own_values_ptr, own_argmax_ptr, own_weights_ptr,
    other_scores_ptr, other_values_ptr, other_argmax_ptr, other_weights_ptr,
    stride_item, stride_row, first, n_others, own_length, other_length, dim, step_own, step_other,
    OWN: tl.constexpr, OTHER: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr, NARROW: tl.constexpr,
    OWN_PACKED: tl.constexpr, OTHER_PACKED: tl.constexpr,
    OWN_VALUES: tl.constexpr, OWN_WEIGHTS: tl.constexpr, OTHER_VALUES: tl.constexpr, OTHER_WEIGHTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of one item's rows. Of items a and b, scores lie at `a * step_own + b * step_other`."""
    own, own_first, _, r, mine, k = _place(
        first, own_length, 0, 0, dim, blocks_ptr, own_cu_ptr, OWN_PACKED, BLOCK_R, BLOCK_D
    )
    inside = k < dim
    begin = own if PAIRS else own * 0  # in 64 bits
    end = own + 1 if PAIRS else begin + n_others
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    if OWN:
        for other in range(begin, end):
            cell = own if PAIRS else own * step_own + other * step_other
            at = (other * own_length + own_first if OWN_PACKED else cell * own_length) + r
            winner = tl.load(own_argmax_ptr + at, mask=mine, other=-1)
            won = winner >= 0
            c = _coefficients(
                own_scores_ptr, own_values_ptr, own_weights_ptr, tl.full((BLOCK_R,), cell, tl.int64), at,
                own_first + r, won, OWN_VALUES, OWN_WEIGHTS,
            )  # fmt: skip
            of_item = _span(other_cu_ptr, other, other_length, stride_item, stride_row, OTHER_PACKED)
            rows = others_ptr + of_item[1] + winner.to(tl.int64) * stride_row
            there = won[:, None] & inside[None, :]
            x = tl.load(rows[:, None] + k[None, :], mask=there, other=0.0).to(tl.float32)
            acc += tl.where(there, c[:, None] * x, 0.0)
    if OTHER:
        # Tokens of all others in one row of numbers, so that short items leave no gaps.
        total = (end - begin) * other_length
        if OTHER_PACKED:
            total = tl.load(other_cu_ptr + n_others)
        all_finite = tl.load(finite_ptr) != 0
        if all_finite:
            for start in range(total * 0, total, BLOCK_F):
                f = start + tl.arange(0, BLOCK_F)
                cells, at_f, token_f, found = _finders(
                    f, total, own, begin, owners_ptr, other_length, stride_item, stride_row, step_own, step_other,
                    PAIRS, OTHER_PACKED,
                )  # fmt: skip
                winners = tl.load(other_argmax_ptr + at_f, mask=f < total, other=-1)
                finders = winners >= 0
                c_f = _coefficients(
                    other_scores_ptr, other_values_ptr, other_weights_ptr, cells, at_f, token_f, finders,
                    OTHER_VALUES, OTHER_WEIGHTS,
                )  # fmt: skip
                there_f = finders[:, None] & inside[None, :]
                y = tl.load((others_ptr + found)[:, None] + k[None, :], mask=there_f, other=0.0)
                to_each = tl.where(winners[None, :] == r[:, None], c_f[None, :], 0.0)
                if NARROW:
                    acc = tl.dot(to_each.to(y.dtype), y, acc)
                else:
                    acc = tl.dot(to_each, y.to(tl.float32), acc, input_precision=PRECISION)
        else:
            # Zero times infinity is NaN: one token after the other, each to its winner alone.
            for one in range(total * 0, total):
                its_cell, its_at, its_token, its_first = _finders(
                    one, total, own, begin, owners_ptr, other_length, stride_item, stride_row, step_own, step_other,
                    PAIRS, OTHER_PACKED,
                )  # fmt: skip
                its_winner = tl.load(other_argmax_ptr + its_at)
                its_c = _coefficients(
                    other_scores_ptr, other_values_ptr, other_weights_ptr, its_cell, its_at, its_token,
                    its_winner >= 0, OTHER_VALUES, OTHER_WEIGHTS,
                )  # fmt: skip
                its = tl.load(others_ptr + its_first + k, mask=inside & (its_winner >= 0), other=0.0).to(tl.float32)
                hit = (r == its_winner) & (its_winner >= 0)
                acc += tl.where(hit[:, None], its_c * its[None, :], 0.0)
    to = grad_ptr + (own_first + r)[:, None] * dim + k[None, :]
    tl.store(to, acc.to(grad_ptr.dtype.element_ty), mask=mine[:, None] & inside[None, :])


@triton.jit
def _max_sim_bwd_soft_kernel(
    others_ptr, grad_ptr, blocks_ptr, own_cu_ptr, other_cu_ptr, owns_ptr, own_mask_ptr, other_mask_ptr,
    own_scores_ptr, own_values_ptr, own_maxima_ptr, own_weights_ptr,
    other_scores_ptr, other_values_ptr, other_maxima_ptr, other_weights_ptr,
    stride_own_item, stride_own_row, stride_item, stride_row,
    first, n_others, own_length, other_length, dim, step_own, step_other, rate,
    OWN: tl.constexpr, OTHER: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr, NARROW: tl.constexpr,
    OWN_PACKED: tl.constexpr, OTHER_PACKED: tl.constexpr,
    OWN_VALUES: tl.constexpr, OWN_WEIGHTS: tl.constexpr, OTHER_VALUES: tl.constexpr, OTHER_WEIGHTS: tl.constexpr,
    OWN_MASK: tl.constexpr, OTHER_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The same for soft maxima, which `maxima` hold; `rate` is log2(e) / temperature."""
    own, own_first, own_at, r, mine, k = _place(
        first, own_length, stride_own_item, stride_own_row, dim, blocks_ptr, own_cu_ptr, OWN_PACKED, BLOCK_R, BLOCK_D
    )
    inside = k < dim
    token = own_first + r
    keep_r = mine
    if OWN_MASK:
        keep_r = mine & (tl.load(own_mask_ptr + token, mask=mine, other=0) != 0)
    own_rows = owns_ptr + own_at + r.to(tl.int64) * stride_own_row
    begin = own if PAIRS else own * 0  # in 64 bits
    end = own + 1 if PAIRS else begin + n_others
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for other in range(begin, end):
        cell = own if PAIRS else own * step_own + other * step_other
        if OWN:
            at = (other * own_length + own_first if OWN_PACKED else cell * own_length) + r
            c = _coefficients(
                own_scores_ptr, own_values_ptr, own_weights_ptr, tl.full((BLOCK_R,), cell, tl.int64), at, token, keep_r,
                OWN_VALUES, OWN_WEIGHTS,
            )  # fmt: skip
            top = tl.load(own_maxima_ptr + at, mask=keep_r, other=0.0)
        other_first, other_at, count = _span(other_cu_ptr, other, other_length, stride_item, stride_row, OTHER_PACKED)
        other_to = own * other_length + other_first if OTHER_PACKED else cell * other_length
        for start in range(0, count, BLOCK_F):
            f = start + tl.arange(0, BLOCK_F)
            keep_f = f < count
            other_token = other_first + f
            if OTHER_MASK:
                keep_f = keep_f & (tl.load(other_mask_ptr + other_token, mask=keep_f, other=0) != 0)
            rows = others_ptr + other_at + f.to(tl.int64) * stride_row
            s = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
            for inner in range(0, dim, BLOCK_K):
                n = inner + tl.arange(0, BLOCK_K)
                x = tl.load(own_rows[:, None] + n[None, :], mask=keep_r[:, None] & (n < dim)[None, :], other=0.0)
                y = tl.load(rows[None, :] + n[:, None], mask=(n < dim)[:, None] & keep_f[None, :], other=0.0)
                s = tl.dot(x, y, s, input_precision=PRECISION)
            p = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
            if OWN:
                # A similarity is at most the soft maximum, but may come out an ulp above it: never more than all of it.
                p += c[:, None] * tl.exp2(tl.minimum((s - top[:, None]) * rate, 0.0, propagate_nan=tl.PropagateNan.ALL))
            if OTHER:
                at_f = other_to + f
                c_f = _coefficients(
                    other_scores_ptr, other_values_ptr, other_weights_ptr, tl.full((BLOCK_F,), cell, tl.int64), at_f,
                    other_token, keep_f, OTHER_VALUES, OTHER_WEIGHTS,
                )  # fmt: skip
                top_f = tl.load(other_maxima_ptr + at_f, mask=keep_f, other=0.0)
                share = tl.minimum((s - top_f[None, :]) * rate, 0.0, propagate_nan=tl.PropagateNan.ALL)
                p += c_f[None, :] * tl.exp2(share)
            p = tl.where(keep_r[:, None] & keep_f[None, :], p, 0.0)
            z = tl.load(rows[:, None] + k[None, :], mask=keep_f[:, None] & inside[None, :], other=0.0)
            if NARROW:
                acc = tl.dot(p.to(z.dtype), z, acc)
            else:
                acc = tl.dot(p, z.to(tl.float32), acc, input_precision=PRECISION)
    # Zero times NaN of the other side stays off tokens that are not kept.
    acc = tl.where(keep_r[:, None], acc, 0.0)
    to = grad_ptr + token[:, None] * dim + k[None, :]
    tl.store(to, acc.to(grad_ptr.dtype.element_ty), mask=mine[:, None] & inside[None, :])


@dataclass(frozen=True)
class Direction:
    """Of one direction of the forward: gradients of scores `(Nq, Nd)` and of values; winners or soft maxima; weights.

    Values and winners are `(Nq, Nd, L)`, or `(N of the other side, total)` where the tokens are packed. In pairs Nd
    is 1. All dense.
    """

    scores: Tensor
    values: Tensor | None
    places: Tensor
    weights: Tensor | None


def max_sim_backward(
    q: Side,
    d: Side,
    incoming: tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]],
    *,
    temperature: float | None,
    pairs: bool,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens of q and d in their dtypes, for checked arguments.

    Args:
        incoming: for the forward and the reverse direction the gradients of scores (None: no part) and of values,
            and the argmax, which the hard form needs.
    """
    check_backward_temperature(temperature)
    q, d = (
        replace(x, mask=None if x.mask is None else x.mask.contiguous(),
                weights=None if x.weights is None else x.weights.contiguous())
        for x in (q, d)
    )  # fmt: skip
    maxima: tuple[Tensor | None, ...] = (None, None)
    if temperature is not None:
        wanted = [x[0] is not None for x in incoming]
        maxima = _soft_maxima(q, d, wanted, temperature, pairs, precision)
    ahead, back = (
        None if given[0] is None else Direction(
            given[0].contiguous(), None if given[1] is None else given[1].contiguous(),
            _dense(given[2] if top is None else top), side.weights,
        )
        for given, top, side in zip(incoming, maxima, (q, d), strict=True)
    )  # fmt: skip
    grads = []
    for own, other, by_own, by_other in ((q, d, ahead, back), (d, q, back, ahead)):
        grad = torch.empty_like(own.tokens, memory_format=torch.contiguous_format)
        steps = (d.number, 1) if own is q else (1, d.number)
        if grad.numel() > 0:
            _launch(own, other, grad, (by_own, by_other), steps, temperature, pairs, precision)
        grads.append(grad)
    return grads[0], grads[1]


def _dense(x: Tensor | None) -> Tensor:
    assert x is not None, "the hard form's backward needs the argmax"
    return x.contiguous()


def _soft_maxima(
    q: Side, d: Side, wanted: list[bool], temperature: float, pairs: bool, precision: str
) -> tuple[Tensor | None, Tensor | None]:
    """Soft maxima of both directions as far as they are wanted: as large as the hard form's argmax."""
    found: list[Tensor | None] = []
    sides = replace(q, weights=None), replace(d, weights=None)
    for (one, other), on in zip((sides, sides[::-1]), wanted, strict=True):
        if not on:
            found.append(None)
            continue
        grid, packed = (one.number, 1 if pairs else other.number), one.cu_seqlens is not None
        shape = (other.number, one.tokens.shape[0]) if packed else (*grid, one.length)
        values = one.tokens.new_zeros(shape, dtype=torch.float32)
        nothing, places = values.new_empty(0), values.new_empty(0, dtype=torch.int32)
        if values.numel() and one.number:
            outputs = (values.new_empty(grid), nothing, places, values, places, nothing)
            score_sides(one, other, outputs, temperature, pairs, precision)
        found.append(values if pairs or packed or one is sides[0] else values.transpose(0, 1).contiguous())
    return found[0], found[1]


def _launch(
    own: Side,
    other: Side,
    grad: Tensor,
    directions: tuple[Direction | None, Direction | None],
    steps: tuple[int, int],
    temperature: float | None,
    pairs: bool,
    precision: str,
) -> None:
    """Fill `grad`, that of `own`."""
    mine, theirs = directions
    if other.number == 0 or other.length == 0:
        grad.zero_()
        return
    soft, dtype, dim = temperature is not None, own.tokens.dtype, own.tokens.shape[-1]
    plan = plan_max_sim_backward(
        own.length, dim, dtype, soft=soft, scatter=soft or theirs is not None,
        aligned=all(stride * dtype.itemsize % 16 == 0 for x in (own, other) for stride in x.strides),
    )  # fmt: skip
    blocks, owners = _blocks(own, grad, plan.block_r), None
    if not soft and theirs is not None and other.cu_seqlens is not None:
        owners = torch.repeat_interleave(other.cu_seqlens.diff())
    of_own, of_other = ([None] * 4 if x is None else [x.scores, x.values, x.places, x.weights] for x in directions)
    # Unused pointers still need something to point at.
    tables, results = (
        [grad if x is None else x for x in given]
        for given in ((blocks, own.cu_seqlens, other.cu_seqlens), (*of_own, *of_other))
    )
    switches: dict[str, Any] = {
        # Products of float16 go through TF32, whose range the small coefficients need.
        "PRECISION": "tf32" if dtype == torch.float16 else precision, "NARROW": dtype == torch.bfloat16,
        "OWN": mine is not None, "OTHER": theirs is not None, "PAIRS": pairs,
        "OWN_PACKED": own.cu_seqlens is not None, "OTHER_PACKED": other.cu_seqlens is not None,
        "OWN_VALUES": of_own[1] is not None, "OWN_WEIGHTS": of_own[3] is not None,
        "OTHER_VALUES": of_other[1] is not None, "OTHER_WEIGHTS": of_other[3] is not None,
        "BLOCK_R": plan.block_r, "BLOCK_F": plan.block_f, "BLOCK_D": plan.block_d,
        "num_warps": plan.num_warps, "num_stages": plan.num_stages, "maxnreg": plan.max_registers,
    }  # fmt: skip
    lengths = (other.number, own.tokens.shape[-2], other.tokens.shape[-2], dim, *steps)
    n_blocks = own.number * triton.cdiv(own.length, plan.block_r) if blocks is None else blocks.shape[0]
    programs = n_blocks * triton.cdiv(dim, plan.block_d)
    if not soft:
        finite = grad if theirs is None else _all_finite(other, owners)
    for first in range(0, programs, MAX_PROGRAMS):
        grid = (min(MAX_PROGRAMS, programs - first),)
        if temperature is None:
            _max_sim_bwd_hard_kernel[grid](
                other.tokens, grad, *tables, grad if owners is None else owners, finite, *results, *other.strides,
                first, *lengths, **switches,
            )  # fmt: skip
            continue
        bits = [grad if x.mask is None else x.mask.view(torch.uint8) for x in (own, other)]
        _max_sim_bwd_soft_kernel[grid](
            other.tokens, grad, *tables, own.tokens, *bits, *results, *own.strides, *other.strides, first, *lengths,
            LOG2_E.value / temperature, OWN_MASK=own.mask is not None, OTHER_MASK=other.mask is not None,
            BLOCK_K=plan.block_k, **switches,
        )  # fmt: skip


def _blocks(own: Side, grad: Tensor, block_r: int) -> Tensor | None:
    """Of packed items, (item, first row) of each program's block of rows; rows of no item get their gradient, 0."""
    if own.cu_seqlens is None:
        return None
    grad[int(own.cu_seqlens[-1]) :] = 0
    counts = (own.cu_seqlens.diff() + block_r - 1) // block_r
    item = torch.repeat_interleave(counts)
    before = (counts.cumsum(0) - counts)[item]
    return torch.stack((item, (torch.arange(item.shape[0], device=item.device) - before) * block_r), 1)


def _all_finite(side: Side, owners: Tensor | None) -> Tensor:
    """One int32 on the device: whether all kept tokens are free of infinities and NaN."""
    tokens, mask = side.tokens, side.mask
    if owners is not None:  # rows of no item may hold anything
        tokens, mask = tokens[: owners.shape[0]], None if mask is None else mask[: owners.shape[0]]
    # A sum over a row is finite only if the row is, unless it overflows, which the slower way survives.
    finite = tokens.sum(-1, dtype=torch.float32).isfinite()
    return (finite if mask is None else finite | ~mask).all().to(torch.int32)
