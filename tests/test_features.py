"""Features: what they refuse, rows of them, several in one, files."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.features import ImageFeatures, TextFeatures
from tests.scorer_cases import D, make_images, make_texts, unit


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def same(a: ImageFeatures | TextFeatures, b: ImageFeatures | TextFeatures) -> bool:
    """Whether both hold the same values, dtypes and kinds in every field."""
    assert type(a) is type(b)
    for item in fields(a):
        x, y = getattr(a, item.name), getattr(b, item.name)
        if item.name == "hidden":
            if list(x) != list(y) or not all(torch.equal(x[k], y[k]) for k in x):
                return False
        elif isinstance(x, torch.Tensor):
            if y is None or x.dtype != y.dtype or not torch.equal(x, y):
                return False
        elif x != y:
            return False
    return True


def full_images(n: int = 3) -> ImageFeatures:
    ids = tuple(f"image {i}" for i in range(n))
    return replace(make_images(n), hidden={2: unit(n, 7), 11: unit(n, 7)}, ids=ids, fingerprint="f")


def full_texts(n: int = 4, tokens: int = 5) -> TextFeatures:
    return replace(
        make_texts(n, tokens),
        attention_mask=torch.ones(n, tokens).bool(),
        end=torch.arange(n),
        truncated=torch.arange(n) % 2 == 0,
        hidden={3: unit(n, tokens)},
        segmenter="rules",
    )


BOTH = pytest.mark.parametrize("make", [full_images, full_texts])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding": torch.ones(3)}, r"embedding must be float32 of shape \(B, D\), got float32 \(3,\)"),
        ({"embedding": torch.ones(3, D).int()}, r"embedding must be .* got int32 \(3, 8\)"),
        ({"embedding": torch.ones(3, D).half()}, r"embedding must be float32 .* got float16 \(3, 8\)"),
        ({"embedding": torch.ones(3, D).double()}, r"embedding must be float32 .* got float64 \(3, 8\)"),
        ({"embedding": [[1.0]]}, "embedding must be .* got list"),
        ({"ids": "abc"}, "ids must be a tuple of strings, one for each row, got 'abc'"),
        ({"ids": ["a", "b", "c"]}, "ids must be a tuple of strings"),
        ({"ids": ("a", "b", 3)}, "ids must be a tuple of strings"),
        ({"grid": (2, 3, 1)}, r"grid must be two positive integers .* got \(2, 3, 1\)"),
        ({"grid": (-2, -3)}, r"grid must be two positive integers .* got \(-2, -3\)"),
        ({"grid": (2.0, 3)}, r"grid must be two positive integers .* got \(2.0, 3\)"),
        ({"aligned": 1}, "aligned must be True or False, got 1"),
        ({"region_plan": None}, "region_plan must be a string, got NoneType"),
        ({"sizes": torch.ones(3, 3).int()}, r"sizes must be integers of shape \(B, 2\), got int32 \(3, 3\)"),
        ({"sizes": torch.ones(3, 2)}, r"sizes must be integers of shape \(B, 2\), got float32 \(3, 2\)"),
        ({"views": torch.ones(3, 2).int()}, r"views must be integers of shape \(B, 4\)"),
        ({"boxes": torch.ones(3, 5, 4)}, r"boxes must be integers of shape \(B, R, 4\), got float32 \(3, 5, 4\)"),
        ({"patches": 3}, "patches must be a tensor, got int"),
        ({"hidden": 3}, "hidden must be a mapping of layers to tensors, got int"),
        ({"ids": ("a",)}, "ids must have one row for each of 3 embeddings, got 1"),
        ({"hidden": {4: torch.ones(2, 7, D)}}, r"hidden\[4\] must have one row for each of 3 embeddings, got 2"),
        ({"sizes": torch.tensor(3)}, "sizes must have one row for each of 3 embeddings, got a single number"),
        ({"patches": torch.ones(3, 6)}, r"patches must be .* three dimensions, got float32 \(3, 6\)"),
        ({"regions": torch.ones(3, 5, D, 1)}, r"regions must be .* three dimensions, got float32 \(3, 5, 8, 1\)"),
        ({"regions": torch.ones(3, 5, D).int()}, "regions must be a floating-point tensor .* got int32"),
        ({"boxes": torch.ones(3, 5, 2)}, r"boxes must be integers of shape \(B, R, 4\), got float32 \(3, 5, 2\)"),
        ({"boxes": torch.ones(3, 4, 4).int()}, r"region_mask must have the shape \(3, 4\) of boxes, got \(3, 5\)"),
        ({"patch_mask": torch.ones(3, 6)}, r"patch_mask must be a bool tensor .* got float32 \(3, 6\)"),
        ({"patch_mask": torch.ones(3, 6, 1).bool()}, r"patch_mask must be .* got bool \(3, 6, 1\)"),
        ({"patch_mask": torch.ones(3, 5).bool()}, r"patch_mask must have the shape \(3, 6\) of patches, got \(3, 5\)"),
        ({"grid": (2, 2)}, r"rows \* columns = 4 vectors an image, got 6"),
    ],
)
def test_images_that_do_not_fit_together_are_refused(changes, message: str):
    with pytest.raises(ValueError, match=f"ImageFeatures: .*{message}"):
        replace(full_images(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.ones(4, D)}, "tokens must be .* three dimensions"),
        ({"segments": torch.ones(4, D)}, "segments must be .* three dimensions"),
        ({"token_mask": torch.ones(4, 6).bool()}, r"token_mask must have the shape \(4, 5\) of tokens, got \(4, 6\)"),
        ({"attention_mask": torch.ones(4, 5)}, "attention_mask must be a bool tensor"),
        ({"segment_mask": torch.ones(4, 2).bool()}, r"segment_mask must have the shape \(4, 3\) of segments"),
        ({"segment_negated": torch.ones(4, 2).bool()}, r"segment_negated must have the shape \(4, 3\) of segments"),
        ({"segment_mask": None}, "segment_texts of row 1 must name 3 to 3 segments .has no segment_mask.* got 1"),
        ({"segment_texts": (("a",),) * 4}, "segment_texts of row 0 must name 3 to 3 segments .* got 1"),
        ({"segment_texts": (("a",) * 4,) * 4}, "segment_texts of row 0 must name 3 to 3 segments .* got 4"),
        ({"segment_texts": ("abc",) * 4}, "segment_texts must be a tuple of tuples of strings"),
        ({"token_texts": ((1,),) * 4}, "token_texts must be a tuple of tuples of strings"),
        ({"texts": "abcd"}, "texts must be a tuple of strings, one for each row, got 'abcd'"),
        ({"end": torch.ones(4)}, r"end must be integers of shape \(B,\), got float32 \(4,\)"),
        ({"truncated": torch.ones(4)}, r"truncated must be bool of shape \(B,\), got float32 \(4,\)"),
        ({"texts": ("a", "b")}, "texts must have one row for each of 4 embeddings, got 2"),
    ],
)
def test_texts_that_do_not_fit_together_are_refused(changes, message: str):
    with pytest.raises(ValueError, match=f"TextFeatures: {message}"):
        replace(full_texts(), **changes)


@BOTH
def test_rows_are_chosen_in_every_way(make):
    features = make()
    n = len(features)
    last = features[n - 1]
    assert len(last) == 1 and torch.equal(last.embedding, features.embedding[-1:])
    for row in (-1, np.int64(n - 1), torch.tensor(n - 1), [n - 1], np.array([-1]), slice(n - 1, None)):
        assert same(features[row], last)
    mask = torch.arange(n) != 1
    for rows in ([0, *range(2, n)], mask, mask.tolist(), mask.numpy()):
        assert same(features[rows], make_rows(features, [0, *range(2, n)]))
    assert same(features[::-1], features[list(range(n))[::-1]])
    assert same(features[[1, 1]], make_rows(features, [1, 1]))
    assert len(features[[]]) == 0 and len(features[torch.zeros(n).bool()]) == 0


def make_rows(features, rows: list[int]):
    return type(features).cat([features[row] for row in rows])


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (3, IndexError, "row 3 is out of range for 3 rows"),
        (-4, IndexError, "row -4 is out of range for 3 rows"),
        ([0, 5], IndexError, "row 5 is out of range for 3 rows"),
        ([True, False], IndexError, "a bool selection must have 3 entries, one for each row, got 2"),
        (torch.ones(4).bool(), IndexError, "must have 3 entries, one for each row, got 4"),
        (True, TypeError, "a row must be an integer, got a bool"),
        (np.True_, TypeError, "a row must be an integer, got a bool"),
        (1.0, TypeError, "'float' object cannot be interpreted as an integer"),
        ([0.5], TypeError, r"rows must be a slice, integers or one bool for each row, got float32 \(1,\)"),
        ([[0, 1]], TypeError, r"rows must be .* got int64 \(1, 2\)"),
    ],
)
def test_rows_that_are_not_there_are_refused(rows, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        full_images()[rows]


@BOTH
def test_to_moves_every_tensor(make):
    moved = make().to("meta")
    held = [getattr(moved, item.name) for item in fields(moved)] + list(moved.hidden.values())
    assert {value.device.type for value in held if isinstance(value, torch.Tensor)} == {"meta"}
    assert same(make_seeded(make).to("cpu"), make_seeded(make))


def make_seeded(make):
    torch.manual_seed(1)
    return make()


@BOTH
def test_parts_joined_are_the_whole(make):
    features = make()
    assert same(type(features).cat([features[:1], features[1:3], features[3:]]), features)
    assert same(type(features).cat([features]), features)


def test_ragged_regions_are_padded_and_masked():
    a, b = make_images(2, regions=5), replace(make_images(1, regions=2), region_mask=None)
    both = ImageFeatures.cat([b, a])
    assert both.region_mask.tolist() == [[True, True, False, False, False], [True] * 5, [True] * 4 + [False]]
    assert torch.equal(both.regions[0, :2], b.regions[0]) and not both.regions[0, 2:].any()
    assert torch.equal(both.boxes[0, :2], b.boxes[0]) and not both.boxes[0, 2:].any()
    assert both.boxes.dtype == torch.int32 and torch.equal(both.regions[1:], a.regions)
    assert both.grid == (2, 3)


def test_ragged_boxes_without_vectors_have_a_mask_too():
    parts = [ImageFeatures(unit(1), boxes=torch.ones(1, n, 4).int()) for n in (1, 2)]
    assert ImageFeatures.cat(parts).region_mask.tolist() == [[True, False], [True, True]]


def test_ragged_texts_are_padded_and_masked():
    a, b = full_texts(4, tokens=5)[:2], full_texts(4, tokens=7)[:3]
    both = TextFeatures.cat([a, b])
    for name in ("tokens", "token_mask", "attention_mask"):
        value = getattr(both, name)
        assert value.dtype == getattr(a, name).dtype
        assert torch.equal(value[:2, :5], getattr(a, name)) and torch.equal(value[2:], getattr(b, name))
        assert not value[:2, 5:].any()
    assert both.hidden[3].shape == (5, 7, D) and not both.hidden[3][:2, 5:].any()
    assert both.texts == a.texts + b.texts and both.end.tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("first", [True, False])
def test_no_mask_means_all_are_real(first: bool):
    masked, plain = make_images(2), replace(make_images(2), patch_mask=None, region_mask=None)
    both = ImageFeatures.cat([plain, masked] if first else [masked, plain])
    rows = slice(0, 2) if first else slice(2, 4)
    assert both.patch_mask[rows].all() and both.region_mask[rows].all()
    others = slice(2, 4) if first else slice(0, 2)
    assert torch.equal(both.patch_mask[others], masked.patch_mask)
    assert ImageFeatures.cat([plain, plain]).patch_mask is None


def test_parts_may_be_joined_in_any_grouping():
    cat = ImageFeatures.cat
    shapes = [(6, (2, 3)), (6, (3, 2)), (4, (2, 2)), (6, None)]
    made = [ImageFeatures(unit(1), patches=unit(1, p), grid=grid) for p, grid in shapes]
    whole = cat(made)
    assert whole.grid is None and whole.patch_mask.sum(1).tolist() == [6, 6, 4, 6]
    assert same(cat([cat(made[:2]), cat(made[2:])]), whole)
    assert same(cat([made[0], cat([cat(made[1:3]), made[3]])]), whole)
    assert cat([made[0], made[3]]).grid is None and cat([made[3], made[0]]).grid is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "g"}, r"must agree on fingerprint, got \['f', 'g'\]"),
        ({"tap": "value"}, "must agree on tap"),
        ({"aligned": False}, "must agree on aligned"),
        ({"region_plan": "own"}, "must agree on region_plan"),
        ({"hidden": {}}, "must hold hidden states of the same layers"),
        ({"sizes": None}, "sizes is present in some parts and missing in others"),
        ({"patches": None}, "patches is present in some parts and missing in others"),
        ({"embedding": torch.ones(3, 4)}, r"agree on the width of embedding, got \[\(4,\), \(8,\)\]"),
        ({"regions": torch.ones(3, 5, 4)}, r"agree on the width of regions, got \[\(4,\), \(8,\)\]"),
    ],
)
def test_parts_that_disagree_are_not_joined(changes, message: str):
    images = full_images()
    with pytest.raises(ValueError, match=f"ImageFeatures.cat: .*{message}"):
        ImageFeatures.cat([images, replace(images, **changes)])


def test_nothing_and_other_kinds_are_not_joined():
    with pytest.raises(ValueError, match=r"TextFeatures\.cat: needs at least one part, got none"):
        TextFeatures.cat([])
    with pytest.raises(TypeError, match=r"ImageFeatures\.cat: parts must be ImageFeatures, got TextFeatures"):
        ImageFeatures.cat([full_images(), full_texts()])
    with pytest.raises(ValueError, match="must agree on segment_template"):
        TextFeatures.cat([full_texts(), replace(full_texts(), segment_template="a {}")])


@BOTH
def test_files_give_back_what_was_saved(make, tmp_path: Path):
    features, path = make(), tmp_path / "a.safetensors"
    for saved in (features, features[:1], type(features)(features.embedding)):
        saved.save(path)
        assert same(type(features).load(str(path)), saved)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def header(**changes) -> dict[str, str]:
    plain = {"kind": "ImageFeatures", "format_version": 1} | changes
    return {"peaksim": json.dumps({name: value for name, value in plain.items() if value is not None})}


E, ONES = "embedding", torch.ones(2, D)
DAMAGED = {
    "no header": ({E: ONES}, None, r"was not written by peaksim \(no header\)"),
    "no kind": ({E: ONES}, header(kind=None), r"has a header that cannot be read \(KeyError\('kind'\)\)"),
    "no version": ({E: ONES}, header(format_version=None), r"cannot be read \(KeyError\('format_version'\)\)"),
    "odd version": ({E: ONES}, header(format_version=[1]), r"must state format_version as a whole .* got \[1\]"),
    "half a version": ({E: ONES}, header(format_version=1.5), "must state format_version as a whole .* got 1.5"),
    "version as text": ({E: ONES}, header(format_version="1"), "must state format_version as a whole .* got '1'"),
    "version as flag": ({E: ONES}, header(format_version=True), "must state format_version as a whole .* got True"),
    "no such version": ({E: ONES}, header(format_version=0), "must state format_version as a whole .* got 0"),
    "not finite": ({E: ONES / torch.arange(2)[:, None]}, header(), "is damaged .*embedding must be finite.* row 0"),
    "half precision": ({E: ONES.half()}, header(), r"is damaged .*embedding must be float32.* got float16"),
    "ids as one word": ({E: ONES}, header(ids="ab"), "is damaged .*ids must be a tuple of strings"),
    "no JSON": ({E: ONES}, {"peaksim": "{"}, r"header that cannot be read \(JSONDecodeError"),
    "no object": ({E: ONES}, {"peaksim": "3"}, r"header that cannot be read \(TypeError"),
    "other kind": ({E: ONES}, header(kind="TextFeatures"), "other features than ImageFeatures, got 'TextFeatures'"),
    "later format": ({E: ONES}, header(format_version=9), "has format 9, this version reads up to 1"),
    "extra tensor": ({E: ONES, "x": ONES}, header(), "has no place for: x"),
    "text as tensor": ({E: ONES, "tap": ONES}, header(), "has no place for: tap"),
    "extra entry": ({E: ONES}, header(tokens=3), "has no place for: tokens"),
    "tensor as entry": ({E: ONES}, header(patches=[1, 2]), "has no place for: patches"),
    "hidden twice": ({E: ONES}, header(hidden={}), "is damaged"),
    "no embedding": ({"patches": torch.ones(2, 3, D)}, header(), "is damaged .*missing .* 'embedding'"),
    "odd layer": ({E: ONES, "hidden.a": ONES}, header(), "is damaged .*invalid literal"),
    "wrong shape": ({E: ONES, "patches": ONES}, header(), "is damaged .*patches must be"),
    "wrong value": ({E: ONES}, header(ids=3), "is damaged"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_files_of_other_things_are_refused_by_name(case: str, tmp_path: Path):
    tensors, metadata, message = DAMAGED[case]
    path = tmp_path / "damaged.file"
    save_file({name: value.clone() for name, value in tensors.items()}, path, metadata=metadata)
    with pytest.raises(ValueError, match=rf"ImageFeatures\.load: .*damaged\.file .*{message}"):
        ImageFeatures.load(path)


@pytest.mark.parametrize("content", [b"", b"junk", b"\x89PNG\r\n" * 100])
def test_junk_is_refused_by_name(content: bytes, tmp_path: Path):
    path = tmp_path / "junk.file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"ImageFeatures\.load: .*junk\.file is not a whole safetensors file"):
        ImageFeatures.load(path)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_cut_files_are_refused_by_name(kept: float, tmp_path: Path):
    path = tmp_path / "cut.file"
    full_images().save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match=r"cut\.file is not a whole safetensors file"):
        ImageFeatures.load(path)


def test_a_missing_file_is_a_missing_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"none\.file"):
        TextFeatures.load(tmp_path / "none.file")


@BOTH
def test_features_are_saved_under_a_name(make):
    with pytest.raises(ValueError, match=r"Features\.save: path must name a file, got ''"):
        make().save("")


def test_features_print_shapes_and_no_numbers():
    images = ImageFeatures(torch.eye(2), grid=(1, 1), patches=torch.ones(2, 1, 3), ids=("a", "b"), fingerprint="f")
    assert repr(images) == (
        "ImageFeatures(2 rows: embedding (2, 2), patches (2, 1, 3), grid (1, 1), aligned False, 2 ids, fingerprint f)"
    )
    texts = TextFeatures(torch.eye(2), hidden={3: torch.ones(2, 1, 4)}, texts=("x", "y"))
    assert repr(texts) == "TextFeatures(2 rows: embedding (2, 2), hidden layers [3], 2 texts)"
