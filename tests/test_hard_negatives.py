"""Hard negatives of captioned pictures: what is set against a caption is false, and true denials are captions alone."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from engine.datasets.base import ImageRef
from engine.datasets.captioned import CaptionedImages, CaptionedItem
from engine.datasets.coco import read_coco
from engine.scenes.negation_training import negation_examples
from engine.scenes.wordings import DENIALS
from engine.scenes.world import is_held_out, is_training_scene
from engine.segments import get_segmenter
from engine.training.hard_negatives import denials, scene_denials, with_negatives
from engine.training.negation_data import PHOTO_DENIALS
from tests.captioned_files import write_coco

NAMES = ("dog", "bench", "umbrella", "car")
DENIES = re.compile(r"\b(no|not|without)\b", re.IGNORECASE)


@pytest.fixture
def coco(tmp_path: Path) -> CaptionedImages:
    return read_coco(*write_coco(tmp_path))


def denied(text: str) -> list[str]:
    """The names of which a sentence made from the templates says that they are not there."""
    found = []
    for name in NAMES:
        for match in re.finditer(rf"\b{name}\b", text):
            around = text[max(0, match.start() - 20) : match.end() + 20].lower()
            ways = (rf"\bno {name}", rf"without an? {name}", rf"without any {name}", rf"not feature an? {name}")
            if any(re.search(way, around) for way in (*ways, rf"\ban? {name} is not", rf"not an? {name}")):
                found.append(name)
    return found


def test_denials_of_absent_things_are_captions_and_those_of_present_ones_negatives(coco):
    data = with_negatives(coco, "negation", seed=1)
    assert [item.id for item in data.items] == [item.id for item in coco.items]
    assert [item.image for item in data.items] == [item.image for item in coco.items]
    true_denials = 0
    for item in data.items:
        # Two captions: each plain, with a true denial, and an answer.
        assert len(item.captions) == len(item.negatives) == 6
        for caption, negative in zip(item.captions, item.negatives, strict=True):
            assert not set(denied(caption)) & set(item.present), caption
            true_denials += bool(denied(caption))
            affirmed = [name for name in NAMES if re.search(rf"\b{name}\b", negative) and name not in denied(negative)]
            false = set(denied(negative)) & set(item.present) or set(affirmed) - set(item.present)
            assert false, negative
    assert true_denials > len(data.items)
    assert with_negatives(coco, "negation", seed=1) == data != with_negatives(coco, "negation", seed=2)


def test_a_denial_by_itself_tells_nothing(coco):
    for item in with_negatives(coco, "negation").items:
        plain, with_true = item.captions[:2]
        assert item.negatives[0] == item.negatives[1] and not DENIES.search(plain)
        # The same template, another name.
        held = {re.sub(r"\b(an?|An?) (?=" + "|".join(NAMES) + ")", "", text) for text in (with_true, item.negatives[0])}
        assert len({re.sub("|".join(NAMES), "X", text) for text in held}) == 1


def test_without_categories_only_what_captions_name_is_denied():
    texts = ("A dog and a cat on two benches.", "No umbrella.", "Dogs.")
    items = tuple(CaptionedItem(str(k), ImageRef(str(k)), (text,)) for k, text in enumerate(texts))
    data = with_negatives(CaptionedImages("own", items), "negation")
    (item,) = data.items
    assert item.id == "0" and [str(problem) for problem in data.problems] == [
        "1: nothing can be denied of it",
        "2: nothing can be denied of it",
    ]
    assert item.captions[0] == texts[0] and item.captions[1] in (
        "This image features a dog and a cat.",
        "This image features a cat and a dog.",
    )
    assert not any(DENIES.search(caption) for caption in item.captions)
    assert all(DENIES.search(text) and re.search("dog|cat", text) for text in item.negatives)


def test_swaps_take_attributes_before_nouns(coco):
    data = with_negatives(coco, "swaps")
    by_id = {item.id: item for item in data.items}
    assert by_id["0"].negatives[0] == "a blue cube and a red ball (0 0)"
    assert by_id["2"].negatives[0].startswith("a horse rides a man")
    assert all(item.captions == coco.items[int(item.id)].captions for item in data.items)
    lonely = CaptionedImages("own", (CaptionedItem("a", ImageRef("a"), ("a dog", "a red cube and a blue ball")),))
    (item,) = with_negatives(lonely, "swaps").items
    assert item.captions == ("a red cube and a blue ball",)
    nothing = CaptionedImages("own", (CaptionedItem("a", ImageRef("a"), ("a dog",)),))
    with pytest.raises(ValueError, match="got none; the first of 1 problems: a: its captions have nothing to exchange"):
        with_negatives(nothing, "swaps")


def test_negatives_of_the_file_are_kept_or_dropped():
    other = ImageRef("b")
    items = (
        CaptionedItem("a", ImageRef("a"), ("x",), ("y",), other),
        CaptionedItem("b", ImageRef("b"), ("x",)),
    )
    data = CaptionedImages("own", items)
    kept = with_negatives(data, "file")
    assert kept.items == items[:1] and str(kept.problems[0]) == "b: the file has no negative of it"
    plain = with_negatives(data, "none").items
    assert [(item.negatives, item.negative_image) for item in plain] == [((), None)] * 2
    with pytest.raises(ValueError, match="kind must be one of 'file', 'swaps', 'negation', 'none', got 'x'"):
        with_negatives(data, "x")


def test_denials_of_nothing_are_none():
    rng = np.random.default_rng(0)
    assert denials(["A dog."], [], ["car"], rng) == []
    assert len(denials(["A dog."], ["dog"], ["car"], rng)) == 2
    kinds = [right for right, _ in denials(["A dog."] * 3, ["dog", "bench"], ["car"], rng)[2::3]]
    assert [bool(DENIES.search(text)) for text in kinds] == [False, True, True]


@pytest.mark.parametrize("split", ["in_domain", "held_out"])
@pytest.mark.parametrize("sets", [("training", "benchmark"), ("held_out",)])
def test_scenes_have_both_languages_and_both_splits(split, sets):
    data = scene_denials(12, seed=4, sets=sets, split=split)
    examples = negation_examples(12, seed=4, sets=sets, split=split)
    for item, example in zip(data.items, examples, strict=True):
        right = example.options[example.correct]
        assert item.captions[:3] == (example.caption, example.denied, right)
        assert set(item.negatives[2:]) == set(example.options) - {right}
        assert item.negatives[:2] == (example.contradicted,) * 2
        assert item.image.load is not None and np.array_equal(item.image.load(), example.image())
        held = is_held_out(example.scene)
        assert held == (split == "held_out") and is_training_scene(example.scene) != held
    assert len({item.id for item in scene_denials(3, seed=4, sets=sets).items} & {x.id for x in data.items}) in (0, 3)
    # Out of domain no wording of training is spoken.
    tails = [template.partition("{n}")[2].strip(" .{C}") for template in DENIALS["held_out"]]
    if sets == ("held_out",):
        assert all(any(tail in item.captions[1] for tail in tails if tail) or " not any " in item.captions[1]
                   for item in data.items)  # fmt: skip


def test_splits_and_templates():
    with pytest.raises(ValueError, match="split must be one of 'in_domain', 'held_out', got 'shifted'"):
        scene_denials(1, split="shifted")
    assert len(set(PHOTO_DENIALS)) == 7 and get_segmenter("spacy").name.startswith("spacy")
