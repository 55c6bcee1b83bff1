"""Reading annotation files and finding images: literal names, no evaluation, no wrong picture."""

from __future__ import annotations

import pytest

from engine.datasets.base import (
    CHOICE,
    GROUP,
    Dataset,
    ImageRef,
    Item,
    RetrievalDataset,
    Rule,
    choice_notes,
    contradictions,
    spread,
)
from engine.datasets.files import (
    ImageFolder,
    int_field,
    parse_text_list,
    read_csv,
    read_json,
    read_json_lines,
    text_field,
)

ODD_NAMES = [
    "a%20b.jpg",
    "what? why: & = %.png",
    "it's [one] (two)!@~,+;.jpg",
    "ünïcödé ß.png",
    "x" * 251 + ".png",
]


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_name_is_taken_literally(tmp_path, name):
    touch(tmp_path, name)
    finder = ImageFolder(tmp_path, "test")
    assert finder.find(name) == tmp_path / name
    assert finder.missing == ()


def test_percent_signs_are_not_decoded(tmp_path):
    touch(tmp_path, "a b.jpg")
    finder = ImageFolder(tmp_path, "test")
    assert finder.find("a%20b.jpg") is None
    assert finder.missing == ("a%20b.jpg",)


def test_a_foreign_path_is_found_by_its_longest_tail(tmp_path):
    touch(tmp_path, "val2017/1.jpg", "1.jpg")
    finder = ImageFolder(tmp_path, "test")
    assert finder.find("/home/somebody/coco/val2017/1.jpg") == tmp_path / "val2017" / "1.jpg"
    assert ImageFolder(tmp_path / "val2017", "test").find("data/val2017/1.jpg") == tmp_path / "val2017/1.jpg"
    assert ImageFolder(tmp_path, "test").find("./1.jpg") == tmp_path / "1.jpg"


def test_two_names_never_share_a_file(tmp_path):
    touch(tmp_path, "7.png")
    finder = ImageFolder(tmp_path, "test")
    finder.find("data/positive/7.png")
    with pytest.raises(ValueError, match=r"'data/positive/7.png' and 'data/negative/7.png' would both be"):
        finder.find("data/negative/7.png")


@pytest.mark.parametrize("name", ["../secret.png", "a/../../b.png", "/", ""])
def test_a_name_stays_inside_its_folder(tmp_path, name):
    with pytest.raises(ValueError, match="must stay inside its folder"):
        ImageFolder(tmp_path, "test").find(name)


def test_a_name_no_file_system_holds_is_missing(tmp_path):
    finder = ImageFolder(tmp_path, "test")
    assert finder.find("y" * 300 + ".png") is None
    assert finder.find("zero\0byte.png") is None


def test_missing_images_are_counted_and_named(tmp_path):
    touch(tmp_path, "here.png")
    finder = ImageFolder(tmp_path, "test")
    for name in ("here.png", "gone1.png", "gone2.png", "gone1.png"):
        finder.find(name)
    assert finder.check("skip") == ("gone1.png", "gone2.png")
    with pytest.raises(
        FileNotFoundError, match=r"test: 2 of 3 images are not in .*, e.g. gone1.png, gone2.png"
    ):
        finder.check("error")
    with pytest.raises(ValueError, match="on_missing must be one of 'error', 'skip', got"):
        finder.check("ignore")


def test_a_folder_without_a_single_image_is_refused_even_when_skipping(tmp_path):
    finder = ImageFolder(tmp_path, "test")
    finder.find("gone.png")
    with pytest.raises(FileNotFoundError, match="1 of 1 images"):
        finder.check("skip")


def test_no_folder_means_nothing_is_looked_up_and_a_wrong_folder_is_an_error(tmp_path):
    finder = ImageFolder(None, "test")
    assert finder.find("a.png") is None and finder.missing == () and finder.check("error") == ()
    with pytest.raises(FileNotFoundError, match="must be a folder, it is none"):
        ImageFolder(tmp_path / "nowhere", "test")


@pytest.mark.parametrize(
    ("cell", "texts"),
    [
        ('["a", "b"]', ["a", "b"]),
        ("['a', 'b']", ["a", "b"]),
        ('["it\'s", \'say "x"\']', ["it's", 'say "x"']),
        (r"['caf\xe9']", ["café"]),
        (r'["caf\u00e9"]', ["café"]),
        ("[]", []),
        ("['']", [""]),
    ],
)
def test_list_cells_as_json_or_literal(cell, texts):
    assert parse_text_list(cell, where="row") == texts


@pytest.mark.parametrize(
    "cell",
    [
        "__import__('os').system('true')",
        "[open('x', 'w')]",
        "[1, 2]",
        "'text'",
        "{'a': 1}",
        "",
        "[" * 5000,
        "(" * 5000 + ")" * 5000,
        "[" * 90000 + "]" * 9000,
    ],
)
def test_list_cells_are_never_evaluated(cell):
    with pytest.raises(ValueError, match="row 3: wanted a list of texts as a literal, got"):
        parse_text_list(cell, where="row 3")


