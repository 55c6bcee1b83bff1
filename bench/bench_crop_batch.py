"""crop_batch against the Pillow loop, in turn: `pytest bench/bench_crop_batch.py` prints the table of ratios."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from bench.paired import Paired, name_of
from engine.ops.crop_batch import crop_batch

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
FILL = (127, 127, 127)


@dataclass(frozen=True)
class Case:
    """`crops` boxes of `box` (height, width) at random places of an image of `image`, resized to `size`²."""

    image: tuple[int, int]
    box: tuple[int, int]
    crops: int
    size: int
    mode: str = "rescaled"

    def inputs(self) -> tuple[Tensor, Tensor]:
        make = torch.Generator().manual_seed(7)
        image = torch.randint(0, 256, (*self.image, 3), dtype=torch.uint8, generator=make)
        (height, width), (h, w) = self.image, self.box
        y = torch.randint(0, height - h + 1, (self.crops,), generator=make)
        x = torch.randint(0, width - w + 1, (self.crops,), generator=make)
        return image, torch.stack([torch.zeros_like(x), x, y, x + w, y + h], 1)


CASES = {
    "35 crops": Case((480, 640), (96, 96), 35, 224),
    "140 crops": Case((480, 640), (96, 96), 140, 224),
    "thirds": Case((480, 640), (160, 213), 35, 224),
    "whole images": Case((480, 640), (480, 640), 35, 224),
    "native": Case((480, 640), (96, 96), 35, 224, "native"),
    "scenes": Case((96, 96), (48, 48), 35, 96),
}


def ours(image: Tensor, boxes: Tensor, case: Case, dtype: torch.dtype) -> Tensor:
    return crop_batch([image], boxes, case.size, mean=MEAN, std=STD, fill=FILL, dtype=dtype, mode=case.mode)


def pillow_loop(image: Tensor, boxes: Tensor, case: Case, dtype: torch.dtype) -> Tensor:
    """What one writes with Pillow and numpy: crop, resize, normalise, stack."""
    picture, size = Image.fromarray(image.numpy()), (case.size, case.size)
    mean, std = np.array(MEAN, np.float32), np.array(STD, np.float32)
    batch = []
    for _, x0, y0, x1, y1 in boxes.tolist():
        crop = picture.crop((x0, y0, x1, y1))
        if case.mode == "native":
            canvas = Image.new("RGB", picture.size, FILL)
            canvas.paste(crop, ((picture.width - crop.width) // 2, (picture.height - crop.height) // 2))
            crop = canvas
        pixels = np.asarray(crop.resize(size, Image.Resampling.BICUBIC), dtype=np.float32)
        batch.append(((pixels / 255 - mean) / std).transpose(2, 0, 1))
    return torch.from_numpy(np.stack(batch)).to(dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def bench_crop_batch(paired: Paired, name: str, dtype: torch.dtype) -> None:
    """The first crops are checked against the reference."""
    case = CASES[name]
    image, boxes = case.inputs()
    wanted = crop_batch(
        [image], boxes[:3], case.size, mean=MEAN, std=STD, fill=FILL, mode=case.mode, backend="reference"
    )
    # In levels of a byte: the promise, and what rounding to the dtype adds.
    allowed = 2 + (0 if dtype == torch.float32 else 3)

    def check(got: Tensor) -> None:
        levels = (got[:3].float() - wanted).abs() * torch.tensor(STD)[:, None, None] * 255
        assert levels.max() <= allowed and levels.mean() <= allowed / 6

    baselines = {"Pillow": lambda: pillow_loop(image, boxes, case, dtype)}
    paired("crop_batch", name, lambda: ours(image, boxes, case, dtype), baselines, expected=check, dtype=dtype)
