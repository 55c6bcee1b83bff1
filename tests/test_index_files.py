"""Damage to any file of an index is found and the file named; formats and models that do not fit are refused."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.engine import Engine
from engine.retrieval import manifest as manifest_file
from engine.retrieval.checksums import BLOCK_BYTES, BlockSums, MappedFile, sums_of
from engine.retrieval.errors import IndexDamaged
from engine.retrieval.index import Index
from engine.retrieval.manifest import FORMAT_VERSION, READERS, Manifest, decoded, encoded
from engine.retrieval.tombstones import (
    SLOT_BYTES,
    SLOT_ROWS,
    SLOTS,
    append_tombstones,
    read_tombstones,
    write_tombstones,
)
from tests.fake_encoder import FakeEncoder
from tests.index_cases import SPACE, engine, images, index_at, names, texts

IDS = names(0, 12)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "index"
    index = index_at(folder, segment_bytes=2500)
    index.add(images(IDS), metadata={"year": range(12)})
    index.delete([IDS[3], IDS[4]])
    index.delete([IDS[5]])
    with index._storage.change() as change:
        change.put_extra("near", lambda place: (place / "a.bin").write_bytes(bytes(range(100))), rows=12)
    index.delete([IDS[6]])
    assert index.verify() == []
    return folder


@pytest.fixture
def folder(base, tmp_path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "index"))


def files(folder: Path) -> list[Path]:
    """All files that hold something."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("writer.lock"))


def used_bytes(path: Path) -> list[int]:
    """Places to damage: all of small files, some of large ones."""
    size = path.stat().st_size
    random = np.random.default_rng(zlib.crc32(path.name.encode()))
    return sorted({0, size - 1, *random.integers(0, size, size=40).tolist()})


def test_a_flipped_bit_anywhere_is_found_by_verify(folder):
    checked = set()
    index = Index.open(folder)
    with pytest.MonkeyPatch.context() as patch:
        # A damaged slot is looked at again, in case it was being written.
        patch.setattr("engine.retrieval.storage.SLOT_WAIT_S", 0.0)
        for path in files(folder):
            whole = path.read_bytes()
            for place in used_bytes(path):
                data = bytearray(whole)
                data[place] ^= 1 << (place % 8)
                path.write_bytes(data)
                found = index.verify()
                assert found and path.name in found[0], (path, place, found)
            path.write_bytes(whole)
            checked.add(path.suffix)
        assert checked == {".json", ".bin", ".codes", ".parquet"}
        assert index.verify() == []


