"""Benchmark items: only the binding differs, each caption is true of its own picture alone, nothing leaks."""

import hashlib
import re
from dataclasses import replace

import numpy as np
import pytest

from engine.scenes.captions import WORDS, phrase
from engine.scenes.items import CATEGORIES, ITEM_SPLITS, ControlledItem, controlled_items, described
from engine.scenes.negation import NEGATION_TEMPLATES, negation_items, retrieval_items
from engine.scenes.settings import ITEMS_FORMAT
from engine.scenes.world import (
    SceneSpec,
    is_held_out,
    is_training_scene,
    is_withheld,
    sample_scene,
)
from tests.scenes_reader import is_true

N = 200
_FIELDS = {"color": "color", "size": "size", "material": "material", "quantity": "count"}


@pytest.fixture(scope="module", params=[(c, s) for c in CATEGORIES for s in ITEM_SPLITS], ids="-".join)
def items(request) -> list[ControlledItem]:
    category, split = request.param
    return controlled_items(category, N, seed=3, split=split)


def test_each_caption_is_true_of_its_own_picture_alone(items):
    for item in items:
        truth = [[is_true(c, s) for s in item.scenes] for c in item.captions]
        assert truth == [[True, False], [False, True]], item


def test_captions_have_the_same_words(items):
    for item in items:
        bags = []
        for caption in item.captions:
            words = re.findall(r"[a-z]+|,", caption)
            singular = [re.sub(r"(cross)es$|(?<=[a-z]{3})s$", r"\1", w) if w != "cross" else w for w in words]
            bags.append(sorted({"an": "a"}.get(w, w) for w in singular))
            assert set(words) <= set(WORDS)
        assert bags[0] == bags[1]
        assert item.captions[0] != item.captions[1]


def test_scenes_differ_in_one_thing_alone(items):
    for item in items:
        first, second = item.scenes
        assert first.groups[2:] == second.groups[2:]
        if item.category == "position":
            assert first.groups == second.groups
            a, b = first.objects[:2]
            keep = [o._replace(cell=p.cell, x=p.x, y=p.y) for o, p in ((a, b), (b, a))]
            assert second.objects == (*keep, *first.objects[2:])
            continue
        field = _FIELDS[item.category]
        for k in (0, 1):
            mine, other, swapped = first.groups[k], first.groups[1 - k], second.groups[k]
            for name in ("shape", "color", "size", "material", "count"):
                assert getattr(swapped, name) == getattr(other if name == field else mine, name)
        assert getattr(first.groups[0], field) != getattr(first.groups[1], field)
        places = [[(o.cell, o.x, o.y, o.angle_deg) for o in s.objects] for s in item.scenes]
        assert places[0] == places[1]
        sizes = [[o.size_px for o in s.objects] for s in item.scenes]
        if item.category == "size":
            sizes[1][:2] = sizes[1][1::-1]
        assert sizes[0] == sizes[1]


def test_combinations_follow_the_split(items):
    for item in items:
        for spec in item.scenes:
            assert is_held_out(spec) == (item.split != "in_domain")
            assert is_training_scene(spec) == (item.split == "in_domain")
            withheld = [is_withheld(g.shape, g.color, g.material) for g in spec.groups[:2]]
            assert withheld == [item.split != "in_domain"] * 2
            assert len(spec.groups) in ((4, 5) if item.split == "shifted" else (2,))
            assert all(g.count == 1 for g in spec.groups[2:])
            assert spec.view.kind == "full"


def test_pairs_are_apart(items):
    if items[0].category == "quantity":
        assert all(sum(g.count for g in i.scenes[0].groups[:2]) <= 6 for i in items)
        return
    for item in items:
        a, b = item.scenes[0].objects[:2]
        gap = sorted((abs(a.x - b.x), abs(a.y - b.y)))
        assert gap[1] >= 40
        if item.category == "position":
            assert gap[0] < 24


def test_items_are_unique_deterministic_and_extend(items):
    category, split = items[0].category, items[0].split
    assert len({(i.captions, i.scenes[0].groups) for i in items}) == N
    assert controlled_items(category, 20, seed=3, split=split) == items[:20]
    assert controlled_items(category, 20, seed=4, split=split) != items[:20]


def test_segments_and_boxes_name_the_same_things(items):
    for item in items[:50]:
        for caption, segments, boxes, spec in zip(item.captions, item.segments, item.boxes, item.scenes, strict=True):
            for segment, (x0, y0, x1, y1) in zip(segments, boxes, strict=True):
                assert segment in caption
                assert 0 <= x0 < x1 <= 96 and 0 <= y0 < y1 <= 96
                held = [o for o in spec.objects if x0 <= o.x < x1 and y0 <= o.y < y1]
                shape = segment.split()[-1]
                named = [o for o in held if shape.startswith(spec.groups[o.group].shape)]
                count = {"two": 2, "three": 3, "four": 4}.get(segment.split()[0], 1)
                assert len(named) == count


def test_pictures_share_their_background(items):
    for item in items[:10]:
        first, second = item.images().astype(int)
        assert (first != second).any()
        touched = np.zeros((96, 96), bool)
        for spec in item.scenes:
            for o in spec.objects:
                if o.group < 2:
                    r = int(np.ceil(o.size_px * 0.6)) + 1
                    x, y = round(o.x), round(o.y)
                    touched[max(0, y - r) : y + r + 1, max(0, x - r) : x + r + 1] = True
        assert not (first != second).any(axis=2)[~touched].any()
        np.testing.assert_array_equal(item.images()[0], first)


