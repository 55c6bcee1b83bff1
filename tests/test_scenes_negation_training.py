"""Denials for training: true ones are true, false ones are false, and nothing held out is named."""

from __future__ import annotations

import re

import pytest

from engine.encoders.scenes import WordTokenizer
from engine.scenes.captions import PLURALS
from engine.scenes.negation import NEGATION_TEMPLATES, negation_items, retrieval_items
from engine.scenes.negation_training import NegationExample, negation_examples
from engine.scenes.wordings import DENIALS, WORDINGS, wordings_of
from engine.scenes.world import COLORS, MATERIALS, SHAPE_GROUP, SHAPES, Group, is_training_scene
from engine.training.scenes import VOCABULARY

SETS = ("training", "benchmark", "held_out")
SINGULAR = {plural: shape for shape, plural in PLURALS.items()}
# Whatever stands in one of these is denied.
DENIES = re.compile(r"\b(no|not|without|absent|excluded)\b")


def holds(name: str, groups: tuple[Group, ...]) -> bool:
    """Whether a scene holds what a name like "red circle", "metal object" or "circle" says."""
    *attributes, noun = name.split()
    return any(
        noun in (group.shape, "object") and all(word in (group.color, group.material) for word in attributes)
        for group in groups
    )


def names_in(text: str) -> list[str]:
    """All "color shape", "material shape", "color object" and bare shapes of a short sentence."""
    words = re.findall(r"[a-z]+", text.lower())
    found = []
    for place, word in enumerate(words):
        if SINGULAR.get(word, word) in (*SHAPES, "object"):
            before = [words[place - 1]] if place and words[place - 1] in (*COLORS, *MATERIALS) else []
            found.append(" ".join([*before, SINGULAR.get(word, word)]))
    return found


@pytest.fixture(scope="module", params=[("training",), ("benchmark",), ("held_out",), SETS])
def examples(request: pytest.FixtureRequest) -> list[NegationExample]:
    return negation_examples(240, seed=4, sets=request.param)


def is_true(option: str, groups: tuple[Group, ...]) -> bool:
    """Whether an answer is true: names before the first denying word are affirmed, the others denied."""
    text = option.lower()
    start = DENIES.search(text)
    if start is None:
        return all(holds(name, groups) for name in names_in(text))
    if re.search(r"\b(absent|excluded|not included)\b", text):
        # The denied name is the last one before the word.
        *affirmed, denied = names_in(text)
    else:
        affirmed, (denied,) = names_in(text[: start.start()]), names_in(text[start.start() :])
    return all(holds(name, groups) for name in affirmed) and not holds(denied, groups)


def test_the_right_answer_alone_is_true(examples):
    for example in examples:
        truth = [is_true(option, example.scene.groups) for option in example.options]
        assert truth == [place == example.correct for place in range(4)], example


def denied_name(text: str) -> str:
    """What a caption with a denial denies, read off the templates."""
    found = set()
    for template in (template for name in SETS for template in DENIALS[name]):
        pattern = re.escape(template)
        for slot in "cCn":
            pattern = pattern.replace(rf"\{{{slot}\}}", f"(?P<{slot}>.*)")
        match = re.fullmatch(pattern, text)
        if match and names_in(match["n"]) == [match["n"]]:
            found.add(match["n"])
    (name,) = found
    return name


def test_true_denials_are_true_and_false_ones_false(examples):
    for example in examples:
        assert not holds(denied_name(example.denied), example.scene.groups)
        assert holds(denied_name(example.contradicted), example.scene.groups)
        assert example.caption.lower() in example.denied.lower() and not DENIES.search(example.caption)


def test_kinds_and_places_rotate(examples):
    assert [example.kind for example in examples[:6]] == [*NEGATION_TEMPLATES] * 2
    assert [example.correct for example in examples[:8]] == [0, 1, 2, 3] * 2


def test_nothing_held_out_is_shown_or_said(examples):
    for example in examples:
        assert is_training_scene(example.scene)
        for text in (example.caption, example.denied, example.contradicted, *example.options):
            shapes = {SINGULAR.get(word, word) for word in re.findall(r"[a-z]+", text.lower())} & {*SHAPES}
            assert len({SHAPE_GROUP[shape] for shape in shapes}) == len(shapes), text


def test_every_word_is_known_and_fits(examples):
    tokenizer = WordTokenizer(VOCABULARY, 40)
    for example in examples:
        for text in (example.caption, example.denied, example.contradicted, *example.options):
            assert not tokenizer.unknown(text) and not bool(tokenizer([text]).truncated)


def test_examples_repeat_and_pictures_are_drawn(examples):
    again = negation_examples(3, seed=4, sets=("training",))
    assert again == negation_examples(5, seed=4, sets=("training",))[:3]
    assert again != negation_examples(3, seed=5, sets=("training",))
    assert examples[0].image().shape == (96, 96, 3)


def test_sets_share_no_wording():
    assert set(WORDINGS) == set(DENIALS) == set(SETS)
    sentences = [(w.negative, w.hybrid) for name in SETS for w in WORDINGS[name]] + [DENIALS[name] for name in SETS]
    flat = [sentence for group in sentences for sentence in group]
    assert len(set(flat)) == len(flat)


@pytest.mark.parametrize("wording", SETS)
def test_benchmark_items_can_be_worded_otherwise(wording):
    items = negation_items(24, seed=1, wording=wording)
    usual = negation_items(24, seed=1)
    assert [(item.present, item.absent, item.correct) for item in items] == [
        (item.present, item.absent, item.correct) for item in usual
    ]
    for item in items:
        truth = [is_true(option, item.scene.groups) for option in item.captions]
        assert truth == [place == item.correct for place in range(4)]
    assert (items == usual) == (wording == "benchmark")


def test_the_benchmark_reads_as_it_did():
    item = negation_items(1, seed=2026, split="held_out")[0]
    assert all(option.startswith("This image ") and option.endswith(".") for option in item.captions)
    retrieval = retrieval_items(1, seed=2026, split="held_out")[0]
    assert retrieval.negated_caption.startswith(f"There is no {retrieval.absent} in the image. ")


def test_what_is_refused():
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        negation_examples(0, seed=1)
    with pytest.raises(ValueError, match="sets must be one or more of training, benchmark, held_out, got"):
        negation_examples(1, seed=1, sets=("coco",))
    with pytest.raises(ValueError, match="sets must be one or more"):
        wordings_of(())
