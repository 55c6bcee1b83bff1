"""Run by `bench/bench_index.py` in an environment with fast-plaid: builds and asks its index; prints JSON.

The folder holds `windows.pt` (N, P, D) and `queries.pt` (B, T, D). Times are the process's own.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch


def main(folder: Path) -> None:
    from fast_plaid import search

    torch.set_num_threads(1)
    windows, queries = torch.load(folder / "windows.pt"), torch.load(folder / "queries.pt")
    index = search.FastPlaid(index=str(folder / "plaid"), device="cpu")
    start = time.process_time()
    index.create(documents_embeddings=list(windows))
    build = time.process_time() - start
    found, times = [], []
    for query in queries:
        start = time.process_time()
        (hits,) = index.search(queries_embeddings=query[None], top_k=10)
        times.append(time.process_time() - start)
        found.append([int(row) for row, _ in hits])
    facts = {"version": version("fast-plaid"), "build_s": build, "query_s": statistics.median(times), "found": found}
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
