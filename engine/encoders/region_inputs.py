"""Regions of images as network input in one step, for encoders that squash each picture to their input."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.choices import Fill
from engine.crops import fill_colour
from engine.encoders.base import EncoderSpec
from engine.ops.crop_batch import crop_batch


@dataclass(frozen=True)
class RegionInputs:
    """Regions of several images, equal ones counted once.

    Attributes:
        images: `(H, W, 3)` uint8.
        boxes: `(n, 5)` int64, image and half-open rectangle of each region that differs from those before it.
        fill: `(n, 3)` uint8, the colour of what the image does not cover.
        mode: `"rescaled"` or `"native"`, see `engine.crops`.
        rows: for each region that was asked for, image by image, its place among `boxes`.
    """

    images: list[Tensor]
    boxes: Tensor
    fill: Tensor
    mode: str
    rows: list[int]

    @staticmethod
    def of(images: Sequence[Image.Image], boxes: Sequence[np.ndarray], *, mode: str, fill: Fill) -> RegionInputs:
        """The regions `boxes` (one integer array `(R, 4)` an image) of upright RGB images."""
        pixels = [np.array(image) for image in images]
        place: dict[object, int] = {}
        rows: list[int] = []
        kept: list[list[int]] = []
        colours: list[tuple[int, int, int]] = []
        for number, (image, rectangles) in enumerate(zip(images, boxes, strict=True)):
            colour = fill_colour(image, fill)
            for box in np.asarray(rectangles).tolist():
                key = _content(pixels[number], box, mode, colour)
                if key not in place:
                    place[key] = len(kept)
                    kept.append([number, *box])
                    colours.append(colour)
                rows.append(place[key])
        return RegionInputs(
            [torch.from_numpy(array) for array in pixels],
            torch.tensor(kept).reshape(-1, 5),
            torch.tensor(colours, dtype=torch.uint8).reshape(-1, 3),
            mode,
            rows,
        )

    def batches(self, spec: EncoderSpec, batch_size: int) -> Iterator[Tensor]:
        """Normalised inputs `(at most batch_size, 3, image_size, image_size)`, float32, in the order of `boxes`."""
        for boxes, fill in zip(self.boxes.split(batch_size), self.fill.split(batch_size), strict=True):
            yield crop_batch(
                self.images, boxes, spec.image_size, mean=spec.mean, std=spec.std, fill=fill,
                interpolation=spec.interpolation, mode=self.mode,
            )  # fmt: skip


def _content(pixels: np.ndarray, box: list[int], mode: str, colour: tuple[int, int, int]) -> object:
    """What decides a region's input: equal keys, equal inputs."""
    x0, y0, x1, y1 = box
    height, width = pixels.shape[:2]
    left, top, right, bottom = max(x0, 0), max(y0, 0), min(x1, width), min(y1, height)
    whole = (left, top, right, bottom) == (x0, y0, x1, y1)
    seen = pixels[top : max(bottom, top), left : max(right, left)]
    digest = hashlib.blake2b(seen.tobytes(), digest_size=16).digest()
    canvas = (height, width) if mode == "native" else None
    shown = None if whole and mode == "rescaled" else colour
    return (x1 - x0, y1 - y0), (left - x0, top - y0), seen.shape, digest, canvas, shown