def test_a_truncated_or_missing_file_is_found_at_open(folder):
    for path in files(folder):
        whole = path.read_bytes()
        for kept in (0, len(whole) // 2, len(whole) - 1, None):
            if kept is None:
                path.unlink()
            else:
                path.write_bytes(whole[:kept])
            wanted = (FileNotFoundError, IndexDamaged) if kept is None else IndexDamaged
            with pytest.raises(wanted, match=path.name):
                Index.open(folder)
        path.write_bytes(whole + b"x")
        with pytest.raises(IndexDamaged, match=path.name):
            Index.open(folder)
        path.write_bytes(whole)
    assert Index.open(folder).verify() == []


@pytest.mark.parametrize("kind", ["windows", "patches", "global", "ids"])
def test_damage_is_found_when_a_block_is_first_read(folder, kind):
    segment = Index.open(folder).snapshot.pieces[1].segment
    section = {"global": "global", "ids": "ids.hashes"}.get(kind, f"{kind}.codes")
    facts = segment._sections[section]
    path = segment.folder / facts["file"]
    data = bytearray(path.read_bytes())
    data[facts["offset"] + 5] ^= 4
    path.write_bytes(data)
    # Opening reads no vectors.
    index = Index.open(folder, model=engine())
    scorer = {"windows": "sgi", "patches": "max_sim"}.get(kind, "global")
    for candidates in (None, 12):
        with pytest.raises(IndexDamaged, match=f"{path.name} is damaged: the checksum of bytes 0 to .* differs"):
            index.search(texts(1), scorer=scorer, candidates=candidates)


def test_blocks_are_checked_one_by_one(tmp_path):
    path = tmp_path / "file"
    data = bytearray(np.random.default_rng(0).integers(0, 256, 3 * BLOCK_BYTES + 100, dtype=np.uint8).tobytes())
    path.write_bytes(data)
    sums = sums_of(path)
    assert sums.size == len(data) and len(sums.all()) == 4
    pieces = BlockSums()
    for start in range(0, len(data), 700_001):
        pieces.update(bytes(data[start : start + 700_001]))
    assert pieces.all() == sums.all()
    data[2 * BLOCK_BYTES + 7] ^= 1
    path.write_bytes(data)
    file = MappedFile(path, len(data), sums.all())
    file.check(0, 2 * BLOCK_BYTES)
    file.check(3 * BLOCK_BYTES)
    file.check_ranges(np.array([5, 3 * BLOCK_BYTES, 9]), np.array([BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 9, 9]))
    for check in (
        lambda: file.check(2 * BLOCK_BYTES - 1, 2 * BLOCK_BYTES + 1),
        lambda: file.check_ranges(np.array([0, BLOCK_BYTES]), np.array([9, 2 * BLOCK_BYTES + 1])),
    ):
        with pytest.raises(IndexDamaged, match=f"bytes {2 * BLOCK_BYTES} to {3 * BLOCK_BYTES} differs"):
            check()
    assert len(list(file.faults())) == 1
    with pytest.raises(IndexDamaged, match=f"{len(data)} bytes were written, there are 5"):
        path.write_bytes(b"short")
        MappedFile(path, len(data), sums.all())


def test_a_file_that_is_deleted_stays_readable(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    before = len(os.listdir("/proc/self/fd"))
    file = MappedFile(path, 10, sums_of(path).all())
    assert len(os.listdir("/proc/self/fd")) == before
    path.unlink()
    file.check()
    assert bytes(file.data.tolist()) == b"0123456789"


def test_a_reader_whose_files_a_commit_has_just_deleted_begins_anew(folder, monkeypatch):
    writer, turns = Index.open(folder, model=engine()), [0]
    mapped = torch.from_file

    def compacted_meanwhile(path: str, **options: object) -> torch.Tensor:
        turns[0] += 1
        if turns[0] == 4:
            monkeypatch.setattr(torch, "from_file", mapped)
            writer.compact()
        return mapped(path, **options)

    monkeypatch.setattr(torch, "from_file", compacted_meanwhile)
    index = Index.open(folder, model=engine())
    assert turns[0] == 4 and index.stats() == writer.stats() and index.verify() == []


def test_any_change_of_the_manifest_is_found(tmp_path):
    manifest = Manifest(model="m", fingerprint="f", dim=4, deleted="deleted-00000001.bin")
    whole = encoded(manifest)
    assert decoded(tmp_path, whole) == manifest
    for place in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[place] ^= 1 << bit
            with pytest.raises(ValueError, match=r"manifest.json (is damaged|has format)"):
                decoded(tmp_path, bytes(data))
        with pytest.raises(IndexDamaged):
            decoded(tmp_path, whole[:place])
    with pytest.raises(IndexDamaged):
        decoded(tmp_path, whole + b"\n")


def test_a_newer_format_is_refused_with_a_way_out(folder):
    path = folder / "manifest.json"
    wanted = f'"format_version":{FORMAT_VERSION + 1}'.encode()
    path.write_bytes(path.read_bytes().replace(f'"format_version":{FORMAT_VERSION}'.encode(), wanted))
    with pytest.raises(ValueError, match=r"has format 2, this version reads up to 1; install a newer peaksim"):
        Index.open(folder)
    assert json.loads(path.read_bytes())["format_version"] == 2


def test_an_older_format_is_read_by_its_reader_and_committed_as_the_newest(folder, monkeypatch):
    path = folder / "manifest.json"
    before = list(Index.open(folder).ids())
    reader = READERS[FORMAT_VERSION]
    read = []

    def older(body):
        read.append(body["model"])
        return reader(body)

    monkeypatch.setattr(manifest_file, "FORMAT_VERSION", FORMAT_VERSION + 1)
    monkeypatch.setattr(manifest_file, "READERS", {FORMAT_VERSION: older, FORMAT_VERSION + 1: reader})
    index = Index.open(folder, model=engine())
    assert list(index.ids()) == before and read == ["fake"] and index.verify() == []
    assert json.loads(path.read_bytes())["format_version"] == FORMAT_VERSION
    index.add(images(["fresh"]))
    assert json.loads(path.read_bytes())["format_version"] == FORMAT_VERSION + 1
    read.clear()
    assert list(Index.open(folder).ids()) == [*before, "fresh"] and read == []
    # What knows the older format alone refuses it from here on.
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"has format 2, this version reads up to 1; install a newer peaksim"):
        Index.open(folder)


@pytest.mark.parametrize(("version", "message"), [("0", "there is no format 0, the first is 1"), ("true", "True")])
def test_a_format_that_never_was_is_refused(folder, version, message):
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format_version":1', f'"format_version":{version}'.encode()))
    with pytest.raises(ValueError, match=message):
        Index.open(folder)


def test_another_model_is_refused(folder):
    other = Engine(FakeEncoder(name="other"), segmenter="rules")
    with pytest.raises(ValueError, match=r"was made by fake with the fingerprint fake-1, got other with other-1"):
        Index.open(folder, model=other)
    index = Index.open(folder, model=engine())
    strange = other.encode_texts(["a red circle"], scorer=SPACE)
    with pytest.raises(ValueError, match="queries must come from the encoder fake-1, got those of other-1"):
        index.search(strange)


def test_a_folder_without_an_index_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"manifest.json is missing; the folder holds no index"):
        Index.open(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"must be empty or new, it holds 'notes.txt'"):
        index_at(tmp_path)
    index_at(tmp_path / "index")
    with pytest.raises(FileExistsError, match="holds an index already"):
        index_at(tmp_path / "index")


