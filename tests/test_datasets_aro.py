"""ARO: boxes, macro slices, and the orders made at load time."""

from __future__ import annotations

import json

import pytest

from engine.datasets.aro import SYMMETRIC_RELATIONS, read_order, read_vg_attribution, read_vg_relation
from engine.datasets.word_order import (
    PERTURBATIONS,
    function_word_tagger,
    prepare_caption,
    reorder,
)

CAPTION = "A brown dog runs over the green field near two old trees"


def boxed(image="31", **changed):
    row = {
        "image_id": image,
        "image_path": f"{image}.jpg",
        "true_caption": "the cup is on the table",
        "false_caption": "the table is on the cup",
        "relation_info": {"object": "9", "name": "on"},
        "relation_name": "on",
        "bbox_x": 42,
        "bbox_y": 0,
        "bbox_w": 259,
        "bbox_h": 354,
    }
    return {**row, **changed}


def write(path, value):
    path.write_text(json.dumps(value))
    return path


def test_relation_items_hold_the_half_open_box_and_the_true_caption_second(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "31.jpg").write_bytes(b"x")
    data = read_vg_relation(write(tmp_path / "r.json", [boxed()]), tmp_path / "images")
    item = data.items[0]
    assert item.images[0].box == (42, 0, 301, 354)
    assert item.images[0].path == tmp_path / "images" / "31.jpg"
    assert item.texts == ("the table is on the cup", "the cup is on the table") and item.right == 1
    assert (item.id, item.type) == ("0", "on")
    assert "not an official count of vg_relation (23937)" in data.edition
    assert data.rule.average == "macro" and data.rule.macro_exclude == SYMMETRIC_RELATIONS
    assert "next to" in SYMMETRIC_RELATIONS and "on" not in SYMMETRIC_RELATIONS
    assert "on the side of" in SYMMETRIC_RELATIONS and len(SYMMETRIC_RELATIONS) == 157


def test_attribution_items_are_grouped_by_the_pair(tmp_path):
    data = read_vg_attribution(write(tmp_path / "a.json", [boxed(attributes=["open", "wooden"])]))
    assert data.items[0].type == "open_wooden"
    assert data.rule.macro_min == 25 and data.name == "vg_attribution"
    with pytest.raises(ValueError, match="row 0: attributes must be a list of two words, got None"):
        read_vg_attribution(write(tmp_path / "a.json", [boxed()]))


def test_one_picture_with_two_boxes_is_two_references(tmp_path):
    rows = [boxed(), boxed(bbox_x=0), boxed(true_caption="x y", false_caption="x y")]
    data = read_vg_relation(write(tmp_path / "r.json", rows))
    refs = {item.images[0] for item in data.items}
    assert len(refs) == 2 and {ref.name for ref in refs} == {"31.jpg"}
    assert "1 item: a wrong option is the same text as the right one, a tie for every model" in data.notes


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"image_path": "32.jpg"}, "image_path must be the picture of image_id '31', got '32.jpg'"),
        ({"bbox_w": 0}, "bbox_w and bbox_h must be positive, got 0 x 354"),
        ({"bbox_x": -300}, r"the box must overlap the picture '31\.jpg', got \(-300, 0, -41, 354\)"),
        ({"bbox_y": -354}, r"the box must overlap the picture '31\.jpg', got \(42, -354, 301, 0\)"),
        ({"bbox_h": "tall"}, "field 'bbox_h' must be an integer, got 'tall'"),
        ({"true_caption": ""}, "field 'true_caption' must be a text"),
        ({"relation_name": None}, "field 'relation_name' must be a text"),
    ],
)
def test_relation_refuses_what_does_not_belong_together(tmp_path, changed, message):
    with pytest.raises(ValueError, match=f"vg_relation: row 1: {message}"):
        read_vg_relation(write(tmp_path / "r.json", [boxed(), boxed(**changed)]))


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a list of objects that is not empty"):
        read_vg_relation(write(tmp_path / "r.json", {"0": boxed()}))
    with pytest.raises(ValueError, match="name must be 'coco_order' or 'flickr30k_order', got 'coco'"):
        read_order(write(tmp_path / "o.json", []), name="coco")
    with pytest.raises(ValueError, match="coco_order: row 0: caption must be a list of texts, got 'A dog'"):
        read_order(write(tmp_path / "o.json", [{"image": "a.jpg", "caption": "A dog"}]))