def test_a_list_cell_has_a_size_limit():
    with pytest.raises(ValueError, match="may hold 100000 characters, got 100001"):
        parse_text_list("x" * 100_001, where="row")


def test_json_with_a_double_key_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"0": 1, "0": 2}')
    with pytest.raises(ValueError, match="key '0' comes twice"):
        read_json(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"read_json: .* must be JSON"):
        read_json(path)


def test_json_lines_name_the_broken_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 0}\n\n[1]\n')
    with pytest.raises(ValueError, match="line 3 must be an object"):
        list(read_json_lines(path))
    path.write_text('{"id": 0}\n{"id"\n')
    with pytest.raises(ValueError, match="line 2 must be JSON"):
        list(read_json_lines(path))
    path.write_text('{"id": 0}\n\n{"id": 1}')
    assert list(read_json_lines(path)) == [(1, {"id": 0}), (3, {"id": 1})]


def test_csv_needs_its_columns_in_any_order_and_whole_rows(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('b,extra,a\n"one, two",x,"line\nbreak"\n', encoding="utf-8-sig")
    assert read_csv(path, ("a", "b")) == [{"b": "one, two", "extra": "x", "a": "line\nbreak"}]
    with pytest.raises(ValueError, match=r"must have columns \['c'\], got \['b', 'extra', 'a'\]"):
        read_csv(path, ("c",))
    for row in ("1,2", "1,2,3,4"):
        path.write_text(f"a,b,c\n{row}\n")
        with pytest.raises(ValueError, match="line 2 must have 3 cells like the header"):
            read_csv(path, ("a",))


READERS = (read_json, lambda path: list(read_json_lines(path)), lambda path: read_csv(path, ("a",)))


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_text_is_named_with_its_line(tmp_path, reader):
    path = tmp_path / "latin.csv"
    path.write_bytes(b"a,b\n1,2\nb\xe9ton,3\n")
    with pytest.raises(ValueError, match=r"read_\w+: .*latin\.csv line 3 must be UTF-8, got byte 0xe9"):
        reader(path)
    path.write_bytes("a,b\n".encode("utf-16"))
    with pytest.raises(ValueError, match=r"read_\w+: .*latin\.csv line 1 must be UTF-8, got byte 0xff"):
        reader(path)
    with pytest.raises(ValueError, match=rf"read_\w+: {tmp_path} must be a file, got a folder"):
        reader(tmp_path)


def test_a_byte_order_mark_and_foreign_line_ends_are_read(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b'\xef\xbb\xbf{"id": 0}\r\n\r\n{"id": 1, "text": "\xe2\x80\xa8"}\r\n')
    assert list(read_json_lines(path)) == [(1, {"id": 0}), (3, {"id": 1, "text": "\u2028"})]
    path.write_bytes(b'\xef\xbb\xbfa,b\r\n\r\n"x\r\ny",2\r\n')
    assert read_csv(path, ("a",)) == [{"a": "x\r\ny", "b": "2"}]


def test_broken_csv_is_named_with_the_line_where_the_row_begins(tmp_path):
    path = tmp_path / "a.csv"
    for text, message in (
        ('a,b\n1,2\n"open,3\n4,5\n', "line 3 must begin a row of CSV with its quotes closed, got: unexpected end"),
        ('a,b\n"1"x,2\n', "line 2 must begin a row of CSV with its quotes closed, got: ',' expected after"),
        (f"a,b\n1,{'x' * 131_073}\n", r"line 2 must begin a row .* got: field larger than field limit \(131072\)"),
        ('"a,b\n', "line 1 must begin a row of CSV"),
        ("a,b,a\n1,2,3\n", r"must have column 'a' once, got \['a', 'b', 'a'\]"),
        ("", r"must have columns \['a'\], got \[\]"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"read_csv: .*a\.csv {message}"):
            read_csv(path, ("a",))
    path.write_text("a,,\n1,2,3\n")
    assert read_csv(path, ("a",))[0]["a"] == "1"


def test_json_nested_too_deep_is_no_crash(tmp_path):
    path = tmp_path / "deep"
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"read_json: .*deep must be JSON"):
        read_json(path)
    with pytest.raises(ValueError, match="deep line 1 must be JSON"):
        list(read_json_lines(path))


def test_fields_say_what_was_wanted():
    with pytest.raises(ValueError, match="row 1: field 'caption' must be a text that is not empty, got None"):
        text_field({}, "caption", where="row 1")
    with pytest.raises(ValueError, match="got '  '"):
        text_field({"caption": "  "}, "caption", where="row 1")
    assert text_field({"caption": " two  blanks "}, "caption", where="row") == " two  blanks "
    assert int_field({"n": "-3"}, "n", where="row") == int_field({"n": -3}, "n", where="row") == -3
    for value in (True, "3.5", None, "x"):
        with pytest.raises(ValueError, match="row: field 'n' must be an integer, got"):
            int_field({"n": value}, "n", where="row")


def choice(name, texts=("right", "wrong"), right=0, image="a.png"):
    return Item(name, (ImageRef(image),), tuple(texts), right, type=name[0])


def test_a_dataset_refuses_double_ids_and_items_of_another_kind():
    with pytest.raises(ValueError, match="ids must be unique, got 'x' 2 times"):
        Dataset("d", "e", Rule(CHOICE), (choice("x"), choice("x")))
    for item in (choice("x", right=2), choice("x", texts=("one",)), Item("x", (ImageRef("a"),), ("a", "b"))):
        with pytest.raises(ValueError, match="item 'x' does not fit kind 'choice'"):
            Dataset("d", "e", Rule(CHOICE), (item,))
    with pytest.raises(ValueError, match="does not fit kind 'group': 1 images, 2 texts, right index 0"):
        Dataset("d", "e", Rule(GROUP), (choice("x"),))


def test_shards_are_disjoint_and_whole_and_limits_keep_the_types():
    items = tuple(choice(f"{'ab'[row >= 30]}{row}") for row in range(40))
    data = Dataset("d", "40 items", Rule(CHOICE), items)
    parts = [data.select(limit=20, shard=(k, 3)) for k in range(3)]
    ids = [item.id for part in parts for item in part.items]
    assert sorted(ids) == sorted(item.id for item in data.select(limit=20).items)
    assert sum(item.type == "b" for item in data.select(limit=20).items) == 5
    assert {part.fingerprint for part in parts} == {data.fingerprint}
    assert parts[0].edition == "40 items; 7 of 40, limit 20 spread evenly, shard 0 of 3"
    assert data.select() is data and data.select(limit=99) is data
    assert spread(3, 3) == [0, 1, 2]
    for shard in ((3, 3), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="shard: wanted"):
            data.select(shard=shard)
    with pytest.raises(ValueError, match="limit: wanted at least 1"):
        data.select(limit=0)


def test_the_fingerprint_knows_texts_boxes_and_the_right_answer():
    def mark(item):
        return Dataset("d", "e", Rule(CHOICE), (item,)).fingerprint

    base = choice("x")
    boxed = Item("x", (ImageRef("a.png", box=(0, 0, 2, 2)),), base.texts, 0, "x")
    marks = {mark(base), mark(choice("x", right=1)), mark(choice("x", ("right ", "wrong"))), mark(boxed)}
    assert len(marks) == 4
    assert mark(base) == mark(choice("x"))


def test_contradictions_are_found_and_noted():
    items = (
        choice("a", ("red", "blue")),
        choice("b", ("blue", "green")),
        choice("c", ("red", "pink"), image="other.png"),
    )
    assert contradictions(items) == ("a", "b")
    assert choice_notes(items, {}) == (
        "2 items share a pair that is right in one and wrong in another, e.g. a, b",
    )


def test_a_retrieval_set_is_cut_by_images_and_sharded_by_queries():
    images = tuple(ImageRef(f"{row}.png") for row in range(6))
    owner = tuple(row // 2 for row in range(12))
    data = RetrievalDataset("r", "6 images", images, tuple(f"t{row}" for row in range(12)), owner)
    assert len(data) == 18
    parts = [data.select(shard=(k, 4)) for k in range(4)]
    assert sorted(query for part in parts for query in part.queries) == sorted(data.queries)
    assert all(part.images == images and part.fingerprint == data.fingerprint for part in parts)
    half = data.select(limit=3)
    assert [ref.name for ref in half.images] == ["0.png", "2.png", "4.png"]
    assert half.texts == ("t0", "t1", "t4", "t5", "t8", "t9") and half.owner == (0, 0, 1, 1, 2, 2)
    assert half.fingerprint != data.fingerprint and "gallery cut to 3 images" in half.edition
    with pytest.raises(ValueError, match="owner must give each of 1 texts one of 2 images"):
        RetrievalDataset("r", "e", images[:2], ("t",), (0,))
    with pytest.raises(ValueError, match="ids must be unique"):
        RetrievalDataset("r", "e", (images[0], images[0]), ("t", "u"), (0, 1))


def test_image_references_compare_by_name_and_box(tmp_path):
    assert ImageRef("a", tmp_path) == ImageRef("a") and hash(ImageRef("a", tmp_path)) == hash(ImageRef("a"))
    assert ImageRef("a", box=(0, 0, 1, 1)) != ImageRef("a")
