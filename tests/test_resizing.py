"""Named resize policies and normalised pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from engine.images import normalise, resize


def ramp(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width * 1000 + height)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("shape", [(50, 37), (37, 50), (33, 33), (32, 32), (20, 31), (200, 45), (45, 200)])
def test_crop_policy_is_the_field_standard_to_the_pixel(shape: tuple[int, int], interpolation: str) -> None:
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    image = ramp(*shape)
    mode = v2.InterpolationMode(interpolation)
    expected = v2.Compose([v2.Resize(32, interpolation=mode), v2.CenterCrop(32)])(image)
    assert np.array_equal(np.asarray(resize(image, 32, "crop", interpolation=interpolation)), np.asarray(expected))


def test_squash_is_one_pillow_resize() -> None:
    image = ramp(40, 25)
    expected = image.resize((30, 20), Image.Resampling.BICUBIC)
    assert np.array_equal(np.asarray(resize(image, (20, 30), "squash")), np.asarray(expected))


def test_resize_is_antialiased() -> None:
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    for policy in ("crop", "pad", "squash"):
        small = np.asarray(resize(Image.fromarray(stripes), 8, policy)).astype(int)
        assert np.abs(small[:, 1:-1] - 128).max() < 20


def test_pad_keeps_the_ends_and_centres() -> None:
    wide = np.zeros((10, 40, 3), dtype=np.uint8)
    wide[:, :20], wide[:, 20:] = (255, 0, 0), (0, 0, 255)
    shown = np.asarray(resize(Image.fromarray(wide), 20, "pad", fill=(1, 2, 3)))
    assert (shown[:7] == (1, 2, 3)).all() and (shown[12:] == (1, 2, 3)).all()
    assert (shown[7:12, :8] == (255, 0, 0)).all() and (shown[7:12, 12:] == (0, 0, 255)).all()


def test_crop_drops_the_ends_of_a_wide_image() -> None:
    wide = np.zeros((10, 40, 3), dtype=np.uint8)
    wide[:, 15:25] = 255
    assert (np.asarray(resize(Image.fromarray(wide), 10, "crop")) == 255).all()


@pytest.mark.parametrize("policy", ["crop", "pad", "squash"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3000), (3000, 1), (2, 5)])
def test_extreme_shapes_stay_small(policy: str, shape: tuple[int, int]) -> None:
    image = Image.new("RGB", shape, (10, 20, 30))
    for size in (16, (8, 24)):
        shown = resize(image, size, policy, fill=(10, 20, 30))
        assert shown.size == ((16, 16) if size == 16 else (24, 8))
        assert (np.asarray(shown) == (10, 20, 30)).all()


def test_normalise_is_the_formula() -> None:
    image = ramp(6, 5)
    mean, std = (0.48, 0.45, 0.4), (0.26, 0.25, 0.27)
    expected = (np.asarray(image) / 255.0 - mean) / std
    out = normalise(image, mean, std)
    assert out.dtype == torch.float32 and out.shape == (3, 5, 6) and out.is_contiguous()
    np.testing.assert_allclose(out.numpy(), expected.transpose(2, 0, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: resize(i.convert("L"), 4), "resize: image must be RGB, got mode L"),
        (
            lambda i: resize(i, 4, "stretch"),
            'resize: policy must be "crop", "pad" or "squash", got \'stretch\'',
        ),
        (
            lambda i: resize(i, 4, interpolation="nearest"),
            'resize: interpolation must be "bicubic" or "bilinear"',
        ),
        (lambda i: resize(i, 0), "resize: size must be at least 1, got 0"),
        (lambda i: normalise(i.convert("L"), (0,) * 3, (1,) * 3), "normalise: image must be RGB, got mode L"),
        (
            lambda i: normalise(i, (0,), (1,) * 3),
            "normalise: mean and std must be three numbers, got 1 and 3",
        ),
        (lambda i: normalise(i, (0,) * 3, (1, 0, 1)), r"normalise: std must be positive, got \(1, 0, 1\)"),
    ],
)
def test_wrong_calls_say_what_was_wanted(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(ramp(5, 5))
