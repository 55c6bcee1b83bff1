"""Readers of SugarCrepe, Winoground and BiVLC on small files written in their formats."""

from __future__ import annotations

import csv
import json

import pytest

from engine.datasets.bivlc import RESULT_COLUMNS, PublishedGroup, read_bivlc, read_bivlc_outcomes
from engine.datasets.sugarcrepe import SUBSETS, PublishedChoice, read_sugarcrepe, read_sugarcrepe_outcomes
from engine.datasets.winoground import read_winoground


def entry(number, caption="A red cup. ", negative="A blue cup."):
    return {"filename": f"{number:012d}.jpg", "caption": caption, "negative_caption": negative}


def write_sugarcrepe(folder, **changed):
    folder.mkdir(parents=True, exist_ok=True)
    for place, subset in enumerate(SUBSETS):
        entries = changed.get(subset, {"0": entry(place), "1": entry(place + 10)})
        (folder / f"{subset}.json").write_text(json.dumps(entries, indent=4))
    return folder


def write_csv(path, header, rows):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerows([header, *rows])
    return path


def touch(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


def test_sugarcrepe_keeps_keys_blanks_and_order(tmp_path):
    write_sugarcrepe(tmp_path / "data", swap_obj={"107": entry(1), "109": entry(2), "110": entry(3)})
    data = read_sugarcrepe(tmp_path)
    assert [item.id for item in data.items][-3:] == ["swap_obj/107", "swap_obj/109", "swap_obj/110"]
    first = data.items[0]
    assert (first.id, first.type, first.subtype, first.right) == ("add_att/0", "add", "att", 0)
    assert first.texts == ("A red cup. ", "A blue cup.")
    assert first.images[0].name == "000000000000.jpg" and first.images[0].path is None
    assert "15 items, not an official count of SugarCrepe (7511, 7512)" in data.edition
    assert data.notes[0].endswith("swap_att 2, swap_obj 3")


def test_sugarcrepe_knows_both_editions_and_gives_them_the_same_ids(tmp_path):
    sizes = dict(zip(SUBSETS, (692, 2062, 788, 1652, 1406, 666, 246), strict=True))
    rows, changed = [], {}
    for subset, size in sizes.items():
        texts = [(f"{subset} {row} right", f"{subset} {row} wrong") for row in range(size)]
        kept = {
            str(row): entry(row, *texts[row]) for row in range(size) if (subset, row) != ("swap_obj", 108)
        }
        changed[subset] = kept
        rows += [(f"{row:012d}.jpg", *texts[row], *subset.split("_")) for row in range(size)]
    current = read_sugarcrepe(write_sugarcrepe(tmp_path, **changed))
    header = ("filename", "caption", "negative_caption", "type", "subtype")
    older = read_sugarcrepe(write_csv(tmp_path / "all.csv", header, rows))
    assert current.edition == "7511 items, the current files (swap_obj without key 108)"
    assert older.edition == "7512 items, the older copy (swap_obj with the withdrawn key 108)"
    in_current = {item.id: item.texts for item in current.items}
    in_older = {item.id: item.texts for item in older.items}
    assert in_older.pop("swap_obj/108")
    assert in_current == in_older


def test_sugarcrepe_counts_missing_images(tmp_path):
    write_sugarcrepe(tmp_path / "data")
    images = touch(tmp_path / "val2017", "000000000000.jpg", "000000000010.jpg", "000000000001.jpg")
    with pytest.raises(FileNotFoundError, match="sugarcrepe: 11 of 14 images are not in"):
        read_sugarcrepe(tmp_path, images)
    data = read_sugarcrepe(tmp_path, images, on_missing="skip")
    assert [item.id for item in data.items] == ["add_att/0", "add_att/1", "add_obj/0"]
    assert len(data.missing) == 11 and "14 items" in data.edition and "11 images missing" in data.edition
    assert data.items[0].images[0].path == images / "000000000000.jpg"


def test_sugarcrepe_refuses_other_formats(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold add_att.json, .* missing add_att, add_obj"):
        read_sugarcrepe(tmp_path)
    write_sugarcrepe(tmp_path / "list", add_obj=[entry(1)])
    with pytest.raises(ValueError, match=r"add_obj\.json must be an object, got list"):
        read_sugarcrepe(tmp_path / "list")
    write_sugarcrepe(tmp_path / "lack", swap_att={"4": {"filename": "a.jpg", "caption": "A cup."}})
    with pytest.raises(ValueError, match="swap_att/4: field 'negative_caption' must be a text"):
        read_sugarcrepe(tmp_path / "lack")
    header = ("filename", "caption", "negative_caption", "type", "subtype")
    wrong = write_csv(tmp_path / "wrong.csv", header, [("a.jpg", "A", "B", "move", "obj")])
    with pytest.raises(ValueError, match="move_obj/0: type and subtype must be one of add_att"):
        read_sugarcrepe(wrong)


def test_sugarcrepe_flags_a_pair_of_one_text(tmp_path):
    data = read_sugarcrepe(write_sugarcrepe(tmp_path, add_att={"0": entry(1, "same", "same")}))
    assert data.items[0].tags == ("identical options",)
    assert "1 item: both captions are the same text, a tie for every model" in data.notes


def test_sugarcrepe_outcomes(tmp_path):
    header = ("filename", "caption", "negative_caption", "type", "subtype", "correct")
    path = write_csv(tmp_path / "o.csv", header, [("a.jpg", "A", "B", "add", "obj", n) for n in (1, 0)])
    wanted = [PublishedChoice("add", "obj", True), PublishedChoice("add", "obj", False)]
    assert read_sugarcrepe_outcomes(path) == wanted
    write_csv(path, header, [("a.jpg", "A", "B", "add", "obj", "yes")])
    with pytest.raises(ValueError, match="row 2: correct must be 0 or 1, got 'yes'"):
        read_sugarcrepe_outcomes(path)


def wino(number, **changed):
    row = {
        "id": number,
        "image_0": f"ex_{number}_img_0",
        "image_1": f"ex_{number}_img_1",
        "caption_0": f"cup {number} on plate",
        "caption_1": f"plate on cup {number}",
        "tag": "Noun",
        "secondary_tag": "",
        "num_main_preds": 1 + number % 2,
        "collapsed_tag": ("Object", "Relation", "Both")[number % 3],
    }
    return {**row, **changed}


def write_winoground(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "examples.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def test_winoground_pairs_images_and_captions_by_id(tmp_path):
    rows = [wino(3), wino(7, image_0=None, image_1={"bytes": None}), wino(8, image_0="ex_8_img_0.png")]
    write_winoground(tmp_path, rows)
    images = touch(tmp_path / "images", *(f"ex_{n}_img_{side}.png" for n in (3, 7, 8) for side in (0, 1)))
    data = read_winoground(tmp_path, images)
    assert [item.id for item in data.items] == ["3", "7", "8"]
    item = data.items[1]
    assert [ref.path for ref in item.images] == [images / "ex_7_img_0.png", images / "ex_7_img_1.png"]
    assert item.texts == ("cup 7 on plate", "plate on cup 7") and item.right is None
    assert (item.type, item.subtype, data.items[2].subtype) == ("Relation", "2 predicates", "1 predicate")
    assert data.edition.startswith("3 items, not an official count")
    assert len(read_winoground(write_winoground(tmp_path / "data", rows).parent)) == 3


def test_winoground_official_count_and_tags(tmp_path):
    write_winoground(tmp_path, [wino(number) for number in range(400)])
    tags = tmp_path / "new_tag_assignments.json"
    tags.write_text(
        json.dumps({str(n): ["Unusual Image", "Visually Difficult"][: n % 3] for n in range(400)})
    )
    data = read_winoground(tmp_path, tags=tags)
    assert data.edition == "400 items, the official count"
    assert [item.tags for item in data.items[:3]] == [
        ("NoTag",),
        ("Unusual Image",),
        ("Unusual Image", "Visually Difficult"),
    ]
    tags.write_text(json.dumps({"x0": []}))
    with pytest.raises(ValueError, match="it names none of them"):
        read_winoground(tmp_path, tags=tags)
    tags.write_text("[]")
    with pytest.raises(ValueError, match="must be an object of id -> list of tags"):
        read_winoground(tmp_path, tags=tags)
    tags.write_text('{"0": ["Unusual", 3]}')
    with pytest.raises(ValueError, match=r"winoground: tags: .* list of tags for id '0', got \['Unusual', 3\]"):
        read_winoground(tmp_path, tags=tags)


def test_winoground_refuses_an_image_of_another_item(tmp_path):
    write_winoground(tmp_path, [wino(1, image_1="ex_2_img_1")])
    with pytest.raises(ValueError, match="image_1 of id 1 must be 'ex_1_img_1', got 'ex_2_img_1'"):
        read_winoground(tmp_path)
    write_winoground(tmp_path, [wino(1), wino(1)])
    with pytest.raises(ValueError, match="ids must be unique, got '1' 2 times"):
        read_winoground(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"must hold examples.jsonl \(itself or in data/\)"):
        read_winoground(tmp_path / "nowhere")


def test_winoground_skips_items_with_one_missing_image(tmp_path):
    write_winoground(tmp_path, [wino(0), wino(1)])
    images = touch(tmp_path / "images", "ex_0_img_0.png", "ex_0_img_1.png", "ex_1_img_0.png")
    data = read_winoground(tmp_path, images, on_missing="skip")
    assert [item.id for item in data.items] == ["0"] and data.missing == ("ex_1_img_1.png",)


BIVLC = ("image", "caption", "negative_caption", "negative_image", "type", "subtype")


def test_bivlc_from_csv_and_json_lines(tmp_path):
    rows = [(f"{n}_0.png", f"cup {n}", f"no cup {n}", f"{n}_1.png", "replace", "obj") for n in range(2)]
    table = write_csv(tmp_path / "bivlc.csv", BIVLC, rows)
    lines = tmp_path / "bivlc.jsonl"
    lines.write_text("\n".join(json.dumps(dict(zip(BIVLC, row, strict=True))) for row in rows))
    images = touch(tmp_path / "images", "0_0.png", "0_1.png", "1_0.png", "1_1.png")
    data = read_bivlc(table, images)
    assert data.items == read_bivlc(lines, images).items
    item = data.items[1]
    assert item.id == "1" and item.texts == ("cup 1", "no cup 1")
    assert [ref.path for ref in item.images] == [images / "1_0.png", images / "1_1.png"]
    assert (item.type, item.subtype) == ("replace", "obj")


def test_bivlc_refuses_printed_images_and_other_files(tmp_path):
    printed = "<PIL.JpegImagePlugin.JpegImageFile image mode=RGB size=500x332 at 0x7F83>"
    path = write_csv(tmp_path / "b.csv", BIVLC, [(printed, "a", "b", "x.png", "add", "att")])
    with pytest.raises(
        ValueError, match="row 0: image must be a file name, got the printed form of an image"
    ):
        read_bivlc(path)
    with pytest.raises(ValueError, match=r"must be a .csv or .jsonl file, got 'b.parquet'"):
        read_bivlc(tmp_path / "b.parquet")
    same = write_csv(tmp_path / "c.csv", BIVLC, [("x.png", "a", "a", "x.png", "add", "att")])
    assert read_bivlc(same).items[0].tags == ("identical options", "identical images")


OLD, NEW = list(RESULT_COLUMNS.values()), list(RESULT_COLUMNS)


@pytest.mark.parametrize("names", [OLD, NEW], ids=["committed names", "names of the code"])
def test_bivlc_outcomes_under_both_names(tmp_path, names):
    head = ("image", "caption", "negative_caption", "negative_image", "type", "subtype", *names)
    printed = "<PIL.PngImagePlugin.PngImageFile>"
    row = (printed, "a", "b", printed, "swap", "att", True, True, False, True, True, False, False)
    path = write_csv(tmp_path / "r.csv", head, [row])
    assert read_bivlc_outcomes(path) == [PublishedGroup("swap", "att", True, True, False, True)]
    write_csv(path, head, [(*row[:-1], True)])
    with pytest.raises(ValueError, match="row 2: totals must follow from the parts"):
        read_bivlc_outcomes(path)
    write_csv(path, head, [(*row[:-1], "maybe")])
    with pytest.raises(ValueError, match="group_score must be True or False, got 'maybe'"):
        read_bivlc_outcomes(path)


def test_bivlc_outcomes_need_one_whole_set_of_columns(tmp_path):
    path = write_csv(tmp_path / "r.csv", ("type", "subtype", "I2T", "group_score"), [("a", "b", 1, 1)])
    with pytest.raises(ValueError, match=r"must have rows with columns Ipos_2T, .* or text_score_i0"):
        read_bivlc_outcomes(path)
