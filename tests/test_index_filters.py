"""Conditions on metadata: what they mean, and that they reach nothing else."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import engine
from engine.features import ImageFeatures
from engine.retrieval.filters import Filter, rows_where
from engine.retrieval.index import Index
from tests.fake_encoder import WIDTH, FakeEncoder
from tests.index_cases import images, index_at
from tests.test_index_candidates import clusters

TABLE = pa.table(
    {
        "year": [2019, 2021, None, 2022],
        "Tag": ["cat", "cat", "dog", "it's"],
        "size": [{"w": 1}, {"w": 2}, {"w": 3}, None],
        "words": [["x"], ["y"], [], None],
        "day": [datetime.date(2020, 1, 1)] * 3 + [datetime.date(2024, 2, 29)],
        "odd name": [1.5, float("nan"), None, -1.0],
    }
)
MEANT = {
    "year > 2020 and tag = 'cat'": "0100",
    "YEAR between 2020 and 2030": "0101",
    "year is null or year = 2019": "1010",
    "not tag = 'cat'": "0011",
    "tag in ('dog', 'bird')": "0010",
    "tag ilike 'C%' and year % 2 = 1": "1100",
    "tag = 'it''s'": "0001",
    "size.w >= 2": "0110",
    "list_contains(words, 'x') or words[1] = 'y'": "1100",
    "day >= date '2024-01-01'": "0001",
    "year(day) = 2020 and cast(year as double) / 2 > 1009.6": "0100",
    "\"odd name\" > 0 or isnan(\"odd name\")": "1100",
    "case when tag = 'dog' then true else false end": "0010",
    "coalesce(year, 0) = 0 -- a remark": "0010",
    "regexp_matches(Tag, '^c.t$')": "1100",
    "true": "1111",
    "null": "0000",
    "1 = 2": "0000",
}


@pytest.mark.parametrize("where", MEANT)
def test_conditions_mean_what_they_say(where: str):
    found = Filter.parse(where, TABLE.column_names).mask(TABLE)
    assert found.dtype == bool and "".join("01"[int(kept)] for kept in found) == MEANT[where]


@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc")), max_size=20), st.integers(0, 5))
def test_rows_keep_their_order(rows: list[tuple[int, str]], least: int):
    numbers, words = pa.array([n for n, _ in rows], pa.int64()), pa.array([s for _, s in rows], pa.string())
    table = pa.table({"n": numbers, "s": words})
    found = Filter.parse(f"n >= {least} and s <> 'b'", table.column_names).mask(table)
    assert found.tolist() == [n >= least and s != "b" for n, s in rows]


def test_only_the_columns_that_are_named_are_read():
    assert Filter.parse("YEAR > 1 and size.w = 2 or year < 0", TABLE.column_names).columns == ("year", "size")


WRONG = {
    "": "must hold a condition",
    "year >": r"must be one SQL condition, got 'year >' \(syntax error",
    "yaer > 3": "there is no column 'yaer', the metadata has year, Tag, size",
    'tag = "cat"': "there is no column 'cat'.*'single quotes'",
    "year": "must be true or false for each row, 'year' is BIGINT",
    "tag || 'x'": "is VARCHAR",
    "year > 'abc'": "Could not convert string 'abc'.*in \"year > 'abc'\"",
    "size.h = 1": "where: .*h",
    "year = '\ud800'": "must be whole characters",
    "random() > 0.5": "random is no function for conditions; there are abs",
}


@pytest.mark.parametrize("where", WRONG)
def test_errors_name_the_column_or_the_place(where: str):
    with pytest.raises(ValueError, match=f"where: .*{WRONG[where]}" if where != "size.h = 1" else WRONG[where]):
        Filter.parse(where, TABLE.column_names).mask(TABLE)


def test_what_is_no_text_is_refused():
    with pytest.raises(TypeError, match="where: must be a string, got int"):
        Filter.parse(3, ["year"])  # type: ignore[arg-type]


# Each would read a file, write one, change a setting, run a statement or look past the row.
ATTACKS = (
    "exists(select 1 from read_csv('{file}'))",
    "year > (select count(*) from read_text('{file}'))",
    "(select true from '{file}')",
    "read_csv('{file}')",
    "read_text('{file}') = 'x'",
    "getenv('HOME') = 'x'",
    "current_setting('home_directory') = ''",
    "true; attach '{file}' as other",
    "true; copy (select 1) to '{out}'",
    "copy metadata to '{out}'",
    "attach '{out}'",
    "install httpfs",
    "load httpfs",
    "pragma database_list",
    "set enable_external_access = true",
    "true) from metadata; attach '{out}' as other; select (true",
    "true) from metadata; copy metadata to '{out}'; select (true",
    "true) as kept from read_csv('{file}') where (true",
    "true) as kept from '{file}' --",
    "true) union all select (true",
    "true) as kept, (true",
    "true) as kept from metadata limit 1 --",
    "true) as kept from metadata order by random() --",
    "true) as kept from metadata, range(1000000000) --",
    "year in (select 1)",
    "year > all(select 1)",
    "count(*) > 1",
    "row_number() over () > 1",
    "*",
    "columns('y.*') > 3",
    "metadata.year > 1",
    "duckdb_settings.name = 'x'",
    "#1 = 2",
    "year = ?",
    "year = $1",
    "list_transform([1], x -> x + 1) = [2]",
    "unnest([true])",
    "query('select 1') = 1",
    "nextval('a') = 1",
    "error('x')",
    "year > 2020 /*",
    "main.read_csv('{file}') is null",
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_but_one_condition_is_let_through(attack: str, tmp_path: Path):
    file, out = tmp_path / "secret.csv", tmp_path / "out.csv"
    file.write_text("a\n1\n")
    with pytest.raises(ValueError, match="where: "):
        Filter.parse(attack.format(file=file, out=out), TABLE.column_names).mask(TABLE)
    assert os.listdir(tmp_path) == ["secret.csv"]


def test_even_past_the_parser_files_cannot_be_reached(tmp_path: Path):
    file = tmp_path / "secret.csv"
    file.write_text("a\n1\n")
    for attack in (
        f"exists(select 1 from read_csv('{file}'))",
        f"exists(select 1 from '{file}')",
        f"true) as kept from metadata; copy metadata to '{tmp_path}/out.csv'; select (true",
        "true) as kept from metadata; set enable_external_access = true; select (true",
    ):
        with pytest.raises(ValueError, match="where: "):
            Filter(attack, ("year",)).mask(TABLE)
    assert os.listdir(tmp_path) == ["secret.csv"]


def test_python_variables_are_no_tables():
    secret = pa.table({"a": [1]})
    assert secret.num_rows == 1
    with pytest.raises(ValueError, match="where: "):
        Filter("exists(select 1 from secret)", ("year",)).mask(TABLE)


def test_an_index_knows_ids_and_rows_without_metadata(tmp_path: Path):
    index = Index.create(tmp_path, model=engine.Engine(FakeEncoder()), vectors=())
    vectors = functional.normalize(clusters(6, WIDTH), dim=1)
    index.add(ImageFeatures(vectors[:2], ids=("a", "b")))
    assert rows_where(index.snapshot, "id = 'b'").tolist() == [False, True]
    index.add(ImageFeatures(vectors[2:4], ids=("c", "d")), metadata={"n": [1, 2]})
    index.add(ImageFeatures(vectors[4:], ids=("e", "f")), metadata=[{"n": 3, "s": "x"}, {}])
    index.delete(["d"])
    assert rows_where(index.snapshot, "n >= 2").tolist() == [False, False, False, True, True, False]
    assert rows_where(index.snapshot, "n is null and s is null").nonzero()[0].tolist() == [0, 1, 5]
    query = ImageFeatures(vectors[3:4])
    assert [hit.id for hit in index.search(query, scorer="global", where="n >= 2")[0]] == ["e"]
    found = index.search(query, scorer="global", where="id in ('a', 'c') or s = 'x'")[0]
    assert {hit.id for hit in found} == set("ace")
    assert index.search(query, scorer="global", where="false") == [[]]
    with pytest.raises(ValueError, match="there is no column 'm', the metadata has id, n, s"):
        index.search(query, scorer="global", where="m = 1")


def test_a_condition_is_remembered_for_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    index = Index.create(tmp_path, model=engine.Engine(FakeEncoder()), vectors=())
    index.add(ImageFeatures(clusters(3, WIDTH), ids=("a", "b", "c")), metadata={"n": [1, 2, 3]})
    before = index.snapshot
    assert rows_where(before, "n > 1").tolist() == [False, True, True]
    index.add(ImageFeatures(clusters(1, WIDTH, seed=1), ids=("d",)), metadata={"n": [4]})
    assert rows_where(index.snapshot, "n > 1").tolist() == [False, True, True, True]
    for number in range(20):
        assert rows_where(before, f"n > {number}").sum() == max(0, 3 - number)
    monkeypatch.setattr(Filter, "parse", None)
    assert rows_where(before, "n > 19").tolist() == [False, False, False]


def test_values_of_every_kind_are_compared(tmp_path: Path):
    table = pa.table({"a": np.arange(3, dtype=np.uint8), "b": pa.array(["x", "y", "x"]).dictionary_encode()})
    assert Filter.parse("a > 0 and b = 'x'", ["a", "b"]).mask(table).tolist() == [False, False, True]


def test_ids_of_other_bytes_do_not_stop_conditions_on_ids(tmp_path):
    index = index_at(tmp_path / "index")
    index.add(images(["a.png", "b\udcff.png"]))
    assert rows_where(index.snapshot, "id = 'a.png'").tolist() == [True, False]
    assert rows_where(index.snapshot, r"id = 'b\udcff.png'").tolist() == [False, True]


def test_values_in_other_layouts_are_kept_and_asked_for(tmp_path: Path):
    index = index_at(tmp_path / "index")
    runs = pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"])
    views = pa.array(["x", "y", "z"], pa.string_view())
    index.add(images(["1", "2", "3"]), metadata={"run": runs, "view": views, "half": np.array([0, 1, 2], np.float16)})
    for where, wanted in (("run = 'a'", 2), ("view = 'z'", 1), ("half >= 1", 2)):
        assert rows_where(index.snapshot, where).sum() == wanted, where


def test_values_that_no_condition_can_read_are_named(tmp_path: Path):
    index = index_at(tmp_path / "index")
    index.add(images(["1"]), metadata={"wide": pa.array([None], pa.decimal256(40, 0)), "n": [1]})
    with pytest.raises(ValueError, match="where: "):
        rows_where(index.snapshot, "wide = 1")
    assert rows_where(index.snapshot, "n = 1").all()


@pytest.mark.parametrize("metadata", [{}, [{}, {}], {"nothing": [None, None]}], ids=str)
def test_metadata_without_values_leaves_a_sound_index(metadata: Any, tmp_path: Path):
    index = index_at(tmp_path / "index")
    index.add(images(["1", "2"]), metadata=metadata)
    assert index.verify() == []
