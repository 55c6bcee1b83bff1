"""One antialiased way to resize, named policies for the aspect ratio, and pixels as a model wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from PIL import Image

ResizePolicy = Literal["crop", "pad", "squash"]
Interpolation = Literal["bicubic", "bilinear"]

_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
# "crop" throws the ends of a long image away anyway: cutting them first keeps the intermediate image small.
_LONGEST_ASPECT = 32


def resize(
    image: Image.Image,
    size: int | tuple[int, int],
    policy: ResizePolicy = "crop",
    *,
    interpolation: Interpolation = "bicubic",
    fill: tuple[int, int, int] = (0, 0, 0),
) -> Image.Image:
    """Resize an RGB image to `size` by a named policy, always antialiased (Pillow's filters).

    Args:
        image: PIL image of mode RGB.
        size: side S of a square result, or (height, width).
        policy: "crop" scales until the image covers the target and cuts the middle out (drops the ends of a
            wide image); "pad" scales until it fits and fills the rest; "squash" ignores the aspect ratio.
        interpolation: "bicubic" or "bilinear".
        fill: RGB 0..255 of what "pad" adds; the other policies never show it.

    Returns:
        A PIL image of mode RGB and exactly `size`. For a square target "crop" rounds as torchvision's
        `Resize` and `CenterCrop` do: long side int(S * long / short), offset round((long - S) / 2). Beyond an
        aspect ratio of 32 the ends go before scaling.

    Raises:
        ValueError: mode is not RGB, unknown policy or interpolation, size below 1.

    Example:
        >>> resize(Image.new("RGB", (8, 4), (9, 9, 9)), 4, "pad").getpixel((0, 0))
        (0, 0, 0)
    """
    height, width = _check(image, size, policy, interpolation)
    resample = _FILTERS[interpolation]
    if policy == "squash":
        return image.resize((width, height), resample)
    if policy == "crop":
        return _cover(image, height, width, resample)
    scale = min(width / image.width, height / image.height)
    inner_w = min(width, max(1, round(image.width * scale)))
    inner_h = min(height, max(1, round(image.height * scale)))
    canvas = Image.new("RGB", (width, height), fill)
    canvas.paste(image.resize((inner_w, inner_h), resample), ((width - inner_w) // 2, (height - inner_h) // 2))
    return canvas


def normalise(image: Image.Image, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Turn an RGB image into (value / 255 - mean) / std.

    Args:
        image: PIL image of mode RGB, H x W.
        mean, std: three numbers each, in units of 0..1 pixel values.

    Returns:
        float32 tensor (3, H, W), contiguous.

    Raises:
        ValueError: mode is not RGB, not three numbers, or a std that is not positive.

    Example:
        >>> normalise(Image.new("RGB", (2, 2), (255, 0, 0)), (0.5,) * 3, (0.5,) * 3)[:, 0, 0].tolist()
        [1.0, -1.0, -1.0]
    """
    if image.mode != "RGB":
        raise ValueError(f"normalise: image must be RGB, got mode {image.mode}")
    if len(mean) != 3 or len(std) != 3:
        raise ValueError(f"normalise: mean and std must be three numbers, got {len(mean)} and {len(std)}")
    if min(std) <= 0:
        raise ValueError(f"normalise: std must be positive, got {tuple(std)}")
    pixels = torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())  # (3, H, W)
    centre = torch.tensor(list(mean), dtype=torch.float32)[:, None, None]
    spread = torch.tensor(list(std), dtype=torch.float32)[:, None, None]
    return pixels.to(torch.float32).div_(255).sub_(centre).div_(spread)


def _check(image: Image.Image, size: int | tuple[int, int], policy: str, interpolation: str) -> tuple[int, int]:
    if image.mode != "RGB":
        raise ValueError(f"resize: image must be RGB, got mode {image.mode}")
    if policy not in ("crop", "pad", "squash"):
        raise ValueError(f'resize: policy must be "crop", "pad" or "squash", got {policy!r}')
    if interpolation not in _FILTERS:
        raise ValueError(f'resize: interpolation must be "bicubic" or "bilinear", got {interpolation!r}')
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise ValueError(f"resize: size must be at least 1, got {size}")
    return height, width


def _cover(image: Image.Image, height: int, width: int, resample: Image.Resampling) -> Image.Image:
    """Scale until (height, width) is covered, then cut the middle out."""
    longest_w = max(1, _LONGEST_ASPECT * image.height * width // height)
    longest_h = max(1, _LONGEST_ASPECT * image.width * height // width)
    if image.width > longest_w:
        left = (image.width - longest_w) // 2
        image = image.crop((left, 0, left + longest_w, image.height))
    elif image.height > longest_h:
        top = (image.height - longest_h) // 2
        image = image.crop((0, top, image.width, top + longest_h))
    if image.width * height <= image.height * width:
        scaled = (width, max(height, int(width * image.height / image.width)))
    else:
        scaled = (max(width, int(height * image.width / image.height)), height)
    if scaled != image.size:
        image = image.resize(scaled, resample)
    left, top = round((scaled[0] - width) / 2), round((scaled[1] - height) / 2)
    return image.crop((left, top, left + width, top + height))
