"""Crops of images as one normalised batch. Contract: `engine.reference.crop_batch`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.ops.checks import check_number, check_tensor, choose_backend, name_of
from engine.ops.native import as_array, extension, forced_isa, on_device_of
from engine.reference import crop_batch as reference
from engine.reference.crop_batch import Placements, Taps

OP = "crop_batch"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Longest box and furthest corner, in pixels, that the kernels' arithmetic is made for.
MAX_SIDE = 2**24
MAX_PLACE = 2**40


def _crop_batch(
    images: Sequence[Tensor],
    boxes: Tensor,
    fill: Tensor,
    size: Sequence[int],
    mean: Sequence[float],
    std: Sequence[float],
    interpolation: str,
    dtype: torch.dtype,
    mode: str,
    backend: str,
) -> Tensor:
    """The op on arguments of the right types and shapes; the numbers in `boxes` are checked here."""
    height, width = size
    boxes, fill = boxes.to("cpu", torch.int64).contiguous(), fill.cpu().contiguous()
    _check_places(images, boxes, mode)
    if backend == "reference":
        return reference.crop_batch(
            images, boxes, fill, (height, width), mean=mean, std=std, interpolation=interpolation, dtype=dtype,
            mode=mode,
        )  # fmt: skip
    rows = [image if _dense_rows(image) else image.contiguous() for image in images]
    result = torch.empty(len(boxes), 3, height, width, dtype=dtype, device=_device(images, boxes))
    if result.numel() == 0:
        return result
    # byte * scale + shift
    scale, shift = [1 / (255 * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]
    if backend == "cpp":
        extension(OP).crop_batch(
            [as_array(image) for image in rows], as_array(boxes), as_array(fill), scale, shift, interpolation,
            mode == "native", name_of(dtype), as_array(result), forced_isa(), torch.get_num_threads(),
        )  # fmt: skip
        return result
    from engine.kernels.crop_batch import crop_batch_forward

    sizes = torch.tensor([image.shape[:2] for image in rows], dtype=torch.int64)
    placed = reference.placements(sizes, boxes, mode, (height, width))
    axes, taps = _axes(placed, (height, width), interpolation)
    with on_device_of(result):
        crop_batch_forward(rows, boxes[:, 0], placed, axes, taps, fill, scale, shift, result)
    return result


def _axes(placed: Placements, size: tuple[int, int], interpolation: str) -> tuple[Tensor, Taps]:
    """One table of taps for all boxes, computed once per length, and the rows (n, 2) where each box's two begin."""
    begins: dict[tuple[int, int], int] = {}
    tables: list[Taps] = []
    rows = 0
    axes = []
    for lengths in placed.size.tolist():
        for axis in zip(lengths, size, strict=True):
            if axis not in begins:
                begins[axis] = rows
                tables.append(reference.axis_taps(*axis, interpolation))
                rows += axis[1]
            axes.append(begins[axis])
    widest = max(table.weights.shape[1] for table in tables)
    weights = [functional.pad(table.weights, (0, widest - table.weights.shape[1])) for table in tables]
    first, count = (torch.cat([table[k] for table in tables]) for k in (0, 1))
    return torch.tensor(axes, dtype=torch.int64).reshape(-1, 2), Taps(first, count, torch.cat(weights))


crop_batch_op = torch.library.custom_op("peaksim::crop_batch", _crop_batch, mutates_args=())


@crop_batch_op.register_fake
def _crop_batch_fake(
    images: Sequence[Tensor],
    boxes: Tensor,
    fill: Tensor,
    size: Sequence[int],
    mean: Sequence[float],
    std: Sequence[float],
    interpolation: str,
    dtype: torch.dtype,
    mode: str,
    backend: str,
) -> Tensor:
    return boxes.new_empty(len(boxes), 3, *size, dtype=dtype, device=_device(images, boxes))


