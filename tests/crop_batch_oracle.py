"""Crops by Pillow, one axis at a time, and the ways to run crop_batch, for its tests."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from engine.ops.crop_batch import crop_batch
from engine.ops.native import ISA_VARIABLE, instruction_sets

# A run under Triton's interpreter (see test_crop_batch_triton.py) repeats the same tests with that backend alone.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["triton"] if INTERPRETED else ["reference", *(f"cpp:{isa}" for isa in instruction_sets())]
# The interpreter cuts bfloat16 results off instead of rounding them; compiled kernels are another matter.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
# Pillow's weights are made in double precision: where its compiler fuses products and sums, one may be rounded
# the other way, and with it a byte.
LEVELS = 0 if platform.machine() in ("x86_64", "AMD64") else 1
BYTES = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}


def noise(*size: int) -> Tensor:
    """An image (H, W, 3) of random bytes, half of them black or white so that filters overshoot."""
    image = torch.randint(0, 256, (*size, 3))
    extreme = torch.randint(0, 2, (*size, 3)) * 255
    return torch.where(torch.rand(*size, 3) < 0.5, image, extreme).to(torch.uint8)


def run(backend: str, images: list[Tensor], boxes: Any, size: Any, **options: Any) -> Tensor:
    """crop_batch on an entry of BACKENDS; plain bytes (as float32) unless told otherwise."""
    name, _, isa = backend.partition(":")
    options = {**BYTES, "fill": (10, 250, 99), **options}
    with pytest.MonkeyPatch.context() as patch:
        if isa:
            patch.setenv(ISA_VARIABLE, isa)
        return crop_batch(images, torch.as_tensor(boxes).reshape(-1, 5), size, backend=name, **options)


def picture(image: Tensor, box: list[int], mode: str, fill: tuple[int, int, int]) -> Image.Image:
    """What gets resized, pixel by pixel."""
    x0, y0, x1, y1 = box
    height, width = image.shape[:2]
    sheet = Image.new("RGB", (x1 - x0, y1 - y0) if mode == "rescaled" else (width, height), fill)
    left, top = (0, 0) if mode == "rescaled" else ((width - (x1 - x0)) // 2, (height - (y1 - y0)) // 2)
    for y in range(max(y0, 0), min(y1, height)):
        for x in range(max(x0, 0), min(x1, width)):
            sheet.putpixel((left + x - x0, top + y - y0), tuple(image[y, x].tolist()))
    return sheet


def pillow(
    images: list[Tensor], boxes: Any, size: tuple[int, int], *, mode: str, interpolation: str, fill: Any = (10, 250, 99)
) -> Tensor:
    """The bytes (n, 3, height, width) that Pillow gives, in the contract's order of axes whatever its version."""
    height, width = size
    results = []
    for image, *box in torch.as_tensor(boxes).reshape(-1, 5).tolist():
        sheet = picture(images[image], box, mode, fill)
        columns_first = sheet.height > height and sheet.height - height > 2 * max(0, sheet.width - width)
        between = (sheet.width, height) if columns_first else (width, sheet.height)
        done = sheet.resize(between, FILTERS[interpolation]).resize((width, height), FILTERS[interpolation])
        results.append(np.array(done).transpose(2, 0, 1))
    return torch.from_numpy(np.stack(results)).float()


def assert_bytes(actual: Tensor, expected: Tensor, levels: int = LEVELS) -> None:
    """Bytes as float32, equal but for `levels` and the last bit of the normalisation."""
    assert actual.shape == expected.shape and actual.dtype == torch.float32
    difference = (actual - expected.float()).abs()
    assert difference.max() <= levels + 1e-3, (difference.flatten(1).max(1), actual, expected)


def check(backend: str, images: list[Tensor], boxes: Any, size: tuple[int, int], **options: Any) -> Tensor:
    """Run and compare with Pillow."""
    options = {"mode": "rescaled", "interpolation": "bicubic", **options}
    got = run(backend, images, boxes, size, **options)
    assert_bytes(got, pillow(images, boxes, size, **options))
    return got
