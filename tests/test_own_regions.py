"""Regions and segments of the user's own: how they were made is recorded, what does not fit is named."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from engine.engine import Engine
from engine.features import ImageFeatures, RegionPlan
from engine.scorers.sgi import SGI
from tests.fake_encoder import FakeEncoder, picture

PICTURES = [picture("red", "blue"), picture("green")]


@pytest.fixture
def fake() -> Engine:
    return Engine(FakeEncoder(), segmenter="rules")


@pytest.mark.parametrize(
    ("made", "wanted", "plans"),
    [
        (SGI(), SGI(crops="native"), "own/native/border, got own/rescaled/border"),
        (SGI(crops="native"), SGI(crops="windows"), "own/windows, got own/native/border"),
        (SGI(fill=(1, 2, 3)), SGI(), "own/rescaled/border, got own/rescaled/rgb1-2-3"),
    ],
)
def test_regions_made_in_another_way_are_refused(fake: Engine, made: SGI, wanted: SGI, plans: str, tmp_path):
    fake.encode_images(PICTURES[:1], regions=[[[0, 0, 9, 9]]], scorer=made).save(tmp_path / "features")
    images = ImageFeatures.load(tmp_path / "features")
    with pytest.raises(ValueError, match=f"sgi: regions of your own boxes must be encoded as {plans}; encode the ima"):
        fake.score(images, ["red"], scorer=wanted)
    # As they were made they fit, whatever the grid; and full_image=True has added none.
    assert fake.score(images, ["red"], scorer=replace(made, grid="dense")).shape == (1, 1)
    assert made.full_image and images.boxes.tolist() == [[[0, 0, 9, 9]]]


def test_the_mode_of_windows_is_recorded_without_a_fill():
    assert RegionPlan(mode="windows", fill="mean").of_own_boxes == RegionPlan(mode="windows").of_own_boxes
    assert RegionPlan("dense", "native", (1, 2, 3), False).of_own_boxes == "own/native/rgb1-2-3"


def test_regions_the_user_computed_fit_every_scorer(fake: Engine):
    images = fake.encode_images(PICTURES, regions=[[[0, 0, 9, 9]]] * 2)
    computed = replace(images, region_plan="")
    for crops in ("rescaled", "native", "windows"):
        assert fake.score(computed, ["red"], scorer=SGI(crops=crops)).shape == (2, 1)


@pytest.mark.parametrize("crops", ["rescaled", "native", "windows"])
@pytest.mark.parametrize("box", [[32, 0, 40, 8], [-9, -9, 0, 8], [0, 40, 8, 50], [4, 4, 4, 8], [8, 4, 4, 8]])
def test_a_region_that_is_not_in_the_picture_is_named(fake: Engine, crops: str, box: list[int]):
    # The stand-in cannot encode windows: there both pictures come in one batch, which is looked at first.
    size = 2 if crops == "windows" else 1
    own = [[[0, 0, 9, 9]], [[-4, -4, 28, 28], box]]
    shown = rf"must have .* a pixel of the image of 32 x 32 .*, got {re.escape(str(box))}"
    with pytest.raises(ValueError, match=f"encode_images: region 1 of image b {shown}"):
        fake.encode_images(PICTURES, regions=own, scorer=SGI(crops=crops), ids=["a", "b"], batch_size=size)
    with pytest.raises(ValueError, match=f"encode_images: region 1 of image 1 {shown}"):
        boxes = [np.array(rectangles) for rectangles in own]
        fake.encoder.encode_images(PICTURES, regions=RegionPlan(mode=crops), boxes=boxes, batch_size=size)


def test_segments_that_are_cut_are_named_and_those_the_cut_made_equal(fake: Engine):
    first, second, fits = (" ".join(["red"] * 10 + end) for end in (["box"], ["cat"], []))
    with pytest.warns(UserWarning, match="cut: segment 1 of text 0 .'red red.*'., 0 of text 1 ") as told:
        fake.encode_texts(["a", "b"], scorer="sgi", segments=[["red", first], [second, first, fits]])
    (message,) = [str(warning.message) for warning in told]
    assert message.endswith("so they score alike: segments [1 of text 0, 0 of text 1, 2 of text 1]")
    assert "2 of text 1" not in message.split(";")[0]


def test_a_template_may_make_a_segment_too_long(fake: Engine):
    with pytest.warns(UserWarning, match="cut: segment 0 of text 0 .'a b c d e f g h i'.$"):
        fake.encode_texts(["a"], scorer=SGI(template="a photo of {}"), segments=[["a b c d e f g h i", "a b c"]])
