"""The pixel rules of a dual encoder: a policy of `engine.images`, or the source library's own code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from PIL import Image
from torch import Tensor

from engine.images import Interpolation, ResizePolicy, normalise, resize

RESIZE_MODES = ("model", "source", "crop", "squash", "pad")


@dataclass(frozen=True)
class PixelRules:
    """How an upright RGB image becomes the model's input.

    Attributes:
        size: side of the square input in pixels.
        mean, std: per-channel normalisation of pixels in 0..1.
        policy: `"crop"`, `"squash"` or `"pad"`, as the checkpoint's configuration says.
        interpolation: `"bicubic"` or `"bilinear"`.
        fill: colour 0..255 of what `"pad"` adds.
        mode: `"model"` (`policy` through `engine.images`), `"source"` (the source library's own
            transform, pixel for pixel), or another policy in place of the checkpoint's.
        source: the source library's transform of an RGB image to `(3, size, size)`.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    policy: ResizePolicy
    interpolation: Interpolation
    source: Callable[[Image.Image], Tensor]
    fill: int = 0
    mode: str = "model"

    def __post_init__(self) -> None:
        check_resize(self.mode)

    @property
    def geometry(self) -> ResizePolicy:
        """Which part of the image the input shows: `"crop"`, `"squash"` or `"pad"`."""
        return self.policy if self.mode in ("model", "source") else cast(ResizePolicy, self.mode)

    def __call__(self, image: Image.Image) -> Tensor:
        """Normalised input `(3, size, size)`, float32."""
        if self.mode == "source":
            return self.source(image).float()
        fill = (self.fill, self.fill, self.fill)
        small = resize(image, self.size, self.geometry, interpolation=self.interpolation, fill=fill)
        return normalise(small, self.mean, self.std)

    def facts(self) -> dict[str, object]:
        """What a fingerprint must cover."""
        return {
            "size": self.size,
            "mean": [round(float(value), 6) for value in self.mean],
            "std": [round(float(value), 6) for value in self.std],
            "resize": (self.geometry, self.mode == "source"),
            "interpolation": self.interpolation,
            "fill": self.fill if self.geometry == "pad" else None,
        }


def check_resize(mode: str) -> None:
    """Raise ValueError for a resize mode that does not exist."""
    if mode not in RESIZE_MODES:
        raise ValueError(f"load: resize must be one of {', '.join(map(repr, RESIZE_MODES))}, got {mode!r}")