@pytest.mark.parametrize("split", ITEM_SPLITS)
def test_multiple_choice_has_one_right_answer_whose_place_rotates(split):
    items = negation_items(120, seed=1, split=split)
    assert [i.correct for i in items] == [k % 4 for k in range(120)]
    for item in items:
        truth = [is_true(c, item.scene) for c in item.captions]
        assert [k for k, t in enumerate(truth) if t] == [item.correct], item
        assert len(set(item.captions)) == 4
        words = {w for c in item.captions for w in re.findall(r"[a-z]+|[,.]", c.lower())}
        assert words <= set(WORDS)
        assert is_true(f"there is no {item.absent}", item.scene)
        assert is_held_out(item.scene) == (split != "in_domain")
    assert all(sum(i.template == t for i in items) == 40 for t in NEGATION_TEMPLATES)
    assert all(
        sum(i.correct == k and i.template == t for i in items) == 10 for k in range(4) for t in NEGATION_TEMPLATES
    )
    assert len({(i.present, i.absent, i.template, i.scene.groups) for i in items}) == 120
    assert negation_items(10, seed=1, split=split) == items[:10]


def test_multiple_choice_wording():
    by_template = {i.template: i for i in negation_items(3, seed=1)}
    starts = {
        "positive": r"This image features an? .+ and an? .+\.",
        "negative": r"This image does not feature an? .+\.",
        "hybrid": r"This image features an? .+, but not an? .+\.",
    }
    for template, item in by_template.items():
        assert re.fullmatch(starts[template], item.captions[item.correct])


@pytest.mark.parametrize("split", ITEM_SPLITS)
def test_retrieval_captions_are_true_and_unique(split):
    items = retrieval_items(300, seed=2, split=split)
    assert len({i.caption for i in items}) == 300
    for item in items:
        assert is_true(item.caption, item.scene)
        assert is_true(item.negated_caption, item.scene)
        assert item.negated_caption == (
            f"There is no {item.absent} in the image. {item.caption[0].upper()}{item.caption[1:]}"
        )
        assert set(re.findall(r"[a-z]+|[,.]", item.negated_caption.lower())) <= set(WORDS)
    assert retrieval_items(5, seed=2, split=split) == items[:5]
    assert items[0].image().shape == negation_items(1, seed=0, split=split)[0].image().shape == (96, 96, 3)


def test_no_caption_of_a_held_out_item_can_be_met_in_training():
    rng = np.random.default_rng(8)
    trained: list[SceneSpec] = [sample_scene(rng) for _ in range(3000)]
    pairs = {frozenset((a.shape, b.shape)) for s in trained for a in s.groups for b in s.groups if a != b}
    for category in CATEGORIES:
        for item in controlled_items(category, 100, seed=0):
            assert frozenset(g.shape for g in item.scenes[0].groups) not in pairs


def test_messages():
    with pytest.raises(ValueError, match=r"controlled_items: category must be one of color, .*, got 'taste'"):
        controlled_items("taste", 1, seed=0)
    with pytest.raises(ValueError, match="controlled_items: n must be at least 1, got 0"):
        controlled_items("color", 0, seed=0)
    with pytest.raises(ValueError, match=r"negation_items: split must be one of .*, got 'train'"):
        negation_items(1, seed=0, split="train")
    with pytest.raises(ValueError, match=r"retrieval_items: split must be one of .*, got 'x'"):
        retrieval_items(1, seed=0, split="x")


@pytest.mark.parametrize("category", CATEGORIES)
def test_described_items_say_more_and_stay_true_of_one_picture(category):
    for item in controlled_items(category, 30, seed=4):
        full = described(item, ["size", "color", "material"])
        assert replace(full, captions=item.captions, segments=item.segments) == item
        assert described(item, []) == item
        truth = [[is_true(c, s) for s in full.scenes] for c in full.captions]
        assert truth == [[True, False], [False, True]], full
        for scene, caption, parts in zip(full.scenes, full.captions, full.segments, strict=True):
            wanted = {phrase(group) for group in scene.groups[:2]}
            assert set(parts) == wanted and all(part in caption for part in parts)


# Mean grey value of the first two pictures (of items: of both) of every category, then of the choices, then of the
# retrieval, split by split. Float arithmetic may differ a little from machine to machine; another palette, size or
# background differs more.
GREY = (
    *(145.04, 131.37, 112.97, 109.22, 123.25, 154.41, 96.96, 136.66, 125.66, 103.14, 105.78, 142.83, 99.71, 134.46),
    *(157.46, 115.01, 163.24, 114.3, 100.42, 128.45, 146.6, 106.93, 123.05, 99.0, 152.1, 147.07, 117.68, 129.49),
    *(102.15, 131.17, 98.12, 134.89, 134.66, 112.15, 113.26, 95.44, 111.56, 124.39, 140.87, 125.61, 114.55, 150.99),
)
WORDING = "1e69fef300123026328442b34bb56142a4838490c6909d774d4a2391533ddf9e"


def test_a_format_stands_for_the_same_items():
    """When this fails because items were changed on purpose: raise ITEMS_FORMAT and write the new values here."""
    words, grey = hashlib.sha256(), []
    for split in ITEM_SPLITS:
        for category in CATEGORIES:
            for item in controlled_items(category, 2, seed=2026, split=split):
                words.update(repr((item.captions, item.segments)).encode())
                grey.append(item.images().mean())
        for choice in negation_items(2, seed=2026, split=split):
            words.update(repr((choice.captions, choice.correct)).encode())
            grey.append(choice.image().mean())
        for scene in retrieval_items(2, seed=2026, split=split):
            words.update(repr((scene.caption, scene.negated_caption)).encode())
            grey.append(scene.image().mean())
    assert ITEMS_FORMAT == 1 and words.hexdigest() == WORDING
    assert grey == pytest.approx(GREY, abs=0.03)
