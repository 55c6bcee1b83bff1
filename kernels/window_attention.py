"""Window attention on the GPU: one program for each window, image and head, over the window's cells alone.

The contract stands in `engine.reference.window_attention`. A window sees a few dozen cells, other ones than its
neighbour's, so there is no product wide enough for tensor cores that would not read mostly cells that do not count
(and let a NaN among them through). Programs of one image and head are neighbours: they share the keys and values
in the cache.

The backward owns what it writes: one kernel for what belongs to windows, one for what belongs to cells, in which a
program goes through the windows in order. No atomic additions, hence the same result from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs in one launch: the grid's first axis takes no more.
MAX_PROGRAMS = 2**31 - 1
# Registers a thread may use. Left alone, the assembler aims at more blocks per processor and spills for them.
MAX_REGISTERS = {"forward": 128, "backward": 255}


@dataclass(frozen=True)
class Plan:
    """Shape of a launch: cells and elements of a head per block, warps."""

    block_c: int
    block_d: int
    num_warps: int


def plan_window_attention(cells: int, dim: int) -> Plan:
    """The launch for grids of `cells` and heads of `dim`; plain arithmetic, no tuning.

    A block of 2048 numbers is 16 registers of each of 128 threads; the backward holds four of them.
    """
    block_d = max(16, triton.next_power_of_2(max(dim, 1)))
    block_c = min(64, max(4, 2048 // block_d), max(4, triton.next_power_of_2(max(cells, 1))))
    return Plan(block_c, block_d, num_warps=4 if block_c * block_d >= 1024 else 2)


@triton.jit
def _box(windows_ptr, b, w, n_windows, rows, columns, SHARED: tl.constexpr):
    """Window w of image b, clipped to the grid: its first column and row, its width, how many cells it holds."""
    at = windows_ptr + (w if SHARED else b * n_windows + w) * 4
    x0 = tl.maximum(tl.load(at), 0)
    y0 = tl.maximum(tl.load(at + 1), 0)
    x1 = tl.minimum(tl.load(at + 2), columns)
    y1 = tl.minimum(tl.load(at + 3), rows)
    # Compared before it is subtracted: boxes may hold any int32.
    width = tl.where(x1 > x0, x1 - x0, 0)
    height = tl.where(y1 > y0, y1 - y0, 0)
    return x0, y0, width, width * height


@triton.jit
def _cells(start, x0, y0, width, n, columns, BLOCK_C: tl.constexpr):
    """Places in the grid of the window's cells from `start`, and which of them there are."""
    i = start + tl.arange(0, BLOCK_C)
    keep = i < n
    place = (y0 + i // width).to(tl.int64) * columns + x0 + i % width
    return tl.where(keep, place, 0), keep


@triton.jit
def _rows(base, cells, keep, stride, d, inside):
    """Rows (BLOCK_C, BLOCK_D) of keys or values as float32; zeros where there is none."""
    at = base + cells[:, None] * stride + d[None, :]
    return tl.load(at, mask=keep[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def _shift(top):
    """What is subtracted from scores: their maximum, or 0 for −inf, since inf − inf would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _attend(
    query, k_base, v_base, stride_kp, stride_vp, own_key, own_value, x0, y0, width, n, columns, d, inside,
    OWN: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Online softmax of one window: the output (BLOCK_D,), maximum and sum of the weights."""
    top = float("-inf")
    total = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    if OWN:
        top = tl.sum(query * own_key, 0)
        total = tl.exp(top - _shift(top))
        acc = total * own_value
    for start in range(0, n, BLOCK_C):
        cells, keep = _cells(start, x0, y0, width, n, columns, BLOCK_C)
        s = tl.sum(query[None, :] * _rows(k_base, cells, keep, stride_kp, d, inside), 1)
        before = top
        top = tl.maximum(top, tl.max(tl.where(keep, s, float("-inf")), 0))
        now = _shift(top)
        p = tl.where(keep, tl.exp(s - now), 0.0)
        # So far nothing but weights of 0: there is no scale to correct, and exp(0 − now) might be infinite.
        old = tl.where(before == float("-inf"), 1.0, tl.exp(before - now))
        total = total * old + tl.sum(p, 0)
        acc = acc * old + tl.sum(p[:, None] * _rows(v_base, cells, keep, stride_vp, d, inside), 0)
    return acc / total, top, total


@triton.jit
def _window_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, own_k_ptr, own_v_ptr, windows_ptr, out_ptr,
    stride_qb, stride_qw, stride_qh, stride_kb, stride_kp, stride_kh, stride_vb, stride_vp, stride_vh,
    stride_ub, stride_uw, stride_uh, stride_zb, stride_zw, stride_zh,
    first, n_windows, n_heads, rows, columns, dim, scale,
    OWN: tl.constexpr, SHARED: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One window of one image and head. u and z are the own keys and values."""
    program = first + tl.program_id(0).to(tl.int64)
    w = program % n_windows
    h = program // n_windows % n_heads
    b = program // n_windows // n_heads
    d = tl.arange(0, BLOCK_D)
    inside = d < dim
    query = tl.load(q_ptr + b * stride_qb + w * stride_qw + h * stride_qh + d, mask=inside, other=0.0)
    query = query.to(tl.float32) * scale
    own_key = query
    own_value = query
    if OWN:
        own_key = tl.load(own_k_ptr + b * stride_ub + w * stride_uw + h * stride_uh + d, mask=inside, other=0.0)
        own_value = tl.load(own_v_ptr + b * stride_zb + w * stride_zw + h * stride_zh + d, mask=inside, other=0.0)
    x0, y0, width, n = _box(windows_ptr, b, w, n_windows, rows, columns, SHARED)
    out, _top, _total = _attend(
        query, k_ptr + b * stride_kb + h * stride_kh, v_ptr + b * stride_vb + h * stride_vh, stride_kp, stride_vp,
        own_key.to(tl.float32), own_value.to(tl.float32), x0, y0, width, n, columns, d, inside,
        OWN, BLOCK_C, BLOCK_D,
    )  # fmt: skip
    if not OWN:
        out = tl.where(n > 0, out, 0.0)
    to = out_ptr + ((b * n_windows + w) * n_heads + h) * dim + d
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _window_attention_bwd_windows_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, own_k_ptr, own_v_ptr, windows_ptr,
    grad_q_ptr, grad_own_k_ptr, grad_own_v_ptr, lse_ptr, mean_ptr,
    stride_gb, stride_gw, stride_gh,
    stride_qb, stride_qw, stride_qh, stride_kb, stride_kp, stride_kh, stride_vb, stride_vp, stride_vh,
    stride_ub, stride_uw, stride_uh, stride_zb, stride_zw, stride_zh,
    first, n_windows, n_heads, rows, columns, dim, scale,
    OWN: tl.constexpr, SHARED: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What belongs to one window: gradients of its query, own key and value; its log-sum-exp and mean slope."""
    program = first + tl.program_id(0).to(tl.int64)
    w = program % n_windows
    h = program // n_windows % n_heads
    b = program // n_windows // n_heads
    d = tl.arange(0, BLOCK_D)
    inside = d < dim
    query = tl.load(q_ptr + b * stride_qb + w * stride_qw + h * stride_qh + d, mask=inside, other=0.0)
    query = query.to(tl.float32) * scale
    g = tl.load(g_ptr + b * stride_gb + w * stride_gw + h * stride_gh + d, mask=inside, other=0.0).to(tl.float32)
    own_key = query
    own_value = query
    if OWN:
        own_key = tl.load(own_k_ptr + b * stride_ub + w * stride_uw + h * stride_uh + d, mask=inside, other=0.0)
        own_value = tl.load(own_v_ptr + b * stride_zb + w * stride_zw + h * stride_zh + d, mask=inside, other=0.0)
    own_key = own_key.to(tl.float32)
    own_value = own_value.to(tl.float32)
    k_base = k_ptr + b * stride_kb + h * stride_kh
    v_base = v_ptr + b * stride_vb + h * stride_vh
    x0, y0, width, n = _box(windows_ptr, b, w, n_windows, rows, columns, SHARED)
    out, top, total = _attend(
        query, k_base, v_base, stride_kp, stride_vp, own_key, own_value, x0, y0, width, n, columns, d, inside,
        OWN, BLOCK_C, BLOCK_D,
    )  # fmt: skip
    lse = _shift(top) + tl.log(total)
    mean = tl.sum(g * out, 0)
    grad_q = tl.zeros((BLOCK_D,), tl.float32)
    to = ((b * n_windows + w) * n_heads + h) * dim + d
    if OWN:
        p_own = tl.exp(tl.sum(query * own_key, 0) - lse)
        slope_own = p_own * (tl.sum(g * own_value, 0) - mean)
        grad_q += slope_own * own_key
        tl.store(grad_own_k_ptr + to, slope_own * query, mask=inside)
        tl.store(grad_own_v_ptr + to, p_own * g, mask=inside)
    for start in range(0, n, BLOCK_C):
        cells, keep = _cells(start, x0, y0, width, n, columns, BLOCK_C)
        key = _rows(k_base, cells, keep, stride_kp, d, inside)
        p = tl.exp(tl.sum(query[None, :] * key, 1) - lse)
        slope = p * (tl.sum(g[None, :] * _rows(v_base, cells, keep, stride_vp, d, inside), 1) - mean)
        grad_q += tl.sum(tl.where(keep, slope, 0.0)[:, None] * key, 0)
    tl.store(grad_q_ptr + to, grad_q * scale, mask=inside)
    tl.store(lse_ptr + program, lse)
    tl.store(mean_ptr + program, mean)


@triton.jit
def _window_attention_bwd_cells_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, windows_ptr, lse_ptr, mean_ptr, grad_k_ptr, grad_v_ptr,
    stride_gb, stride_gw, stride_gh,
    stride_qb, stride_qw, stride_qh, stride_kb, stride_kp, stride_kh, stride_vb, stride_vp, stride_vh,
    first, n_windows, n_heads, rows, columns, dim, scale,
    SHARED: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What belongs to a block of cells of one image and head: gradients of their keys and values."""
    n_cells = tl.cast(rows, tl.int64) * columns
    n_blocks = tl.cdiv(n_cells, BLOCK_C)
    program = first + tl.program_id(0).to(tl.int64)
    block = (program % n_blocks).to(tl.int32)
    h = program // n_blocks % n_heads
    b = program // n_blocks // n_heads
    d = tl.arange(0, BLOCK_D)
    inside = d < dim
    place = block * BLOCK_C + tl.arange(0, BLOCK_C)
    real = place < n_cells
    cells = place.to(tl.int64)
    y = place // columns
    x = place % columns
    key = _rows(k_ptr + b * stride_kb + h * stride_kh, cells, real, stride_kp, d, inside)
    value = _rows(v_ptr + b * stride_vb + h * stride_vh, cells, real, stride_vp, d, inside)
    grad_k = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
    grad_v = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
    for i in range(0, n_windows):
        w = tl.cast(i, tl.int64)
        x0, y0, width, n = _box(windows_ptr, b, w, n_windows, rows, columns, SHARED)
        seen = real & (n > 0) & (x >= x0) & (x - x0 < width) & (y >= y0) & ((y - y0) * width < n)
        if tl.max(seen.to(tl.int32), 0) > 0:
            at = (b * n_heads + h) * n_windows + w
            query = tl.load(q_ptr + b * stride_qb + w * stride_qw + h * stride_qh + d, mask=inside, other=0.0)
            query = query.to(tl.float32) * scale
            g = tl.load(g_ptr + b * stride_gb + w * stride_gw + h * stride_gh + d, mask=inside, other=0.0)
            g = g.to(tl.float32)
            p = tl.exp(tl.sum(query[None, :] * key, 1) - tl.load(lse_ptr + at))
            slope = p * (tl.sum(g[None, :] * value, 1) - tl.load(mean_ptr + at))
            # Chosen after the product: a window's NaN stays off the cells that it does not see.
            grad_k += tl.where(seen[:, None], slope[:, None] * query[None, :], 0.0)
            grad_v += tl.where(seen[:, None], p[:, None] * g[None, :], 0.0)
    to = ((b * n_cells + cells[:, None]) * n_heads + h) * dim + d[None, :]
    mask = real[:, None] & inside[None, :]
    tl.store(grad_k_ptr + to, grad_k, mask=mask)
    tl.store(grad_v_ptr + to, grad_v, mask=mask)


def window_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    windows: Tensor,
    out: Tensor,
    *,
    rows: int,
    columns: int,
    scale: float,
) -> None:
    """Fill the dense `out` for checked arguments of at least one element."""
    has_own = own_k is not None
    q, k, v, own_k, own_v = (_dense_rows(x) for x in (q, k, v, *_own(own_k, own_v, q)))
    n_images, n_windows, n_heads, dim = q.shape
    plan = plan_window_attention(rows * columns, dim)
    for first, count in _launches(n_images * n_windows * n_heads):
        _window_attention_fwd_kernel[(count,)](
            q, k, v, own_k, own_v, windows.contiguous(), out, *_strides(q, k, v, own_k, own_v),
            first, n_windows, n_heads, rows, columns, dim, scale,
            OWN=has_own, SHARED=windows.ndim == 2, BLOCK_C=plan.block_c, BLOCK_D=plan.block_d,
            num_warps=plan.num_warps, maxnreg=MAX_REGISTERS["forward"],
        )  # fmt: skip


def window_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    windows: Tensor,
    *,
    rows: int,
    columns: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, own_k and own_v in the inputs' dtype; the last two of shape (0,) where there are none."""
    has_own = own_k is not None
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    grad_own = [q.new_zeros(q.shape if has_own else (0,), dtype=torch.float32) for _ in range(2)]
    if q.numel() > 0:
        grad, q, k, v, own_k, own_v = (_dense_rows(x) for x in (grad, q, k, v, *_own(own_k, own_v, q)))
        n_images, n_windows, n_heads, dim = q.shape
        plan = plan_window_attention(rows * columns, dim)
        shapes = {
            "SHARED": windows.ndim == 2, "BLOCK_C": plan.block_c, "BLOCK_D": plan.block_d,
            "maxnreg": MAX_REGISTERS["backward"],
        }  # fmt: skip
        sizes = (n_windows, n_heads, rows, columns, dim, scale)
        windows = windows.contiguous()
        lse, mean = (q.new_empty(n_images * n_heads * n_windows, dtype=torch.float32) for _ in range(2))
        for first, count in _launches(lse.numel()):
            _window_attention_bwd_windows_kernel[(count,)](
                grad, q, k, v, own_k, own_v, windows, grad_q, *grad_own, lse, mean,
                *_strides(grad, q, k, v, own_k, own_v), first, *sizes,
                OWN=has_own, num_warps=plan.num_warps, **shapes,
            )  # fmt: skip
        blocks = triton.cdiv(rows * columns, plan.block_c)
        for first, count in _launches(n_images * n_heads * blocks):
            _window_attention_bwd_cells_kernel[(count,)](
                grad, q, k, v, windows, lse, mean, grad_k, grad_v,
                *_strides(grad, q, k, v), first, *sizes, num_warps=plan.num_warps, **shapes,
            )  # fmt: skip
    return tuple(x.to(q.dtype) for x in (grad_q, grad_k, grad_v, *grad_own))  # type: ignore[return-value]


def _own(own_k: Tensor | None, own_v: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """The own keys and values; unused pointers still need something to point at, which is q."""
    return (q, q) if own_k is None or own_v is None else (own_k, own_v)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _launches(programs: int) -> list[tuple[int, int]]:
    """First program and number of programs of each launch."""
    return [(first, min(MAX_PROGRAMS, programs - first)) for first in range(0, programs, MAX_PROGRAMS)]
