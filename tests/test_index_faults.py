"""An index whose writer dies or fails at any step keeps what was committed, and can be written again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.retrieval.errors import IndexBusy
from engine.retrieval.index import Index
from engine.retrieval.storage import Storage
from engine.retrieval.writer_lock import GUARD, LOCK, writing
from tests.index_cases import engine, images, index_at, names, texts
from tests.index_faults import Steps, die, in_child, refuse, watched

OLD, FRESH = names(0, 6), names(6, 16)


def add(index: Index) -> None:
    index.add(images(FRESH), metadata={"year": range(len(FRESH))})


def update(index: Index) -> None:
    index.update(images(OLD[:2], seed=9), metadata={"year": [7, 8]})


def delete(index: Index) -> None:
    index.delete([OLD[1], OLD[4]])


def compact(index: Index) -> None:
    index.compact()


def put_extra(index: Index) -> None:
    def write(folder: Path) -> None:
        (folder / "a.bin").write_bytes(b"one")
        (folder / "b.bin").write_bytes(b"two")

    with index._storage.change() as change:
        change.put_extra("near", write, rows=change.snapshot.rows, facts={"recall": 1})


OPERATIONS: dict[str, Callable[[Index], None]] = {
    "add": add, "update": update, "delete": delete, "compact": compact, "put_extra": put_extra,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(tmp_path) -> Iterator[None]:
    """Flushing protects from power cuts alone, which no test here makes."""
    with watched(Steps(tmp_path / "nowhere")):
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """An index of a few small segments, with deleted rows and metadata."""
    folder = tmp_path_factory.mktemp("base") / "index"
    index = index_at(folder, segment_bytes=3000)
    index.add(images([*OLD, "gone"]), metadata={"year": range(7)})
    index.delete(["gone"])
    return folder


def state(index: Index) -> list[tuple]:
    """What an index answers: ids, metadata and scores."""
    snapshot = index.snapshot
    scores = {hit.id: round(hit.score, 5) for hit in index.search(texts(1), 1000)[0]}
    rows = snapshot.alive.nonzero()[0]
    years = snapshot.metadata_of(rows).to_pylist()
    found = [(name, scores[name], year) for name, year in zip(snapshot.ids(rows), years, strict=True)]
    return [*found, tuple(sorted((n, dict(e.entry.facts)["recall"]) for n, e in snapshot.extras.items()))]


def steps_of(operation: str, base: Path, folder: Path) -> tuple[Steps, list, list]:
    """The steps of an operation, and what the index answers before and after it."""
    shutil.copytree(base, folder)
    index = Index.open(folder, model=engine())
    before = state(index)
    with watched(Steps(folder)) as steps:
        OPERATIONS[operation](index)
    return steps, before, state(Index.open(folder, model=engine()))


def fits(found: list, before: list, after: list, operation: str) -> bool:
    """Whether an interrupted operation left what it may leave: all or nothing, of an addition whole segments."""
    if found in (before, after):
        return True
    # Segments are committed one by one.
    return operation == "add" and found[-1] == after[-1] and found[:-1] == after[: len(found) - 1]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_writer_that_is_killed_at_any_step_leaves_the_old_commit_or_the_new_one(base, tmp_path, operation):
    steps, before, after = steps_of(operation, base, tmp_path / "whole")
    assert len(steps.log) > 5
    seen = set()
    for at in range(len(steps.log)):
        folder = tmp_path / f"step{at}"
        shutil.copytree(base, folder)

        def work(folder: Path = folder, at: int = at) -> None:
            index = Index.open(folder, model=engine())
            watching = Steps(folder)
            watching.at, watching.action = at, die
            with watched(watching):
                OPERATIONS[operation](index)

        assert in_child(work) == -signal.SIGKILL
        index = Index.open(folder, model=engine())
        found = state(index)
        assert fits(found, before, after, operation), f"step {at}: {steps.log[at]}"
        seen.add(len(found) if found not in (before, after) else found == after)
        assert index.verify() == []
        # The lock of the dead counts for nothing, and what he left is cleared away.
        index.add(images(["later"]))
        assert index.verify() == [] and state(index)[-2][0] == "later"
        index.delete(["later"])
        assert leftovers(folder) == []
        shutil.rmtree(folder)
    assert {False, True} <= seen or operation == "compact"


def leftovers(folder: Path) -> list[str]:
    """Files that the newest commit does not know."""
    manifest = Storage(folder).snapshot.manifest
    known = {"manifest.json", manifest.deleted, GUARD, "segments", "extras"}
    segments = {entry.name for entry in manifest.segments}
    extras = {entry.folder for entry in manifest.extras}
    return sorted(
        [path.name for path in folder.iterdir() if path.name not in known]
        + [path.name for path in (folder / "segments").iterdir() if path.name not in segments]
        + [path.name for path in (folder / "extras").iterdir() if path.name not in extras]
    )


@pytest.mark.parametrize(
    ("operation", "number"),
    [*((operation, errno.ENOSPC) for operation in OPERATIONS), ("add", errno.EROFS), ("delete", errno.EROFS)],
)
def test_a_step_that_the_system_refuses_loses_nothing_and_can_be_tried_again(base, tmp_path, operation, number):
    steps, before, after = steps_of(operation, base, tmp_path / "whole")
    refused = 0
    for at in range(len(steps.log)):
        folder = tmp_path / f"step{at}"
        shutil.copytree(base, folder)
        index = Index.open(folder, model=engine())
        watching = Steps(folder)
        watching.at, watching.action = at, refuse(number)
        try:
            with watched(watching):
                OPERATIONS[operation](index)
        except OSError as error:
            refused += 1
            assert error.errno == number
        if (folder / LOCK).exists():
            # The step was to remove it: as long as this process lives, it counts.
            (folder / LOCK).unlink()
        for opened in (index.reload(), Index.open(folder, model=engine())):
            assert fits(state(opened), before, after, operation), f"step {at}: {steps.log[at]}"
            assert opened.verify() == []
        index.add(images(["later"]))
        assert state(index)[-2][0] == "later" and leftovers(folder) == []
        shutil.rmtree(folder)
    assert refused >= 3


def test_all_of_a_commit_is_flushed_before_it_counts(base, tmp_path):
    for operation in OPERATIONS:
        folder = tmp_path / operation
        steps, _, _ = steps_of(operation, base, folder)
        manifest = Storage(folder).snapshot.manifest
        if operation == "delete":
            assert [event for event, path in steps.log if path.endswith(".bin")] == ["open", "write", "fdatasync"]
            continue
        renamed = max(at for at, (event, path) in enumerate(steps.log) if event == "os.rename")
        assert "manifest.json" in steps.log[renamed][1]
        fresh = [folder / manifest.deleted]
        fresh += [p for d in ("segments", "extras") for p in (folder / d).rglob("*") if p.is_file()]
        old = {path.relative_to(base) for path in base.rglob("*")}
        for path in fresh:
            if path.relative_to(folder) in old:
                continue
            flushed = [at for at, step in enumerate(steps.log) if step == ("fsync", str(path))]
            written = [at for at, step in enumerate(steps.log) if step == ("open", str(path))]
            assert flushed and written and max(written) < max(flushed) < renamed, path
            for parent in (path.parent, path.parent.parent):
                if parent != folder.parent and parent != folder:
                    assert any(step == ("fsync", str(parent)) for step in steps.log[max(written) : renamed]), parent
        assert ("fsync", str(folder)) in steps.log[renamed:]


def test_a_second_writer_is_refused_while_the_first_lives(base, tmp_path):
    folder = tmp_path / "index"
    shutil.copytree(base, folder)
    index, other = Index.open(folder, model=engine()), Index.open(folder, model=engine())
    with index._storage.change():
        for work in (lambda: other.delete([OLD[0]]), lambda: other.add(images(["x"])), other.compact):
            with pytest.raises(IndexBusy, match=rf"written by process {os.getpid()} on .*remove .*writer.lock"):
                work()

        def child() -> None:
            with pytest.raises(IndexBusy):
                Index.open(folder, model=engine()).delete([OLD[0]])

        assert in_child(child) == 0
        assert len(other.search(texts(1), 9)[0]) == len(OLD)
    other.delete([OLD[0]])
    # The first takes up what the second has committed before it writes.
    index.delete([OLD[1]])
    assert list(index.ids()) == OLD[2:] and list(other.ids()) == OLD[1:]
    assert list(other.reload().ids()) == OLD[2:]


def test_the_lock_of_another_process_with_the_same_number_counts_for_nothing(tmp_path):
    import socket

    lock = tmp_path / LOCK
    here = {"pid": os.getpid(), "started": "another boot/1", "host": socket.gethostname()}
    for dead in (here, {**here, "pid": 2**22 + 1}, {**here, "pid": None}):
        lock.write_text(json.dumps(dead))
        with writing(tmp_path):
            assert json.loads(lock.read_text())["started"] != "another boot/1"
        assert not lock.exists()
    lock.write_text('{"pid": 1')
    with writing(tmp_path):
        pass
    lock.write_text(json.dumps({**here, "host": "elsewhere"}))
    with pytest.raises(IndexBusy, match="on 'elsewhere'"), writing(tmp_path):
        pass


def test_creating_is_whole_or_not_at_all(tmp_path):
    with watched(Steps(tmp_path / "whole")) as steps:
        index_at(tmp_path / "whole")
    for at in range(len(steps.log)):
        folder = tmp_path / f"step{at}"

        def work(folder: Path = folder, at: int = at) -> None:
            watching = Steps(folder)
            watching.at, watching.action = at, die
            with watched(watching):
                index_at(folder)

        assert in_child(work) == -signal.SIGKILL
        there = (folder / "manifest.json").exists()
        index = Index.open(folder, model=engine()) if there else index_at(folder)
        assert len(index) == 0 and index.verify() == []
        index.add(images(["x"]))
        assert list(index.ids()) == ["x"]


def test_a_folder_that_cannot_be_written_is_named(base, tmp_path, monkeypatch):
    index = Index.open(base, model=engine())
    real = os.open

    def refused(path, flags, *rest, **more):
        if str(path).endswith(GUARD):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(PermissionError, match=f"Index: {base} cannot be written .Permission denied."):
        index.delete(list(index.ids())[:1])
