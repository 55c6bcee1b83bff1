"""Captions: true of their scenes by an independent reader, every word known, every template met."""

import re

import numpy as np
import pytest

from engine.scenes.captions import (
    WORDS,
    absent_phrase,
    caption_for,
    caption_of,
    phrase,
    relations_between,
    with_article,
)
from engine.scenes.world import COLOR_GROUPS, MATERIAL_GROUPS, SHAPE_GROUPS, Group, Object, SceneSpec, sample_scene
from tests.scenes_reader import Unreadable, is_true

RED = Group("square", "red", "small", "striped", 2)
ORANGE = Group("circle", "orange", "large", "glass", 1)


@pytest.fixture(scope="module")
def captioned() -> list[tuple[SceneSpec, str]]:
    rng = np.random.default_rng(5)
    scenes = [sample_scene(rng) for _ in range(2500)]
    return [(s, caption_of(s, rng, negated_share=share)) for s in scenes for share in (0.0, 0.06, 1.0)]


def _scene(*groups: Group) -> SceneSpec:
    """Groups side by side: group ``k`` at x = 20 + 30 k, its objects below one another."""
    objects = tuple(
        Object(k, 0, 20.0 + 30 * k, 16.0 + 20 * i, 17, 0.0, (0, 0, 0))
        for k, g in enumerate(groups)
        for i in range(g.count)
    )
    return SceneSpec(groups, objects, tuple(range(len(groups))))


def test_phrase_orders_its_words():
    assert phrase(RED) == "two small red striped squares"
    assert phrase(RED, ()) == "two squares"
    assert phrase(RED, ("material", "size")) == "two small striped squares"
    assert phrase(ORANGE, ("color",)) == "an orange circle"
    assert phrase(ORANGE) == "a large orange glass circle"
    assert phrase(Group("cross", "red", "small", "metal", 3), ()) == "three crosses"
    assert with_article("arrow") == "an arrow"


def test_the_reader_tells_true_from_false():
    scene = _scene(ORANGE, Group("heart", "green", "small", "metal"), RED)
    for caption in (
        "a photo of an orange circle and two squares",
        "there are two striped squares",
        "an orange circle to the left of a green heart",
        "a heart to the right of a circle",
        "two squares and no moon",
        "two squares without a green square",
        "there is no blue object",
        "no glass heart is present",
        "There is no star in the image. A heart",
        "This image features a green heart, but not a green circle.",
    ):
        assert is_true(caption, scene), caption
    for caption in (
        "a red circle",
        "three squares",
        "a square",
        "a green heart to the left of an orange circle",
        "a heart above a circle",
        "two squares and no heart",
        "two squares without an orange circle",
        "there is no green object",
        "no glass circle is present",
        "There is no heart in the image. A circle",
        "This image does not feature a heart.",
        "This image features a star, but not a heart.",
    ):
        assert not is_true(caption, scene), caption
    for caption in ("a orange circle", "two square", "there is two squares", "a red small circle", "blub"):
        with pytest.raises(Unreadable):
            is_true(caption, scene)


def test_every_caption_is_true(captioned):
    for spec, caption in captioned:
        assert is_true(caption, spec), (caption, spec)


def test_every_word_is_in_the_vocabulary(captioned):
    assert len(WORDS) == len(set(WORDS))
    spoken = {w for _, caption in captioned for w in re.findall(r"[a-z]+|[^a-z\s]", caption)}
    assert spoken <= set(WORDS)
    prompts = (
        "a photo of this image does not feature features but is are present included picture shows without"
    )
    assert set(prompts.split()) <= set(WORDS)


def test_every_template_is_met(captioned):
    text = "\n".join(caption for _, caption in captioned)
    for piece in (
        "a photo of ",
        "a picture of ",
        "an image of ",
        "an image showing ",
        "a scene with ",
        "there is a",
        "there are ",
        "a drawing of ",
        "this image shows ",
        " with ",
        " next to ",
        " beside ",
        ", ",
        " to the left of ",
        " to the right of ",
        " above ",
        " below ",
        " and no ",
        " but no ",
        " without a",
        "there is no ",
        " is present",
        " in the image",
        " object",
    ):
        assert piece in text, piece


def test_zoomed_pictures_get_no_size_words(captioned):
    zoomed = [caption for spec, caption in captioned if spec.zoomed]
    assert len(zoomed) > 1000
    assert not any("small" in c or "large" in c for c in zoomed)


def test_word_shares_are_near_their_settings():
    rng = np.random.default_rng(1)
    captions = [caption_for([ORANGE], rng, negated_share=0.0) for _ in range(3000)]
    for word, share in (("orange", 0.75), ("large", 0.45), ("glass", 0.45)):
        assert abs(np.mean([word in c for c in captions]) - share) < 0.04
    denied = [bool(re.search(r"\bno\b|without", caption_for([ORANGE], rng))) for _ in range(4000)]
    assert 0.04 < np.mean(denied) < 0.08


def test_captions_name_nothing_held_out(captioned):
    rank, hue, tone = (
        {word: k for k, group in enumerate(groups) for word in group}
        for groups in (SHAPE_GROUPS, COLOR_GROUPS, MATERIAL_GROUPS)
    )
    for _, caption in captioned:
        words = re.sub(r"(cross)es\b|\b(\w+)s\b", lambda m: m[1] or m[2], caption).split()
        shapes = {w for w in words if w in rank}
        assert all(len(shapes & set(group)) <= 1 for group in SHAPE_GROUPS), caption
        for color, material, shape in re.findall(r"(\w+) (\w+) (\w+)", " ".join(words)):
            if shape in rank and material in tone and color in hue:
                assert (rank[shape] + hue[color] + tone[material]) % 3 != 0, caption


def test_relations_need_a_clear_gap():
    assert relations_between((20, 20), (44, 43)) == ["to the left of"]
    assert relations_between((60, 70), (20, 20)) == ["to the right of", "below"]
    assert relations_between((20, 20), (30, 60)) == ["above"]
    assert relations_between((20, 20), (30, 30)) == []


def test_absent_phrases_match_no_group_and_may_not_exist():
    rng = np.random.default_rng(2)
    groups = [ORANGE, Group("heart", "green", "small", "metal"), Group("ring", "red", "small", "metal")]
    scene = _scene(*groups)
    found = [absent_phrase(groups, rng) for _ in range(300)]
    assert all(is_true(f"there is no {p}", scene) for p in found if p)
    assert len({p for p in found if p}) > 30


def test_what_is_partly_seen_is_not_denied():
    rng = np.random.default_rng(3)
    hidden = Group("heart", "green", "small", "metal")
    for _ in range(500):
        caption = caption_for([ORANGE], rng, others=[hidden], negated_share=1.0)
        assert not re.search(
            r"(no|without a|without an) (heart|green heart|metal heart|green object)\b", caption
        )


def test_captions_are_deterministic_and_need_a_group():
    scene = _scene(ORANGE, RED)
    assert caption_of(scene, np.random.default_rng(4)) == caption_of(scene, np.random.default_rng(4))
    with pytest.raises(ValueError, match="caption_for: groups must hold at least one group, got none"):
        caption_for([], np.random.default_rng(0))
