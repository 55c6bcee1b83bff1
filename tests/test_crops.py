"""Crop grids and crops: where the boxes lie, what a crop shows, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.crops import CROP_GRIDS, CropGrid, crop, crop_grid, crops, fill_colour


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_scenes_grid_on_96_pixels_is_the_documented_one() -> None:
    expected = [(0, 0, 96, 96)]
    expected += [(x, y, x + 48, y + 48) for y in (0, 24, 48) for x in (0, 24, 48)]
    expected += [(x, y, x + 32, y + 32) for y in range(0, 65, 16) for x in range(0, 65, 16)]
    boxes = crop_grid("scenes").boxes(96, 96)
    assert boxes.dtype == np.int64
    assert boxes.tolist() == [list(box) for box in expected]


@pytest.mark.parametrize(("name", "count"), [("none", 1), ("scenes", 35), ("multi_scale", 55), ("dense", 91)])
def test_named_grids_have_the_documented_number_of_regions(name: str, count: int) -> None:
    assert len(crop_grid(name)) == count == len(crop_grid(name).boxes(70, 31))


def test_without_the_full_image_only_the_windows_remain() -> None:
    with_full = CropGrid(((2, 3),)).boxes(60, 90)
    without = CropGrid(((2, 3),), include_full=False).boxes(60, 90)
    assert with_full[0].tolist() == [0, 0, 90, 60]
    assert np.array_equal(with_full[1:], without)


def test_overlap_zero_tiles_the_image_without_gap_or_repeat() -> None:
    seen = np.zeros((12, 20), dtype=int)
    for x0, y0, x1, y1 in CropGrid(((3, 4),), overlap=0.0, include_full=False).boxes(12, 20):
        seen[y0:y1, x0:x1] += 1
    assert (seen == 1).all()


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 400),
    width=st.integers(1, 400),
    windows=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=3),
    overlap=st.floats(0, 0.95),
)
def test_every_box_lies_in_the_image_and_neighbours_cover_it(
    height: int, width: int, windows: list[tuple[int, int]], overlap: float
) -> None:
    grid = CropGrid(tuple(windows), overlap=overlap)
    boxes = grid.boxes(height, width)
    assert boxes.shape == (len(grid), 4)
    assert (boxes[:, 0] >= 0).all() and (boxes[:, 1] >= 0).all()
    assert (boxes[:, 2] <= width).all() and (boxes[:, 3] <= height).all()
    assert (boxes[:, 2] > boxes[:, 0]).all() and (boxes[:, 3] > boxes[:, 1]).all()
    start = 1
    for rows, columns in windows:
        scale = boxes[start : start + rows * columns]
        start += rows * columns
        assert len({(x1 - x0, y1 - y0) for x0, y0, x1, y1 in scale.tolist()}) == 1
        assert scale[0, :2].tolist() == [0, 0]
        assert scale[-1, 2] == width or columns == 1
        assert scale[-1, 3] == height or rows == 1


@settings(max_examples=30, deadline=None)
@given(height=st.integers(1, 200), width=st.integers(1, 200))
def test_turning_the_image_turns_the_boxes(height: int, width: int) -> None:
    boxes = crop_grid("multi_scale").boxes(height, width)
    turned = crop_grid("multi_scale").boxes(width, height)[:, [1, 0, 3, 2]]
    assert {tuple(box) for box in boxes.tolist()} == {tuple(box) for box in turned.tolist()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CropGrid((), include_full=False), "CropGrid: there must be at least one region"),
        (lambda: CropGrid(((0, 3),)), r"CropGrid: windows must be pairs .* got \(0, 3\)"),
        (lambda: CropGrid(((3, 3),), overlap=1.0), r"CropGrid: overlap must be in \[0, 1\), got 1.0"),
        (lambda: CropGrid().boxes(0, 5), "CropGrid.boxes: the image must have pixels, got 0 x 5"),
        (
            lambda: crop_grid("fine"),
            "crop_grid: the name must be one of dense, multi_scale, none, scenes, got 'fine'",
        ),
    ],
)
def test_wrong_grids_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_presets_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        CROP_GRIDS["scenes"].overlap = 0.1  # type: ignore[misc]


def test_rescaled_gives_the_pixels_of_the_box() -> None:
    image = picture(20, 30)
    region = crop(image, (3, 4, 17, 9))
    assert np.array_equal(np.asarray(region), np.asarray(image)[4:9, 3:17])


def test_outside_the_image_is_the_fill_colour() -> None:
    image = picture(6, 8)
    region = np.asarray(crop(image, (-2, -1, 10, 3), fill=(1, 2, 3)))
    expected = np.full((4, 12, 3), (1, 2, 3), dtype=np.uint8)
    expected[1:, 2:10] = np.asarray(image)[:3]
    assert np.array_equal(region, expected)


def test_a_box_beside_the_image_is_all_fill() -> None:
    for mode in ("rescaled", "native"):
        region = np.asarray(crop(picture(6, 8), (20, 20, 23, 24), mode=mode, fill=(5, 6, 7)))
        assert (region == (5, 6, 7)).all()


def test_native_centre_pastes_unscaled_in_the_middle() -> None:
    image = picture(10, 14)
    sheet = np.asarray(crop(image, (0, 0, 4, 6), mode="native", fill=(9, 9, 9)))
    expected = np.full((10, 14, 3), 9, dtype=np.uint8)
    expected[2:8, 5:9] = np.asarray(image)[0:6, 0:4]
    assert np.array_equal(sheet, expected)


def test_native_same_keeps_the_place() -> None:
    image = picture(10, 14)
    sheet = np.asarray(crop(image, (3, -2, 9, 5), mode="native", place="same", fill=(9, 9, 9)))
    expected = np.full((10, 14, 3), 9, dtype=np.uint8)
    expected[0:5, 3:9] = np.asarray(image)[0:5, 3:9]
    assert np.array_equal(sheet, expected)


def test_canvas_sets_the_size_of_the_sheet() -> None:
    sheet = crop(picture(10, 14), (0, 0, 4, 6), mode="native", canvas=(31, 22))
    assert sheet.size == (22, 31)


def test_native_full_image_is_the_image() -> None:
    image = picture(11, 7)
    for place in ("centre", "same"):
        assert np.array_equal(np.asarray(crop(image, (0, 0, 7, 11), mode="native", place=place)), np.asarray(image))


def test_border_fill_is_the_median_so_an_object_at_the_edge_does_not_tint_it() -> None:
    pixels = np.full((20, 20, 3), (200, 190, 180), dtype=np.uint8)
    pixels[:, :7] = (255, 0, 0)  # covers 20 + 2 * 7 - 2 = 32 of 76 border pixels
    assert fill_colour(Image.fromarray(pixels), "border") == (200, 190, 180)


def test_border_fill_ignores_the_inside_and_mean_does_not() -> None:
    pixels = np.zeros((4, 4, 3), dtype=np.uint8)
    pixels[1:3, 1:3] = 200
    assert fill_colour(Image.fromarray(pixels), "border") == (0, 0, 0)
    assert fill_colour(Image.fromarray(pixels), "mean") == (50, 50, 50)
    assert fill_colour(Image.fromarray(pixels), (3, 2, 1)) == (3, 2, 1)


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (5, 1), (2, 2)])
def test_tiny_images_can_be_filled_and_cropped(size: tuple[int, int]) -> None:
    image = picture(*size)
    boxes = crop_grid("scenes").boxes(*size)
    for mode in ("rescaled", "native"):
        assert len(crops(image, boxes, mode=mode)) == 35


def test_boxes_are_pasted_where_they_are_told() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 10, 3), dtype=np.uint8))
    boxes = [(0, 0, 4, 3), (5, 2, 12, 7)]
    sheets = crops(image, boxes, mode="native", canvas=(9, 11), fill=(1, 2, 3), place=[(7, 6), (2, 0)])
    for sheet, (x0, y0, x1, y1), (left, top) in zip(sheets, boxes, [(7, 6), (2, 0)], strict=True):
        expected = np.full((9, 11, 3), (1, 2, 3), dtype=np.uint8)
        inside = np.asarray(image)[y0:y1, x0:x1]
        expected[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
        assert np.array_equal(np.asarray(sheet), expected)
    with pytest.raises(ValueError, match="place must have a corner for each of 2 boxes, got 1"):
        crops(image, boxes, mode="native", place=[(0, 0)])
    with pytest.raises(ValueError, match=r"put the box of 3 x 4 on the canvas \(8, 10\), got the corner .* = \(7, 0\)"):
        crops(image, boxes[:1], mode="native", place=[(7, 0)])
    with pytest.raises(ValueError, match='canvas and place are for mode="native"'):
        crops(image, boxes[:1], place=[(7, 0)])


def test_the_same_place_on_a_canvas_of_one_colour() -> None:
    image = picture(12, 12)
    sheet = np.asarray(crop(image, (0, 0, 6, 6), mode="native", fill=(1, 2, 3), place="same"))
    assert np.array_equal(sheet[:6, :6], np.asarray(image)[:6, :6])
    assert (sheet[6:] == (1, 2, 3)).all()


def test_no_boxes_give_no_crops() -> None:
    none = np.empty((0, 4), dtype=np.int64)
    assert crops(picture(5, 5), none) == []


def test_the_image_is_left_as_it_was() -> None:
    image = picture(9, 9)
    before = np.array(image)
    region = crop(image, (0, 0, 9, 9))
    region.paste((0, 0, 0), (0, 0, 9, 9))
    assert np.array_equal(np.asarray(image), before)


BOX = (0, 0, 3, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: crop(i.convert("L"), BOX), "crop: image must be RGB, got mode L"),
        (lambda i: crop(i, (3, 0, 3, 4)), r"crop: boxes must have x0 < x1 and y0 < y1, got \[3, 0, 3, 4\]"),
        (lambda i: crop(i, (0, 0, 3)), r"crop: boxes must have shape \(R, 4\), got \(1, 3\)"),
        (lambda i: crop(i, (0.0, 0.0, 3.5, 3.0)), "crop: boxes must be whole pixels"),
        (lambda i: crop(i, BOX, mode="zoom"), 'crop: mode must be "rescaled" or "native", got \'zoom\''),
        (
            lambda i: crop(i, BOX, mode="native", place="top"),
            'crop: place must be "centre" or "same", got \'top\'',
        ),
        (lambda i: crop(i, BOX, canvas=(9, 9)), 'crop: canvas and place are for mode="native"'),
        (lambda i: crop(i, BOX, place="same"), 'crop: canvas and place are for mode="native"'),
        (
            lambda i: crop(i, BOX, mode="native", canvas=(0, 9)),
            r"crop: canvas must be at least 1 x 1, got \(0, 9\)",
        ),
        (lambda i: crop(i, BOX, mode="native", canvas=(2, 9)), "crop: canvas must hold the box of 3 x 3"),
        (
            lambda i: crop(i, BOX, mode="native", canvas=(9, 9), place="same"),
            r"crop: place=\"same\" needs a canvas of the image's size \(8, 8\), got \(9, 9\)",
        ),
        (lambda i: crop(i, BOX, fill="black"), 'fill_colour: fill must be an RGB tuple, "border" or "mean"'),
        (lambda i: crop(i, BOX, fill=(0, 0, 256)), "fill_colour: an RGB fill must be three numbers 0..255"),
        (lambda i: fill_colour(i.convert("L"), "mean"), "fill_colour: image must be RGB, got mode L"),
    ],
)
def test_wrong_calls_say_what_was_wanted(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(picture(8, 8))
