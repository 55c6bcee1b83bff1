"""Hard negatives by exchange: what is exchanged, what is left alone, and that the words stay the same."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from engine.scenes.items import controlled_items
from engine.segments import RulesSegmenter, get_segmenter
from engine.segments.swaps import SWAP_KINDS, swapped, swaps

SPACY = get_segmenter("spacy")
ATTRIBUTES = {
    "a red cube and an old blue ball": ["a blue cube and an old red ball"],
    "An orange cat sits on a red dog.": ["A red cat sits on an orange dog."],
    "Red car next to a blue truck": ["Blue car next to a red truck"],
    "a young tennis player hits a yellow ball": ["a yellow tennis player hits a young ball"],
    "two small red circles and a big green star": [
        "two small green circles and a big red star",
        "two big red circles and a small green star",
    ],
    # One noun, or one attribute: the same would be said again.
    "a red car behind a blue car": [],
    "a red car and a red dog": [],
    "two red cars and one blue car": [],
    # What is denied is no thing of the picture.
    "a red circle but no blue square": [],
    "a man rides a horse": [],
    "": [],
}
NOUNS = {
    "A man rides a horse.": ["A horse rides a man."],
    "a red cube and an old blue ball": ["a red ball and an old blue cube"],
    "An ugly tennis player hits a ball": ["An ugly ball hits a tennis player"],
    "a red car and a dog": ["a red dog and a car"],
    # Symmetric, of another number, or one thing.
    "a cat and a dog": [],
    "a cat sits next to a dog": [],
    "two dogs chase a cat": [],
    "a dog": [],
    "a red circle but no blue square": [],
}


@pytest.mark.parametrize(("caption", "wanted"), ATTRIBUTES.items())
def test_attributes_are_exchanged(caption, wanted):
    assert swapped([caption], "attributes", SPACY) == [wanted]


@pytest.mark.parametrize(("caption", "wanted"), NOUNS.items())
def test_nouns_are_exchanged(caption, wanted):
    assert swapped([caption], "nouns", SPACY) == [wanted]


@pytest.mark.parametrize("tagger", [SPACY, RulesSegmenter()], ids=["spacy", "rules"])
@pytest.mark.parametrize("kind", SWAP_KINDS)
def test_the_words_stay_and_the_caption_does_not(kind, tagger):
    captions = [item.captions[0] for item in controlled_items("color", 40, seed=3)]
    found = swapped(captions, kind, tagger)
    assert all(found)
    for caption, others in zip(captions, found, strict=True):
        assert len(set(others)) == len(others)
        for other in others:
            assert other.lower() != caption.lower()
            assert words(other) == words(caption)


def test_an_attribute_swap_of_two_things_is_the_other_caption_of_its_pair():
    items = controlled_items("color", 40, seed=5)
    found = swapped([item.captions[0] for item in items], "attributes", SPACY)
    assert [words(others[0]) for others in found] == [words(item.captions[1]) for item in items]
    assert sum(item.captions[1] in others for item, others in zip(items, found, strict=True)) > 30


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="swaps: kind must be one of 'attributes', 'nouns', got 'verbs'"):
        swaps("a dog", [], "verbs")


def words(text: str) -> Counter[str]:
    """The words of a caption, articles as one."""
    return Counter("a" if word == "an" else word for word in re.findall(r"\w+", text.lower()))
