"""PeakPatch's corrections on the GPU: one program per embedding, or per pair.

The contract stands in `engine.reference.peak_patch_correct`. A row of D elements lies in registers from its first
load to its last store.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

SHORTEST = tl.constexpr(1e-12)  # see engine/reference/unit.py


@dataclass(frozen=True)
class Plan:
    """Shape of a launch: elements of a row per program, warps."""

    block_d: int
    num_warps: int


def plan_rows(dim: int) -> Plan:
    """The launch for rows of `dim` elements; plain arithmetic, no tuning."""
    block_d = max(32, triton.next_power_of_2(max(dim, 1)))
    return Plan(block_d, min(8, max(1, block_d // 256)))


@triton.jit
def _unit(x):
    """unit(x) of one row, zeros beyond its end, and its length."""
    length = tl.sqrt(tl.sum(x * x, 0))
    return tl.where(length < SHORTEST, 0.0, x / length), length


@triton.jit
def _through_unit(unit, length, grad):
    """Gradient of x, given unit(x) and the gradient of that."""
    return tl.where(length < SHORTEST, 0.0, (grad - unit * tl.sum(unit * grad, 0)) / length)


@triton.jit
def _row(pointer, d, dim):
    return tl.load(pointer + d, mask=d < dim, other=0.0).to(tl.float32)


@triton.jit
def _correct_fwd_kernel(f_ptr, delta_ptr, alpha_ptr, out_ptr, stride_f, stride_delta, dim, BLOCK_D: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    moved = _row(f_ptr + i * stride_f, d, dim) + tl.load(alpha_ptr) * _row(delta_ptr + i * stride_delta, d, dim)
    unit, _ = _unit(moved)
    tl.store(out_ptr + i * dim + d, unit, mask=d < dim)


@triton.jit
def _correct_bwd_kernel(
    f_ptr, delta_ptr, alpha_ptr, grad_ptr, to_f_ptr, to_delta_ptr, to_alpha_ptr, stride_f, stride_delta, dim,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    alpha = tl.load(alpha_ptr)
    delta = _row(delta_ptr + i * stride_delta, d, dim)
    unit, length = _unit(_row(f_ptr + i * stride_f, d, dim) + alpha * delta)
    grad = _through_unit(unit, length, _row(grad_ptr + i * dim, d, dim))
    tl.store(to_f_ptr + i * dim + d, grad, mask=d < dim)
    tl.store(to_delta_ptr + i * dim + d, alpha * grad, mask=d < dim)
    tl.store(to_alpha_ptr + i, tl.sum(grad * delta, 0))


@triton.jit
def _pairs_fwd_kernel(
    image_ptr, text_ptr, low_ptr, sims_ptr, cross_ptr,
    stride_i, stride_tn, stride_tk, stride_ln, stride_lk, first, count, dim, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One pair: image `pair // count` and its caption `pair % count`."""
    pair = first + tl.program_id(0).to(tl.int64)
    n = pair // count
    k = pair % count
    d = tl.arange(0, BLOCK_D)
    v, _ = _unit(_row(image_ptr + n * stride_i, d, dim))
    t, _ = _unit(_row(text_ptr + n * stride_tn + k * stride_tk, d, dim))
    low, _ = _unit(_row(low_ptr + n * stride_ln + k * stride_lk, d, dim))
    cross = v * t
    tl.store(sims_ptr + 2 * pair, tl.sum(v * low, 0))
    tl.store(sims_ptr + 2 * pair + 1, tl.sum(cross, 0))
    tl.store(cross_ptr + pair * dim + d, cross, mask=d < dim)


@triton.jit
def _pairs_bwd_kernel(
    image_ptr, text_ptr, low_ptr, grad_sims_ptr, grad_cross_ptr, to_image_ptr, to_text_ptr, to_low_ptr,
    stride_i, stride_tn, stride_tk, stride_ln, stride_lk, count, dim, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One image and all its captions, in order."""
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    v, length = _unit(_row(image_ptr + n * stride_i, d, dim))
    to_v = tl.zeros((BLOCK_D,), tl.float32)
    for k in range(0, count):
        pair = n * count + k
        place = pair - n * count  # k in 64 bits
        t, t_length = _unit(_row(text_ptr + n * stride_tn + place * stride_tk, d, dim))
        low, low_length = _unit(_row(low_ptr + n * stride_ln + place * stride_lk, d, dim))
        of_low = tl.load(grad_sims_ptr + 2 * pair)
        # The second similarity is the sum of cross.
        of_cross = tl.load(grad_sims_ptr + 2 * pair + 1) + _row(grad_cross_ptr + pair * dim, d, dim)
        to_v += of_cross * t + of_low * low
        to_t = _through_unit(t, t_length, of_cross * v)
        to_low = _through_unit(low, low_length, of_low * v)
        tl.store(to_text_ptr + pair * dim + d, to_t, mask=d < dim)
        tl.store(to_low_ptr + pair * dim + d, to_low, mask=d < dim)
    tl.store(to_image_ptr + n * dim + d, _through_unit(v, length, to_v), mask=d < dim)


def correct_forward(f: Tensor, delta: Tensor, alpha: Tensor, out: Tensor) -> None:
    """Fill `out (B, D)`; f and delta are dense in their last axis, alpha is one float32."""
    plan = plan_rows(f.shape[1])
    _correct_fwd_kernel[(f.shape[0],)](
        f, delta, alpha, out, f.stride(0), delta.stride(0), f.shape[1], BLOCK_D=plan.block_d, num_warps=plan.num_warps
    )


def correct_backward(f: Tensor, delta: Tensor, alpha: Tensor, grad: Tensor, grads: tuple[Tensor, ...]) -> None:
    """Fill the gradients of f, delta and, row by row, alpha; `grad` is dense."""
    plan = plan_rows(f.shape[1])
    _correct_bwd_kernel[(f.shape[0],)](
        f, delta, alpha, grad, *grads, f.stride(0), delta.stride(0), f.shape[1],
        BLOCK_D=plan.block_d, num_warps=plan.num_warps,
    )  # fmt: skip


# Programs in one launch: the grid's first axis takes no more.
MAX_PROGRAMS = 2**31 - 1


def pairs_forward(image: Tensor, text: Tensor, low: Tensor, outputs: tuple[Tensor, Tensor]) -> None:
    """Fill sims and cross; inputs are dense in their last axis."""
    n, count, dim = text.shape
    plan = plan_rows(dim)
    for first in range(0, n * count, MAX_PROGRAMS):
        _pairs_fwd_kernel[(min(MAX_PROGRAMS, n * count - first),)](
            image, text, low, *outputs, image.stride(0), *text.stride()[:2], *low.stride()[:2], first, count, dim,
            BLOCK_D=plan.block_d, num_warps=plan.num_warps,
        )  # fmt: skip


def pairs_backward(
    image: Tensor, text: Tensor, low: Tensor, incoming: tuple[Tensor, Tensor], grads: tuple[Tensor, ...]
) -> None:
    """Fill the gradients of image, text and low, given dense ones of sims and cross."""
    n, count, dim = text.shape
    plan = plan_rows(dim)
    _pairs_bwd_kernel[(n,)](
        image, text, low, *incoming, *grads, image.stride(0), *text.stride()[:2], *low.stride()[:2], count, dim,
        BLOCK_D=plan.block_d, num_warps=plan.num_warps,
    )  # fmt: skip
