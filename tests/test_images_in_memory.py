"""Arrays, tensors and open PIL images as sources of pictures."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from engine.images import ImageError, decode, decode_many
from tests.awkward_pictures import H, W, as_stored, blend, colours, exif, grey3, saved

RGB = colours(20)
ARRAYS: list[tuple[str, Callable[[], object], np.ndarray]] = [
    ("uint8", lambda: RGB, RGB),
    ("uint8-strided", lambda: np.ascontiguousarray(RGB[::-1])[::-1], RGB),
    ("uint16", lambda: RGB.astype(np.uint16) * 257, RGB),
    ("uint16-big-endian", lambda: (RGB.astype(np.uint16) * 257).astype(">u2"), RGB),
    ("float32", lambda: (RGB / 255).astype(np.float32), RGB),
    ("float64", lambda: RGB / 255, RGB),
    ("float16", lambda: np.array([[0, 0.5, 1]], dtype=np.float16), grey3(np.array([[0, 128, 255]]))),
    ("float-rounding-noise", lambda: np.array([[-1e-6, 1 + 1e-6]]), grey3(np.array([[0, 255]]))),
    ("bool", lambda: np.array([[True, False]]), grey3(np.array([[255, 0]]))),
    ("grey", lambda: RGB[:, :, 0], grey3(RGB[:, :, 0])),
    ("grey-with-axis", lambda: RGB[:, :, :1], grey3(RGB[:, :, 0])),
    ("grey-alpha", lambda: RGB[:, :, :2], blend(grey3(RGB[:, :, 0]), RGB[:, :, 1])),
    ("rgba", lambda: np.dstack([RGB, RGB[:, :, 0]]), blend(RGB, RGB[:, :, 0])),
    ("tensor-chw", lambda: torch.from_numpy(RGB).permute(2, 0, 1), RGB),
    ("tensor-hwc", lambda: torch.from_numpy(RGB), RGB),
    ("tensor-float", lambda: torch.from_numpy(RGB).permute(2, 0, 1) / 255, RGB),
    ("tensor-bfloat16", lambda: torch.tensor([[0, 1.0]], dtype=torch.bfloat16), grey3(np.array([[0, 255]]))),
    ("tensor-grad", lambda: torch.zeros(3, 5, 6, requires_grad=True), np.zeros((5, 6, 3))),
    (
        "tensor-three-by-three-is-chw",
        lambda: torch.arange(27, dtype=torch.uint8).view(3, 3, 3),
        np.arange(27).reshape(3, 3, 3).transpose(1, 2, 0),
    ),
    (
        "pil-palette",
        lambda: Image.fromarray(RGB).quantize(256),
        np.asarray(Image.fromarray(RGB).quantize(256).convert("RGB")),
    ),
    (
        "pil-premultiplied",
        lambda: Image.fromarray(np.dstack([RGB, np.full((H, W), 255, np.uint8)])).convert("RGBa"),
        RGB,
    ),
    ("pil-int", lambda: Image.fromarray(RGB[:, :, 0].astype(np.int32) * 257), grey3(RGB[:, :, 0])),
    ("pil-ycbcr", lambda: Image.new("YCbCr", (3, 2), (128, 128, 128)), np.full((2, 3, 3), 128)),
]


@pytest.mark.parametrize(("make", "expected"), [case[1:] for case in ARRAYS], ids=[case[0] for case in ARRAYS])
def test_pixels_in_memory(make: Callable[[], object], expected: np.ndarray) -> None:
    shown = np.asarray(decode(make())).astype(int)
    # Alpha is laid on in 8-bit arithmetic, hence one level.
    assert shown.shape == expected.shape
    assert np.abs(shown - expected.astype(int)).max() <= 1


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: np.zeros((2, 2), np.int64),
            "must be uint8, uint16, bool or floating point from 0 to 1, not int64",
        ),
        (lambda: np.full((2, 2), 255.0), "must lie between 0 and 1, these go from 255 to 255"),
        (lambda: np.array([[0.1, np.nan]]), "must lie between 0 and 1"),
        (lambda: np.zeros((3, 50, 60), np.uint8), r"shape \(H, W\) or \(H, W, C\)"),
        (lambda: np.zeros((1, 2, 2, 3), np.uint8), "one image at a time"),
        (lambda: np.zeros((0, 5, 3), np.uint8), "no pixels"),
        (lambda: torch.zeros(2, 3, 4, 4), "one image at a time"),
        (lambda: torch.zeros(3, 0, 4), "no pixels"),
        (lambda: torch.zeros(2, 2, dtype=torch.complex64), "floating point from 0 to 1, not complex64"),
        (lambda: torch.zeros(3, 4, 4).to_sparse(), "no plain pixels"),
        (lambda: Image.new("RGB", (0, 4)), "no pixels"),
    ],
)
def test_pixels_in_memory_without_an_agreed_meaning_are_refused(make, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        decode(make())


def test_a_source_of_no_accepted_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"source must be a path, bytes, .* got list"):
        decode([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got NoneType"):
        decode_many([None], on_error="skip")  # type: ignore[list-item]


def test_a_pil_image_is_turned_once_and_never_changed() -> None:
    shown = colours(21)
    stored = Image.open(
        io.BytesIO(saved(Image.fromarray(np.ascontiguousarray(as_stored(shown, 6))), "PNG", exif=exif(6)))
    )
    once = decode(stored)
    assert np.array_equal(np.asarray(once), shown)
    assert np.array_equal(np.asarray(decode(once)), shown)
    assert stored.size == (H, W) and stored.getexif()[0x0112] == 6


def test_the_result_shares_no_pixels_with_the_source() -> None:
    image, array = Image.new("RGB", (3, 3)), np.zeros((3, 3, 3), np.uint8)
    for source in (image, array):
        decode(source).paste((9, 9, 9), (0, 0, 3, 3))
    assert image.getpixel((0, 0)) == (0, 0, 0) and not array.any()
