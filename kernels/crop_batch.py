"""Crops to network input on the GPU: both passes of the resize, normalisation and layout in one kernel.

The contract stands in `engine.reference.crop_batch`. Which axis is filtered first differs from box to box, so that
the kernel knows no rows and columns, only the axis that is filtered first (a) and the other (b). One program makes
a tile of the three output planes. It walks the places along b that the tile reads, filters each along a for the
whole tile, and adds it to every output of b that reads it: what is filtered first is computed once per tile and
never leaves the chip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs in one launch: the grid's first axis takes no more.
MAX_PROGRAMS = 2**31 - 1
BITS = tl.constexpr(22)
HALF = tl.constexpr(2**21)
FIELDS = 13


@dataclass(frozen=True)
class Plan:
    """Shape of a launch: outputs per tile along the first and the second axis, tiles per box, warps."""

    block_a: int
    block_b: int
    tiles: int
    num_warps: int


def plan_crop_batch(height: int, width: int) -> Plan:
    """The launch for results of `height` x `width`; plain arithmetic, no tuning.

    Either axis may be a, so that blocks go by the longer side and `tiles` is what the worse order needs.
    """
    block_a = min(64, max(16, triton.next_power_of_2(max(height, width))))
    block_b = 16
    tiles = max(
        triton.cdiv(a, block_a) * triton.cdiv(b, block_b) for a, b in ((width, height), (height, width))
    )
    return Plan(block_a, block_b, tiles, num_warps=4 if block_a == 64 else 1)


@triton.jit
def _byte(total):
    """Sums as bytes: the fraction cut off, limited to 0..255."""
    return tl.minimum(tl.maximum(total >> BITS, 0), 255)


@triton.jit
def _crop_batch_fwd_kernel(
    pixels_ptr, boxes_ptr, first_ptr, count_ptr, total_ptr, weights_ptr, fill_ptr, out_ptr,
    first_box, tiles, n_rows, plane,
    scale_0, scale_1, scale_2, shift_0, shift_1, shift_2,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, N_FIELDS: tl.constexpr,
):  # fmt: skip
    """One tile of one box. `weights` is (K, n_rows), so that neighbouring outputs read neighbouring weights."""
    # 64 bits before any product: pixels and results pass 2^31 elements.
    program = tl.program_id(0).to(tl.int64)
    box = first_box + program // tiles
    tile = (program % tiles).to(tl.int32)
    fields = boxes_ptr + box * N_FIELDS
    source = tl.load(fields)
    stride_a, stride_b = tl.load(fields + 1), tl.load(fields + 2)
    begin_a, end_a = tl.load(fields + 3).to(tl.int32), tl.load(fields + 4).to(tl.int32)
    begin_b, end_b = tl.load(fields + 5).to(tl.int32), tl.load(fields + 6).to(tl.int32)
    size_a, size_b = tl.load(fields + 7).to(tl.int32), tl.load(fields + 8).to(tl.int32)
    out_stride_a, out_stride_b = tl.load(fields + 9), tl.load(fields + 10)
    axis_a, axis_b = tl.load(fields + 11), tl.load(fields + 12)
    fill_0 = tl.load(fill_ptr + box * 3).to(tl.int32)
    fill_1 = tl.load(fill_ptr + box * 3 + 1).to(tl.int32)
    fill_2 = tl.load(fill_ptr + box * 3 + 2).to(tl.int32)

    tiles_a = (size_a + BLOCK_A - 1) // BLOCK_A
    a = (tile % tiles_a) * BLOCK_A + tl.arange(0, BLOCK_A)
    b = (tile // tiles_a) * BLOCK_B + tl.arange(0, BLOCK_B)
    in_a, in_b = a < size_a, b < size_b
    rows_a, rows_b = axis_a + a, axis_b + b
    first_a = tl.load(first_ptr + rows_a, mask=in_a, other=0)
    count_a = tl.load(count_ptr + rows_a, mask=in_a, other=0)
    total_a = tl.load(total_ptr + rows_a, mask=in_a, other=0)
    first_b = tl.load(first_ptr + rows_b, mask=in_b, other=0)
    count_b = tl.load(count_ptr + rows_b, mask=in_b, other=0)
    total_b = tl.load(total_ptr + rows_b, mask=in_b, other=0)
    longest = tl.max(count_a, 0)

    # The picture is the fill colour plus what the pasted rectangle differs from it. Only places of the rectangle
    # are walked: of the rest, filtered along a, the difference is 0.
    low = tl.maximum(tl.min(tl.where(in_b, first_b, 2147483647), 0), begin_b)
    high = tl.minimum(tl.max(tl.where(in_b, first_b + count_b, 0), 0), end_b)
    zeros = tl.zeros((BLOCK_B, BLOCK_A), tl.int32)
    acc_0 = zeros + (total_b * fill_0 + HALF)[:, None]
    acc_1 = zeros + (total_b * fill_1 + HALF)[:, None]
    acc_2 = zeros + (total_b * fill_2 + HALF)[:, None]
    for place in range(low, high):
        line = pixels_ptr + source + (place - begin_b).to(tl.int64) * stride_b
        sum_0 = total_a * fill_0 + HALF
        sum_1 = total_a * fill_1 + HALF
        sum_2 = total_a * fill_2 + HALF
        weights_a = weights_ptr + rows_a
        for k in range(0, longest):
            at = first_a + k
            seen = (k < count_a) & (at >= begin_a) & (at < end_a)
            weight = tl.load(weights_a, mask=seen, other=0)
            pixel = line + (at - begin_a).to(tl.int64) * stride_a
            sum_0 += weight * (tl.load(pixel, mask=seen, other=0).to(tl.int32) - fill_0)
            sum_1 += weight * (tl.load(pixel + 1, mask=seen, other=0).to(tl.int32) - fill_1)
            sum_2 += weight * (tl.load(pixel + 2, mask=seen, other=0).to(tl.int32) - fill_2)
            weights_a += n_rows
        k_b = place - first_b
        reads = (k_b >= 0) & (k_b < count_b)
        weight_b = tl.load(weights_ptr + k_b.to(tl.int64) * n_rows + rows_b, mask=reads, other=0)
        acc_0 += weight_b[:, None] * (_byte(sum_0) - fill_0)[None, :]
        acc_1 += weight_b[:, None] * (_byte(sum_1) - fill_1)[None, :]
        acc_2 += weight_b[:, None] * (_byte(sum_2) - fill_2)[None, :]

    inside = in_b[:, None] & in_a[None, :]
    to = out_ptr + box * 3 * plane + (b * out_stride_b)[:, None] + (a * out_stride_a)[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(to, (_byte(acc_0).to(tl.float32) * scale_0 + shift_0).to(dtype), mask=inside)
    tl.store(to + plane, (_byte(acc_1).to(tl.float32) * scale_1 + shift_1).to(dtype), mask=inside)
    tl.store(to + 2 * plane, (_byte(acc_2).to(tl.float32) * scale_2 + shift_2).to(dtype), mask=inside)


class Placed(Protocol):
    """`engine.reference.crop_batch.Placements`."""

    @property
    def source(self) -> Tensor: ...
    @property
    def begin(self) -> Tensor: ...
    @property
    def end(self) -> Tensor: ...
    @property
    def columns_first(self) -> Tensor: ...


def crop_batch_forward(
    images: Sequence[Tensor],
    image: Tensor,
    placed: Placed,
    axes: Tensor,
    taps: tuple[Tensor, Tensor, Tensor],
    fill: Tensor,
    scale: Sequence[float],
    shift: Sequence[float],
    out: Tensor,
) -> None:
    """Fill `out (n, 3, height, width)` for checked arguments.

    Args:
        images: `(H, W, 3)` uint8 on the device, dense within their rows.
        image: `(n,)`, each box's image. placed: where it lies. axes: `(n, 2)`, the rows of `taps` where its
            vertical and its horizontal axis begin. All on the CPU, as are taps and `fill (n, 3)` uint8.
        scale, shift: result = byte * scale + shift, per channel.
    """
    n, _, height, width = out.shape
    pixels, offsets, strides = pack(images)
    fields = box_fields(placed, offsets[image], strides[image], axes, (height, width))
    first, count, weights = taps
    total = weights.sum(1, dtype=torch.int32)
    tables = [x.to(out.device) for x in (fields, first, count, total, weights.T.contiguous(), fill)]
    plan = plan_crop_batch(height, width)
    boxes = max(1, MAX_PROGRAMS // plan.tiles)
    for begin in range(0, n, boxes):
        _crop_batch_fwd_kernel[(min(boxes, n - begin) * plan.tiles,)](
            pixels, *tables, out, begin, plan.tiles, weights.shape[0], height * width, *scale, *shift,
            BLOCK_A=plan.block_a, BLOCK_B=plan.block_b, N_FIELDS=FIELDS, num_warps=plan.num_warps,
        )  # fmt: skip


def pack(images: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """One buffer of all pixels (a single image is its own), and each image's offset and row stride in bytes, int64."""
    if len(images) == 1:
        return images[0], torch.zeros(1, dtype=torch.int64), torch.tensor([images[0].stride(0)])
    sizes = torch.tensor([image.numel() for image in images], dtype=torch.int64)
    strides = torch.tensor([3 * image.shape[1] for image in images], dtype=torch.int64)
    return torch.cat([image.flatten() for image in images]), sizes.cumsum(0) - sizes, strides


def box_fields(placed: Placed, offsets: Tensor, strides: Tensor, axes: Tensor, size: tuple[int, int]) -> Tensor:
    """What the kernel reads of each box, int64 `(n, FIELDS)`, first axis before second."""
    # Of each pair, the axis that is filtered first.
    order = torch.where(placed.columns_first[:, None], torch.tensor([0, 1]), torch.tensor([1, 0]))

    def ordered(pairs: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(pairs.expand(len(order), 2).gather(1, order).unbind(1))  # type: ignore[return-value]

    pixel = torch.stack([strides, torch.full_like(strides, 3)], 1)
    begin_a, begin_b = ordered(placed.begin)
    end_a, end_b = ordered(placed.end)
    # A box outside its image in one axis only must have nothing to read in either.
    nothing = (end_a <= begin_a) | (end_b <= begin_b)
    end_b = torch.where(nothing, begin_b, end_b)
    source = offsets + (placed.source * pixel).sum(1)
    columns = (
        source, *ordered(pixel), begin_a, end_a, begin_b, end_b, *ordered(torch.tensor(size)),
        *ordered(torch.tensor([size[1], 1])), *ordered(axes),
    )  # fmt: skip
    return torch.stack(columns, 1)
