"""Class centroids on the GPU: sums of sets first, then of the sets of a class, in order and without atomics.

The contract stands in `engine.reference.centroid`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SHORTEST = tl.constexpr(1e-12)  # see engine/reference/unit.py


@dataclass(frozen=True)
class Plan:
    """Shape of a launch: tokens and elements of D per block, warps."""

    block_t: int
    block_d: int
    num_warps: int


def plan_centroid(dim: int) -> Plan:
    """The launch for vectors of `dim` elements; plain arithmetic, no tuning."""
    block_d = min(128, max(16, triton.next_power_of_2(max(dim, 1))))
    return Plan(block_t=32, block_d=block_d, num_warps=4)


@triton.jit
def _bounds(cu_seqlens_ptr, s, total):
    """First and last row of a set, within the tokens."""
    begin = tl.load(cu_seqlens_ptr + s)
    end = tl.load(cu_seqlens_ptr + s + 1)
    begin = tl.minimum(tl.maximum(begin, 0), total)
    return begin, tl.minimum(tl.maximum(end, begin), total)


@triton.jit
def _set_sums_kernel(
    tokens_ptr, cu_seqlens_ptr, sums_ptr, stride, total, dim, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Sum of one set's tokens, for a block of D; each of BLOCK_T rows sums every BLOCK_T-th token."""
    s = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin, end = _bounds(cu_seqlens_ptr, s, total)
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        there = (t < end)[:, None] & (d < dim)[None, :]
        acc += tl.load(tokens_ptr + t.to(tl.int64)[:, None] * stride + d[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(sums_ptr + s * dim + d, tl.sum(acc, 0), mask=d < dim)


@triton.jit
def _class_kernel(
    sums_ptr, cu_seqlens_ptr, order_ptr, cu_classes_ptr, direction_ptr, length_ptr, count_ptr, total, dim,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Mean and direction of one class, whose sets are `order[cu_classes[c] : cu_classes[c + 1]]`."""
    c = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_classes_ptr + c)
    last = tl.load(cu_classes_ptr + c + 1)
    tokens = first - first
    for i in range(first, last):
        begin, end = _bounds(cu_seqlens_ptr, tl.load(order_ptr + i), total)
        tokens += end - begin
    count = tokens.to(tl.float32)
    squares = tl.zeros((BLOCK_D,), tl.float32)
    for at in range(0, dim, BLOCK_D):
        d = at + tl.arange(0, BLOCK_D)
        acc = tl.zeros((BLOCK_D,), tl.float32)
        for i in range(first, last):
            acc += tl.load(sums_ptr + tl.load(order_ptr + i) * dim + d, mask=d < dim, other=0.0)
        mean = acc / tl.maximum(count, 1.0)
        squares += mean * mean
        tl.store(direction_ptr + c * dim + d, mean, mask=d < dim)
    length = tl.sqrt(tl.sum(squares, 0))
    tl.store(length_ptr + c, length)
    tl.store(count_ptr + c, count)
    tl.debug_barrier()
    for at in range(0, dim, BLOCK_D):
        d = at + tl.arange(0, BLOCK_D)
        mean = tl.load(direction_ptr + c * dim + d, mask=d < dim, other=0.0)
        tl.store(direction_ptr + c * dim + d, tl.where(length < SHORTEST, 0.0, mean / length), mask=d < dim)


@triton.jit
def _spread_kernel(
    rows_ptr, cu_seqlens_ptr, classes_ptr, tokens_ptr, total, n_classes, dim,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The class's row to each token of one set, for a block of D; nothing to those of no class."""
    s = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    c = tl.load(classes_ptr + s)
    begin, end = _bounds(cu_seqlens_ptr, s, total)
    known = (c >= 0) & (c < n_classes)
    end = tl.where(known, end, begin)
    row = tl.load(rows_ptr + c * dim + d, mask=(d < dim) & known, other=0.0)
    for start in range(begin, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        there = (t < end)[:, None] & (d < dim)[None, :]
        to = tokens_ptr + t.to(tl.int64)[:, None] * dim + d[None, :]
        tl.store(to, tl.broadcast_to(row[None, :], (BLOCK_T, BLOCK_D)), mask=there)


def centroids_forward(tokens: Tensor, cu_seqlens: Tensor, classes: Tensor, outputs: tuple[Tensor, ...]) -> None:
    """Fill direction `(C, D)`, length and count `(C,)`; tokens are dense in their last axis."""
    direction, length, count = outputs
    n_sets, (total, dim), n_classes = classes.shape[0], tokens.shape, direction.shape[0]
    plan = plan_centroid(dim)
    sums = direction.new_empty((n_sets, dim))
    if n_sets:
        _set_sums_kernel[(n_sets, triton.cdiv(dim, plan.block_d))](
            tokens, cu_seqlens, sums, tokens.stride(0), total, dim,
            BLOCK_T=plan.block_t, BLOCK_D=plan.block_d, num_warps=plan.num_warps,
        )  # fmt: skip
    # Sets class by class, in their order within each.
    named, order = classes.sort(stable=True)
    cu_classes = torch.searchsorted(named, torch.arange(n_classes + 1, device=classes.device))
    _class_kernel[(n_classes,)](
        sums, cu_seqlens, order, cu_classes, direction, length, count, total, dim,
        BLOCK_D=plan.block_d, num_warps=plan.num_warps,
    )  # fmt: skip


def centroids_spread(rows: Tensor, cu_seqlens: Tensor, classes: Tensor, tokens: Tensor) -> None:
    """Fill `tokens (total, D)` with each token's row of `rows (C, D)`, zeros for tokens of no class."""
    n_sets, (total, dim) = classes.shape[0], tokens.shape
    tokens.zero_()
    if n_sets == 0:
        return
    plan = plan_centroid(dim)
    _spread_kernel[(n_sets, triton.cdiv(dim, plan.block_d))](
        rows, cu_seqlens, classes, tokens, total, rows.shape[0], dim,
        BLOCK_T=plan.block_t, BLOCK_D=plan.block_d, num_warps=plan.num_warps,
    )  # fmt: skip