def crop_batch(
    images: Sequence[Tensor],
    boxes: Tensor,
    size: int | tuple[int, int],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    fill: Sequence[int] | Tensor,
    interpolation: str = "bicubic",
    dtype: torch.dtype = torch.float32,
    mode: str = "rescaled",
    backend: str | None = None,
) -> Tensor:
    """Cut boxes out of images, resize them antialiased, and normalise: one batch of network input.

        result[i] = (resize(picture[i]) / 255 - mean) / std

    Resizing gives Pillow's bytes exactly. The edges (boxes beyond the border, fill, rounding) are set down in
    `engine.reference.crop_batch`.

    Args:
        images: upright RGB images `(H, W, 3)` of uint8, of any sizes, on one device. Rows may be any distance
            apart; pixels that are not dense within a row cost a copy.
        boxes: `(n, 5)` int32 or int64: image, x0, y0, x1, y1, a half-open pixel rectangle that may cross the
            image's border. The kernels want them on the CPU; from elsewhere they are fetched.
        size: side of a square result, or (height, width).
        mean, std: three numbers each, in units of 0..1 pixel values.
        fill: colour of what the image does not cover: three numbers 0..255, or uint8 `(n, 3)`, one a box.
        interpolation: "bicubic" (default) or "bilinear".
        dtype: of the result: float32 (default), float16 or bfloat16.
        mode: "rescaled" (default): the crop fills the result. "native": the crop keeps its scale on a canvas of
            the fill colour, of the image's size, which is then resized; the box must fit on it.
        backend: "cpp" (CPU), "triton" (CUDA) or "reference" (plain torch, any device); by default, or with
            "auto", by the images' device.

    Returns:
        `(n, 3, height, width)` of `dtype`, on the images' device. Without gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or range.
        RuntimeError: the backend is missing; the message says how to get it.

    >>> image = torch.full((6, 8, 3), 255, dtype=torch.uint8)
    >>> boxes = torch.tensor([[0, 0, 0, 8, 6], [0, 4, -3, 12, 3]])
    >>> batch = crop_batch([image], boxes, 2, mean=[0.5] * 3, std=[0.5] * 3, fill=(0, 0, 0), interpolation="bilinear")
    >>> batch.shape, batch[0, 0].round(decimals=3).tolist()
    (torch.Size([2, 3, 2, 2]), [[1.0, 1.0], [1.0, 1.0]])
    """
    images = list(images)
    _check_images(images)
    _check_boxes(images, boxes)
    height, width = _check_size(size)
    centre, spread = _check_normalisation(mean, std)
    _check_options(interpolation, dtype, mode)
    colours = _check_fill(fill, len(boxes))
    chosen = choose_backend(OP, backend, images[0] if images else boxes)
    return crop_batch_op(
        images, boxes, colours, [height, width], centre, spread, interpolation, dtype, mode, chosen
    )


def _device(images: Sequence[Tensor], boxes: Tensor) -> torch.device:
    return images[0].device if len(images) else boxes.device


def _dense_rows(image: Tensor) -> bool:
    return image.stride(2) == 1 and (image.shape[1] == 1 or image.stride(1) == 3)


def _check_images(images: Sequence[object]) -> None:
    for k, image in enumerate(images):
        check_tensor(OP, f"images[{k}]", image)
        assert isinstance(image, Tensor) and isinstance(images[0], Tensor)
        if image.dtype != torch.uint8:
            raise TypeError(f"{OP}: images[{k}] must be uint8, got {name_of(image.dtype)}")
        if image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise ValueError(f"{OP}: images[{k}] must have the shape (H, W, 3) with pixels, got {tuple(image.shape)}")
        if image.device != images[0].device:
            raise ValueError(f"{OP}: images must be on one device, got {images[0].device} and {image.device}")


def _check_boxes(images: Sequence[Tensor], boxes: object) -> None:
    check_tensor(OP, "boxes", boxes)
    assert isinstance(boxes, Tensor)
    if boxes.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{OP}: boxes must be int32 or int64 (whole pixels), got {name_of(boxes.dtype)}")
    if boxes.ndim != 2 or boxes.shape[1] != 5:
        raise ValueError(f"{OP}: boxes must have the shape (n, 5), got {tuple(boxes.shape)}")
    if not images and len(boxes):
        raise ValueError(f"{OP}: boxes must be of images that are there, got {len(boxes)} boxes and no image")


