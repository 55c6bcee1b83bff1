"""Pixels: determinism, colors, sizes, materials, views, and batches that depend on seed and step alone."""

import time
import zlib

import numpy as np
import pytest

from engine.scenes.render import presence_of, render, sprite, training_batch
from engine.scenes.settings import SHIFTED, STANDARD
from engine.scenes.world import (
    ATTRIBUTES,
    COLORS,
    MATERIALS,
    SHAPES,
    Group,
    Object,
    SceneSpec,
    View,
    sample_scene,
)


def _one(group: Group, size_px: int = 29, view: View | None = None) -> SceneSpec:
    thing = Object(0, 4, 48.0, 48.0, size_px, 0.0, (0.0, 0.0, 0.0))
    return SceneSpec((group,), (thing,), (0,), view or View())


def _picture(spec: SceneSpec, seed: int = 0, settings=STANDARD) -> np.ndarray:
    return render(spec, np.random.default_rng(seed), settings)


def _changed(spec: SceneSpec, seed: int = 0) -> np.ndarray:
    """Pixels in which the scene differs from its bare background."""
    bare = _picture(SceneSpec((), (), ()), seed).astype(int)
    return np.abs(_picture(spec, seed).astype(int) - bare).max(axis=2) > 8


def test_a_picture_is_a_function_of_scene_and_generator():
    spec = sample_scene(np.random.default_rng(1))
    picture = _picture(spec)
    assert picture.shape == (96, 96, 3) and picture.dtype == np.uint8
    np.testing.assert_array_equal(picture, _picture(spec))
    assert (picture != _picture(spec, 1)).any()


@pytest.mark.parametrize("settings", [STANDARD, SHIFTED], ids=lambda s: s.name)
@pytest.mark.parametrize("color", COLORS)
def test_the_middle_of_an_object_has_its_color(color, settings):
    picture = _picture(_one(Group("square", color, "large", "rubber")), settings=settings)
    wanted = settings.palette[COLORS.index(color)]
    assert np.abs(picture[46:51, 46:51].astype(int) - wanted).max() <= 1
    distance = [np.abs(np.subtract(wanted, other)).max() for other in settings.palette if other != wanted]
    assert min(distance) > 60


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_fill_their_box_and_scale(shape):
    small, large = (_changed(_one(Group(shape, "red", "small", "rubber"), px)) for px in (17, 29))
    assert 0.6 < np.sqrt(small.sum() / large.sum()) / (17 / 29) < 1.25
    for mask, px in ((small, 17), (large, 29)):
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert px * 0.8 <= max(height, width) <= px + 1
        assert min(height, width) >= px * 0.6
        assert abs(rows.mean() - 48) < 3 and abs(columns.mean() - 48) < 4


def test_shapes_differ_from_one_another_at_both_sizes():
    for px in (17, 29):
        masks = [1 - sprite(shape, "rubber", px, 0).keep for shape in SHAPES]
        for i, a in enumerate(masks):
            for b in masks[:i]:
                assert np.minimum(a, b).sum() / np.maximum(a, b).sum() < 0.85


@pytest.mark.parametrize("px", [17, 29])
def test_materials_differ_from_one_another(px):
    looks = [_picture(_one(Group("circle", "blue", "small", m), px)).astype(float) for m in MATERIALS]
    inside = _changed(_one(Group("circle", "blue", "small", "rubber"), px))
    for i, a in enumerate(looks):
        for b in looks[:i]:
            assert np.abs(a - b)[inside].mean() > 12


def test_glass_shows_the_background_and_metal_does_not():
    pictures = {}
    for material in ("glass", "metal"):
        spec = _one(Group("square", "red", "large", material))
        pictures[material] = [_picture(spec, seed)[48, 48].astype(int) for seed in (0, 1, 2, 3)]
    assert np.ptp(pictures["glass"], axis=0).max() > 10
    assert np.ptp(pictures["metal"], axis=0).max() == 0


def test_sprites_are_antialiased_bounded_and_read_only():
    keep, weights = sprite("star", "metal", 29, 1)
    assert ((keep > 0.05) & (keep < 0.95)).sum() > 20
    assert keep.min() >= 0 and keep.max() <= 1 and weights.min() >= 0
    with pytest.raises(ValueError, match="read-only"):
        keep[0, 0] = 1
    # A square turned by 30 degrees still has all of its corners.
    turned = sprite("square", "rubber", 29, 6).keep
    assert abs((1 - turned).sum() - (1 - sprite("square", "rubber", 29, 0).keep).sum()) < 3


