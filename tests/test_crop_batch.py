"""The contract of crop_batch at its edges: every backend against Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import PIL
import pytest
import torch
from PIL import Image

from tests.crop_batch_oracle import BACKENDS, DTYPES, INTERPRETED, assert_bytes, check, noise, pillow, run

per_backend = pytest.mark.parametrize("backend", BACKENDS)
per_filter = pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
per_mode = pytest.mark.parametrize("mode", ["rescaled", "native"])

# Image of 9 x 13 pixels: inside, whole, touching, crossing each border and all of them, outside, one pixel.
BOXES = [
    [0, 2, 3, 9, 8], [0, 0, 0, 13, 9], [0, 8, 4, 13, 9], [0, -3, 2, 4, 6], [0, 9, 3, 17, 7], [0, 3, -4, 7, 2],
    [0, 5, 6, 10, 14], [0, -2, -3, 11, 6], [0, 20, 1, 26, 5], [0, 3, -9, 8, -2], [0, 12, 8, 13, 9],
]  # fmt: skip


@per_backend
@per_filter
@per_mode
def test_boxes_anywhere(backend: str, interpolation: str, mode: str) -> None:
    check(backend, [noise(9, 13)], BOXES, (8, 7), mode=mode, interpolation=interpolation)


@per_backend
@per_filter
def test_boxes_larger_than_the_image(backend: str, interpolation: str) -> None:
    boxes = [[0, -2, -1, 9, 6], [0, -6, 1, 9, 3], [0, -1, -9, 2, 11]]
    check(backend, [noise(4, 5)], boxes, (6, 6), interpolation=interpolation)


@per_backend
@per_filter
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (5, 3), (17, 33)])
def test_sizes(backend: str, interpolation: str, size: tuple[int, int]) -> None:
    check(backend, [noise(7, 11), noise(3, 2)], [[0, 1, 1, 10, 6], [1, 0, 0, 2, 3]], size, interpolation=interpolation)


@per_backend
@per_mode
def test_one_below_and_above_the_blocks(backend: str, mode: str) -> None:
    sides = [(3, 15), (2, 65)] if INTERPRETED else [(n, m) for n in (15, 16, 17) for m in (5, 6, 31, 32, 33)]
    images = [noise(*side) for side in sides]
    boxes = [[k, 0, 0, width, height] for k, (height, width) in enumerate(sides)]
    for size in [(4, 17)] if INTERPRETED else [(15, 63), (16, 64), (17, 65), (33, 80)]:
        check(backend, images, boxes, size, mode=mode)


@per_backend
def test_large_reductions(backend: str) -> None:
    length = 30 if INTERPRETED else 700
    images = [noise(2, length), noise(length, 3)]
    for size in ((2, 3), (3, 2)):
        check(backend, images, [[0, 0, 0, length, 2], [1, -2, 0, 3, length]], size)


# The height shrinks by as much as twice the width does, and by one more; the width grows.
@per_backend
@pytest.mark.parametrize("height, width, columns_first", [(18, 9, False), (19, 9, True), (13, 4, True), (12, 4, False)])
def test_the_axis_that_is_filtered_first(backend: str, height: int, width: int, columns_first: bool) -> None:
    image, size, boxes = noise(height, width), (12, 6), [[0, 0, 0, width, height]]
    got = check(backend, [image], boxes, size)
    sheet = Image.fromarray(image.numpy())
    other = (size[1], height) if columns_first else (width, size[0])
    turned = np.array(sheet.resize(other, Image.Resampling.BICUBIC).resize(size[::-1], Image.Resampling.BICUBIC))
    same = torch.equal(got[0].round().to(torch.uint8), torch.from_numpy(turned).permute(2, 0, 1))
    assert not same or height == size[0]
    if int(PIL.__version__.split(".")[0]) >= 13:
        whole = np.array(sheet.resize(size[::-1], Image.Resampling.BICUBIC)).transpose(2, 0, 1)
        assert_bytes(got, torch.from_numpy(whole)[None])


@per_backend
def test_many_images_and_colours(backend: str) -> None:
    images = [noise(4, 6), noise(7, 3), noise(1, 1)]
    boxes = torch.tensor([[2, -1, -1, 2, 2], [0, 4, 2, 8, 5], [1, 0, 0, 3, 7], [0, -3, -2, 2, 3]], dtype=torch.int32)
    fill = torch.tensor([[0, 0, 0], [255, 1, 128], [9, 9, 9], [200, 100, 50]], dtype=torch.uint8)
    got = run(backend, images, boxes, 5, fill=fill)
    for k in range(len(boxes)):
        colour = tuple(fill[k].tolist())
        wanted = pillow(images, boxes[k], (5, 5), mode="rescaled", interpolation="bicubic", fill=colour)
        assert_bytes(got[k : k + 1], wanted)


@per_backend
@per_mode
def test_outside_is_the_fill_colour(backend: str, mode: str) -> None:
    boxes = [[0, 30, 0, 33, 3], [0, 2**40 - 5, 0, 2**40, 5], [0, -(2**40), -(2**40), -(2**40) + 4, -(2**40) + 4]]
    got = run(backend, [noise(5, 6)], boxes, 4, mode=mode, fill=(7, 255, 0))
    assert_bytes(got, torch.tensor([7, 255, 0])[:, None, None].expand(3, 3, 4, 4), levels=0)


@per_backend
@per_filter
def test_one_pixel_fills_the_result(backend: str, interpolation: str) -> None:
    image = noise(6, 8)
    got = run(backend, [image], [[0, 7, 5, 8, 6]], 9, interpolation=interpolation)
    assert_bytes(got, image[5, 7][:, None, None].expand(1, 3, 9, 9), levels=0)


@per_backend
@per_filter
def test_the_same_size_is_no_resize(backend: str, interpolation: str) -> None:
    image = noise(12, 10)
    got = run(backend, [image], [[0, 2, 1, 9, 9]], (8, 7), interpolation=interpolation)
    assert_bytes(got, image[1:9, 2:9].permute(2, 0, 1)[None], levels=0)


@per_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_normalisation_and_dtypes(backend: str, dtype: torch.dtype) -> None:
    image = torch.arange(256, dtype=torch.uint8).reshape(16, 16, 1).expand(16, 16, 3)
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 3.7)
    got = run(backend, [image], [[0, 0, 0, 16, 16], [0, 90, 90, 91, 91]], 16, dtype=dtype, mean=mean, std=std)
    assert got.dtype == dtype and got.is_contiguous()
    for c in range(3):
        exact = (torch.arange(256).double() / 255 - mean[c]) / std[c]
        # One rounding to the dtype, after float32 arithmetic.
        allowed = torch.finfo(dtype).eps / 2 * 1.01 * exact.abs() + 1e-6
        assert ((got[0, c].double().flatten() - exact).abs() <= allowed).all()
        colour = torch.tensor((10, 250, 99)[c] / 255).sub(mean[c]).div(std[c])
        assert (got[1, c].float() - colour).abs().max() <= torch.finfo(dtype).eps * colour.abs() + 1e-6


@per_backend
def test_rounding_of_narrow_results_is_to_even(backend: str) -> None:
    image = torch.arange(256, dtype=torch.uint8).reshape(16, 16, 1).repeat(1, 1, 3)
    for dtype in DTYPES[1:]:
        # Bytes times a power of two, plus one that leaves ties; and numbers below float16's normal ones.
        for scale, shift in ((1.0, 2048.0), (1.0, 256.0), (2.0**-24, 0.0), (2.0**-25, 0.0), (512.0, 0.0)):
            exact = (torch.arange(256).double() * scale + shift).to(dtype)
            mean, std = -shift / (255 * scale), 1 / (255 * scale)
            got = run(backend, [image], [[0, 0, 0, 16, 16]], 16, dtype=dtype, mean=[mean] * 3, std=[std] * 3)
            assert torch.equal(got[0, 0].flatten(), exact), (dtype, scale, shift)


@per_backend
def test_rows_and_pixels_of_any_strides(backend: str) -> None:
    image = noise(8, 10)
    boxes = [[0, 1, 2, 9, 7], [0, -2, 5, 6, 11]]
    wanted = run(backend, [image], boxes, 6)
    padded = torch.full((8, 14, 3), 77, dtype=torch.uint8)
    padded[:, 2:12] = image
    views = {
        "rows apart": padded[:, 2:12],
        "channels first": image.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "every second row": image.repeat_interleave(2, 0)[::2],
        "every second pixel": image.repeat_interleave(2, 1)[:, ::2],
        "columns first": image.transpose(0, 1).contiguous().transpose(0, 1),
    }
    for name, view in views.items():
        assert torch.equal(run(backend, [view], boxes, 6), wanted), name
        assert torch.equal(run(backend, [noise(2, 2), view], [[1, *box[1:]] for box in boxes], 6), wanted), name
    row = noise(1, 10)
    assert torch.equal(run(backend, [row.expand(8, 10, 3)], boxes, 6), run(backend, [row.repeat(8, 1, 1)], boxes, 6))


@per_backend
@per_mode
def test_nothing(backend: str, mode: str) -> None:
    none = torch.zeros(0, 5, dtype=torch.int64)
    assert run(backend, [noise(3, 4)], none, (5, 6), mode=mode).shape == (0, 3, 5, 6)
    assert run(backend, [], none, 4, mode=mode, dtype=torch.float16).dtype == torch.float16
    assert run(backend, [], none, 4, fill=torch.zeros(0, 3, dtype=torch.uint8)).shape == (0, 3, 4, 4)


@per_backend
def test_offsets_beyond_32_bits(backend: str, tmp_path: Path) -> None:
    rows = 2**31 // 1800 + 1000
    file = np.memmap(tmp_path / "sparse", np.uint8, "w+", shape=(rows, 600, 3))
    corner = noise(6, 8)
    file[rows - 9 : rows - 3, 590:598] = corner.numpy()
    wanted = pillow([corner], [[0, 0, 0, 8, 6]], (5, 4), mode="rescaled", interpolation="bicubic")
    assert_bytes(run(backend, [torch.from_numpy(file)], [[0, 590, rows - 9, 598, rows - 3]], (5, 4)), wanted)


def test_pillow_itself_on_square_crops() -> None:
    """Ordinary crops, resized in one call: the promise of 2/255 and 0.3/255 on average, whatever Pillow's version."""
    if BACKENDS == ["triton"]:
        return
    image = noise(60, 80)
    boxes = [[0, x, y, x + side, y + side] for side in (20, 30, 60) for x in (0, 15) for y in (0, 60 - side)]
    for backend in BACKENDS:
        got = run(backend, [image], boxes, 56)
        sheets = [Image.fromarray(image.numpy()).crop(tuple(box[1:])).resize((56, 56), 3) for box in boxes]
        difference = (got - torch.stack([torch.from_numpy(np.array(s)).permute(2, 0, 1) for s in sheets])).abs()
        assert difference.max() <= 2 and difference.mean() <= 0.3
