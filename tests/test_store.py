"""The feature store: what goes in comes out in any order, a killed writer loses one shard, strangers are refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.features import ImageFeatures, TextFeatures
from engine.store import FeatureStore, Manifest
from tests.head_cases import FACTS, make_images, make_texts

ROWS = 11


def manifest(kind: str, **changes: object) -> Manifest:
    return replace(Manifest(kind, ROWS, FACTS.fingerprint, source="random", shard_rows=4), **changes)


def filled(folder: Path, features: ImageFeatures | TextFeatures, **changes: object) -> FeatureStore:
    kind = "images" if isinstance(features, ImageFeatures) else "texts"
    store = FeatureStore.create(folder, manifest(kind, **changes))
    store.fill(lambda start, stop: features[start:stop])
    return store


def check_equal(found: ImageFeatures | TextFeatures, expected: ImageFeatures | TextFeatures, tolerance: float) -> None:
    assert type(found) is type(expected)
    for name, value in vars(expected).items():
        got = getattr(found, name)
        if name == "hidden":
            assert list(got) == list(value)
            for layer in value:
                torch.testing.assert_close(got[layer], value[layer], rtol=tolerance, atol=tolerance)
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            torch.testing.assert_close(got, value, rtol=tolerance, atol=tolerance)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(got, value) and got.dtype == value.dtype
        else:
            assert got == value, name


@pytest.mark.parametrize("make", [make_images, make_texts])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("float16", 1e-3), ("bfloat16", 8e-3)])
def test_rows_come_back_in_any_order(tmp_path, make, dtype, tolerance):
    features = make(ROWS)
    store = filled(tmp_path, features, dtype=dtype)
    assert len(store) == ROWS and store.shards == 3 and store.missing() == []
    again = FeatureStore.open(tmp_path)
    check_equal(again[:], features, tolerance)
    for rows in ([7], [10, 0, 5, 0, 4], [-1, 3]):
        check_equal(again[rows], features[rows], tolerance)
    check_equal(again[torch.tensor([8, 2])], features[[8, 2]], tolerance)
    assert again[[0]].embedding.dtype == torch.float32


def test_half_precision_takes_half_the_room(tmp_path):
    features = make_images(ROWS)
    for dtype in ("float32", "float16"):
        filled(tmp_path / dtype, features, dtype=dtype)
    wide, narrow = (
        (tmp_path / dtype / "shard-00000" / "hidden.2.npy").stat().st_size for dtype in ("float32", "float16")
    )
    assert wide - 128 == 2 * (narrow - 128)


def test_texts_of_several_lengths_are_padded(tmp_path):
    texts = make_texts(ROWS)
    store = FeatureStore.create(tmp_path, manifest("texts"))

    def encode(start: int, stop: int) -> TextFeatures:
        part = texts[start:stop]
        length = 7 if start else 6
        return replace(
            part,
            tokens=part.tokens[:, :length],
            token_mask=part.token_mask[:, :length],
            attention_mask=part.attention_mask[:, :length],
            hidden={layer: state[:, :length] for layer, state in part.hidden.items()},
            token_texts=tuple(words[:length] for words in part.token_texts),
        )

    store.fill(encode)
    found = store[[0, 9]]
    assert found.hidden[1].shape[1] == 7 and not found.token_mask[0, 6]
    torch.testing.assert_close(found.hidden[1][0, :6], texts.hidden[1][0, :6], rtol=1e-3, atol=1e-3)


def test_layers_that_nobody_wants_are_not_read(tmp_path):
    n = 6
    hidden = {layer: torch.randn(n, 2, 3) for layer in (1, 4, 7)}
    features = TextFeatures(torch.nn.functional.normalize(torch.randn(n, 4)), fingerprint="f", hidden=hidden)
    store = FeatureStore.create(tmp_path, Manifest("texts", n, "f", dtype="float32", shard_rows=4))
    store.fill(lambda start, stop: features[slice(start, stop)])
    some = store.with_layers([4])
    assert set(some[[5, 1]].hidden) == {4} and set(store[[5, 1]].hidden) == {1, 4, 7}
    assert torch.equal(some[[5, 1]].hidden[4], hidden[4][[5, 1]])
    assert store.with_layers(())[:].hidden == {} and len(some) == n


def test_parts_without_entries_are_kept(tmp_path):
    texts = replace(make_texts(ROWS), segments=torch.zeros(ROWS, 0, 12), segment_mask=torch.zeros(ROWS, 0).bool())
    assert filled(tmp_path, texts)[[1, 9]].segments.shape == (2, 0, 12)


def test_filling_goes_on_where_it_stopped(tmp_path):
    images = make_images(ROWS)
    store = FeatureStore.create(tmp_path, manifest("images"))
    seen: list[tuple[int, int]] = []

    def encode(start: int, stop: int) -> ImageFeatures:
        if len(seen) == 1:
            raise KeyboardInterrupt
        seen.append((start, stop))
        return images[start:stop]

    with pytest.raises(KeyboardInterrupt):
        store.fill(encode)
    assert store.missing() == [1, 2]
    with pytest.raises(ValueError, match="rows 4 and on are not written yet; fill the store"):
        store[[0, 6]]
    reports: list[tuple[int, int]] = []
    again = FeatureStore.create(tmp_path, manifest("images"))
    again.fill(lambda start, stop: images[start:stop], progress=lambda *done: reports.append(done))
    assert reports == [(8, 11), (11, 11)]
    check_equal(again[:], images, 1e-3)


KILLED = """
import sys
from engine.store import FeatureStore, Manifest, np
from tests.head_cases import make_images
store = FeatureStore.create(sys.argv[1], Manifest("images", 11, "tiny-1", source="random", shard_rows=4))
images = make_images(11)
write, calls = np.save, []
def save(file, array):
    calls.append(file)
    if len(calls) == 8:
        file.write(b"half")
        file.flush()
        print("writing", flush=True)
        sys.stdin.read()
        file.seek(0)
    write(file, array)
