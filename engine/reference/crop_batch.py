"""The contract of crop_batch, and its specification in plain torch.

    result[i] = (resize(picture[i]) / 255 - mean) / std            (n_boxes, 3, height, width)

`boxes (n, 5)` are (image, x0, y0, x1, y1): half-open pixel rectangles of upright images. What gets resized is a
picture of bytes. With mode "rescaled" it is the box itself, so that the crop fills the result; with "native" it is
a canvas of the image's size with the box pasted unscaled in its middle, at floor((canvas - box) / 2). Whatever the
image does not cover has the box's fill colour: the parts of a box outside the image, and the rest of the canvas.

Resizing is Pillow's antialiased resampling of 8-bit pictures, byte for byte:

* Output i of an axis of `length` places resized to `size` looks at c = (i + 1/2) · length / size, through the
  filter stretched by s = max(1, length / size). Bilinear is the triangle of support 1; bicubic is Keys' cubic with
  a = −1/2, of support 2. It reads the places from int(c − support · s + 1/2) to int(c + support · s + 1/2), cut at
  the ends of the picture; the weights add up to 1 there.
* Weights are rounded to 22 bits of fraction, half away from zero.
* Each row is filtered along first, then each column; the other way round where the height shrinks by more than
  twice as many pixels as the width does (a width that grows shrinks by none). After each of the two, sums are
  rounded (half up) and limited to 0..255. This is the order of Pillow from version 13 on; before, rows always
  came first.

An axis that keeps its length is left as it is, since its weights are 1 in the middle and 0 elsewhere. A picture of
one colour keeps it exactly. (On an axis longer than 16,000 times its result the fast forms, which skip what has
the fill colour, may be off by one level there.)

Crops know nothing of each other: no pixel outside the box has any influence on "rescaled".

What is returned is float32, float16 or bfloat16, rounded once from arithmetic in at least float32. There is no
gradient: bytes have none.

Resampling follows Pillow's `ImagingResample` (Lundh, Clark and contributors); the cubic is Keys, "Cubic
convolution interpolation for digital image processing" (1981).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BITS = 22
SUPPORT = {"bilinear": 1.0, "bicubic": 2.0}


class Taps(NamedTuple):
    """For each of S outputs along an axis: the first place it reads, how many, and their weights."""

    first: Tensor
    """(S,) int32."""
    counts: Tensor
    """(S,) int32, at least 1."""
    weights: Tensor
    """(S, K) int32 in units of 2^-22; 0 from `counts` on."""


class Placements(NamedTuple):
    """Where each crop lies on the picture that is resized: int64 (n, 2), rows before columns; and the order."""

    size: Tensor
    """Of the picture."""
    source: Tensor
    """First pixel of the image that is on the picture."""
    begin: Tensor
    """Where on the picture that pixel lies."""
    end: Tensor
    """Where the pasted rectangle ends; end <= begin for a box wholly outside its image."""
    columns_first: Tensor
    """(n,) bool: filtered down the columns before along the rows."""


def axis_taps(length: int, size: int, interpolation: str) -> Taps:
    """Places and weights of an axis of `length` places resized to `size`."""
    scale = length / size
    stretch = max(scale, 1.0)
    support = SUPPORT[interpolation] * stretch
    centre = (torch.arange(size, dtype=torch.float64) + 0.5) * scale
    first = (centre - support + 0.5).to(torch.int64).clamp(min=0)
    count = (centre + support + 0.5).to(torch.int64).clamp(max=length) - first
    step = torch.arange(int(count.max()))
    x = (((first[:, None] + step) - centre[:, None] + 0.5) * (1.0 / stretch)).abs()
    if interpolation == "bilinear":
        exact = (1.0 - x).clamp(min=0)
    else:
        a = -0.5
        near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
        far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
        exact = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    exact = torch.where(step < count[:, None], exact, 0.0)
    # A running sum has the order of a loop, on which the last bit depends.
    scaled = exact / exact.cumsum(1)[:, -1:] * 2**BITS
    weights = torch.where(scaled < 0, scaled - 0.5, scaled + 0.5).to(torch.int32)
    return Taps(first.to(torch.int32), count.to(torch.int32), weights)


def placements(sizes: Tensor, boxes: Tensor, mode: str, to: tuple[int, int]) -> Placements:
    """Place boxes (n, 5) of images whose (height, width) are `sizes` (n_images, 2) int64; results have size `to`."""
    image = sizes[boxes[:, 0]]
    low, high = boxes[:, [2, 1]], boxes[:, [4, 3]]
    native = mode == "native"
    size = image if native else high - low
    at = (image - (high - low)) // 2 if native else torch.zeros_like(low)
    source = low.clamp(min=0)
    shrinks = size - torch.tensor(to)
    columns_first = shrinks[:, 0] > 2 * shrinks[:, 1].clamp(min=0)
    return Placements(size, source, at + source - low, at + torch.minimum(high, image) - low, columns_first)


def resize_axis(picture: Tensor, size: int, interpolation: str) -> Tensor:
    """Resize the last axis of bytes, given and returned as float64 `(..., length)`."""
    length = picture.shape[-1]
    taps = axis_taps(length, size, interpolation)
    dense = torch.zeros(size, length + taps.weights.shape[1], dtype=torch.float64)
    places = taps.first[:, None].long() + torch.arange(taps.weights.shape[1])
    dense.scatter_(1, places, taps.weights.double())
    # Products of bytes and 24-bit weights are exact in float64, and so are their sums.
    sums = picture @ dense[:, :length].T.to(picture.device)
    return ((sums + 2 ** (BITS - 1)) / 2**BITS).floor().clamp(0, 255)


def resize(picture: Tensor, size: tuple[int, int], interpolation: str, columns_first: bool) -> Tensor:
    """Resize bytes, given and returned as float64 `(..., height, width)`, in both axes."""
    if columns_first:
        return resize_axis(resize_axis(picture.mT, size[0], interpolation).mT, size[1], interpolation)
    return resize_axis(resize_axis(picture, size[1], interpolation).mT, size[0], interpolation).mT


def crop_batch(
    images: Sequence[Tensor],
    boxes: Tensor,
    fill: Tensor,
    size: tuple[int, int],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    interpolation: str,
    dtype: torch.dtype,
    mode: str,
) -> Tensor:
    """The contract above, for arguments that the op has checked: fill is uint8 (n, 3), boxes int64 on the CPU."""
    device = images[0].device if len(images) else boxes.device
    sizes = torch.tensor([image.shape[:2] for image in images], dtype=torch.int64).reshape(-1, 2)
    result = torch.empty(len(boxes), 3, *size, dtype=dtype, device=device)
    centre, spread = (torch.tensor(list(x), dtype=torch.float64, device=device)[:, None, None] for x in (mean, std))
    placed = placements(sizes, boxes, mode, size)
    for i, image in enumerate(boxes[:, 0].tolist()):
        (height, width), (y, x), (top, left), (bottom, right) = (part[i].tolist() for part in placed[:4])
        colour = fill[i].to(device, torch.float64)[:, None, None]
        picture = colour.expand(3, height, width).clone()
        if top < bottom and left < right:
            seen = images[image][y : y + bottom - top, x : x + right - left]
            picture[:, top:bottom, left:right] = seen.permute(2, 0, 1)
        pixels = resize(picture, size, interpolation, bool(placed.columns_first[i]))
        result[i] = ((pixels / 255 - centre) / spread).to(dtype)
    return result
