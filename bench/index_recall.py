"""Recall of an index on synthetic images: `python -m bench.index_recall FOLDER [--candidates 1000 5000]`.

Images of 50 windows of 512 numbers (`bench/index_data.py`), int8; captions of 4 segments. Of the ten best the share is
printed that is found by so many candidates against all codes, and by all codes against float32 vectors; beside that
what the structure for candidates says of itself, and CPU time. Started again on the same folder it goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.index_data import BLOCK, Clusters, ids_of, index_for, one_of, recall
from engine.retrieval.index import CANDIDATES
from engine.retrieval.scan import BestRows
from engine.scorers.sgi import SGI

K, SEGMENTS = 10, 4
SCORER = SGI(grid="none", crops="windows")


def float_ids(data: Clusters, segments: torch.Tensor) -> list[list[str]]:
    """The best by float32 vectors, drawn again block by block."""
    best = [BestRows(K) for _ in segments]
    flat = segments.flatten(0, 1)
    for first in range(0, data.images, BLOCK):
        windows = data.block(first).regions
        assert windows is not None
        found = (windows.flatten(0, 1) @ flat.T).view(*windows.shape[:2], -1).amax(dim=1)  # (n, queries · segments)
        scores = found.view(len(found), len(segments), -1).mean(dim=2).T.numpy()
        for query, one in enumerate(best):
            one.take(scores[query], np.arange(first, first + len(found)), None)
    return [[f"image {row}" for row in one.found().rows.tolist()] for one in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--candidates", type=int, nargs="+", default=[CANDIDATES])
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    data = Clusters(images=options.images, dim=options.dim)
    index = index_for(options.folder, options.dim)
    cpu = time.process_time()
    before = len(index)
    index.add((data.block(first) for first in range(before - before % BLOCK, data.images, BLOCK)), existing="skip")
    stats = index.stats()
    say(f"build: {len(index) - before} of {stats.images} images in {time.process_time() - cpu:.0f} s of CPU time")
    say(f"structure: {dict(stats.extras)}")
    queries = data.queries(options.queries, SEGMENTS)
    exact = timed("all codes", lambda: ids_of(index.search(queries, K, scorer=SCORER, candidates=None)))
    single = one_of(queries)[0]
    timed("one query, all codes", lambda: index.search(single, K, scorer=SCORER, candidates=None))
    for count in options.candidates:
        ask = partial(index.search, k=K, scorer=SCORER, candidates=count)
        near = timed(f"{count} candidates", lambda ask=ask: ids_of(ask(queries)))
        timed(f"one query, {count} candidates", lambda ask=ask: ask(single))
        say(f"recall@{K} of {count} candidates against all codes: {recall(near, exact):.3f}")
    true = float_ids(data, queries.segments)
    say(f"recall@{K} of int8 against float32: {recall(exact, true):.3f}")


def timed(what, call):
    """The result of a call, its CPU time printed."""
    cpu = time.process_time()
    found = call()
    say(f"{what}: {1e3 * (time.process_time() - cpu):.1f} ms of CPU time")
    return found


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
