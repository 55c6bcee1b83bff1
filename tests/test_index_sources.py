"""Folders, lists, shards and embeddings into an index: nothing twice, nothing shifted, every failure named."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

import engine
from engine.retrieval.index import Index
from engine.retrieval.sources import Embeddings, Files, Shards, picture_at
from tests.fake_encoder import WIDTH, FakeEncoder, picture

COLOURS = ("red", "green", "blue", "grey")


def png(*colours: str) -> bytes:
    held = io.BytesIO()
    picture(*colours).save(held, "PNG")
    return held.getvalue()


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
def index(tmp_path: Path, encoder: FakeEncoder) -> Index:
    return Index.create(tmp_path / "index", model=engine.Engine(encoder), vectors=("patches",))


def folder(root: Path) -> Path:
    (root / "deep" / "er").mkdir(parents=True)
    for place, colour in (("b.png", "red"), ("a.PNG", "green"), ("deep/c.png", "blue"), ("deep/er/d.png", "grey")):
        (root / place).write_bytes(png(colour))
    (root / "deep" / "broken.png").write_bytes(b"no picture")
    (root / "notes.txt").write_text("no picture either")
    return root


def test_a_folder_is_read_all_the_way_down_and_broken_files_are_named(tmp_path, index):
    root = folder(tmp_path / "photos")
    source = Files.of_folder(root)
    assert source.total == 5
    failures: list = []
    report = index.add(source.batches(2), on_error=failures.append)
    assert report.added == 4 and list(index.ids()) == ["a.PNG", "b.png", "deep/c.png", "deep/er/d.png"]
    assert [(f.id, f.path) for f in report.failures] == [("deep/broken.png", str(root / "deep" / "broken.png"))]
    assert failures == list(report.failures) and "not an image" in failures[0].reason
    assert [hit.id for hit in index.search("blue", 1, scorer="max_sim")[0]] == ["deep/c.png"]
    paths = index.snapshot.metadata(["path"]).column("path").to_pylist()
    assert [Path(path).read_bytes() for path in paths] == [png(c) for c in ("green", "red", "blue", "grey")]


def test_what_is_there_is_not_encoded_again(tmp_path, index, encoder):
    root = folder(tmp_path / "photos")
    (root / "deep" / "broken.png").unlink()

    def interrupted():
        for number, batch in enumerate(Files.of_folder(root).batches(2)):
            if number == 1:
                raise KeyboardInterrupt
            yield batch

    with pytest.raises(KeyboardInterrupt):
        index.add(interrupted(), existing="skip")
    assert len(index) == 2
    before = sum(encoder.calls)
    report = index.add(Files.of_folder(root).batches(3), existing="skip")
    assert (report.added, report.skipped) == (2, 2) and sum(encoder.calls) - before == 2
    assert len(set(index.ids())) == 4
    assert index.add(Files.of_folder(root).batches(), existing="skip").added == 0


def test_a_list_names_files_from_its_own_folder_on(tmp_path, index):
    root = folder(tmp_path / "photos")
    (root / "list.txt").write_text("\ufeffdeep/c.png\n\n b.png \n", encoding="utf-8")
    index.add(Files.of_list(root / "list.txt").batches())
    assert list(index.ids()) == ["deep/c.png", "b.png"]
    index.add(Files([root / "a.PNG"]).batches())
    assert list(index.ids())[-1] == str(root / "a.PNG")


def test_nothing_to_read_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"empty must hold pictures \(\.avif"):
        Files.of_folder(tmp_path / "empty")
    with pytest.raises(NotADirectoryError, match="must be a folder"):
        Files.of_folder(tmp_path / "missing")
    with pytest.raises(ValueError, match="must name pictures, one a line, got none"):
        Files.of_list(tmp_path / "empty.txt")
    with pytest.raises(ValueError, match="Files: paths must be a list"):
        Files([])
    with pytest.raises(ValueError, match="Shards: paths must be a list"):
        Shards("a.tar")


def shard(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            facts = tarfile.TarInfo(name)
            facts.size = len(data)
            tar.addfile(facts, io.BytesIO(data))
    return path


def test_shards_bring_pictures_captions_and_chosen_fields(tmp_path, index):
    first = shard(
        tmp_path / "00000.tar",
        {
            "0001.png": png("red"), "0001.txt": b"a red thing\n", "0001.json": json.dumps({"year": 2020}).encode(),
            "0002.json": json.dumps({"caption": "no picture here"}).encode(),
            "0003.JPG": png("green"), "0003.json": json.dumps({"caption": "green", "year": None}).encode(),
            "x/0004.png": png("blue"), "x/0004.cls": b"7",
            "0005.png": b"broken", "0006.png": png("grey"), "0006.json": b"{broken",
        },
    )  # fmt: skip
    second = shard(tmp_path / "00001.tar", {"0001.seg.png": b"x", "0001.png": png("red", "blue")})
    source = Shards([first, second], columns=["year"])
    report = index.add(source.batches(3), on_error=lambda _: None)
    assert list(index.ids()) == ["00000/0001", "00000/0003", "00000/x/0004", "00000/0006", "00001/0001"]
    assert [failure.id for failure in report.failures] == ["00000/0005"]
    assert [failure.id for failure in source.failures] == ["00000/0006"] and "kept" in source.failures[0].reason
    table = index.snapshot.metadata()
    assert table.column("caption").to_pylist() == ["a red thing", "green", None, None, None]
    assert table.column("year").to_pylist() == [2020, None, None, None, None]
    place = table.column("path").to_pylist()[2]
    assert place.endswith("00000.tar!x/0004.png") and picture_at(place) == png("blue")
    assert [hit.id for hit in index.search("blue", 1, scorer="max_sim", where="caption is null")[0]] == ["00000/x/0004"]


def test_a_damaged_shard_is_named_and_the_others_are_read(tmp_path, index):
    good = shard(tmp_path / "good.tar", {"1.png": png("red"), "2.png": png("blue")})
    members = {"1.png": png("green"), "2.png": 3000 * b"x", "3.png": png("grey")}
    whole = shard(tmp_path / "cut.tar", members).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: 512 + 1024 + 512 + 700])
    (tmp_path / "none.tar").write_bytes(b"this is no tar file" * 100)
    source = Shards([tmp_path / "cut.tar", tmp_path / "none.tar", tmp_path / "missing.tar", good])
    index.add(source.batches(), existing="skip", on_error=lambda _: None)
    assert list(index.ids()) == ["cut/1", "good/1", "good/2"]
    assert [failure.path.rpartition("/")[2] for failure in source.failures] == ["cut.tar", "none.tar", "missing.tar"]
    assert all("damaged or cannot be read" in failure.reason for failure in source.failures)


def test_known_samples_of_a_shard_are_not_read(tmp_path, index, encoder):
    path = shard(tmp_path / "s.tar", {f"{n}.png": png(COLOURS[n]) for n in range(4)})
    index.add(Shards([path]).batches(2), existing="skip")
    before = sum(encoder.calls)
    again = Shards([shard(tmp_path / "s.tar", {f"{n}.png": png(COLOURS[n % 4]) for n in range(5)})])
    index.add(again.batches(2, known=index.__contains__), existing="skip")
    assert again.skipped == 4 and sum(encoder.calls) - before == 1 and len(index) == 5


def test_what_is_too_large_for_a_picture_is_not_read(tmp_path, index, monkeypatch):
    monkeypatch.setattr("engine.retrieval.sources.MAX_MEMBER_BYTES", 500)
    source = Shards([shard(tmp_path / "s.tar", {"1.png": 600 * b"x", "2.png": png("red")})])
    index.add(source.batches())
    assert list(index.ids()) == ["s/2"] and "600 bytes are too many" in source.failures[0].reason


def embeddings(root: Path, rows: np.ndarray, parts: int = 2) -> Path:
    (root / "img_emb").mkdir(parents=True)
    (root / "metadata").mkdir()
    for number, part in enumerate(np.array_split(np.arange(len(rows)), parts)):
        np.save(root / "img_emb" / f"img_emb_{number}.npy", rows[part].astype(np.float16))
        table = pa.table({"image_path": [f"p{row}.jpg" for row in part], "caption": [f"c{row}" for row in part]})
        parquet.write_table(table, root / "metadata" / f"metadata_{number}.parquet")
    return root


def test_embeddings_of_clip_retrieval_are_found_by_their_paths(tmp_path, encoder):
    rows = np.random.default_rng(0).standard_normal((11, WIDTH))
    rows[4] = np.nan
    rows[7] = 0
    source = Embeddings(embeddings(tmp_path / "out", rows))
    assert source.total == 11
    index = Index.create(tmp_path / "index", model=engine.Engine(encoder), vectors=())
    assert index.add(source.batches(3), existing="skip").added == 9
    assert [failure.id for failure in source.failures] == ["p4.jpg", "p7.jpg"]
    assert "img_emb_0.npy row 4" in source.failures[0].path
    query = engine.ImageFeatures(engine.Engine(encoder).encode_images([picture("red")]).embedding)
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    best = int(np.nanargmax(unit @ query.embedding[0].numpy()))
    (hits,) = index.search(query, 3, scorer="global", where="caption <> 'c0'")
    assert hits[0].id == f"p{best}.jpg"
    assert index.snapshot.metadata().column("caption").to_pylist()[4] == "c5"
    with pytest.raises(ValueError, match="needs patches"):
        Index.create(tmp_path / "other", model=engine.Engine(encoder), vectors=("patches",)).add(source.batches())


def test_embeddings_that_do_not_belong_together_are_refused(tmp_path):
    rows = np.ones((6, WIDTH))
    root = embeddings(tmp_path / "a", rows)
    (root / "metadata" / "metadata_1.parquet").unlink()
    with pytest.raises(FileNotFoundError, match="must hold part 1 in both"):
        Embeddings(root)
    root = embeddings(tmp_path / "b", rows)
    np.save(root / "img_emb" / "img_emb_1.npy", rows.astype(np.float16))
    with pytest.raises(ValueError, match=r"img_emb_1\.npy must hold one row .* for each of 3 rows"):
        Embeddings(root)
    with pytest.raises(ValueError, match="must have a column 'key' for the ids, it has image_path, caption"):
        Embeddings(embeddings(tmp_path / "c", rows), id_column="key")
    with pytest.raises(FileNotFoundError, match="at least one part"):
        Embeddings(tmp_path)


def test_a_place_that_is_gone_is_said(tmp_path):
    file = tmp_path / "a.png"
    Image.new("RGB", (2, 2)).save(file)
    assert picture_at(str(file)) == file
    for place in (str(tmp_path / "b.png"), f"{shard(tmp_path / 's.tar', {'1.png': b'x'})}!2.png"):
        with pytest.raises(FileNotFoundError, match="picture_at: "):
            picture_at(place)


def test_a_link_to_nothing_is_reported(tmp_path, index):
    root = folder(tmp_path / "photos")
    (root / "gone.png").symlink_to(tmp_path / "nowhere.png")
    report = index.add(Files.of_folder(root).batches(8), on_error=lambda failure: None)
    assert {failure.id: failure.reason for failure in report.failures}["gone.png"] == "there is no such file"
    assert report.added == 4


def test_folders_that_are_not_read_are_reported(tmp_path, index, monkeypatch):
    root = folder(tmp_path / "photos")
    (root / "deep" / "broken.png").unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "e.png").write_bytes(png("red"))
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    whole = os.scandir

    def scandir(path="."):
        if str(path).endswith("er"):
            # Root reads anything: the refusal is injected.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return whole(path)

    monkeypatch.setattr(os, "scandir", scandir)
    source = Files.of_folder(root, prefix="p/")
    assert {failure.id: (failure.path, failure.reason) for failure in source.failures} == {
        "p/deep/er": (str(root / "deep" / "er"), "the folder cannot be read (Permission denied)"),
        "p/linked": (str(root / "linked"), "a link to a folder is not followed; add the folder itself"),
    }
    assert index.add(source.batches()).added == 3
    with pytest.raises(ValueError, match=r"must hold pictures .* got none; .*er: the folder cannot be read"):
        Files.of_folder(root / "deep" / "er")


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_picture_that_is_listed_twice_is_passed_over_the_second_time(tmp_path, index, encoder, batch_size):
    root = folder(tmp_path / "photos")
    (root / "list.txt").write_text("b.png\na.PNG\nb.png\ndeep/c.png\na.PNG\n")
    report = index.add(Files.of_list(root / "list.txt").batches(batch_size), existing="skip", batch_size=batch_size)
    assert (report.added, report.skipped) == (3, 2)
    assert list(index.ids()) == ["b.png", "a.PNG", "deep/c.png"]
    with pytest.raises(ValueError, match=r"'b\.png'"):
        index.add(Files.of_list(root / "list.txt").batches(batch_size), existing="refuse")