np.save = save
store.fill(lambda start, stop: images[start:stop])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a system that can kill a process")
def test_a_writer_killed_in_the_middle_loses_one_shard(tmp_path):
    root = Path(__file__).resolve().parent.parent
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with writer:
        assert writer.stdout.readline() == "writing\n"
        writer.send_signal(signal.SIGKILL)
    assert (tmp_path / "shard-00001.part").is_dir()
    images = make_images(ROWS)
    store = FeatureStore.create(tmp_path, manifest("images"))
    assert store.missing() == [1, 2]
    before = (tmp_path / "shard-00000" / "hidden.1.npy").stat().st_mtime_ns
    store.fill(lambda start, stop: images[start:stop])
    assert (tmp_path / "shard-00000" / "hidden.1.npy").stat().st_mtime_ns == before
    assert not list(tmp_path.glob("*.part"))
    check_equal(store[:], images, 1e-3)


FILLING = """
import sys
from engine.store import FeatureStore, Manifest
from tests.head_cases import make_images
store = FeatureStore.create(sys.argv[1], Manifest("images", 11, "tiny-1", source="random", shard_rows=4))
images = make_images(11)
print("begun", flush=True)
def encode(start, stop):
    print(start, flush=True)
    return images[start:stop]
store.fill(encode)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a system that can kill a process")
@pytest.mark.parametrize("killed", [False, True])
def test_of_two_that_fill_a_store_the_second_waits_for_the_first(tmp_path, killed):
    def start(code: str) -> subprocess.Popen[str]:
        root = Path(__file__).resolve().parent.parent
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = {**os.environ, "PYTHONPATH": str(root)}
        return subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=root, env=env, text=True, **pipes)

    with start(KILLED) as first:
        assert first.stdout.readline() == "writing\n"
        with start(FILLING) as second:
            assert second.stdout.readline() == "begun\n"
            # Long enough for one that does not wait.
            time.sleep(0.5)
            if killed:
                first.kill()
            _, error = first.communicate(timeout=60)
            assert killed or first.returncode == 0, error
            said, error = second.communicate(timeout=60)
    # Rows that the first wrote are not encoded again.
    assert second.returncode == 0 and said.split() == (["4", "8"] if killed else []), error
    assert not list(tmp_path.glob("*.part"))
    check_equal(FeatureStore.open(tmp_path)[:], make_images(ROWS), 1e-3)


def test_a_whole_store_is_not_written_to(tmp_path):
    images = make_images(ROWS)
    filled(tmp_path, images)
    (tmp_path / "filling.lock").unlink()
    filled(tmp_path, images)
    assert not (tmp_path / "filling.lock").exists()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("facts.json", lambda path: path.write_bytes(b"")),
        ("facts.json", lambda path: path.write_bytes(b"[]")),
        ("facts.json", Path.unlink),
        ("embedding.npy", lambda path: path.write_bytes(b"")),
        ("embedding.npy", lambda path: path.write_bytes(b"junk of any kind")),
        ("embedding.npy", _cut),
        ("embedding.npy", Path.unlink),
    ],
)
def test_a_damaged_shard_is_named_and_made_again(tmp_path, name, damage):
    texts = TextFeatures(torch.nn.functional.normalize(torch.randn(ROWS, 6), dim=1), fingerprint=FACTS.fingerprint)
    filled(tmp_path, texts)
    shard = tmp_path / "shard-00001"
    damage(shard / name)
    store = FeatureStore.open(tmp_path)
    with pytest.raises(ValueError, match=rf"{shard} is damaged \(.+\); remove this folder, it is made again"):
        store[[0, 5]]
    shutil.rmtree(shard)
    check_equal(filled(tmp_path, texts)[:], texts, 0)


def test_a_shard_of_other_rows_is_damaged(tmp_path):
    texts = TextFeatures(torch.nn.functional.normalize(torch.randn(ROWS, 6), dim=1), fingerprint=FACTS.fingerprint)
    filled(tmp_path, texts)
    np.save(tmp_path / "shard-00001" / "embedding.npy", texts.embedding[:3].numpy())
    with pytest.raises(ValueError, match=r"shard-00001 is damaged \(3 rows in place of 4\)"):
        FeatureStore.open(tmp_path)[[0, 5]]


def test_another_store_in_the_folder_is_refused_and_kept(tmp_path):
    filled(tmp_path, make_images(ROWS))
    with pytest.raises(
        ValueError, match=r"holds other features \(fingerprint 'tiny-1' in place of 'x'\); choose another folder"
    ):
        FeatureStore.create(tmp_path, manifest("images", fingerprint="x"))
    with pytest.raises(ValueError, match=r"\(kind 'images' in place of 'texts', source 'random' in place of 'y'\)"):
        FeatureStore.create(tmp_path, manifest("texts", source="y"))
    assert FeatureStore.open(tmp_path).missing() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda part: replace(part, fingerprint="other"),
            "must give ImageFeatures of 4 rows by 'tiny-1', got .*'other'",
        ),
        (lambda part: part[:2], "got ImageFeatures of 2 rows"),
        (lambda part: make_texts(4), "got TextFeatures of 4 rows"),
        (
            lambda part: replace(part, hidden={1: part.hidden[1] * 1e6}),
            r"hidden.1 must hold finite numbers within float16, got up to \d.*; use dtype='bfloat16'",
        ),
    ],
)
def test_features_that_do_not_fit_are_refused(tmp_path, change, message):
    images = make_images(ROWS)
    store = FeatureStore.create(tmp_path, manifest("images"))
    with pytest.raises(ValueError, match=message):
        store.fill(lambda start, stop: change(images[start:stop]))
    assert store.missing() == [0, 1, 2]


@pytest.mark.parametrize("rows", [[11], [-12], [], torch.zeros(2, 2)])
def test_rows_that_are_not_there_are_refused(tmp_path, rows):
    store = filled(tmp_path, make_images(ROWS))
    with pytest.raises(IndexError, match=r"is out of range for 11 rows|must be a list of at least one row"):
        store[rows]


def test_manifests_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="is missing; the folder holds no store"):
        FeatureStore.open(tmp_path)
    path = tmp_path / "manifest.json"
    for text, message in (
        ("{", r"is damaged \(manifest.json: .*\); remove this folder, it is made again"),
        ("null", r"is damaged \(manifest.json: "),
        (json.dumps({"format_version": 9}), "has format 9, this version reads up to 2"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            FeatureStore.open(tmp_path)
    with pytest.raises(ValueError, match="kind must be one of images, texts, got 'x'"):
        manifest("x")
    with pytest.raises(ValueError, match="dtype must be one of float16, bfloat16, float32, got 'int8'"):
        manifest("images", dtype="int8")
    with pytest.raises(ValueError, match="rows and shard_rows must be at least 1, got 0 and 4"):
        manifest("images", rows=0)


def test_many_shards_keep_few_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.store.OPEN_SHARDS", 2)
    images = make_images(ROWS)
    store = filled(tmp_path, images, shard_rows=1)
    check_equal(store[:], images, 1e-3)
    assert len(store._open) == 2


def test_reading_is_mapped_and_does_not_change_the_files(tmp_path):
    store = filled(tmp_path, make_images(ROWS), dtype="float32")
    store[[0]].hidden[1].zero_()
    assert np.load(tmp_path / "shard-00000" / "hidden.1.npy").any()
    assert store[[0]].hidden[1].any()
