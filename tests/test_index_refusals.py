"""What an index refuses, and what it says then."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from engine.features import RegionPlan
from engine.retrieval.index import Index
from engine.scorers.max_sim import MaxSim
from tests.index_cases import engine, images, index_at, names, texts


@pytest.fixture
def index(tmp_path) -> Index:
    return index_at(tmp_path / "index")


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (["a", "a"], ValueError, r"ids must be distinct, got 'a' twice \(row 1\)"),
        (["a", ""], ValueError, "ids must not be empty"),
        (["a", 3], TypeError, "ids must be strings, got int for row 1"),
        (["a", "\udcff\ud800"], ValueError, "ids must be text, got half a character"),
        ("ab", TypeError, "ids must be a list of strings, got str"),
    ],
)
def test_ids_that_are_none_are_refused(index, ids, error, message):
    with pytest.raises(error, match=message):
        index.add(images(["x", "y"]), ids=ids)
    assert len(index) == 0


def test_numbers_are_no_ids_of_pictures_either(index):
    with pytest.raises(TypeError, match="ids must be strings, got int for row 0"):
        index.add([Image.new("RGB", (4, 4))], ids=[1])
    assert len(index) == 0


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"year": [1]}, ValueError, "metadata must have one row for each of 2 images, got 1"),
        ({"year": ["old", "new"]}, ValueError, "metadata column 'year' must hold int64 as in the index, got string"),
        ({"year": [1.5, 2]}, ValueError, "metadata column 'year' must hold int64"),
        ({"Id": [1, 2]}, ValueError, "must not have a column 'Id'"),
        ([{}], ValueError, "one row for each of 2 images, got 1"),
        (7, TypeError, "an Arrow table, a mapping of columns or a list of mappings, got int"),
        ({"Year": [1, 2]}, ValueError, "must differ in more than case, got 'Year' beside 'year'"),
        ([{"tag": 1}, {"TAG": 2}], ValueError, "must differ in more than case, got 'TAG' beside 'tag'"),
        (pa.table([[1, 2], [3, 4]], names=["w", "w"]), ValueError, "must differ in more than case, got 'w' beside 'w'"),
        ({"tag": [1, "a"]}, ValueError, "column 'tag' must hold values of one type that Arrow has"),
        ({"tag": [object(), None]}, ValueError, "column 'tag' must hold values of one type that Arrow has"),
        ({"tag": ["a", "\udcff"]}, ValueError, "column 'tag' must hold values of one type that Arrow has"),
        ({"tag": [{}, {}]}, ValueError, "column 'tag' must be of a type that Parquet holds, got struct<>"),
        ({"tag": None}, TypeError, "column 'tag' must be a list with a value for each image, got NoneType"),
        ({"tag": "ab"}, TypeError, "column 'tag' must be a list with a value for each image, got str"),
        ({3: [1, 2]}, TypeError, "columns must have strings as names, got 3"),
        ({"tag": [1, 2], "year": [1]}, ValueError, "columns must be equally long, got {'tag': 2, 'year': 1}"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(index, metadata, error, message):
    index.add(images(["known"]), metadata={"year": [1]})
    with pytest.raises(error, match=message):
        index.add(images(["x", "y"]), metadata=metadata)
    assert list(index.ids()) == ["known"]


def test_numbers_that_are_none_are_refused_by_name(index):
    for part in ("embedding", "regions", "patches"):
        features = images(["good", "bad"])
        getattr(features, part)[1].view(-1)[3] = torch.nan
        with pytest.raises(ValueError, match=r"of 'bad' must be finite, got NaN or an infinity; it was not added"):
            index.add(features)
    assert len(index) == 0 and index.verify() == []
    features = images(["padded"], regions=4)
    features.regions[~features.region_mask] = torch.nan
    index.add(features)
    asking = texts(2)
    asking.segments[1, 0] = torch.inf
    with pytest.raises(ValueError, match="query 1 must be finite"):
        index.search(asking)
    asking = texts(2)
    asking.embedding[0, 0] = torch.nan
    with pytest.raises(ValueError, match="query 0 must be finite"):
        index.search(asking, scorer="global")
    # What a mask leaves out may hold anything.
    asking = texts(2)
    asking.segments[1, -1] = torch.nan
    assert len(index.search(asking)[1]) == 1


def test_features_that_do_not_fit_are_refused(index):
    good = images(["x"])
    for changes, message in (
        ({"fingerprint": "other-1"}, "must come from the encoder fake-1, got those of other-1"),
        ({"regions": None, "region_mask": None, "boxes": None}, "needs windows, which the features do not hold"),
        ({"patches": None}, "needs patches, which the features do not hold"),
        ({"region_plan": str(RegionPlan())}, "windows must follow the plan .*native.*, got .*rescaled"),
        ({"tap": "hidden"}, "patches must come from tap 'projected', got 'hidden'"),
        ({"region_mask": torch.zeros(1, 4, dtype=torch.bool)}, "every image needs windows, got none for 'x'"),
        ({"embedding": torch.ones(1, 3)}, "embeddings must have 24 numbers, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            index.add(replace(good, **changes))
    assert len(index) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"k": 1.0}, TypeError, "k must be an integer, got float"),
        ({"candidates": 0}, ValueError, "candidates must be at least 1"),
        ({"scorer": "best"}, ValueError, "scorer: must be one of"),
        ({"queries": []}, ValueError, "at least one query"),
        ({"queries": iter(())}, ValueError, "at least one query"),
        ({"queries": 3}, TypeError, "queries must be texts, pictures or features, .* got int"),
        ({"queries": {"a": "red"}}, TypeError, "queries must be texts, .* got dict"),
        ({"queries": np.array([["red"], ["blue"]])}, TypeError, r"got an array of shape \(2, 1\)"),
        ({"queries": ["red", Image.new("RGB", (4, 4))]}, TypeError, "all texts or all pictures"),
        ({"scorer": "max_sim_head"}, ValueError, "max_sim_head"),
    ],
)
def test_searches_that_make_no_sense_are_refused(index, arguments, error, message):
    index.add(images(names(0, 3)))
    with pytest.raises(error, match=message):
        index.search(**{"queries": "red", **arguments})


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_made_is_said(tmp_path, monkeypatch, number):
    Index.create(tmp_path / "missing" / "parents" / "x", model=engine(), vectors=())
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"^Index: .*file.* must be a folder that is there or can be made, got"):
            Index.create(place, model=engine(), vectors=())

    def refused(path, *args, **options):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(OSError, match=rf"^Index: .*y must be a folder .* \({os.strerror(number)}\)$"):
        Index.create(tmp_path / "y", model=engine(), vectors=())


def test_a_name_that_no_folder_can_have_is_said():
    with pytest.raises(ValueError, match=r"^Index: the folder's name must hold no null character, got 'a\\x00b'$"):
        Index.create("a\0b", model=engine(), vectors=())


def test_an_encoder_that_cannot_give_the_vectors_is_refused_at_once(tmp_path):
    held = engine()
    with pytest.raises(ValueError, match=r"must give windows, got: .*mode='windows' needs .*SGI\(crops='native'\)"):
        Index.create(tmp_path / "x", model=held)
    assert not (tmp_path / "x").exists()
    Index.create(tmp_path / "x", model=held, vectors=("patches",))


def test_options_that_make_no_sense_are_refused(tmp_path):
    for options, error, message in (
        ({"vectors": ("stars",)}, ValueError, "vectors must be one of 'windows', 'patches', 'head', got 'stars'"),
        ({"vectors": "windows"}, TypeError, "vectors must be a list"),
        ({"vectors": ("patches", MaxSim())}, ValueError, "each kind once, got 'patches' twice"),
        ({"vectors": ("global",)}, ValueError, "vectors must be one of"),
        ({"vectors": (MaxSim(tap="hidden"),)}, ValueError, "a tap in the text's space, fake gives 'hidden'"),
        ({"store": "int4"}, ValueError, "store must be one of 'int8', 'bf16', got 'int4'"),
        ({"ann": ""}, ValueError, "ann must be 'auto' or a FAISS factory string"),
        ({"ann": 3}, TypeError, "ann must be 'auto' or a FAISS factory string, got int"),
        ({"ann": "IDMap,Flat"}, ValueError, "without IDMap, rows are numbered, got 'IDMap,Flat'"),
        ({"segment_bytes": 0}, ValueError, "segment_bytes must be a whole number from 1, got 0"),
    ):
        with pytest.raises(error, match=message):
            Index.create(tmp_path / "x", model=engine(), **options)
    with pytest.raises(TypeError, match="model must be a name or an Engine, got int"):
        Index.create(tmp_path / "x", model=3)
    assert not (tmp_path / "x").exists()
