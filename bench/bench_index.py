"""An index's exact search against torch: `pytest bench/bench_index.py [--threads 2]` prints the ratios.

20,000 images of 50 vectors of 128 numbers, drawn around seeded centres, int8 in mapped files; a query is a text of 32
tokens. torch scores the same vectors as float32 in memory: one matrix product a block, maximum, sum, top 10. Both start
from a query's vectors and end at ten images. What rounding to codes costs is the recall of torch's ten.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from bench.paired import Paired, Work
from engine.features import ImageFeatures, TextFeatures
from engine.retrieval.index import Index
from engine.retrieval.manifest import Manifest, VectorKind
from engine.retrieval.storage import Storage
from engine.scorers.max_sim import MaxSim

IMAGES, PATCHES, TOKENS, DIM, CENTRES, K = 20_000, 50, 32, 128, 2_000, 10
SCORER = MaxSim(reduction="sum", tap="projected")


def clustered(make: torch.Generator, centres: Tensor, rows: int, each: int, spread: float) -> Tensor:
    """Unit vectors `(rows, each, DIM)`, each near a centre drawn for it."""
    chosen = centres[torch.randint(len(centres), (rows, each), generator=make)]
    return normalize(chosen + spread * torch.randn(rows, each, DIM, generator=make) / DIM**0.5, dim=2)


@pytest.fixture(scope="module")
def collection() -> Iterator[tuple[Index, Tensor, Tensor, Tensor]]:
    """The index, its vectors `(IMAGES, PATCHES, DIM)` as float32, queries `(32, TOKENS, DIM)`, and what torch finds."""
    make = torch.Generator().manual_seed(3)
    centres = normalize(torch.randn(CENTRES, DIM, generator=make), dim=1)
    vectors = clustered(make, centres, IMAGES, PATCHES, 1.0)
    asked = torch.randint(IMAGES, (32,), generator=make)
    # A query asks for parts of one image, more or less.
    parts = vectors[asked][:, torch.randint(PATCHES, (TOKENS,), generator=make)]
    queries = normalize(parts + 1.2 * torch.randn(parts.shape, generator=make) / DIM**0.5, dim=2)
    with tempfile.TemporaryDirectory() as folder:
        kind = VectorKind("patches", DIM, tap="projected")
        Storage.create(folder, Manifest(model="none", fingerprint="numbers", dim=DIM, vectors=(kind,)))
        index = Index.open(folder)
        start = time.process_time()
        index.add(stream(vectors))
        print(f"\nbuild: {IMAGES} images in {time.process_time() - start:.1f} s of CPU time")
        wanted = by_torch(vectors, queries)
        of_all = recall(by_index(index, queries), wanted)
        print(f"recall@{K} of 32 queries: {of_all:.4f}")
        assert of_all >= 0.97
        yield index, vectors, queries, wanted


def stream(vectors: Tensor) -> Iterator[ImageFeatures]:
    for start in range(0, len(vectors), 500):
        block = vectors[start : start + 500]
        ids = tuple(str(number) for number in range(start, start + len(block)))
        yield ImageFeatures(
            normalize(block.mean(dim=1), dim=1), patches=block, aligned=True, tap="projected", ids=ids,
            fingerprint="numbers",
        )  # fmt: skip


def by_torch(vectors: Tensor, queries: Tensor) -> Tensor:
    """Rows `(queries, K)` of the best images."""
    flat = vectors.view(-1, DIM)
    scores = []
    for block in flat.split(1000 * PATCHES):
        similarity = queries.reshape(-1, DIM) @ block.T
        best = similarity.view(len(queries), TOKENS, -1, PATCHES).amax(dim=3)
        scores.append(best.sum(dim=1))
    return torch.cat(scores, dim=1).topk(K).indices


def recall(found: Tensor, wanted: Tensor) -> float:
    return float((found[:, :, None] == wanted[: len(found), None, :]).any(dim=2).float().mean())


def by_index(index: Index, queries: Tensor) -> Tensor:
    texts = TextFeatures(queries[:, 0], tokens=queries, fingerprint="numbers")
    found = index.search(texts, K, scorer=SCORER, candidates=None)
    return torch.tensor([[int(hit.id) for hit in hits] for hits in found])


@pytest.mark.parametrize("number", [1, 8])
def bench_exact_search(paired: Paired, collection: tuple[Index, Tensor, Tensor, Tensor], number: int) -> None:
    index, vectors, queries, wanted = collection

    def finds_them(found: Tensor) -> None:
        # One of the ten of one query is a tenth.
        assert recall(found, wanted) > 0.89

    rows = float(IMAGES * PATCHES)
    paired(
        "Index.search", f"N {IMAGES} P {PATCHES} T {TOKENS} D {DIM} x {number}, exact",
        lambda: by_index(index, queries[:number]), {"torch float32": lambda: by_torch(vectors, queries[:number])},
        expected=finds_them, dtype=torch.int8, work=Work(2 * rows * number * TOKENS * DIM, rows * DIM),
    )  # fmt: skip