def test_tombstones_read_back_and_every_slot_counts(tmp_path):
    path = tmp_path / "deleted.bin"
    before = [np.arange(13) % 3 == 0, np.zeros(5, dtype=bool)]
    crc = write_tombstones(path, before)
    found, used = read_tombstones(path, [13, 5], crc)
    assert used == 0 and all((a == b).all() for a, b in zip(found, before, strict=True))
    for slot in range(SLOTS):
        append_tombstones(path, slot, [slot % 18, 17])
    found, used = read_tombstones(path, [13, 5], crc)
    assert used == SLOTS and found[0].all() and found[1].all()
    size = path.stat().st_size
    assert size == SLOTS * SLOT_BYTES + 2 + 1
    write_tombstones(path, before)
    append_tombstones(path, 0, [1] * SLOT_ROWS)
    assert path.stat().st_size == size
    assert read_tombstones(path, [13, 5], crc)[0][0][1]
    append_tombstones(path, 2, [4])
    with pytest.raises(IndexDamaged, match="slot 1 is empty, but a later one is not"):
        read_tombstones(path, [13, 5], crc)
    write_tombstones(path, before)
    append_tombstones(path, 0, [18])
    with pytest.raises(IndexDamaged, match="slot 0 deletes row 18 of 18"):
        read_tombstones(path, [13, 5], crc)


def test_more_deletes_than_a_file_has_slots(tmp_path):
    index = index_at(tmp_path, vectors=(), segment_bytes=1 << 20)
    ids = names(0, 2 * SLOTS + SLOT_ROWS + 10)
    index.add(images(ids, regions=1))
    generation = index.stats().generation
    for number in range(SLOTS + 3):
        index.delete([ids[number]])
    assert index.stats().generation == generation + 1
    index.delete(ids[SLOTS + 3 : SLOTS + 4 + SLOT_ROWS])
    assert index.stats().generation == generation + 2
    wanted = ids[SLOTS + 4 + SLOT_ROWS :]
    assert list(index.ids()) == list(Index.open(tmp_path).ids()) == wanted and index.verify() == []
