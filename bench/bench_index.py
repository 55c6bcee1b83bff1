"""The index against exact torch, one at a time against a batch: `pytest bench/bench_index.py [--images 20000]`.

Images of 50 windows of 128 numbers, queries of 32 vectors (of 4 in the batch: segments of a caption, which wait for
memory; 32 vectors wait for multiplications, of which a batch saves none); int8. The baseline is max-sim by torch's
matrix product over all windows in float32, held in memory.

Where `FAST_PLAID_PYTHON` names the Python of an environment with fast-plaid, that is measured beside it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.index_data import Clusters, ids_of, index_for, one_of, recall
from bench.paired import Paired, Row, name_of
from engine.features import TextFeatures
from engine.retrieval.index import Index
from engine.scorers.sgi import SGI

QUERIES, TOKENS, K, CANDIDATES = 32, 32, 10, 1000
# Segments of a caption: a single query of few vectors waits for memory, which a batch reads once.
SEGMENTS = 4
# What fast-plaid 1.7 was measured with at 20,000 images on two cores, and what an index may take of it.
PLAID_BUILD_S, BUILD_SHARE = 634.0, 20.0
DELETE_S = 0.010
SCORER = SGI(grid="none", crops="windows")


class Built:
    """An index with its data in memory."""

    def __init__(self, folder: Path, images: int) -> None:
        self.data = Clusters(images=images)
        features = list(self.data.blocks())
        start = time.process_time()
        self.index = index_for(folder, self.data.dim)
        self.index.add(iter(features))
        self.build_s = time.process_time() - start
        self.windows = torch.cat([block.regions for block in features])
        self.queries = self.data.queries(QUERIES, TOKENS)

    def torch_ids(self, queries: TextFeatures) -> list[list[str]]:
        """The best by torch alone, over all windows in float32."""
        found = []
        for segments in queries.segments:
            scores = (self.windows @ segments.T).amax(dim=1).mean(dim=1)  # (N, P, T), (N, T), (N,)
            found.append([f"image {row}" for row in scores.topk(K).indices.tolist()])
        return found

    def ids(self, queries: TextFeatures, candidates: int | None) -> list[list[str]]:
        return ids_of(self.index.search(queries, K, scorer=SCORER, candidates=candidates))


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    torch.set_num_threads(request.config.getoption("--threads"))
    yield Built(tmp_path_factory.mktemp("index") / "at", request.config.getoption("--images"))


@pytest.mark.parametrize("candidates", [CANDIDATES, None], ids=["candidates", "all"])
def bench_one_query(paired: Paired, built: Built, candidates: int | None) -> None:
    """One query against exact torch."""
    (query, *_) = one_of(built.queries)
    share = recall(built.ids(built.queries, candidates), built.torch_ids(built.queries))
    assert share >= 0.97, f"recall@{K} {share:.3f}"
    wanted = built.torch_ids(query)

    def check(found: list[list[str]]) -> None:
        assert recall(found, wanted) >= 0.8

    what = "all" if candidates is None else f"{candidates} candidates"
    row = paired(
        "index", f"N {built.data.images} one query, {what}, recall@10 {share:.3f}",
        lambda: built.ids(query, candidates), {"torch float32": lambda: built.torch_ids(query)}, expected=check,
        dtype=torch.int8,
    )  # fmt: skip
    assert candidates is None or built.data.images < 20_000 or row.ratios["torch float32"] >= 5


def bench_batch(paired: Paired, built: Built) -> None:
    """32 queries at once against one after the other, over all rows."""
    queries = built.data.queries(QUERIES, SEGMENTS)
    singles = one_of(queries)
    wanted = built.ids(queries, None)

    def one_by_one() -> list[list[str]]:
        return [built.ids(query, None)[0] for query in singles]

    def check(found: list[list[str]]) -> None:
        assert recall(found, wanted) == 1.0

    row = paired(
        "index", f"N {built.data.images} {QUERIES} captions of {SEGMENTS} at once", lambda: built.ids(queries, None),
        {"one by one": one_by_one}, expected=check, dtype=torch.int8,
    )  # fmt: skip
    assert row.ratios["one by one"] >= 2


def bench_build_and_delete(paired: Paired, built: Built, tmp_path: Path) -> None:
    """Seconds to build, and to delete three images for good (the clock's, flushed to the disk)."""
    data = built.data
    allowed = PLAID_BUILD_S / BUILD_SHARE * data.images / 20_000
    assert built.build_s < allowed
    names = iter([f"image {row}" for row in np.random.default_rng(3).permutation(data.images)[:60].tolist()])
    times = []
    for _ in range(15):
        three = [next(names) for _ in range(3)]
        start = time.perf_counter()
        assert built.index.delete(three) == 3
        times.append(time.perf_counter() - start)
        again = Index.open(built.index.path)
        assert not any(name in again for name in three)
    median = statistics.median(times)
    assert median < DELETE_S
    kind, threads = name_of(torch.int8), torch.get_num_threads()
    paired.rows.append(Row("index", f"build of {data.images}", kind, threads, 1e3 * built.build_s, {}))
    paired.rows.append(Row("index", "delete three", kind, threads, 1e3 * median, {}))
    # The fixture must be used; a look at the size costs nothing.
    paired.benchmark.pedantic(lambda: len(built.index), rounds=1)


@pytest.mark.skipif("FAST_PLAID_PYTHON" not in os.environ, reason="FAST_PLAID_PYTHON names no Python with fast-plaid")
def bench_fast_plaid(paired: Paired, built: Built, tmp_path: Path) -> None:
    """fast-plaid on the same data: its build, a query, its recall against exact torch."""
    torch.save(built.windows, tmp_path / "windows.pt")
    torch.save(built.queries.segments, tmp_path / "queries.pt")
    script = Path(__file__).with_name("index_peer.py")
    done = subprocess.run(
        [os.environ["FAST_PLAID_PYTHON"], str(script), str(tmp_path)], check=True, capture_output=True, text=True
    )
    facts = json.loads(done.stdout.splitlines()[-1])
    found = [[f"image {row}" for row in rows] for rows in facts["found"]]
    share = recall(found, built.torch_ids(built.queries))
    kind, threads = "float32", torch.get_num_threads()
    for what, seconds in (("build", facts["build_s"]), (f"one query, recall@10 {share:.3f}", facts["query_s"])):
        case = f"fast-plaid {facts['version']} N {built.data.images} {what}"
        paired.rows.append(Row("index", case, kind, threads, 1e3 * seconds, {}))
    paired.benchmark.pedantic(lambda: len(built.index), rounds=1)
