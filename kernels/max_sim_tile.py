"""What the kernels of max-sim share: where an item's rows begin, maxima over a tile and over two sets of tokens."""

# The arguments of kernels are Triton's values, which have no types to write.
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

NOTHING = tl.constexpr(2**31 - 1)  # greater than any place
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _span(cu_ptr, item, length, stride_item, stride_row, PACKED: tl.constexpr):
    """Of one item: its first row among all rows, its first element, how many rows it has."""
    if PACKED:
        first = tl.load(cu_ptr + item)
        return first, first * stride_row, (tl.load(cu_ptr + item + 1) - first).to(tl.int32)
    return item * length, item * stride_item, length


@triton.jit
def _across(best, place, total, temperature, rate, AXIS: tl.constexpr, SOFT: tl.constexpr, ARGMAX: tl.constexpr):
    """Across rows or columns, from what each place of the tile has seen: hard or soft maxima, the places of the hard
    ones, and the hard ones."""
    is_nan = best != best
    has_nan = tl.max(is_nan.to(tl.int32), AXIS) > 0
    value = tl.max(tl.where(is_nan, float("-inf"), best), AXIS)
    first = tl.full(value.shape, NOTHING, tl.int32)
    if ARGMAX:
        wins = tl.where(tl.expand_dims(has_nan, AXIS), is_nan, best == tl.expand_dims(value, AXIS))
        first = tl.min(tl.where(wins, place, NOTHING), AXIS)
    greatest = tl.where(has_nan, float("nan"), value)
    if SOFT:
        top = tl.expand_dims(value, AXIS)
        scale = tl.where(best == top, 1.0, tl.exp2((best - top) * rate))
        # Nothing seen, nothing to scale.
        value += temperature * tl.log(tl.sum(tl.where(total == 0.0, 0.0, total * scale), AXIS))
    return tl.where(has_nan, float("nan"), value), first, greatest


@triton.jit
def _of_row(s, keep_n, u, temperature, rate, SOFT: tl.constexpr, ARGMAX: tl.constexpr):
    """Hard or soft maximum of each row of a tile over its kept columns, and the token it has."""
    keep = tl.broadcast_to(keep_n[None, :], s.shape)
    best = tl.where(keep, s, float("-inf"))
    place = tl.where(keep, u[None, :], NOTHING)
    return _across(best, place, keep.to(tl.float32), temperature, rate, 1, SOFT, ARGMAX)


@triton.jit
def _of_either(value, place, top, e_value, e_place, e_top, temperature, rate, SOFT: tl.constexpr):
    """Maxima over two sets of tokens, of which the first has the lower places."""
    wins = (e_top > top) | ((e_top != e_top) & (top == top))
    # Where the first set is empty, the second one wins even with -inf.
    place = tl.where(wins | (place == NOTHING), e_place, place)
    if SOFT:
        low = tl.where(value == e_value, 1.0, tl.exp2(-tl.abs(value - e_value) * rate))
        value = tl.maximum(value, e_value) + temperature * tl.log(1.0 + low)
    else:
        value = tl.where(wins, e_value, value)
    return value, place
