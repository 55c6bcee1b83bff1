"""NegBench: column orders, literal cells, leaked remarks, and pairing by image id."""

from __future__ import annotations

import csv

import pytest

from engine.datasets.negbench import read_negbench_mcq, read_negbench_retrieval

FOUR = ("image_path", "correct_answer", *(f"caption_{n}" for n in range(4)), "correct_answer_template")
OPTIONS = ("A cup, but no dog.", "A dog, but no cup.", "A dog.", "No cup.")


def write_csv(path, header, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return path


def mcq(path, rows, header=FOUR):
    return write_csv(path, header, rows)


def test_four_options_with_their_template(tmp_path):
    rows = [
        ("data/coco/images/val2017/000000000009.jpg", 0, *OPTIONS, "hybrid"),
        ("data/coco/images/val2017/000000000009.jpg", 3, *OPTIONS, "negative"),
    ]
    images = tmp_path / "val2017"
    images.mkdir()
    (images / "000000000009.jpg").write_bytes(b"x")
    data = read_negbench_mcq(mcq(tmp_path / "m.csv", rows), images, name="negbench_mcq_coco")
    assert data.name == "negbench_mcq_coco" and [item.right for item in data.items] == [0, 3]
    assert data.items[1].type == "negative" and data.items[1].texts == OPTIONS
    assert data.items[0].images[0].path == images / "000000000009.jpg"
    assert data.notes[0] == "right option by number: 0: 1, 3: 1"
    assert "2 items share a pair that is right in one and wrong in another, e.g. 0, 1" in data.notes


def test_columns_in_another_order_and_binary_options(tmp_path):
    header = ("caption_1", "correct_answer", "caption_0", "image_path")
    data = read_negbench_mcq(mcq(tmp_path / "b.csv", [("No cup.", 1, "A cup.", "x.jpg")], header))
    assert data.items[0].texts == ("A cup.", "No cup.") and data.items[0].right == 1
    assert data.items[0].type == ""


@pytest.mark.parametrize(
    ("count", "words"), [(5914, "COCO val2017"), (5031, "VOC2007 test"), (9997, "synthetic")]
)
def test_official_counts(tmp_path, count, words):
    rows = [(f"{n}.jpg", 0, f"a {n}", f"b {n}", f"c {n}", f"d {n}", "positive") for n in range(count)]
    data = read_negbench_mcq(mcq(tmp_path / "m.csv", rows))
    assert data.edition == f"{count} items, the official {words} file"
    assert data.notes[-1] == (
        "the right option always has the same number: argmax would reward a constant scorer"
    )


def test_odd_options_are_kept_and_flagged(tmp_path):
    leak = "Note: I rephrased the sentence as asked."
    long = "word " * 60
    rows = [
        ("a.jpg", 0, leak, *OPTIONS[1:], "positive"),
        ("b.jpg", 1, f"Original caption -> {OPTIONS[0]}", *OPTIONS[1:], "positive"),
        ("c.jpg", 0, OPTIONS[0], "", OPTIONS[0], long, "positive"),
    ]
    data = read_negbench_mcq(mcq(tmp_path / "m.csv", rows))
    assert [item.tags for item in data.items] == [
        ("leaked remark", "leaked remark in the right option"),
        ("leaked remark",),
        ("identical options", "empty option", "long option"),
    ]
    assert "2 items: an option holds a remark of the language model that wrote it" in data.notes
    assert data.items[2].texts[3] == long


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("a.jpg", 4, *OPTIONS, "positive"), r"row 0: correct_answer must be in 0\.\.3, got 4"),
        (("a.jpg", "first", *OPTIONS, "positive"), "field 'correct_answer' must be an integer, got 'first'"),
        (("a.jpg", 0, *OPTIONS, "maybe"), "correct_answer_template must be one of .*, got 'maybe'"),
        (("", 0, *OPTIONS, "positive"), "field 'image_path' must be a text"),
    ],
)
def test_mcq_refuses_rows_it_cannot_pair(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        read_negbench_mcq(mcq(tmp_path / "m.csv", [row]))


def test_mcq_refuses_gaps_between_options_and_empty_files(tmp_path):
    header = ("image_path", "correct_answer", "caption_0", "caption_1", "caption_3")
    with pytest.raises(ValueError, match="must be caption_0, caption_1, … without a gap"):
        read_negbench_mcq(mcq(tmp_path / "m.csv", [("a.jpg", 0, "a", "b", "c")], header))
    with pytest.raises(ValueError, match="must hold at least one row"):
        read_negbench_mcq(mcq(tmp_path / "m.csv", []))


def test_positive_and_negative_pictures_of_one_name_are_kept_apart(tmp_path):
    rows = [(f"data/syn/{side}/7_img.png", 0, *OPTIONS, "positive") for side in ("positive", "negative")]
    for side in ("positive", "negative"):
        (tmp_path / "syn" / side).mkdir(parents=True)
        (tmp_path / "syn" / side / "7_img.png").write_bytes(b"x")
    path = mcq(tmp_path / "m.csv", rows)
    data = read_negbench_mcq(path, tmp_path / "syn")
    assert [item.images[0].path.parent.name for item in data.items] == ["positive", "negative"]
    with pytest.raises(ValueError, match="would both be"):
        read_negbench_mcq(path, tmp_path / "syn" / "negative")


RETRIEVAL = ("positive_objects", "negative_objects", "filepath", "image_id", "captions")


def test_retrieval_reads_literals_and_keeps_every_caption(tmp_path):
    rows = [
        ("['cup']", "['dog']", "val2017/000000000009.jpg", 9, "['A cup.', \"It's no dog.\"]"),
        ("[]", "[]", "val2017/000000000012.jpg", 12, '["A cup.", "", "A red cup."]'),
    ]
    data = read_negbench_retrieval(write_csv(tmp_path / "r.csv", RETRIEVAL, rows))
    assert data.texts == ("A cup.", "It's no dog.", "A cup.", "", "A red cup.")
    assert data.owner == (0, 0, 1, 1, 1)
    assert [ref.name for ref in data.images] == ["val2017/000000000009.jpg", "val2017/000000000012.jpg"]
    assert data.notes == (
        "captions an image: 2 on 1, 3 on 1",
        "1 captions belong to several images: recall with a single right image is capped",
        "1 captions have no words",
    )


def test_retrieval_refuses_code_wrong_ids_and_doubles(tmp_path):
    path = tmp_path / "r.csv"
    bad = tmp_path / "touched"
    code = f"[open({str(bad)!r}, 'w').name]"
    write_csv(path, RETRIEVAL, [("[]", "[]", "9.jpg", 9, code)])
    with pytest.raises(ValueError, match="row 0: wanted a list of texts as a literal"):
        read_negbench_retrieval(path)
    assert not bad.exists()
    write_csv(path, RETRIEVAL, [("[]", "[]", "000000000009.jpg", 12, "['a']")])
    with pytest.raises(ValueError, match=r"image_id 12 must be the one in the file name '000000000009\.jpg'"):
        read_negbench_retrieval(path)
    write_csv(path, ("filepath", "captions"), [("9.jpg", "['a']"), ("9.jpg", "['b']")])
    with pytest.raises(ValueError, match=r"ids must be unique, got '9\.jpg' 2 times"):
        read_negbench_retrieval(path)
    write_csv(path, ("filepath", "captions"), [("9.jpg", "[]")])
    with pytest.raises(ValueError, match="captions must hold at least one text"):
        read_negbench_retrieval(path)


def test_retrieval_skips_missing_images_with_their_captions(tmp_path):
    rows = [(f"{n}.jpg", f"['a {n}', 'b {n}']") for n in range(3)]
    path = write_csv(tmp_path / "r.csv", ("filepath", "captions"), rows)
    images = tmp_path / "images"
    images.mkdir()
    for n in (0, 2):
        (images / f"{n}.jpg").write_bytes(b"x")
    data = read_negbench_retrieval(path, images, on_missing="skip")
    assert data.missing == ("1.jpg",) and data.owner == (0, 0, 1, 1)
    assert data.texts == ("a 0", "b 0", "a 2", "b 2")
    assert "3 items" in data.edition and "1 images missing" in data.edition
