"""What users do with an index: add, find, replace, delete, describe."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

import engine as peaksim
from engine.features import RegionPlan
from engine.images import ImageError
from engine.retrieval.adding import Batch
from engine.retrieval.index import Index
from engine.retrieval.results import AddReport
from engine.scorers.max_sim import MaxSim
from tests.fake_encoder import PALETTE
from tests.index_cases import SPACE, engine, images, index_at, names, texts

COLOURS = list(PALETTE)


@pytest.fixture
def index(tmp_path) -> Index:
    return index_at(tmp_path / "index")


@pytest.fixture
def pictures(tmp_path) -> dict[str, str]:
    """A picture file for each colour, and a broken one."""
    paths = {}
    for name, colour in PALETTE.items():
        paths[name] = str(tmp_path / f"{name}.png")
        Image.new("RGB", (24, 20), colour).save(paths[name])
    paths["broken"] = str(tmp_path / "broken.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    return paths


def test_pictures_are_found_by_texts(index, pictures):
    report = index.add([pictures[name] for name in COLOURS], ids=COLOURS)
    assert report == AddReport(added=4) and len(index) == 4 and "red" in index and "pink" not in index
    for name in COLOURS:
        for scorer in ("sgi", "max_sim", "global"):
            assert index.search(f"a {name} thing", 1, scorer=scorer)[0][0].id == name
    found = index.search(["red", "blue"], 2)
    assert [hits[0].id for hits in found] == ["red", "blue"] and all(len(hits) == 2 for hits in found)
    again = Index.open(index.path, model=engine())
    assert again.search(["red", "blue"], 2) == found
    # As many hits as there are images, and never more.
    assert sorted(hit.id for hit in index.search("red", 50)[0]) == sorted(COLOURS)


def test_an_empty_index_finds_nothing(index):
    for candidates in ("auto", None, 5):
        assert index.search(["red", "blue"], 3, candidates=candidates) == [[], []]
    assert index.search(texts(2), scorer=MaxSim(direction="symmetric")) == [[], []]
    assert len(index) == 0 and list(index.ids()) == [] and index.verify() == [] and index.compact() == 0
    index.add(images(["x"]))
    index.delete(["x"])
    assert index.search("red", 3) == [[]]
    index.compact()
    assert index.stats().segments == 0 and index.search("red", 3) == [[]]


def test_paths_are_ids_unless_others_are_given(index, pictures):
    index.add([pictures["red"]])
    assert list(index.ids()) == [pictures["red"]]
    with pytest.raises(ValueError, match="pictures that are no files need ids="):
        index.add([Image.new("RGB", (8, 8))])
    with pytest.raises(ValueError, match="features without ids need ids="):
        index.add(replace(images(["x"]), ids=None))
    with pytest.raises(ValueError, match="ids must name each of 2 images, got 1"):
        index.add(images(["x", "y"]), ids=["x"])


def test_any_string_is_an_id(index):
    strange = ["", "a\nb", "名前", "-1", "0", "a" * 5000, "/etc/passwd", "\udcef.png", "'; drop table"][1:]
    index.add(images(strange))
    assert list(Index.open(index.path).ids()) == strange
    index.delete([strange[2]])
    assert list(index.ids()) == strange[:2] + strange[3:]


def test_ids_that_are_there_are_refused_passed_over_or_replaced(index):
    index.add(images(names(0, 6)), metadata={"n": range(6)})
    fresh = images(names(4, 9), seed=1)
    with pytest.raises(ValueError, match="id 'picture 4é' is there already; update replaces it"):
        index.add(fresh)
    assert len(index) == 6
    assert index.add(fresh, existing="skip") == AddReport(added=3, skipped=2)
    assert list(index.ids()) == names(0, 9)
    assert index.add(fresh, existing="skip") == AddReport(skipped=5)
    assert index.add(images(names(4, 10), seed=2), existing="replace") == AddReport(added=6, replaced=5)
    assert list(index.ids()) == names(0, 10)
    rows = index.snapshot.find(names(0, 10))
    assert index.snapshot.metadata_of(rows).column("n").to_pylist() == [0, 1, 2, 3, 4, 5, None, None, None, None]
    wanted = torch.cat([images(names(0, 4)).embedding, images(names(4, 10), seed=2).embedding])
    assert torch.equal(index.snapshot.embedding(rows), wanted)


def test_a_stream_may_bring_an_id_again(index):
    stream = [images(["a", "b"]), images(["c"]), images(["b"], seed=3), images(["a"], seed=4)]
    with pytest.raises(ValueError, match="id 'b' is there already"):
        index.add(iter(stream))
    # What came before it stays.
    assert list(index.ids()) == ["a", "b", "c"]
    assert index.add(iter(stream), existing="replace") == AddReport(added=5, replaced=5)
    assert list(index.ids()) == ["c", "b", "a"]
    assert torch.equal(index.snapshot.embedding(index.snapshot.find(["b"])), images(["b"], seed=3).embedding)


def test_update_replaces_and_keeps_metadata_unless_it_is_given(index):
    index.add(images(names(0, 6)), metadata={"n": range(6), "tag": ["t"] * 6})
    index.update(images([names(0, 6)[2]], seed=5))
    index.update(images([names(0, 6)[3]], seed=5), metadata={"n": [33]})
    assert list(index.ids()) == [*names(0, 2), *names(4, 6), *names(2, 4)]
    rows = index.snapshot.find(names(2, 4))
    assert index.snapshot.metadata_of(rows).to_pylist() == [{"n": 2, "tag": "t"}, {"n": 33, "tag": "t"}]
    # A null that is given is a value; a column that was not there is added.
    index.update(images(names(2, 4), seed=6), metadata=[{"tag": None, "new": 1}, {"tag": "u", "new": 2}])
    found = index.snapshot.metadata_of(index.snapshot.find(names(2, 4))).to_pylist()
    assert found == [{"n": 2, "tag": None, "new": 1}, {"n": 33, "tag": "u", "new": 2}]
    with pytest.raises(KeyError, match="id 'nobody' is not there; nothing was changed"):
        index.update(images([names(0, 1)[0], "nobody"]))
    with pytest.raises(TypeError, match="update takes no iterator"):
        index.update(iter([images(["x"])]))


def test_deletes_are_all_or_nothing(index):
    index.add(images(names(0, 5)))
    with pytest.raises(KeyError, match="id 'nobody' is not there"):
        index.delete([names(0, 1)[0], "nobody"])
    assert len(index) == 5
    assert index.delete(names(1, 4)) == 3
    assert index.delete([]) == 0
    with pytest.raises(KeyError):
        index.delete(names(1, 2))
    assert list(index.ids()) == [names(0, 1)[0], names(4, 5)[0]]
    index.add(images(names(1, 2)))
    assert list(index.ids())[-1] == names(1, 2)[0]


def test_broken_pictures_are_named_and_shift_nothing(index, pictures):
    paths = [pictures[name] for name in ("red", "broken", "blue", "green")]
    with pytest.raises(ImageError, match=r"broken\.png"):
        index.add(paths, ids=["r", "x", "b", "g"], metadata={"n": [0, 1, 2, 3]})
    assert len(index) == 0
    with pytest.warns(UserWarning, match=r"1 of 4 images left out: .*broken\.png"):
        report = index.add(paths, ids=["r", "x", "b", "g"], metadata={"n": [0, 1, 2, 3]}, on_error="skip")
    (failure,) = report.failures
    assert report.added == 3 and failure.id == "x" and failure.path == pictures["broken"] and failure.reason
    rows = index.snapshot.find(["r", "b", "g", "x"])
    assert index.snapshot.metadata_of(rows[:3]).column("n").to_pylist() == [0, 2, 3] and rows[3] == -1
    for name in ("red", "blue", "green"):
        assert index.search(name, 1)[0][0].id == name[0]
    # One that cannot be read any more leaves the old one.
    heard: list = []
    index.update([pictures["broken"], pictures["grey"]], ids=["r", "b"], on_error=heard.append)
    assert [failure.id for failure in heard] == ["r"] and list(index.ids()) == ["r", "g", "b"]
    assert index.search("red", 1)[0][0].id == "r"
    report = index.add([pictures["broken"]], ids=["y"], on_error=heard.append)
    assert report.added == 0 and len(report.failures) == 1 and len(index) == 3


def test_streams_of_pictures_batches_and_features(index, pictures):
    done: list[tuple[int, int]] = []
    paths = (pictures[name] for name in COLOURS)
    index.add(paths, ids=iter(COLOURS), batch_size=3, progress=lambda n, total: done.append((n, total)))
    assert list(index.ids()) == COLOURS and done == [(3, 0), (4, 0)]
    index.add(iter([Batch([pictures["red"]], ["again"], {"n": [1]}), images(["f"]), Batch(images(["g"]))]))
    assert list(index.ids()) == [*COLOURS, "again", "f", "g"]
    assert index.snapshot.metadata().column("n").to_pylist() == [None] * 4 + [1, None, None]
    with pytest.raises(ValueError, match="got fewer ids than images"):
        index.add(iter([pictures["red"]]), ids=iter([]))
    with pytest.raises(ValueError, match="got more ids than images"):
        index.add(iter([pictures["red"]]), ids=iter(["p", "q"]))
    with pytest.raises(TypeError, match="metadata of a stream comes in its batches"):
        index.add(iter([pictures["red"]]), metadata={"n": [1]})
    with pytest.raises(TypeError, match="bring their own ids"):
        index.add(iter([images(["z"])]), ids=["y"])
    index.add([Batch([pictures["red"]], ["list"])])
    index.add(Batch([pictures["red"]], ["alone"]))
    assert {"list", "alone"} <= set(index.ids())


def test_a_stream_that_replaces_an_id_twice_keeps_its_columns(index):
    index.add(images(["a", "b"]), metadata={"n": [1, 2], "tag": ["x", "y"]})
    stream = [Batch(images(["a"], seed=1), metadata={"n": [5]}), Batch(images(["a"], seed=2)), images(["b"], seed=2)]
    index.add(iter(stream), existing="replace")
    found = index.snapshot.metadata_of(index.snapshot.find(["a", "b"])).to_pylist()
    assert found == [{"n": 5, "tag": "x"}, {"n": 2, "tag": "y"}] and len(index) == 2
    assert torch.equal(index.snapshot.embedding(index.snapshot.find(["a"])), images(["a"], seed=2).embedding)


def test_half_a_character_is_no_id_that_is_there(index):
    index.add(images(["a"]))
    assert "\ud800" not in index and "a" in index and 3 not in index


def test_queries_may_be_any_list_of_texts_or_one_stream(index, pictures):
    index.add([pictures[name] for name in COLOURS], ids=COLOURS)
    wanted = index.search(["red", "blue"], 2)
    asked = ["red", "blue"]
    for queries in (
        (word for word in asked), np.array(asked), np.array(asked, dtype=object), pa.array(asked),
        pa.chunked_array([asked]), dict.fromkeys(asked).keys(),
    ):  # fmt: skip
        assert index.search(queries, 2) == wanted
    assert index.search(np.array("red"), 2) == wanted[:1]
    shown = [pictures["red"], pictures["blue"]]
    assert index.search(iter(shown), 2, scorer="global") == index.search(shown, 2, scorer="global")


def test_interrupted_encoding_loses_the_batch_in_flight_alone(tmp_path, pictures, monkeypatch):
    index = index_at(tmp_path / "index", vectors=("patches",), segment_bytes=1 << 20)
    encoder = index.engine.encoder
    left = [encoder.encode_pixels] * 2

    def encode(pixels, **options):
        if not left:
            raise KeyboardInterrupt
        return left.pop()(pixels, **options)

    monkeypatch.setattr(encoder, "encode_pixels", encode)
    with pytest.raises(KeyboardInterrupt):
        index.add([pictures["red"]] * 6, ids=list("abcdef"), batch_size=2)
    assert list(Index.open(tmp_path / "index").ids()) == list("abcd") and index.verify() == []


def test_what_was_encoded_before_an_interruption_stays(tmp_path):
    index = index_at(tmp_path, segment_bytes=1 << 20)

    def stream():
        yield images(names(0, 3))
        yield images(names(3, 5))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index.add(stream())
    assert list(Index.open(tmp_path).ids()) == names(0, 5) and index.verify() == []


def test_slow_work_is_committed_before_a_segment_is_full(tmp_path, pictures, monkeypatch):
    index = index_at(tmp_path / "index", segment_bytes=1 << 20)
    monkeypatch.setattr("engine.retrieval.adding.COMMIT_S", 0.0)
    index.add([pictures[name] for name in COLOURS], ids=COLOURS, batch_size=2)
    assert [entry.rows for entry in index.snapshot.manifest.segments] == [2, 2]
    monkeypatch.setattr("engine.retrieval.adding.COMMIT_S", 300.0)
    index.add(iter([images(["a"]), images(["b"])]))
    assert [entry.rows for entry in index.snapshot.manifest.segments] == [2, 2, 2]
    index.compact()
    assert [entry.rows for entry in index.snapshot.manifest.segments] == [6]


def test_metadata_keeps_rows_and_types(index):
    index.add(images(names(0, 3)), metadata=[{"year": 2020, "tag": "cat"}, {"year": 2021}, {"tag": "dog"}])
    index.add(images(names(3, 4)))
    index.add(images(names(4, 6)), metadata=pa.table({"score": [0.5, 1.5], "year": pa.array([1, 2], pa.int8())}))
    table = index.snapshot.metadata()
    assert table.to_pydict() == {
        "year": [2020, 2021, None, None, 1, 2],
        "tag": ["cat", None, "dog", None, None, None],
        "score": [None, None, None, None, 0.5, 1.5],
    }
    assert index.stats().columns == {"year": "int64", "tag": "string", "score": "double"}
    index.delete([names(0, 3)[1]])
    index.compact()
    again = Index.open(index.path)
    assert again.snapshot.metadata(["year", "tag"]).to_pydict() == {
        "year": [2020, None, None, 1, 2], "tag": ["cat", "dog", None, None, None],
    }  # fmt: skip
    with pytest.raises(KeyError, match="metadata has no column 'size'; there are year, tag, score"):
        again.snapshot.metadata(["size"])


def test_compacting_keeps_rows_and_frees_space(index):
    index.add(images(names(0, 30)), metadata={"n": range(30)})
    index.delete(names(0, 30)[::3])
    before = index.search(texts(2), 50)
    older = Index.open(index.path, model=engine())
    segments = index.stats().segments
    assert index.compact() > 0
    stats = index.stats()
    assert stats.deleted == 0 and stats.images == 20 and stats.segments < segments
    assert index.search(texts(2), 50) == before and index.verify() == []
    assert index.snapshot.metadata().column("n").to_pylist() == [n for n in range(30) if n % 3]
    # A reader keeps what it had opened.
    assert older.stats().deleted == 10 and older.search(texts(2), 50, explain=True)[0][0].alignment
    assert older.snapshot.metadata().num_rows == 30
    assert older.reload().stats() == stats
    generation = stats.generation
    assert index.compact() == 0 and index.stats().generation == generation


def test_full_segments_without_deleted_rows_stay_when_others_are_compacted(tmp_path):
    index = index_at(tmp_path, segment_bytes=2500)
    index.add(images(names(0, 20)))
    index.delete([names(0, 20)[-1]])
    kept = index.snapshot.manifest.segments[0]
    index.compact()
    assert index.snapshot.manifest.segments[0] == kept and list(index.ids()) == names(0, 19)


def test_features_come_back_as_they_are_kept(index):
    from engine.retrieval.stored import features_of

    given = images(names(0, 12))
    index.add(given)
    rows = [7, 0, 11, 3, 3]
    found = features_of(index.snapshot, rows)
    wanted = given[rows]
    assert found.ids == wanted.ids and torch.equal(found.embedding, wanted.embedding)
    assert found.grid == (2, 3) and found.tap == "projected" and found.region_plan == given.region_plan
    assert torch.equal(found.sizes, wanted.sizes) and torch.equal(found.views, wanted.views)
    width = found.regions.shape[1]
    assert torch.equal(found.region_mask, wanted.region_mask[:, :width])
    mask = found.region_mask
    assert (found.regions[mask] - wanted.regions[:, :width][mask]).abs().max() < 0.01
    assert torch.equal(found.boxes[mask], wanted.boxes[:, :width][mask])
    assert (found.patches - wanted.patches).abs().max() < 0.01
    with pytest.raises(IndexError, match="rows must be 0 to 11, got 0 to 12"):
        features_of(index.snapshot, [0, 12])
    empty = index.snapshot.gathered("windows", [])
    assert len(empty.vectors) == 0 and empty.cu_seqlens.tolist() == [0]


def test_stats_say_what_is_there(index):
    index.add(images(names(0, 7), ragged=False))
    index.delete(names(0, 1))
    stats = index.stats()
    assert (stats.images, stats.deleted, stats.vectors) == (6, 1, {"windows": 28, "patches": 42})
    assert (stats.model, stats.fingerprint, stats.store, stats.ann) == ("fake", "fake-1", "int8", "auto")
    on_disk = sum(path.stat().st_size for path in index.path.rglob("*") if path.suffix in (".codes", ".parquet"))
    assert on_disk < stats.size_bytes < on_disk + 20_000
    assert index.recipe.plan == SPACE.needs().regions and index.needs().tap == "projected"


def test_the_embedded_model_and_its_head(tmp_path):
    index = peaksim.Index.create(tmp_path, model="scenes", vectors=("windows", "head"))
    assert index.recipe.plan == RegionPlan(mode="windows")
    colours = ["red", "blue", "green"]
    index.add([Image.new("RGB", (96, 96), colour) for colour in colours], ids=colours)
    assert index.stats().vectors == {"windows": 3 * 35, "head": 3 * 36}
    (hits,) = index.search("a blue square", 2, scorer="max_sim_head", explain=True)
    assert hits[0].id == "blue" and hits[0].margin > 0
    assert {match.text for match in hits[0].alignment} == {"a", "blue", "square"}
    for scorer in ("sgi", "peakpatch", "global"):
        assert index.search("a blue square", 1, scorer=scorer)[0][0].id == "blue"
    asking = index.engine.encode_images([Image.new("RGB", (96, 96), "green")], scorer=index.needs())
    for scorer in ("sgi", "max_sim_head", "global"):
        assert index.search(asking, 1, scorer=scorer)[0][0].id == "green"
    head = index.recipe.head()
    with pytest.raises(ValueError, match="a head must be given by its file"):
        Index.create(tmp_path / "x", vectors=(peaksim.engine.get_scorer("max_sim_head").__class__(head=head),))
    with torch.no_grad():
        head.gate.bias += 1
    try:
        with pytest.raises(ValueError, match="keeps vectors of the head 'that was shipped' as it was then"):
            index.search("blue", scorer="max_sim_head")
    finally:
        with torch.no_grad():
            head.gate.bias -= 1


def test_a_list_is_checked_before_anything_is_encoded(index, pictures):
    index.add([pictures["red"]], ids=["red"])
    index.engine.encoder.calls.clear()
    with pytest.raises(ValueError, match="id 'red' is there already"):
        index.add([pictures["blue"], pictures["red"]], ids=["blue", "red"])
    assert index.engine.encoder.calls == []
    # Resuming: what is there is not encoded again.
    index.add([pictures["blue"], pictures["red"]], ids=["blue", "red"], existing="skip")
    # The picture, and its windows, which look all the same.
    assert index.engine.encoder.calls == [1, 1] and index.snapshot.rows == 2
