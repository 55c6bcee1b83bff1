"""What scenes may hold: splits without a leak, counts, places, views."""

import numpy as np
import pytest

from engine.scenes.settings import SHIFTED, STANDARD
from engine.scenes.world import (
    ATTRIBUTES,
    COLOR_GROUPS,
    MATERIAL_GROUPS,
    SHAPE_GROUPS,
    Group,
    SceneSpec,
    is_held_out,
    is_training_scene,
    sample_scene,
    visible_fraction,
)

N = 4000


def _scenes(split: str, n: int = N, max_groups: int = 3) -> list[SceneSpec]:
    rng = np.random.default_rng(11)
    settings = SHIFTED if split == "shifted" else STANDARD
    return [sample_scene(rng, split=split, max_groups=max_groups, settings=settings) for _ in range(n)]


@pytest.fixture(scope="module")
def training() -> list[SceneSpec]:
    return _scenes("train")


def test_vocabulary_has_three_groups_of_each_and_no_word_twice():
    assert [len(g) for g in SHAPE_GROUPS] == [3, 3, 3]
    assert [len(g) for g in COLOR_GROUPS] == [3, 3, 3]
    assert [len(g) for g in MATERIAL_GROUPS] == [2, 2, 2]
    assert len(ATTRIBUTES) == len(set(ATTRIBUTES)) == 9 + 9 + 2 + 6


def test_training_scenes_hold_nothing_held_out(training):
    # Written out again from the statement of the split, not through the package's own check.
    rank = {w: k for groups in (SHAPE_GROUPS, COLOR_GROUPS, MATERIAL_GROUPS) for k, g in enumerate(groups) for w in g}
    for spec in training + _scenes("in_domain"):
        shapes = {g.shape for g in spec.groups}
        assert all(len(shapes & set(group)) <= 1 for group in SHAPE_GROUPS)
        for g in spec.groups:
            assert (rank[g.shape] + rank[g.color] + rank[g.material]) % 3 != 0
        assert is_training_scene(spec)
        assert not is_held_out(spec)


@pytest.mark.parametrize("split", ["held_out", "shifted"])
def test_held_out_scenes_begin_with_a_pair_that_training_never_shows(split, training):
    def combinations(scenes: list[SceneSpec]) -> tuple[set, set]:
        pairs = {
            frozenset((a.shape, b.shape))
            for s in scenes
            for a in s.groups
            for b in s.groups
            if a.shape != b.shape
        }
        return pairs, {(g.shape, g.color, g.material) for s in scenes for g in s.groups}

    trained_pairs, trained_looks = combinations(training)
    scenes = _scenes(split, 2000)
    assert all(is_held_out(s) and not is_training_scene(s) for s in scenes)
    for spec in scenes:
        first, second = spec.groups[:2]
        assert frozenset((first.shape, second.shape)) not in trained_pairs
        assert (first.shape, first.color, first.material) not in trained_looks
        assert (second.shape, second.color, second.material) not in trained_looks
    assert {len(s.groups) for s in scenes} == ({2} if split == "held_out" else {4, 5})


def test_training_shows_every_word_and_every_allowed_combination(training):
    groups = [g for s in training for g in s.groups]
    assert {w for g in groups for w in (g.shape, g.color, g.size, g.material)} == set(ATTRIBUTES)
    assert len({(g.shape, g.color) for g in groups}) == 9 * 9
    assert len({(g.shape, g.material) for g in groups}) == 9 * 6
    assert len({(g.color, g.material) for g in groups}) == 9 * 6
    assert len({(g.shape, g.color, g.material) for g in groups}) == 9 * 9 * 4


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ((Group("circle", "blue", "small", "metal"), Group("star", "blue", "small", "metal")), "shapes"),
        ((Group("circle", "red", "small", "rubber"),), "look"),
        ((Group("star", "purple", "large", "dotted"),), "look"),
    ],
)
def test_each_rule_of_the_split_alone_rejects_a_scene(groups, reason):
    assert not is_training_scene(SceneSpec(groups, (), ()))
    assert is_training_scene(SceneSpec((Group("circle", "blue", "small", "metal"),), (), ()))


