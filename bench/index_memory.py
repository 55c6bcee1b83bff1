"""Memory of an index: `python -m bench.index_memory FOLDER [--images 200000]` builds one from a stream and searches it.

Images of 50 windows of 512 numbers, int8. Printed are peaks of anonymous resident memory above what was resident
before (Linux): of the build, which holds a block of features and what a segment keeps beside its vectors, and of exact
searches, which map the files and do not load them. Started again on the same folder it goes on where it stopped;
`--seconds` stops it after a while.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.functional import normalize

from engine.features import ImageFeatures, TextFeatures
from engine.retrieval.index import Index
from engine.retrieval.manifest import MANIFEST, Manifest, VectorKind
from engine.retrieval.storage import Storage

WINDOWS, DIM, BLOCK, QUERIES = 50, 512, 256, 4
FINGERPRINT = "of numbers"


@contextmanager
def peak_anonymous_mib() -> Iterator[Callable[[], float]]:
    """A function that tells the peak of anonymous memory since the beginning, above what there was then, in MiB."""
    first, peak, stop = _anonymous_kib(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], _anonymous_kib())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: (max(peak[0], _anonymous_kib()) - first) / 1024
    finally:
        stop.set()
        watcher.join()


def _anonymous_kib() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def opened(folder: Path) -> Index:
    """The index in the folder, made if there is none; of no model, since features are given."""
    if not (folder / MANIFEST).exists():
        plan = {"grid": "none", "mode": "windows", "fill": "border", "full_image": True}
        kind = VectorKind("windows", DIM, plan=plan)
        Storage.create(folder, Manifest(model="none", fingerprint=FINGERPRINT, dim=DIM, vectors=(kind,)))
    return Index.open(folder)


def stream(first: int, last: int) -> Iterator[ImageFeatures]:
    """Images first to last, a block at a time: one block of random windows, turned a little further for each."""
    make = torch.Generator().manual_seed(0)
    windows = normalize(torch.randn(BLOCK, WINDOWS, DIM, generator=make), dim=2)
    for start in range(first, last, BLOCK):
        ids = tuple(f"image {number:09d}" for number in range(start, min(start + BLOCK, last)))
        regions = windows[: len(ids)].roll(start // BLOCK, dims=2)
        yield ImageFeatures(regions[:, 0].clone(), regions=regions, ids=ids, fingerprint=FINGERPRINT)


def build(folder: Path, images: int, seconds: float) -> bool:
    """Add what is missing; whether all is there now."""
    index = opened(folder)
    start, before = time.monotonic(), len(index)

    def until() -> Iterator[ImageFeatures]:
        for block in stream(before, images):
            if time.monotonic() - start > seconds:
                return
            yield block

    cpu = time.process_time()
    with peak_anonymous_mib() as peak:
        index.add(until(), existing="skip")
        added, cpu = len(index) - before, time.process_time() - cpu
        stats = index.stats()
        print(
            f"build: {added} of {stats.images} images in {cpu:.0f} s of CPU time, {stats.segments} segments, "
            f"{stats.size_bytes >> 20} MiB on disk, peak of anonymous memory {peak():.0f} MiB"
        )
    return len(index) >= images


def search(folder: Path) -> None:
    """Exact searches over all of it, cold blocks checked on the way."""
    make = torch.Generator().manual_seed(1)
    vectors = normalize(torch.randn(QUERIES, 6, DIM, generator=make), dim=2)
    texts = TextFeatures(vectors[:, 0], segments=vectors[:, 1:], fingerprint=FINGERPRINT)
    index = opened(folder)
    for turn in ("first, which checks all blocks", "again"):
        with peak_anonymous_mib() as peak:
            cpu = time.process_time()
            hits = index.search(texts, 10, candidates=None)
            cpu = time.process_time() - cpu
            print(f"search {turn}: {QUERIES} queries in {cpu:.1f} s of CPU time, anonymous memory {peak():.0f} MiB")
        assert all(len(found) == 10 for found in hits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if build(options.folder, options.images, options.seconds):
        search(options.folder)


if __name__ == "__main__":
    main()
