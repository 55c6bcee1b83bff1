"""An index under several threads, in forked children, and read while it is written."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.forks import is_forked, one_thread_after_fork
from engine.retrieval.index import Index
from engine.retrieval.storage import Storage
from tests.index_cases import engine, images, index_at, names, texts
from tests.index_faults import in_child


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    # The pool of threads starts with the first work that is worth sharing out.
    torch.randn(600, 600) @ torch.randn(600, 600)
    torch.randn(2_000_000).exp()
    yield
    torch.set_num_threads(before)


def test_a_forked_child_searches_adds_and_encodes_with_one_thread(tmp_path, two_threads):
    index = index_at(tmp_path, segment_bytes=1 << 20)
    index.add(images(names(0, 400)))
    wanted = {scorer: index.search(texts(3), 5, scorer=scorer) for scorer in ("sgi", "max_sim", "global")}
    words = index.search(["a red circle and a blue square"], 5)

    def work() -> None:
        assert is_forked() and torch.get_num_threads() == 2
        for scorer, hits in wanted.items():
            assert index.search(texts(3), 5, scorer=scorer) == hits
        assert index.search(["a red circle and a blue square"], 5, explain=True) == [
            [type(hit)(**{**vars(hit), "alignment": again.alignment}) for hit, again in zip(one, other, strict=True)]
            for one, other in zip(words, index.search(["a red circle and a blue square"], 5, explain=True), strict=True)
        ]
        assert Index.open(tmp_path, model=engine()).search(texts(3), 5) == wanted["sgi"]
        index.add(images(names(400, 700)))
        index.delete(names(0, 1))
        index.compact()
        with one_thread_after_fork():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2

    # A thread that writes while the process is forked is not there in the child, and lets go of nothing.
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with index._storage._lock, index._loading:
            held.set()
            go.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert held.wait(10)
        assert in_child(work, timeout_s=30) == 0
    finally:
        go.set()
        holder.join()
    assert not is_forked()
    assert len(index.reload()) == 699 and index.verify() == []
    with one_thread_after_fork():
        assert torch.get_num_threads() == 2


def test_eight_threads_find_the_same(tmp_path):
    index = index_at(tmp_path)
    index.add(images(names(0, 60)))
    asking = [texts(2, seed=seed) for seed in range(8)]
    wanted = [index.search(queries, 7) for queries in asking]
    fresh = Index.open(tmp_path, model=engine())
    with ThreadPoolExecutor(8) as pool:
        for opened in (fresh, index):
            found = list(pool.map(lambda queries, opened=opened: opened.search(queries, 7), asking * 4))
            assert found == wanted * 4


def test_threads_search_while_another_writes(tmp_path):
    index = index_at(tmp_path)
    index.add(images(names(0, 20)))
    stop, faults = threading.Event(), []

    def search() -> None:
        while not stop.is_set():
            try:
                hits = index.search(texts(1), 1000)[0]
                ids = [hit.id for hit in hits]
                assert len(set(ids)) == len(ids) and set(names(0, 10)) <= set(ids)
            except BaseException as error:
                faults.append(error)
                return

    readers = [threading.Thread(target=search) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for turn in range(6):
            index.add(images(names(20, 30)))
            index.update(images(names(5, 8), seed=turn))
            index.delete(names(20, 30))
            if turn % 2:
                index.compact()
    finally:
        stop.set()
        for reader in readers:
            reader.join(30)
    assert not faults and not any(reader.is_alive() for reader in readers)


def test_readers_in_other_processes_see_one_commit_at_a_time(tmp_path):
    """A child opens the index again and again while the parent adds, updates, deletes and compacts."""
    index = index_at(tmp_path / "index")
    index.add(images(names(0, 20)), metadata={"n": range(20)})
    ready, done = tmp_path / "ready", tmp_path / "done"

    def read() -> None:
        opened, held = 0, Storage(tmp_path / "index")
        kept = held.snapshot
        rows = kept.rows
        seen = set()
        while not done.exists() or opened < 3:
            snapshot = held.refresh() if opened % 2 else Storage(tmp_path / "index").snapshot
            ids = list(snapshot.all_ids())
            # Every commit holds pairs of an even and an odd one, or none of the two.
            assert len(set(ids)) == len(ids) and len(ids) % 2 == 0
            assert snapshot.metadata().num_rows == snapshot.rows
            seen.add(snapshot.manifest.generation)
            opened += 1
            ready.touch()
        # What was opened first is still there, whatever was compacted.
        assert kept.rows == rows and kept.metadata().num_rows == rows and len(list(kept.all_ids())) == 20
        assert kept.gathered("windows", range(rows)).cu_seqlens[-1] > 0
        (tmp_path / "seen").write_text(json.dumps(len(seen)))

    child = threading.Thread(target=lambda: results.append(in_child(read, timeout_s=60)))
    results: list[int] = []
    child.start()
    deadline = time.monotonic() + 30
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for turn in range(10):
        index.add(images(names(20, 24)), metadata={"n": range(4)})
        index.update(images(names(0, 2), seed=turn))
        index.delete(names(20, 24))
        index.compact()
    done.touch()
    child.join(90)
    assert results == [0]
    assert json.loads((tmp_path / "seen").read_text()) >= 2
    assert sorted(index.ids()) == sorted(names(0, 20)) and os.getpid() > 0