def test_counts_cells_and_places_are_sound(training):
    seen_counts = set()
    for spec in training + _scenes("shifted", 500):
        assert sum(g.count for g in spec.groups) == len(spec.objects) <= 6
        assert [sum(o.group == k for o in spec.objects) for k in range(len(spec.groups))] == [
            g.count for g in spec.groups
        ]
        assert len({o.cell for o in spec.objects}) == len(spec.objects)
        seen_counts.update(g.count for g in spec.groups)
        for o in spec.objects:
            assert o.size_px / 2 <= o.x <= 96 - o.size_px / 2
            assert o.size_px / 2 <= o.y <= 96 - o.size_px / 2
    assert seen_counts == {1, 2, 3, 4}


def test_small_and_large_never_meet(training):
    for scenes, low, high in ((training, 20, 26), (_scenes("shifted", 1500), 21, 24)):
        small = [o.size_px for s in scenes for o in s.objects if s.groups[o.group].size == "small"]
        large = [o.size_px for s in scenes for o in s.objects if s.groups[o.group].size == "large"]
        assert max(small) <= low < high <= min(large)


def test_objects_do_not_cover_each_other_noticeably(training):
    for spec in training:
        for i, a in enumerate(spec.objects):
            for b in spec.objects[:i]:
                reach = (a.size_px + b.size_px) / 2
                overlap_x, overlap_y = reach - abs(a.x - b.x), reach - abs(a.y - b.y)
                # Of the boxes: outlines of round and pointed shapes leave their corners free.
                assert min(overlap_x, overlap_y) <= 10


def test_objects_of_a_group_are_neighbours(training):
    def connected(cells: set[int]) -> bool:
        reached = {min(cells)}
        while True:
            more = {
                c for c in cells for r in reached if abs(c // 3 - r // 3) <= 1 and abs(c % 3 - r % 3) <= 1
            } | reached
            if more == reached:
                return reached == cells
            reached = more

    groups = [
        {o.cell for o in s.objects if o.group == k}
        for s in training
        for k, g in enumerate(s.groups)
        if g.count > 1
    ]
    assert sum(connected(cells) for cells in groups) / len(groups) > 0.97


def test_shares_of_views_and_what_they_show(training):
    kinds = [s.view.kind for s in training]
    assert abs(kinds.count("zoom") / N - 0.25) < 0.03
    assert abs(kinds.count("paste") / N - 0.15) < 0.03
    for spec in training:
        kind, x, y, side = spec.view
        assert spec.zoomed == (kind == "zoom")
        assert 0 <= x <= 96 - side and 0 <= y <= 96 - side
        if kind == "zoom":
            assert 96 / side >= 1.4
        elif kind == "paste":
            assert side in (32, 48)
        assert spec.visible
        for k in range(len(spec.groups)):
            whole = all(visible_fraction(o, x, y, side) >= 0.8 for o in spec.objects if o.group == k)
            assert (k in spec.visible) == whole
    assert all(s.view.kind == "full" for split in ("in_domain", "held_out") for s in _scenes(split, 200))


@pytest.mark.parametrize("max_groups", [1, 2, 3])
def test_max_groups_bounds_the_groups(max_groups):
    assert {len(s.groups) for s in _scenes("train", 300, max_groups)} == set(range(1, max_groups + 1))


def test_equal_seeds_give_equal_scenes():
    assert _scenes("train", 50) == _scenes("train", 50)


def test_named_settings():
    assert (STANDARD.name, SHIFTED.name) == ("standard", "shifted")
    assert SHIFTED.palette != STANDARD.palette


def test_messages():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"sample_scene: split must be one of train, .*, got 'test'"):
        sample_scene(rng, split="test")
    with pytest.raises(ValueError, match="sample_scene: max_groups must be 1, 2 or 3, got 4"):
        sample_scene(rng, max_groups=4)
