"""Regions through crop_batch: the same inputs and features as by way of Pillow crops."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from engine.crops import crop_grid, crops
from engine.encoders.base import Encoder
from engine.encoders.region_inputs import RegionInputs
from engine.encoders.scenes import ScenesEncoder
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.features import RegionPlan
from tests.tolerances import assert_close


def encoder() -> ScenesEncoder:
    config = ScenesModelConfig(
        image_size=32, width=16, heads=2, image_layers=1, text_layers=1, stem_width=16, embed_dim=8
    )
    return ScenesEncoder(ScenesModel(config), ["red", "cube"], name="scenes", device=torch.device("cpu"))


def images() -> list[Image.Image]:
    """Pictures of two sizes; a plain one, and one that repeats another but for its corner."""
    first = np.random.default_rng(3).integers(0, 256, (48, 60, 3), dtype=np.uint8)
    second = first.copy()
    second[:20, :20] = 7
    return [Image.fromarray(x) for x in (first, second)] + [Image.new("RGB", (40, 44), (9, 8, 7))]


@pytest.mark.parametrize("mode", ["rescaled", "native"])
@pytest.mark.parametrize("fill", ["border", "mean", (200, 0, 90)])
def test_inputs_are_those_of_pillow_crops(mode: str, fill: object) -> None:
    model = encoder()
    boxes = [np.array([[0, 0, 48, 40], [5, 9, 30, 44], [-4, 30, 20, 60], [5, 9, 30, 44]]) - [0, 0, 0, 4]] * 2
    boxes.append(crop_grid("scenes").boxes(44, 40))
    found = RegionInputs.of(images(), boxes, mode=mode, fill=fill)
    inputs = torch.cat(list(found.batches(model.spec, 3)))[found.rows]
    wanted = [
        model.preprocess(picture)
        for image, rectangles in zip(images(), boxes, strict=True)
        for picture in crops(image, rectangles, mode=mode, fill=fill)
    ]
    assert_close(inputs, torch.stack(wanted), what="inputs")


def test_equal_regions_are_counted_once() -> None:
    grids = [crop_grid("scenes").boxes(image.height, image.width) for image in images()]
    found = RegionInputs.of(images(), grids, mode="rescaled", fill="border")
    assert len(found.rows) == 3 * 35
    # Of the plain picture one region a size is left: whole, halves and thirds.
    assert len(set(found.rows[70:])) == 3
    # The last row of thirds of the second picture is that of the first.
    assert found.rows[35 + 30 : 35 + 35] == found.rows[30:35]
    assert len(found.boxes) == len(found.fill) == max(found.rows) + 1


def test_a_colour_that_shows_tells_regions_apart() -> None:
    plain = [Image.new("RGB", (8, 8), (50, 50, 50)), Image.new("RGB", (8, 8), (50, 50, 50))]
    boxes = [np.array([[0, 0, 4, 4]]), np.array([[-1, 0, 3, 4]])]
    assert RegionInputs.of(plain, boxes, mode="rescaled", fill=(1, 2, 3)).rows == [0, 1]
    assert RegionInputs.of(plain, [boxes[0]] * 2, mode="native", fill="border").rows == [0, 0]
    plain[1] = Image.new("RGB", (8, 9), (50, 50, 50))
    assert RegionInputs.of(plain, [boxes[0]] * 2, mode="native", fill="border").rows == [0, 1]
    assert RegionInputs.of(plain, [boxes[0]] * 2, mode="rescaled", fill="border").rows == [0, 0]


@pytest.mark.parametrize("mode", ["rescaled", "native"])
def test_features_are_those_of_pillow_crops(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = encoder(), RegionPlan(grid="scenes", mode=mode)
    fast = model.encode_images(images(), regions=plan, batch_size=16)
    monkeypatch.setattr(ScenesEncoder, "_encode_regions", Encoder._encode_regions)
    slow = model.encode_images(images(), regions=plan, batch_size=16)
    assert fast.regions.shape == (3, 35, 8)
    assert_close(fast.regions, slow.regions, what="regions")


def test_without_kernels_it_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine._C", None)
    with pytest.raises(RuntimeError, match=r"crop_batch: the C\+\+ CPU kernels are missing .* reinstall peaksim"):
        encoder().encode_images(images(), regions=RegionPlan(grid="none"))
