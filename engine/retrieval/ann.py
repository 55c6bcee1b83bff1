"""Structures that find the nearest global embeddings without looking at all of them, by FAISS.

`ann="auto"` looks at all while they are few. Beyond, measured with 1000 candidates a query on one core: an HNSW graph
must visit at least as many nodes as it is asked for, which takes longer than looking at 50,000 embeddings in order, and
building it takes twenty times as long as an inverted file. So the choice is an inverted file (IVF), with eight bits a
number while memory allows, with product codes (PQ) of four bits for two numbers in the largest collections (training
those of eight bits takes two hundred times as long in FAISS 1.15); a factory string chooses otherwise.
Whatever a structure finds is ranked by the exact cosine afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.forks import is_forked

# Up to so many rows "auto" looks at all embeddings.
EXACT_ROWS = 50_000
# From so many rows on "auto" keeps product codes: 1 byte for 4 numbers in place of 1 for each.
PRODUCT_ROWS = 2_000_000
# Rows a structure is trained on at most, and rows for each list of an inverted file.
TRAINING_ROWS = 131_072
TRAINING_ROWS_PER_LIST = 40
# Rows added at a time.
ADD_ROWS = 16_384
# Effort is raised until this share of the nearest `TUNED_K` is found for `SAMPLE` queries: as many as a search takes as
# candidates. Tuned for the nearest 100, an inverted file lost 7 of 100 images that the scorer would have put first.
RECALL = 0.97
TUNED_K = 1000
RECALL_KS = (10, 100, 1000)
SAMPLE = 64
FILE = "structure.faiss"

# Gives embeddings (n, D) float32 of chosen rows.
Take = Callable[[np.ndarray], Tensor]


@dataclass(frozen=True)
class StructureFacts:
    """What is known of a structure.

    Attributes:
        factory: the FAISS factory string.
        rows: it covers the first so many.
        dim: numbers of an embedding.
        effort: lists looked at of an inverted file (`nprobe`), nodes kept in view of a graph (`efSearch`); 0 for
            others.
        recall: share of the k nearest that are found when k are wanted, by k as text; of queries half way between
            two embeddings: captions are no images, and an image's own embedding would flatter it.
        sample: number of those queries.
        trained_rows: rows it was trained on.
    """

    factory: str
    rows: int
    dim: int
    effort: int = 0
    recall: Mapping[str, float] = field(default_factory=dict)
    sample: int = 0
    trained_rows: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For a manifest."""
        return asdict(self)