def test_prepared_captions():
    assert prepare_caption('  "A dog" (brown); runs:  fast! ') == "a dog brown runs fast"
    assert prepare_caption("it's a well-known cat, no?") == "it's a well-known cat, no?"
    assert prepare_caption(" ".join(map(str, range(40)))) == " ".join(map(str, range(30)))


def test_each_order_keeps_the_words_and_its_own_promise():
    nouns, others, within, trigrams = reorder(CAPTION, "seed")
    words = CAPTION.split()
    for text in (nouns, others, within, trigrams):
        assert sorted(text.split()) == sorted(words) and text != CAPTION
    function = [i for i, (_, kind) in enumerate(function_word_tagger(CAPTION)) if not kind]
    assert [nouns.split()[i] for i in function] == [words[i] for i in function]
    content = [i for i in range(len(words)) if i not in function]
    assert [others.split()[i] for i in content] == [words[i] for i in content]
    parts = [set(words[start : start + 3]) for start in range(0, len(words), 3)]
    assert [set(within.split()[start : start + 3]) for start in range(0, len(words), 3)] == parts
    assert all(" ".join(words[start : start + 3]) in trigrams for start in range(0, len(words), 3))


def test_a_tagger_keeps_nouns_on_noun_places_and_adjectives_on_theirs():
    kinds = {"brown": "adjective", "green": "adjective", "old": "adjective"}
    kinds |= dict.fromkeys(("dog", "field", "trees"), "noun")

    def tagger(text):
        return [(word, kinds.get(word, "")) for word in text.split()]

    mixed = reorder(CAPTION, "k", tagger)[0]
    assert mixed != CAPTION
    assert [kind for _, kind in tagger(mixed)] == [kind for _, kind in tagger(CAPTION)]


def write_order(path, count=6):
    entries = [
        {
            "image": f"val2014/{n}.jpg",
            "caption": [f"{CAPTION} {n}.", f"A {n} cat sits on a red mat by the door"],
        }
        for n in range(count)
    ]
    return write(path, entries)


def test_orders_depend_on_seed_and_item_alone(tmp_path):
    path = write_order(tmp_path / "o.json")
    data = read_order(path)
    assert [item.id for item in data.items[:3]] == ["0/0", "0/1", "1/0"]
    assert data.items == read_order(path).items
    assert data.items != read_order(path, seed=1).items
    shorter = read_order(write_order(tmp_path / "short.json", count=2))
    assert shorter.items == data.items[:4]
    # Frozen: a change of these texts is a change of the benchmark.
    assert data.items[0].texts == FROZEN


FROZEN = (
    "a brown dog runs over the green field near two old trees 0",
    "a dog runs green over the field brown near old trees two 0",
    "near brown dog runs a over green field the two old trees 0",
    "brown dog a over runs the green near field two trees old 0",
    "green field near 0 a brown dog runs over the two old trees",
)


def test_order_items_hold_prepared_texts_true_first(tmp_path):
    data = read_order(write_order(tmp_path / "o.json", 1), name="flickr30k_order", seed=3)
    item = data.items[0]
    assert item.right == 0 and len(item.texts) == 1 + len(PERTURBATIONS)
    assert item.texts[0] == f"{CAPTION} 0".lower()
    assert data.name == "flickr30k_order"
    assert data.edition.endswith("; orders by function words, seed 3")
    assert data.notes[0] == f"wrong options: {', '.join(PERTURBATIONS)}"
    tagged = read_order(write_order(tmp_path / "o.json", 1), tagger=function_word_tagger)
    assert tagged.edition.endswith("; orders by the caller's tagger, seed 0")


def test_a_caption_without_another_order_is_flagged(tmp_path):
    path = write(tmp_path / "o.json", [{"image": "a.jpg", "caption": ["Dog", "Dogs!"]}])
    data = read_order(path)
    assert all(item.tags == ("identical options",) for item in data.items)
    assert data.items[0].texts == ("dog",) * 5