def _check_size(size: object) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, int) else size
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(type(n) is int for n in pair):
        raise TypeError(f"{OP}: size must be a whole number or (height, width), got {size!r}")
    if not all(1 <= n <= MAX_SIDE for n in pair):
        raise ValueError(f"{OP}: size must be 1 to {MAX_SIDE} pixels, got {size}")
    return pair[0], pair[1]


def _check_normalisation(mean: object, std: object) -> tuple[list[float], list[float]]:
    centre, spread = (_three_numbers(name, x) for name, x in (("mean", mean), ("std", std)))
    if not all(math.isfinite(m) and abs(m) <= 1e6 for m in centre):
        raise ValueError(f"{OP}: mean must be finite and at most 1e6, got {centre}")
    if not all(1e-6 <= s <= 1e6 for s in spread):
        raise ValueError(f"{OP}: std must be between 1e-6 and 1e6, got {spread}")
    return centre, spread


def _three_numbers(name: str, x: object) -> list[float]:
    if not isinstance(x, (Sequence, np.ndarray)) or isinstance(x, (str, bytes)) or len(x) != 3:
        raise ValueError(f"{OP}: {name} must be three numbers, got {x!r}")
    return [check_number(OP, f"{name}[{k}]", one) for k, one in enumerate(x)]


def _check_options(interpolation: object, dtype: object, mode: object) -> None:
    if not isinstance(interpolation, str) or interpolation not in reference.SUPPORT:
        raise ValueError(f"{OP}: interpolation must be 'bicubic' or 'bilinear', got {interpolation!r}")
    if dtype not in DTYPES:
        raise TypeError(f"{OP}: dtype must be {', '.join(map(name_of, DTYPES))}, got {dtype}")
    if mode not in ("rescaled", "native"):
        raise ValueError(f"{OP}: mode must be 'rescaled' or 'native', got {mode!r}")


def _check_fill(fill: Sequence[int] | Tensor, n: int) -> Tensor:
    """The fill as uint8 (n, 3)."""
    if isinstance(fill, Tensor):
        if fill.dtype != torch.uint8:
            raise TypeError(f"{OP}: fill must be uint8, got {name_of(fill.dtype)}")
        if tuple(fill.shape) != (n, 3):
            raise ValueError(f"{OP}: fill must have one colour a box, shape {(n, 3)}, got {tuple(fill.shape)}")
        return fill
    colour = list(fill) if isinstance(fill, Sequence) else []
    if len(colour) != 3 or not all(isinstance(x, int) and 0 <= x <= 255 for x in colour):
        raise ValueError(f"{OP}: fill must be three whole numbers 0..255, got {fill!r}")
    return torch.tensor([colour], dtype=torch.uint8).expand(n, 3)


def _check_places(images: Sequence[Tensor], boxes: Tensor, mode: str) -> None:
    """Raise ValueError for the first box that no image or no arithmetic fits."""
    image, low, high = boxes[:, 0], boxes[:, 1:3], boxes[:, 3:5]
    known = (image >= 0) & (image < len(images))
    near = (boxes[:, 1:].abs() <= MAX_PLACE).all(1)
    sides = high - low
    proper = near & (sides > 0).all(1) & (sides <= MAX_SIDE).all(1)
    for right, wanted in (
        (known, f"name one of {len(images)} images"),
        (proper, f"have x0 < x1 <= x0 + {MAX_SIDE}, y0 < y1 likewise, within {MAX_PLACE} of the image"),
    ):
        if not right.all():
            row = int((~right).nonzero()[0, 0])
            raise ValueError(f"{OP}: boxes must {wanted}, got {boxes[row].tolist()} in row {row}")
    if mode == "native" and len(boxes):
        canvas = torch.tensor([[x.shape[1], x.shape[0]] for x in images])[image]
        small = (sides <= canvas).all(1)
        if not small.all():
            row = int((~small).nonzero()[0, 0])
            raise ValueError(
                f"{OP}: boxes of mode 'native' must fit on their image of {canvas[row, 1]} x {canvas[row, 0]}, "
                f"got {boxes[row].tolist()} in row {row}"
            )
