"""Crop grids and crops: the regions of an image that are looked at one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from engine.choices import CropMode, Fill, GridName

Place = Literal["centre", "same"]
Box = Sequence[int] | np.ndarray



@dataclass(frozen=True)
class CropGrid:
    """Sliding windows of several scales, as fractions of an image of any size.

    A scale of n windows in a row, neighbours sharing `overlap` of their length, has windows of the fraction
    1 / (1 + (n - 1) (1 - overlap)) of the side: with half overlap 2 -> 2/3, 3 -> 1/2, 4 -> 2/5, 5 -> 1/3.

    Args:
        windows: one (rows, columns) per scale, each at least 1.
        overlap: shared fraction of neighbouring windows, 0 <= overlap < 1; default 0.5.
        include_full: whether the full image is the first region; default True.

    Raises:
        ValueError: no region at all, rows or columns below 1, overlap outside [0, 1).

    Example:
        >>> crop_grid("scenes").boxes(96, 96)[[0, 1, 2, 10]].tolist()
        [[0, 0, 96, 96], [0, 0, 48, 48], [24, 0, 72, 48], [0, 0, 32, 32]]
    """

    windows: tuple[tuple[int, int], ...] = ()
    overlap: float = 0.5
    include_full: bool = True

    def __post_init__(self) -> None:
        if not self.windows and not self.include_full:
            raise ValueError("CropGrid: there must be at least one region, got no windows and include_full=False")
        for scale in self.windows:
            if len(scale) != 2 or min(scale) < 1:
                raise ValueError(f"CropGrid: windows must be pairs (rows, columns) of at least 1, got {scale}")
        if not 0 <= self.overlap < 1:
            raise ValueError(f"CropGrid: overlap must be in [0, 1), got {self.overlap}")

    def __len__(self) -> int:
        """Return the number of regions R, the same for every image."""
        return int(self.include_full) + sum(rows * columns for rows, columns in self.windows)

    def boxes(self, height: int, width: int) -> np.ndarray:
        """Return the regions of an image of `height` x `width` pixels.

        Returns:
            int64 array (R, 4) of half-open pixel rectangles x0, y0, x1, y1 of the upright image, all inside
            it and at least one pixel large, all windows of a scale equally large: the full image first if
            included, then scale by scale in row-major order. Small images get repeated boxes, never fewer.

        Raises:
            ValueError: height or width below 1.
        """
        if height < 1 or width < 1:
            raise ValueError(f"CropGrid.boxes: the image must have pixels, got {height} x {width}")
        found = [(0, 0, width, height)] if self.include_full else []
        for rows, columns in self.windows:
            spans_y = _spans(height, rows, self.overlap)
            spans_x = _spans(width, columns, self.overlap)
            found += [(x0, y0, x1, y1) for y0, y1 in spans_y for x0, x1 in spans_x]
        return np.array(found, dtype=np.int64)


CROP_GRIDS: dict[GridName, CropGrid] = {
    "none": CropGrid(),
    "scenes": CropGrid(((3, 3), (5, 5))),
    "multi_scale": CropGrid(((2, 2), (3, 3), (4, 4), (5, 5))),
    "dense": CropGrid(((2, 2), (3, 3), (4, 4), (5, 5), (6, 6))),
}


def crop_grid(grid: GridName | CropGrid) -> CropGrid:
    """Look a named grid up; a `CropGrid` passes.

    "none": the full image alone (1 region); "scenes": full, 3 x 3 halves, 5 x 5 thirds (35); "multi_scale":
    full and 2 x 2 to 5 x 5 (55); "dense": full and 2 x 2 to 6 x 6 (91). All with half overlap.

    Raises:
        ValueError: unknown name.

    Example:
        >>> len(crop_grid("multi_scale"))
        55
    """
    if isinstance(grid, CropGrid):
        return grid
    if grid not in CROP_GRIDS:
        raise ValueError(f"crop_grid: the name must be one of {', '.join(sorted(CROP_GRIDS))}, got {grid!r}")
    return CROP_GRIDS[grid]


def fill_colour(image: Image.Image, fill: Fill) -> tuple[int, int, int]:
    """Resolve a fill: an RGB tuple passes, "border" is the median of the outermost pixels, "mean" the mean.

    The median per channel over the ring of border pixels is the background's colour as long as objects touch
    less than half of the border.

    Raises:
        ValueError: image is not RGB, an unknown name, or numbers outside 0..255.

    Example:
        >>> fill_colour(Image.new("RGB", (4, 4), (7, 8, 9)), "border")
        (7, 8, 9)
    """
    _check_rgb("fill_colour", image)
    if isinstance(fill, str):
        if fill not in ("border", "mean"):
            raise ValueError(f'fill_colour: fill must be an RGB tuple, "border" or "mean", got {fill!r}')
        pixels = np.asarray(image)
        if fill == "mean":
            colour = pixels.reshape(-1, 3).mean(axis=0)
        else:
            ring = np.concatenate([pixels[0], pixels[-1], pixels[1:-1, 0], pixels[1:-1, -1]])
            colour = np.median(ring, axis=0)
        return (int(colour[0] + 0.5), int(colour[1] + 0.5), int(colour[2] + 0.5))
    if len(fill) != 3 or min(fill) < 0 or max(fill) > 255:
        raise ValueError(f"fill_colour: an RGB fill must be three numbers 0..255, got {tuple(fill)}")
    return (int(fill[0]), int(fill[1]), int(fill[2]))


def crop(
    image: Image.Image,
    box: Box,
    *,
    mode: CropMode = "rescaled",
    canvas: tuple[int, int] | None = None,
    fill: Fill = "border",
    place: Place = "centre",
) -> Image.Image:
    """Cut one region out.

    Args:
        image: PIL image of mode RGB.
        box: half-open pixel rectangle x0, y0, x1, y1; what lies outside the image has the fill colour.
        mode: "rescaled" gives the region alone (whoever encodes it enlarges it, so size words lose their
            meaning); "native" pastes it unscaled on a canvas of the fill colour.
        canvas: (height, width) of that canvas; default the size of the image. For "native" only.
        fill: RGB tuple, "border" (default) or "mean"; see `fill_colour`.
        place: where "native" pastes: "centre" (default), or "same" place as in the image (needs a canvas of
            the image's size). For "native" only.

    Returns:
        A PIL image of mode RGB: of the box's size ("rescaled") or the canvas's ("native").

    Raises:
        ValueError: not RGB, empty or ill-formed box, unknown mode or place, canvas or place without "native",
            a canvas smaller than the box, or "same" on a canvas of another size.

    Source: native scale is this engine's own answer to size words in structure-guided inference
    (arXiv 2604.11496 reports that they stay at chance with rescaled crops).

    Example:
        >>> crop(Image.new("RGB", (9, 6)), (0, 0, 3, 3), mode="native").size
        (9, 6)
    """
    return crops(image, [box], mode=mode, canvas=canvas, fill=fill, place=place)[0]


def crops(
    image: Image.Image,
    boxes: np.ndarray | Sequence[Box],
    *,
    mode: CropMode = "rescaled",
    canvas: tuple[int, int] | None = None,
    fill: Fill = "border",
    place: Place | Sequence[tuple[int, int]] = "centre",
) -> list[Image.Image]:
    """Cut many regions out of one image; arguments, result and errors as for `crop`, boxes (R, 4).

    `place` may also be a corner for each box: (left, top) of where it is pasted, the whole box on the canvas.

    Example:
        >>> image = Image.new("RGB", (96, 96))
        >>> sorted({region.size for region in crops(image, crop_grid("scenes").boxes(96, 96))})
        [(32, 32), (48, 48), (96, 96)]
    """
    _check_rgb("crop", image)
    _check_mode(image, mode, canvas, place)
    rectangles = _check_boxes(boxes)
    colour = fill_colour(image, fill)
    height, width = canvas or (image.height, image.width)
    corners = None if isinstance(place, str) else _check_corners(place, rectangles, (height, width))
    found = []
    for row, (x0, y0, x1, y1) in enumerate(rectangles.tolist()):
        if mode == "rescaled":
            found.append(_window(image, (x0, y0, x1, y1), colour))
            continue
        if corners is not None:
            left, top = corners[row]
        elif place == "same":
            left, top = x0, y0
        else:
            if x1 - x0 > width or y1 - y0 > height:
                raise ValueError(
                    f"crop: canvas must hold the box of {y1 - y0} x {x1 - x0}, got (height, width) = {height, width}"
                )
            left, top = (width - (x1 - x0)) // 2, (height - (y1 - y0)) // 2
        sheet = Image.new("RGB", (width, height), colour)
        # Only what is inside the image is pasted: the rest of the box has the canvas's colour already.
        inner = (max(x0, 0), max(y0, 0), min(x1, image.width), min(y1, image.height))
        if inner[0] < inner[2] and inner[1] < inner[3]:
            sheet.paste(image.crop(inner), (left + inner[0] - x0, top + inner[1] - y0))
        found.append(sheet)
    return found


def _spans(length: int, count: int, overlap: float) -> list[tuple[int, int]]:
    """Place `count` equal windows along a side, the first and the last flush with its ends."""
    window = max(1, int(length / (1 + (count - 1) * (1 - overlap)) + 0.5))
    if count == 1:
        return [(0, window)]
    room, steps = length - window, count - 1
    # Round half up in integers, so that every platform gives the same boxes.
    starts = [(2 * step * room + steps) // (2 * steps) for step in range(count)]
    return [(start, start + window) for start in starts]


def _window(image: Image.Image, box: tuple[int, int, int, int], colour: tuple[int, int, int]) -> Image.Image:
    """Cut a box out; Pillow would fill the outside with black."""
    x0, y0, x1, y1 = box
    if x0 >= 0 and y0 >= 0 and x1 <= image.width and y1 <= image.height:
        return image.crop(box)
    sheet = Image.new("RGB", (x1 - x0, y1 - y0), colour)
    inner = (max(x0, 0), max(y0, 0), min(x1, image.width), min(y1, image.height))
    if inner[0] < inner[2] and inner[1] < inner[3]:
        sheet.paste(image.crop(inner), (inner[0] - x0, inner[1] - y0))
    return sheet


def _check_rgb(who: str, image: Image.Image) -> None:
    if image.mode != "RGB":
        raise ValueError(f"{who}: image must be RGB, got mode {image.mode}")


def _check_mode(image: Image.Image, mode: str, canvas: tuple[int, int] | None, place: object) -> None:
    if mode not in ("rescaled", "native"):
        raise ValueError(f'crop: mode must be "rescaled" or "native", got {mode!r}')
    if isinstance(place, str) and place not in ("centre", "same"):
        raise ValueError(f'crop: place must be "centre" or "same", got {place!r}')
    if mode == "rescaled" and (canvas is not None or place != "centre"):
        raise ValueError('crop: canvas and place are for mode="native", got mode="rescaled"')
    if canvas is not None and min(canvas) < 1:
        raise ValueError(f"crop: canvas must be at least 1 x 1, got {canvas}")
    if place == "same" and canvas not in (None, (image.height, image.width)):
        raise ValueError(
            f'crop: place="same" needs a canvas of the image\'s size {(image.height, image.width)}, got {canvas}'
        )


def _check_corners(
    place: Sequence[tuple[int, int]], rectangles: np.ndarray, canvas: tuple[int, int]
) -> Sequence[tuple[int, int]]:
    if len(place) != len(rectangles):
        raise ValueError(f"crop: place must have a corner for each of {len(rectangles)} boxes, got {len(place)}")
    height, width = canvas
    for (left, top), (x0, y0, x1, y1) in zip(place, rectangles.tolist(), strict=True):
        if left < 0 or top < 0 or left + x1 - x0 > width or top + y1 - y0 > height:
            raise ValueError(
                f"crop: place must put the box of {y1 - y0} x {x1 - x0} on the canvas {(height, width)}, got the "
                f"corner (left, top) = {(left, top)}"
            )
    return place


def _check_boxes(boxes: np.ndarray | Sequence[Box]) -> np.ndarray:
    rectangles = np.asarray(boxes)
    if rectangles.ndim != 2 or rectangles.shape[1] != 4:
        raise ValueError(f"crop: boxes must have shape (R, 4), got {rectangles.shape}")
    if not np.issubdtype(rectangles.dtype, np.integer):
        raise ValueError(f"crop: boxes must be whole pixels (integers), got {rectangles.dtype}")
    empty = (rectangles[:, 2] <= rectangles[:, 0]) | (rectangles[:, 3] <= rectangles[:, 1])
    if empty.any():
        raise ValueError(f"crop: boxes must have x0 < x1 and y0 < y1, got {rectangles[empty][0].tolist()}")
    return rectangles
