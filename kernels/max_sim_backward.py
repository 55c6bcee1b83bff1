"""The backward of max-sim on the GPU, reproducible bit by bit; formulas and contract: `engine.reference.max_sim`.

The owner computes: one program per block of rows of one item (a query or a document) and slice of D holds their
gradient in registers and adds what each item of the other side contributes, in order. No atomics. Queries and documents
take the same way: both directions of the forward appear as "own" (this item's tokens looked for others') and "other"
(others' tokens looked for this item's).

Hard maxima: own tokens gather their winners' rows; others' tokens reach their winners through a product with a matrix
that holds each coefficient in the row of its winner. Soft maxima: similarities are made again, tile by tile.
"""

# The arguments of kernels are Triton's values, which have no types to write.
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.max_sim import MAX_PROGRAMS, score_sides
from engine.kernels.max_sim_plan import Side, plan_max_sim_backward
from engine.kernels.max_sim_tile import LOG2_E


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
def _place(first, length, dim, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """The program's item, rows of it and elements of D."""
    program = first + tl.program_id(0).to(tl.int64)
    slices = (dim + BLOCK_D - 1) // BLOCK_D
    blocks = (length + BLOCK_R - 1) // BLOCK_R
    own = program // slices // blocks
    r = (program // slices % blocks).to(tl.int32) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = (program % slices).to(tl.int32) * BLOCK_D + tl.arange(0, BLOCK_D)
    return own, r, k


@triton.jit
def _max_sim_bwd_hard_kernel(
    others_ptr, grad_ptr, finite_ptr,
    own_scores_ptr, own_values_ptr, own_argmax_ptr, own_weights_ptr,
    other_scores_ptr, other_values_ptr, other_argmax_ptr, other_weights_ptr,
    stride_item, stride_row, first, n_others, own_length, other_length, dim, step_own, step_other,
    OWN: tl.constexpr, OTHER: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr, NARROW: tl.constexpr,
    OWN_VALUES: tl.constexpr, OWN_WEIGHTS: tl.constexpr, OTHER_VALUES: tl.constexpr, OTHER_WEIGHTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of one item's rows. Of items a and b, results lie at `a * step_own + b * step_other`."""
    own, r, k = _place(first, own_length, dim, BLOCK_R, BLOCK_D)
    inside = k < dim
    mine = r < own_length
    begin = own if PAIRS else own * 0  # in 64 bits
    end = own + 1 if PAIRS else begin + n_others
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    if OWN:
        for other in range(begin, end):
            cell = own if PAIRS else own * step_own + other * step_other
            at = cell * own_length + r
            winner = tl.load(own_argmax_ptr + at, mask=mine, other=-1)
            won = winner >= 0
            c = _coefficients(
                own_scores_ptr, own_values_ptr, own_weights_ptr, tl.full((BLOCK_R,), cell, tl.int64), at,
                own * own_length + r, won, OWN_VALUES, OWN_WEIGHTS,
            )  # fmt: skip
            rows = others_ptr + other * stride_item + winner.to(tl.int64) * stride_row
            there = won[:, None] & inside[None, :]
            x = tl.load(rows[:, None] + k[None, :], mask=there, other=0.0).to(tl.float32)
            acc += tl.where(there, c[:, None] * x, 0.0)
    if OTHER:
        # Tokens of all others in one row of numbers, so that short items leave no gaps.
        total = (end - begin) * other_length
        all_finite = tl.load(finite_ptr) != 0
        if all_finite:
            for start in range(total * 0, total, BLOCK_F):
                f = start + tl.arange(0, BLOCK_F)
                item = begin + f // other_length
                row = f % other_length
                cells = item if PAIRS else own * step_own + item * step_other
                winners = tl.load(other_argmax_ptr + cells * other_length + row, mask=f < total, other=-1)
                finders = winners >= 0
                c_f = _coefficients(
                    other_scores_ptr, other_values_ptr, other_weights_ptr, cells, cells * other_length + row,
                    item * other_length + row, finders, OTHER_VALUES, OTHER_WEIGHTS,
                )  # fmt: skip
                found = others_ptr + item * stride_item + row * stride_row
                y = tl.load(found[:, None] + k[None, :], mask=finders[:, None] & inside[None, :], other=0.0)
                to_each = tl.where(winners[None, :] == r[:, None], c_f[None, :], 0.0)
                if NARROW:
                    acc = tl.dot(to_each.to(y.dtype), y, acc)
                else:
                    acc = tl.dot(to_each, y.to(tl.float32), acc, input_precision=PRECISION)
        else:
            # Zero times infinity is NaN: one token after the other, each to its winner alone.
            for one in range(total * 0, total):
                its_item = begin + one // other_length
                its_row = one % other_length
                its_cell = its_item if PAIRS else own * step_own + its_item * step_other
                its_winner = tl.load(other_argmax_ptr + its_cell * other_length + its_row)
                its_c = _coefficients(
                    other_scores_ptr, other_values_ptr, other_weights_ptr, its_cell, its_cell * other_length + its_row,
                    its_item * other_length + its_row, its_winner >= 0, OTHER_VALUES, OTHER_WEIGHTS,
                )  # fmt: skip
                token = others_ptr + its_item * stride_item + its_row * stride_row + k
                its = tl.load(token, mask=inside & (its_winner >= 0), other=0.0).to(tl.float32)
                hit = (r == its_winner) & (its_winner >= 0)
                acc += tl.where(hit[:, None], its_c * its[None, :], 0.0)
    to = grad_ptr + (own * own_length + r)[:, None] * dim + k[None, :]
    tl.store(to, acc.to(grad_ptr.dtype.element_ty), mask=mine[:, None] & inside[None, :])


@triton.jit
def _max_sim_bwd_soft_kernel(
    owns_ptr, others_ptr, grad_ptr, own_mask_ptr, other_mask_ptr,
    own_scores_ptr, own_values_ptr, own_maxima_ptr, own_weights_ptr,
    other_scores_ptr, other_values_ptr, other_maxima_ptr, other_weights_ptr,
    stride_own_item, stride_own_row, stride_item, stride_row,
    first, n_others, own_length, other_length, dim, step_own, step_other, rate,
    OWN: tl.constexpr, OTHER: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr, NARROW: tl.constexpr,
    OWN_VALUES: tl.constexpr, OWN_WEIGHTS: tl.constexpr, OTHER_VALUES: tl.constexpr, OTHER_WEIGHTS: tl.constexpr,
    OWN_MASK: tl.constexpr, OTHER_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The same for soft maxima, which `maxima` hold; `rate` is log2(e) / temperature."""
    own, r, k = _place(first, own_length, dim, BLOCK_R, BLOCK_D)
    inside = k < dim
    mine = r < own_length
    token = own * own_length + r
    keep_r = mine
    if OWN_MASK:
        keep_r = mine & (tl.load(own_mask_ptr + token, mask=mine, other=0) != 0)
    own_rows = owns_ptr + own * stride_own_item + r.to(tl.int64) * stride_own_row
    begin = own if PAIRS else own * 0  # in 64 bits
    end = own + 1 if PAIRS else begin + n_others
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for other in range(begin, end):
        cell = own if PAIRS else own * step_own + other * step_other
        if OWN:
            at = cell * own_length + r
            c = _coefficients(
                own_scores_ptr, own_values_ptr, own_weights_ptr, tl.full((BLOCK_R,), cell, tl.int64), at, token, keep_r,
                OWN_VALUES, OWN_WEIGHTS,
            )  # fmt: skip
            top = tl.load(own_maxima_ptr + at, mask=keep_r, other=0.0)
        for start in range(0, other_length, BLOCK_F):
            f = start + tl.arange(0, BLOCK_F)
            keep_f = f < other_length
            other_token = other * other_length + f
            if OTHER_MASK:
                keep_f = keep_f & (tl.load(other_mask_ptr + other_token, mask=keep_f, other=0) != 0)
            rows = others_ptr + other * stride_item + f.to(tl.int64) * stride_row
            s = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
            for inner in range(0, dim, BLOCK_K):
                n = inner + tl.arange(0, BLOCK_K)
                x = tl.load(own_rows[:, None] + n[None, :], mask=keep_r[:, None] & (n < dim)[None, :], other=0.0)
                y = tl.load(rows[None, :] + n[:, None], mask=(n < dim)[:, None] & keep_f[None, :], other=0.0)
                s = tl.dot(x, y, s, input_precision=PRECISION)
            p = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
            if OWN:
                p += c[:, None] * tl.exp2((s - top[:, None]) * rate)
            if OTHER:
                at_f = cell * other_length + f
                c_f = _coefficients(
                    other_scores_ptr, other_values_ptr, other_weights_ptr, tl.full((BLOCK_F,), cell, tl.int64), at_f,
                    other_token, keep_f, OTHER_VALUES, OTHER_WEIGHTS,
                )  # fmt: skip
                top_f = tl.load(other_maxima_ptr + at_f, mask=keep_f, other=0.0)
                p += c_f[None, :] * tl.exp2((s - top_f[None, :]) * rate)
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
    """Of one direction of the forward: gradients of scores `(Nq, Nd)` and values `(Nq, Nd, L)`; winners or soft maxima
    `(Nq, Nd, L)`; weights `(N, L)`. In pairs Nd is 1. All dense."""

    scores: Tensor
    values: Tensor | None
    places: Tensor
    weights: Tensor | None


def max_sim_backward(
    q: Tensor,
    d: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    weights: tuple[Tensor | None, Tensor | None],
    incoming: tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]],
    *,
    temperature: float | None,
    pairs: bool,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and d in their dtypes, for checked arguments; q and d are dense in their last axis.

    Args:
        masks, weights: of queries and of documents.
        incoming: for the forward and the reverse direction the gradients of scores (None: no part) and of values,
            and the argmax, which the hard form needs.
    """
    kept = tuple(None if x is None else x.contiguous() for x in masks)
    weighed = tuple(None if x is None else x.contiguous() for x in weights)
    maxima: tuple[Tensor | None, ...] = (None, None)
    if temperature is not None:
        wanted = [x[0] is not None for x in incoming]
        maxima = _soft_maxima(q, d, kept, wanted, temperature, pairs, precision)
    ahead, back = (
        None if given[0] is None else Direction(
            given[0].contiguous(), None if given[1] is None else given[1].contiguous(),
            _dense(given[2] if top is None else top), weight,
        )
        for given, top, weight in zip(incoming, maxima, weighed, strict=True)
    )  # fmt: skip
    grads = []
    for own, other, by_own, by_other, mask in ((q, d, ahead, back, kept), (d, q, back, ahead, kept[::-1])):
        grad = torch.empty_like(own, memory_format=torch.contiguous_format)
        steps = (d.shape[0], 1) if own is q else (1, d.shape[0])
        if grad.numel() > 0:
            _launch(own, other, grad, (by_own, by_other), mask, steps, temperature, pairs, precision)
        grads.append(grad)
    return grads[0], grads[1]


def _dense(x: Tensor | None) -> Tensor:
    assert x is not None, "the hard form's backward needs the argmax"
    return x.contiguous()


def _soft_maxima(
    q: Tensor, d: Tensor, masks: tuple[Tensor | None, ...], wanted: list[bool], temperature: float, pairs: bool,
    precision: str,
) -> tuple[Tensor | None, Tensor | None]:
    """Soft maxima `(Nq, Nd, L)` of both directions as far as they are wanted: as large as the hard form's argmax."""
    found: list[Tensor | None] = []
    sides = Side(q, masks[0]), Side(d, masks[1])
    for (one, other), on in zip((sides, sides[::-1]), wanted, strict=True):
        if not on:
            found.append(None)
            continue
        grid = (one.number, 1 if pairs else other.number)
        values = one.tokens.new_zeros((*grid, one.length), dtype=torch.float32)
        nothing, places = values.new_empty(0), values.new_empty(0, dtype=torch.int32)
        if values.numel():
            outputs = (values.new_empty(grid), nothing, places, values, places, nothing)
            score_sides(one, other, outputs, temperature, pairs, precision)
        found.append(values if pairs or one is sides[0] else values.transpose(0, 1).contiguous())
    return found[0], found[1]


def _launch(
    own: Tensor, other: Tensor, grad: Tensor, directions: tuple[Direction | None, Direction | None],
    masks: tuple[Tensor | None, ...], steps: tuple[int, int], temperature: float | None, pairs: bool, precision: str,
) -> None:
    """Fill `grad`, that of `own`."""
    mine, theirs = directions
    if other.shape[0] == 0 or other.shape[1] == 0:
        grad.zero_()
        return
    soft, narrow = temperature is not None, own.dtype == torch.bfloat16
    plan = plan_max_sim_backward(
        own.shape[1], own.shape[2], own.dtype, soft=soft, scatter=soft or theirs is not None,
        aligned=all(stride * x.itemsize % 16 == 0 for x in (own, other) for stride in x.stride()[:2]),
    )  # fmt: skip
    # Products of float16 go through TF32, whose range the small coefficients need.
    precise = "tf32" if own.dtype == torch.float16 else precision
    of_own, of_other = ([None] * 4 if x is None else [x.scores, x.values, x.places, x.weights] for x in directions)
    # Unused pointers still need something to point at.
    results = [grad if x is None else x for x in (*of_own, *of_other)]
    switches: dict[str, Any] = {
        "OWN": mine is not None, "OTHER": theirs is not None, "PAIRS": pairs, "PRECISION": precise, "NARROW": narrow,
        "OWN_VALUES": of_own[1] is not None, "OWN_WEIGHTS": of_own[3] is not None,
        "OTHER_VALUES": of_other[1] is not None, "OTHER_WEIGHTS": of_other[3] is not None,
        "BLOCK_R": plan.block_r, "BLOCK_F": plan.block_f, "BLOCK_D": plan.block_d,
        "num_warps": plan.num_warps, "num_stages": plan.num_stages, "maxnreg": plan.max_registers,
    }  # fmt: skip
    lengths = (other.shape[0], own.shape[1], other.shape[1], own.shape[2], *steps)
    programs = own.shape[0] * triton.cdiv(own.shape[1], plan.block_r) * triton.cdiv(own.shape[2], plan.block_d)
    if not soft:
        finite = grad if theirs is None else _all_finite(other, masks[1])
    for first in range(0, programs, MAX_PROGRAMS):
        grid = (min(MAX_PROGRAMS, programs - first),)
        if temperature is None:
            _max_sim_bwd_hard_kernel[grid](
                other, grad, finite, *results, *other.stride()[:2], first, *lengths, **switches
            )
            continue
        bits = [grad if x is None else x.view(torch.uint8) for x in masks]
        _max_sim_bwd_soft_kernel[grid](
            own, other, grad, *bits, *results, *own.stride()[:2], *other.stride()[:2], first, *lengths,
            LOG2_E.value / temperature, OWN_MASK=masks[0] is not None, OTHER_MASK=masks[1] is not None,
            BLOCK_K=plan.block_k, **switches,
        )  # fmt: skip


def _all_finite(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """One int32 on the device: whether all kept tokens are free of infinities and NaN."""
    # A sum over a row is finite only if the row is, unless it overflows, which the slower way survives.
    finite = tokens.sum(-1, dtype=torch.float32).isfinite()
    return (finite if mask is None else finite | ~mask).all().to(torch.int32)