def factory_for(ann: str, rows: int, dim: int) -> str | None:
    """The FAISS factory string for so many rows; None where all embeddings are to be looked at.

    >>> factory_for("auto", 10_000, 512) is None, factory_for("auto", 1_000_000, 512)
    (True, 'IVF3276,SQ8')
    >>> factory_for("auto", 100_000_000, 512)
    'IVF3276,PQ256x4fs'
    """
    if ann != "auto":
        return ann
    if rows <= EXACT_ROWS:
        return None
    lists = min(round(4 * math.sqrt(rows)), TRAINING_ROWS // TRAINING_ROWS_PER_LIST)
    if rows < PRODUCT_ROWS:
        return f"IVF{lists},SQ8"
    # The parts of a product code must be equally wide.
    parts = next(parts for parts in range(max(1, dim // 2), 0, -1) if dim % parts == 0)
    return f"IVF{lists},PQ{parts}x4fs"


class Structure:
    """A FAISS index over embeddings. May be searched from several threads.

    Args:
        index: of FAISS.
        facts: about it.
        memory: what the index reads in place, kept alive.
    """

    def __init__(self, index: Any, facts: StructureFacts, memory: object = None) -> None:
        self._index = index
        self._memory = memory
        self.facts = facts

    @property
    def spare(self) -> int:
        """Rows found for each that is wanted: product codes rank coarsely, and the exact cosine ranks again."""
        return 4 if "PQ" in self.facts.factory else 1

    @classmethod
    def build(cls, factory: str, rows: int, dim: int, take: Take, *, seed: int = 0) -> Structure:
        """A structure over `rows` embeddings, its effort chosen by measuring.

        Training is on a GPU where a FAISS for GPUs finds one and knows the kind. `take` is asked for `ADD_ROWS` rows
        at a time, for training for at most `TRAINING_ROWS`.

        Raises:
            ImportError: FAISS is missing; the message names the extra.
            ValueError: a factory string that FAISS does not know, too few rows to train on, or a kind that cannot
                search among chosen rows.
        """
        faiss = load_faiss()
        try:
            index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise _unknown(factory, error) from error
        inverted = faiss.try_extract_index_ivf(index)
        if inverted is not None:
            # Fewer rows a list than FAISS likes make a structure that the measurement below judges; it would print.
            inverted.cp.min_points_per_centroid = 1
        trained = 0 if index.is_trained else min(rows, TRAINING_ROWS)
        with threads_of_torch(faiss):
            if trained:
                chosen = np.sort(np.random.default_rng(seed).choice(rows, trained, replace=False))
                index = _train(faiss, index, take(chosen).numpy(), factory)
            built = cls(index, StructureFacts(factory, rows, dim, trained_rows=trained))
            try:
                for first in range(0, rows, ADD_ROWS):
                    index.add(take(np.arange(first, min(first + ADD_ROWS, rows))).numpy())
                # Some kinds cannot leave rows out, which conditions and deleted rows ask for.
                built.search(take(np.arange(1)).numpy(), 1, allowed=np.ones(rows, dtype=bool), effort=1)
            except RuntimeError as error:
                raise ValueError(f"Index: {factory!r} cannot hold and search {rows} rows ({_why(error)})") from error
        return built._tuned(take, seed)

    def save(self, folder: Path) -> None:
        """Write `FILE` into a folder."""
        faiss = load_faiss()
        try:
            faiss.write_index(self._index, str(folder / FILE))
        except RuntimeError as error:
            raise OSError(f"Index: {folder / FILE} cannot be written ({_why(error)})") from error

    @classmethod
    def load(cls, data: Tensor, facts: Mapping[str, Any]) -> Structure:
        """A structure out of the bytes of its file, uint8, which it reads in place: mapped ones are not copied.

        Raises ImportError where FAISS is missing, ValueError for bytes that FAISS does not read.
        """
        faiss = load_faiss()
        try:
            index = faiss.read_index(faiss.ZeroCopyIOReader(faiss.swig_ptr(data.numpy()), len(data)))
        except RuntimeError as error:
            raise ValueError(f"Index: the structure for candidates cannot be read ({_why(error)})") from error
        return cls(index, StructureFacts(**facts), data)

    def search(
        self, queries: np.ndarray, count: int, *, allowed: np.ndarray | None = None, effort: int | None = None
    ) -> list[np.ndarray]:
        """For each query up to `spare · count` rows, int64, nearest first as far as the structure knows.

        Args:
            queries: float32 `(B, D)`.
            allowed: bool `(rows,)`, rows that may be found. The rarer they are, the more lists are looked at.
            effort: by default that of the facts.
        """
        faiss = load_faiss()
        wanted = min(self.spare * count, self.facts.rows)
        effort = self.facts.effort if effort is None else effort
        selector = None
        if allowed is not None:
            bits = np.packbits(allowed, bitorder="little")
            selector = faiss.IDSelectorBitmap(bits)
            effort = min(self._most_effort(), effort * min(16, -(-len(allowed) // max(1, int(allowed.sum())))))
        with threads_of_torch(faiss):
            parameters = _parameters(faiss, self._index, selector, effort, wanted)
            _, found = self._index.search(np.ascontiguousarray(queries, dtype=np.float32), wanted, params=parameters)
        # FAISS fills up with -1 where it finds too few.
        return [rows[rows >= 0] for rows in found]

    def _most_effort(self) -> int:
        faiss = load_faiss()
        inverted = faiss.try_extract_index_ivf(self._index)
        return inverted.nlist if inverted is not None else 8 * max(TUNED_K, *RECALL_KS)

    def _tuned(self, take: Take, seed: int) -> Structure:
        """The same with the least effort that finds enough, and what it finds."""
        queries = _between(take, self.facts.rows, seed)
        greatest = min(max(RECALL_KS), self.facts.rows)
        exact = nearest(queries, self.facts.rows, take, greatest)
        tuned = min(TUNED_K, self.facts.rows)
        effort, most = 0, 0
        if _effort_name(load_faiss(), self._index):
            effort, most = 8, self._most_effort()
        while effort < most and _recall(self.search(queries, tuned, effort=effort), exact, tuned) < RECALL:
            effort = min(2 * effort, most)
        found = {
            str(k): round(_recall(self.search(queries, k, effort=effort), exact, k), 4)
            for k in RECALL_KS if k <= greatest
        }  # fmt: skip
        facts = {**self.facts.as_dict(), "effort": effort, "recall": found, "sample": len(queries)}
        return Structure(self._index, StructureFacts(**facts))


def check_ann(ann: str, dim: int) -> None:
    """Refuse what is no factory string for an index.

    Raises:
        TypeError: no string.
        ValueError: one that FAISS does not know, or that has numbers of its own for the rows.
        ImportError: FAISS is missing, which knows.
    """
    if not isinstance(ann, str):
        raise TypeError(f"Index: ann must be 'auto' or a FAISS factory string, got {type(ann).__name__}")
    if ann != "auto":
        faiss = load_faiss()
        try:
            made = faiss.index_factory(dim, ann, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise _unknown(ann, error) from error
        if isinstance(made, faiss.IndexIDMap):
            raise ValueError(f"Index: ann must be a FAISS factory string without IDMap, rows are numbered, got {ann!r}")


def load_faiss() -> Any:
    """The module. Raises ImportError that says how to get it."""
    try:
        import faiss
    except ImportError as error:
        raise ImportError(
            "Index: finding candidates in a large index needs FAISS; install it with pip install 'peaksim[cpu]' or "
            "'peaksim[gpu]', or search with candidates=None, which looks at all rows"
        ) from error
    return faiss


@contextmanager
def threads_of_torch(faiss: Any) -> Iterator[None]:
    """FAISS works with as many threads as torch while this lasts; with one after a fork, where others would hang."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1 if is_forked() else torch.get_num_threads())
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def nearest(queries: np.ndarray, rows: int, take: Take, k: int) -> list[np.ndarray]:
    """The k nearest rows of each query by looking at all embeddings; int64, best first."""
    asking = torch.from_numpy(queries)
    best, where = torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
    for first in range(0, rows, ADD_ROWS):
        own = np.arange(first, min(first + ADD_ROWS, rows))
        scores = torch.cat([best, asking @ take(own).T], 1)
        numbers = torch.cat([where, torch.from_numpy(own).expand(len(queries), -1)], 1)
        best, places = scores.topk(min(k, scores.shape[1]), dim=1)
        where = numbers.gather(1, places)
    return list(where.numpy())


def _train(faiss: Any, index: Any, vectors: np.ndarray, factory: str) -> Any:
    on_gpu = None
    if hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0:
        try:
            resources = faiss.StandardGpuResources()
            on_gpu = faiss.index_cpu_to_gpu(resources, 0, index)
        except RuntimeError:
            # A kind that FAISS has for CPUs alone, such as a graph.
            on_gpu = None
    try:
        if on_gpu is None:
            index.train(vectors)
            return index
        on_gpu.train(vectors)
        return faiss.index_gpu_to_cpu(on_gpu)
    except RuntimeError as error:
        raise ValueError(f"Index: {factory!r} cannot be trained on {len(vectors)} rows ({_why(error)})") from error


def _effort_name(faiss: Any, index: Any) -> str:
    if faiss.try_extract_index_ivf(index) is not None:
        return "nprobe"
    return "efSearch" if isinstance(faiss.downcast_index(index), faiss.IndexHNSW) else ""


def _parameters(faiss: Any, index: Any, selector: Any, effort: int, count: int) -> Any:
    chosen = {} if selector is None else {"sel": selector}
    name = _effort_name(faiss, index)
    if name == "nprobe":
        parameters = faiss.SearchParametersIVF(nprobe=max(1, effort), **chosen)
        if isinstance(faiss.downcast_index(index), faiss.IndexPreTransform):
            return faiss.SearchParametersPreTransform(index_params=parameters)
        return parameters
    if name == "efSearch":
        return faiss.SearchParametersHNSW(efSearch=max(effort, count), **chosen)
    return faiss.SearchParameters(**chosen) if chosen else None


def _between(take: Take, rows: int, seed: int) -> np.ndarray:
    """Queries half way between two embeddings each, unit norm, `(SAMPLE, D)`."""
    pairs = np.random.default_rng((seed, rows)).integers(rows, size=(2, SAMPLE))
    middle = take(pairs[0]) + take(pairs[1])
    return torch.nn.functional.normalize(middle, dim=1).numpy()


def _recall(found: list[np.ndarray], exact: list[np.ndarray], k: int) -> float:
    # Of the exact cosine's k nearest all that were found stay among the k best once they are ranked by it.
    shares = [len(np.intersect1d(own, true[:k])) / k for own, true in zip(found, exact, strict=True)]
    return float(np.mean(shares))


def _unknown(factory: str, error: Exception) -> ValueError:
    return ValueError(f"Index: ann must be 'auto' or a FAISS factory string, got {factory!r} ({_why(error)})")


def _why(error: Exception) -> str:
    return " ".join(str(error).split())[-200:]