def test_backgrounds_are_mid_toned_and_some_are_plain():
    bare = SceneSpec((), (), ())
    pictures = [_picture(bare, seed).astype(float) for seed in range(200)]
    means = np.array([p.mean() for p in pictures])
    spread = np.array([p.std(axis=(0, 1)).max() for p in pictures])
    assert means.min() > 70 and means.max() < 190
    assert 0.15 < (spread == 0).mean() < 0.45
    assert spread.max() < 12
    assert np.mean([_picture(bare, s, SHIFTED).std(axis=(0, 1)).max() for s in range(50)]) > spread.mean()


def test_an_object_at_the_border_is_cut_not_wrapped():
    thing = Object(0, 0, 10.0, 90.0, 29, 0.0, (0.0, 0.0, 0.0))
    spec = SceneSpec((Group("square", "red", "large", "rubber"),), (thing,), (0,))
    mask = _changed(spec)
    assert mask[90, 10] and not mask[:60].any() and not mask[:, 40:].any()


def test_zoom_enlarges_the_window():
    group = Group("square", "blue", "small", "rubber")
    plain, zoomed = _changed(_one(group, 17)), _picture(_one(group, 17, View("zoom", 32, 32, 32)))
    blue = (zoomed[..., 2] > 180) & (zoomed[..., 0] < 80)
    assert 8 < blue.sum() / plain.sum() < 9.5


def test_paste_keeps_native_pixels_on_a_plain_canvas():
    group = Group("heart", "cyan", "small", "dotted")
    whole, pasted = _picture(_one(group, 17)), _picture(_one(group, 17, View("paste", 30, 28, 48)))
    np.testing.assert_array_equal(pasted[24:72, 24:72], whole[28:76, 30:78])
    frame = np.concatenate([pasted[:24].reshape(-1, 3), pasted[:, :24].reshape(-1, 3)])
    assert (frame == frame[0]).all()


def test_presence_marks_what_is_seen():
    spec = SceneSpec(
        (Group("heart", "cyan", "small", "dotted"), Group("ring", "red", "large", "metal")),
        (
            Object(0, 0, 16.0, 16.0, 17, 0.0, (0, 0, 0)),
            Object(1, 8, 80.0, 80.0, 29, 0.0, (0, 0, 0)),
        ),
        (0, 1),
    )

    def words(target: np.ndarray, value: float) -> set[str]:
        return {w for w, v in zip(ATTRIBUTES, target, strict=True) if v == value}

    assert words(presence_of(spec), 1) == {
        "heart",
        "cyan",
        "small",
        "dotted",
        "ring",
        "red",
        "large",
        "metal",
    }
    zoomed = presence_of(SceneSpec(spec.groups, spec.objects, (0,), View("zoom", 0, 0, 48)))
    assert words(zoomed, 1) == {"heart", "cyan", "dotted"}
    assert words(zoomed, 0.5) == {"small", "large"}
    # Most of the ring, but not 80 %, is in this window: it is not spoken of, but it is there.
    partly = presence_of(SceneSpec(spec.groups, spec.objects, (0,), View("paste", 0, 0, 88)))
    assert "ring" in words(partly, 1)


def test_batches_depend_on_seed_and_step_alone():
    one, two = training_batch(7, 3, 24), training_batch(7, 3, 24)
    np.testing.assert_array_equal(one.images, two.images)
    np.testing.assert_array_equal(one.presence, two.presence)
    np.testing.assert_array_equal(one.counts, two.counts)
    assert one.captions == two.captions
    assert (one.images != training_batch(7, 4, 24).images).any()
    assert (one.images != training_batch(8, 3, 24).images).any()
    assert one.images.shape == (24, 96, 96, 3) and one.images.dtype == np.uint8
    assert one.presence.shape == (24, 26) and one.presence.dtype == np.float32
    assert one.counts.shape == (24,) and one.counts.dtype == np.int64


def test_counts_are_given_for_single_groups():
    counts = training_batch(1, 0, 200, max_groups=1).counts
    assert set(counts.tolist()) == {1, 2, 3, 4}
    assert -1 in training_batch(1, 0, 50).counts


def test_settings_reach_the_batch():
    assert (training_batch(1, 0, 4).images != training_batch(1, 0, 4, settings=SHIFTED).images).any()


def test_the_training_stream_is_the_one_the_shipped_weights_saw():
    # Captions follow from the scenes, so this fixes both without depending on floating point.
    captions = training_batch(7, 3, 256).captions
    assert zlib.crc32("\n".join(captions).encode()) == 2364654264


def test_a_sample_takes_well_under_two_milliseconds():
    # The same batch again: its sprites are drawn, as after the first minute of a training.
    training_batch(1, 0, 256)
    start = time.process_time()
    training_batch(1, 0, 256)
    assert (time.process_time() - start) / 256 < 0.002
