"""Readers of training data: what they give, stable ids, and what is wrong with a file said and left out."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from engine.datasets.base import ImageRef
from engine.datasets.captioned import CaptionedImages, CaptionedItem, Problem
from engine.datasets.coco import read_coco
from engine.datasets.trohn import read_trohn
from engine.datasets.web_dataset import Member, read_web_dataset
from engine.images import decode
from tests.captioned_files import encoded, sample, write_coco, write_shard, write_trohn


def rewrite(path: Path, change: object) -> None:
    content = json.loads(path.read_text())
    change(content)  # type: ignore[operator]
    path.write_text(json.dumps(content))


def test_coco_gives_every_picture_with_its_captions_and_categories(tmp_path):
    captions, images, instances = write_coco(tmp_path)
    data = read_coco(captions, images, instances)
    assert [item.id for item in data.items] == [str(key) for key in range(6)] and not data.problems
    first = data.items[0]
    assert first.captions == ("a red cube and a blue ball (0 0)", "a red cube and a blue ball (0 1)")
    assert first.present == ("bench", "dog") and first.image.path == images / "000000000000.png"
    assert first.negatives == () and first.negative_image is None
    assert [item.present for item in read_coco(captions, images).items] == [()] * 6


def test_coco_goes_on_without_missing_pictures_and_captions(tmp_path):
    captions, images, _ = write_coco(tmp_path)
    whole = read_coco(captions, images)
    (images / "000000000002.png").unlink()
    rewrite(captions, lambda x: x["annotations"].append({"image_id": 3, "caption": "  "}))
    rewrite(captions, lambda x: x.update(annotations=[a for a in x["annotations"] if a["image_id"] != 4]))
    data = read_coco(captions, images)
    assert [item.id for item in data.items] == ["0", "1", "3", "5"]
    kept = [item for item in whole.items if item.id in ("0", "1", "3", "5")]
    assert list(data.items) == kept and data.fingerprint != whole.fingerprint
    assert [str(problem) for problem in data.problems] == [
        f"{images}/000000000002.png: there is no such file",
        f"{images}/000000000004.png: {captions} has no caption of it",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("annotations"), "captions.json must be an object with the lists images and annotations, and"),
        (lambda x: x["annotations"][0].pop("caption"), "annotation 0: field 'caption' must be a text"),
        (lambda x: x["annotations"][1].update(image_id="?"), "annotation 1: field 'image_id' must be an integer"),
        (lambda x: x["images"][2].update(file_name=""), "image 2: field 'file_name' must be a text that is not empty"),
        (lambda x: x["images"].append(dict(x["images"][0])), "would both be|ids must be unique, got '0' 2 times"),
    ],
)
def test_coco_files_of_another_form_are_refused(tmp_path, change, message):
    captions, images, _ = write_coco(tmp_path)
    rewrite(captions, change)
    with pytest.raises(ValueError, match=message):
        read_coco(captions, images)


def test_coco_without_any_picture_or_category_is_refused(tmp_path):
    captions, images, instances = write_coco(tmp_path)
    rewrite(instances, lambda x: x["categories"].pop(0))
    with pytest.raises(ValueError, match="category_id must be one of the categories, got 10"):
        read_coco(captions, images, instances)
    (tmp_path / "other").mkdir()
    with pytest.raises(FileNotFoundError, match="6 of 6 images are not in"):
        read_coco(captions, tmp_path / "other")
    rewrite(captions, lambda x: x.update(annotations=[]))
    with pytest.raises(ValueError, match=r"at least one item to train on, got none; the first of 6 problems: .*0\.png"):
        read_coco(captions, images)


def test_trohn_gives_pairs_of_captions_and_pictures(tmp_path):
    rows, images, others = write_trohn(tmp_path)
    data = read_trohn(rows, images, others)
    assert [item.id for item in data.items] == [str(row) for row in range(6)] and not data.problems
    item = data.items[3]
    assert item.captions == ("a red cube 3",) and item.negatives == ("a blue cube 3",)
    # The same names, other folders; a bare number is COCO's file of that id.
    assert [ref.path for ref in item.images] == [images / "000000000003.jpg", others / "000000000003.jpg"]
    text_only = read_trohn(write_trohn(tmp_path / "text", negative_images=False)[0], images)
    assert [len(item.images) for item in text_only.items] == [1] * 6 and text_only.items[3].negatives == item.negatives


def test_trohn_names_missing_columns(tmp_path):
    rows, images, others = write_trohn(tmp_path, negative_images=False)
    with pytest.raises(ValueError, match=r"must have columns \['caption', 'negative_caption', 'negative_image'\], got"):
        read_trohn(rows, images, others)
    text = rows.read_text()
    rows.write_text(text.replace("negative_caption", "negated"))
    with pytest.raises(ValueError, match=r"must have columns \['caption', 'negative_caption'\], got \['image_id'"):
        read_trohn(rows, images)
    rows.write_text(text.replace("image_id", "picture"))
    with pytest.raises(ValueError, match="must have a column image_id or image or filename, got"):
        read_trohn(rows, images)
    rows.write_text(text.splitlines()[0] + "\n")
    with pytest.raises(ValueError, match=r"rows\.csv must hold at least one row"):
        read_trohn(rows, images)


def test_trohn_rows_keep_their_numbers(tmp_path):
    rows, images, others = write_trohn(tmp_path)
    (others / "000000000001.jpg").unlink()
    rows.write_text(rows.read_text().replace("a blue cube 4", " "))
    data = read_trohn(rows, images, others)
    assert [item.id for item in data.items] == ["0", "2", "3", "5"]
    assert [str(problem) for problem in data.problems] == [
        f"{rows} row 1: there is no image '000000000001.jpg'",
        f"{rows} row 4: negative_caption is empty",
    ]


def test_shards_are_read_in_order_of_their_names(tmp_path):
    write_shard(tmp_path / "b.tar", sample("x/1", 3, json=b'{"negative_caption": "no"}'))
    second = sample("2", 2, negative_txt=b"not 2", negative_jpg=encoded(9, "JPEG"))
    write_shard(tmp_path / "a.tar", sample("1", 1) | second)
    data = read_web_dataset(str(tmp_path / "*.tar"))
    assert [item.id for item in data.items] == ["a.tar/1", "a.tar/2", "b.tar/x/1"] and not data.problems
    assert [item.captions for item in data.items] == [("caption 1",), ("caption 2",), ("caption 3",)]
    assert [item.negatives for item in data.items] == [(), ("not 2",), ("no",)]
    load = data.items[0].image.load
    assert load is not None and load() == encoded(1)
    assert [ref.name for ref in data.items[1].images] == ["a.tar/2.png", "a.tar/2.negative.jpg"]
    assert decode(data.items[1].images[1].load()).size == (24, 24)  # type: ignore[misc]


def test_samples_that_lack_something_are_named(tmp_path):
    members = sample("1", 1) | {"2.png": encoded(2), "3.txt": b"words", "4.png": b"", "4.txt": b"\xff", "5.cls": b"1"}
    members |= {"6.png": encoded(6), "6.json": b"[1]", "7.png": encoded(7), "7.json": b"{"} | sample("8", 8)
    members |= sample("9", 9, negative_png=encoded(10))
    write_shard(tmp_path / "a.tar", members)
    data = read_web_dataset(str(tmp_path / "a.tar"))
    assert [item.id for item in data.items] == ["a.tar/1", "a.tar/8"]
    said = {problem.path.rpartition("/")[2]: problem.reason for problem in data.problems}
    assert said["2"] == "a sample must have a caption (txt, or json with a caption), got none"
    assert said["3"] == "a sample must have a picture (jpg, jpeg, png, webp), got txt"
    assert said["4"] == "4.txt must be UTF-8, got byte 0xff" and said["6"] == "6.json must be an object, got [1]"
    assert said["7"].startswith("7.json must be JSON") and said["5"].endswith("got cls")
    assert said["9"] == "a negative picture must have a negative caption, got none"


def test_broken_members_are_passed_over_and_named(tmp_path):
    path = tmp_path / "a.tar"
    write_shard(path, sample("1", 1) | sample("2", 2) | sample("3", 3))
    whole = read_web_dataset(str(path))
    with tarfile.open(path) as archive:
        header = archive.getmember("2.png").offset
    data = bytearray(path.read_bytes())
    data[header : header + 40] = b"\xff" * 40
    path.write_bytes(data)
    found = read_web_dataset(str(path))
    assert list(found.items) == [whole.items[0], whole.items[2]]
    assert [problem.path for problem in found.problems] == [str(path), f"{path}/2"]
    stop = header + 512 + blocks(encoded(2))
    assert found.problems[0].reason == f"bytes {header} to {stop} are no tar member and are lost"


def blocks(data: bytes) -> int:
    return -(-len(data) // 512) * 512


def test_a_shard_that_was_cut_gives_what_is_whole(tmp_path):
    path = tmp_path / "a.tar"
    write_shard(path, sample("1", 1) | {"2.txt": b"two", "2.png": encoded(2)})
    with tarfile.open(path) as archive:
        member = archive.getmember("2.png")
    data = path.read_bytes()
    for length in (member.offset_data + 100, member.offset + 100, member.offset):
        path.write_bytes(data[:length])
        found = read_web_dataset(str(path))
        assert [item.id for item in found.items] == ["a.tar/1"]
        assert any(problem.path.startswith(str(path)) for problem in found.problems)


def test_what_is_no_shard_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file fits"):
        read_web_dataset(str(tmp_path / "*.tar"))
    (tmp_path / "a.tar").write_bytes(b"something else" * 100)
    with pytest.raises(ValueError, match=r"one item to train on, got none; the first of 1 problems: .*a\.tar"):
        read_web_dataset(str(tmp_path / "a.tar"))
    for folder in ("1", "2"):
        write_shard(tmp_path / folder / "a.tar", sample("1", 1))
    with pytest.raises(ValueError, match="shards must have names of their own"):
        read_web_dataset(str(tmp_path / "*" / "a.tar"))
    with pytest.raises(OSError, match="x must hold 10000000 bytes"):
        Member(tmp_path / "1" / "a.tar", "x", 0, 10_000_000)()


def test_items_and_ids_must_fit():
    ref = ImageRef("a")
    with pytest.raises(ValueError, match="a must have captions, and no negatives or one for each, got 2 and 1"):
        CaptionedItem("a", ref, ("x", "y"), ("z",))
    with pytest.raises(ValueError, match="the negative image of a must have a caption, got none"):
        CaptionedItem("a", ref, ("x",), negative_image=ref)
    with pytest.raises(ValueError, match="ids must be unique"):
        CaptionedImages("data", (CaptionedItem("a", ref, ("x",)),) * 2)
    assert str(Problem("a.png", "the file is empty")) == "a.png: the file is empty"
