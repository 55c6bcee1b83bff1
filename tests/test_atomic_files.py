"""A file is written whole or not at all, and nothing is left beside it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from engine.atomic_files import write_text, written_whole
from engine.features import ImageFeatures, TextFeatures


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_takes_the_place_of_the_old(tmp_path: Path):
    target = tmp_path / "a.txt"
    target.write_text("old")
    with written_whole(target) as unfinished:
        unfinished.write_text("new")
        assert unfinished.parent == tmp_path and target.read_text() == "old"
    assert target.read_text() == "new" and names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, error: type[BaseException]):
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(error), written_whole(target) as unfinished:
        unfinished.write_text("half")
        raise error
    assert target.read_text() == "old" and names(tmp_path) == ["a.txt"]


def test_a_folder_in_the_way_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError), written_whole(tmp_path / "a") as unfinished:
        unfinished.write_text("new")
    assert names(tmp_path) == ["a"]


def test_nothing_written_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "a"):
        pass
    assert names(tmp_path) == []


def test_the_bytes_are_on_the_disk_before_the_name_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append("sync"), sync(number))[1])
    monkeypatch.setattr(Path, "replace", lambda self, target: (done.append("replace"), replace(self, target))[1])
    with written_whole(tmp_path / "a") as unfinished:
        unfinished.write_text("new")
    assert done == ["sync", "replace"]


def test_two_writers_do_not_mix_their_bytes(tmp_path: Path):
    target, other_wrote = tmp_path / "a", threading.Event()

    def other() -> None:
        with written_whole(target) as unfinished:
            unfinished.write_text("other")
        other_wrote.set()

    with written_whole(target) as unfinished:
        unfinished.write_text("mine")
        threading.Thread(target=other).start()
        assert other_wrote.wait(10) and target.read_text() == "other"
    assert target.read_text() == "mine" and names(tmp_path) == ["a"]


def test_a_link_stays_and_its_file_is_written(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "a")
    for text in ("first", "second"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "a").read_text() == f"{text}\n"
    assert names(tmp_path) == ["link", "real"] and names(tmp_path / "real") == ["a"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are POSIX's")
def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Opened for both, so that neither side waits for the other.
    reader = os.open(pipe, os.O_RDWR)
    try:
        write_text(pipe, "told")
        assert os.read(reader, 100) == b"told\n"
    finally:
        os.close(reader)
    assert pipe.is_fifo() and names(tmp_path) == ["pipe"]


@pytest.mark.parametrize("kind", [ImageFeatures, TextFeatures])
def test_features_that_cannot_be_written_leave_nothing_behind(
    kind: type[ImageFeatures] | type[TextFeatures], tmp_path: Path
):
    features = kind(torch.eye(2))
    (tmp_path / "taken").mkdir()
    for place in ("taken", "absent/features"):
        with pytest.raises(OSError, match=rf"{kind.__name__}.save: .*{place} could not be written"):
            features.save(tmp_path / place)
    assert names(tmp_path) == ["taken"]
    features.save(tmp_path / "good")
    assert torch.equal(kind.load(tmp_path / "good").embedding, torch.eye(2))


@pytest.mark.skipif(os.name != "posix", reason="permission bits are POSIX's")
def test_files_have_the_permissions_that_the_umask_leaves_or_the_old_file_had(tmp_path: Path):
    features, path = ImageFeatures(torch.eye(2)), tmp_path / "a.safetensors"
    before = os.umask(0o027)
    try:
        # safetensors writes through a temporary file that only its owner may read.
        features.save(path)
        assert path.stat().st_mode & 0o777 == 0o640
        write_text(tmp_path / "b", "new")
        assert (tmp_path / "b").stat().st_mode & 0o777 == 0o640
        path.chmod(0o604)
        features.save(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o604
