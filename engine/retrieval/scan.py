"""The exact search: every stored vector is looked at, a segment at a time, in the order of insertion."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.ops.max_sim import max_sim
from engine.ops.max_sim_int8 import max_sim_int8
from engine.ops.max_sim_varlen import max_sim_varlen
from engine.ops.quantize import quantize
from engine.reference.quantize import QuantizedTokens
from engine.retrieval.segment import PackedVectors
from engine.retrieval.snapshot import Piece, Snapshot
from engine.scorers.late import LateQueries

# Scores held at once, of all queries; large enough to feed every thread.
BLOCK_SCORES = 1 << 22
# Where fewer than this share of a segment's rows count, they are copied out and the others not looked at.
SPARSE = 0.25


@dataclass(frozen=True)
class Found:
    """The best rows of one query, best first: float32 scores and int64 rows."""

    scores: np.ndarray
    rows: np.ndarray


class Asking:
    """Late queries made ready for stored vectors; scores any of them.

    Args:
        queries: see `LateQueries`.
        store: `"int8"` or `"bf16"`.

    Raises:
        ValueError: a query that is not finite, or a soft maximum of int8 codes.
    """

    def __init__(self, queries: LateQueries, store: str) -> None:
        kept = queries.weights != 0
        vectors = queries.vectors.detach().to("cpu", torch.float32)
        bad = (~vectors.isfinite().all(dim=2) & kept.cpu()).any(dim=1).nonzero().flatten().tolist()
        if bad:
            raise ValueError(f"Index: query {bad[0]} must be finite, got NaN or an infinity")
        self.kind = queries.kind
        self.number = len(queries)
        self.weights = queries.weights.detach().to("cpu", torch.float32)
        self.mask = self.weights != 0
        # What takes no part may hold anything.
        self.vectors = torch.where(self.mask[:, :, None], vectors, 0.0)
        self.temperature = queries.temperature
        self.codes: QuantizedTokens | None = None
        if queries.kind != "global" and store == "int8":
            if queries.temperature is not None:
                raise ValueError(
                    "Index: int8 vectors are scored with the hard maximum, got a temperature of "
                    f"{queries.temperature}; ask with the hard maximum, or keep vectors as bf16"
                )
            self.codes = quantize(self.vectors)

    def scores(self, documents: PackedVectors) -> Tensor:
        """Scores `(queries, images)` float32 of packed vectors."""
        vectors, scales = documents.vectors, documents.scales
        bounds: Tensor | None = documents.cu_seqlens
        lengths = documents.cu_seqlens.diff()
        if len(lengths) and bool((lengths == lengths[0]).all()):
            # Images with as many vectors each need no boundaries, whose looking through takes longer than a search.
            vectors = vectors.view(len(lengths), -1, vectors.shape[1])
            scales = None if scales is None else scales.view(len(lengths), -1)
            bounds = None
        found: object
        if scales is not None:
            assert self.codes is not None
            found = max_sim_int8(
                self.codes, QuantizedTokens(vectors, scales), d_cu_seqlens=bounds, q_mask=self.mask,
                q_weights=self.weights,
            )  # fmt: skip
        elif bounds is None:
            found = max_sim(
                self.vectors.to(torch.bfloat16), vectors, q_mask=self.mask, q_weights=self.weights,
                temperature=self.temperature,
            )  # fmt: skip
        else:
            found = max_sim_varlen(
                self.vectors.to(torch.bfloat16), vectors, d_cu_seqlens=bounds, q_mask=self.mask,
                q_weights=self.weights, temperature=self.temperature,
            )  # fmt: skip
        assert isinstance(found, Tensor)  # no alignment was asked for
        return found

    def global_scores(self, embedding: Tensor) -> Tensor:
        """Scores `(queries, images)` float32 of global embeddings `(images, D)`."""
        # The kernel's sums do not depend on how many rows it is given, as a library's matrix product's may.
        found = max_sim(self.vectors, embedding[:, None], q_mask=self.mask, q_weights=self.weights)
        assert isinstance(found, Tensor)
        return found


def scan(snapshot: Snapshot, asking: Asking, k: int, *, allowed: np.ndarray | None = None) -> list[Found]:
    """The k best rows of each query among all that are not deleted; fewer where there are fewer.

    Args:
        k: 1 or more.
        allowed: bool `(snapshot.rows,)`: rows that may be found.

    Returns:
        for each query its rows in descending order of score; of equal scores the row inserted first stands first.

    Raises:
        ValueError: the index does not keep these vectors.
        IndexDamaged: what was read is not what was written.
    """
    if asking.kind != "global":
        snapshot.need(asking.kind)
    best = [BestRows(k) for _ in range(asking.number)]
    for piece in snapshot.pieces:
        keep = piece.alive if allowed is None else piece.alive & allowed[piece.first : piece.first + piece.rows]
        count = int(keep.sum())
        if count == 0:
            continue
        rows = None if count >= SPARSE * piece.rows else keep.nonzero()[0]
        step = max(1, BLOCK_SCORES // max(1, asking.number))
        for first in range(0, piece.rows if rows is None else count, step):
            if rows is None:
                own = np.arange(first, min(first + step, piece.rows))
                counted = keep[own]
            else:
                own, counted = rows[first : first + step], None
            scores = _scores(piece, asking, own, whole=rows is None).numpy()
            for query, one in enumerate(best):
                one.take(scores[query], own + piece.first, counted)
    return [one.found() for one in best]


def score_rows(snapshot: Snapshot, asking: Asking, rows: np.ndarray) -> np.ndarray:
    """Scores `(queries, len(rows))` float32 of chosen rows, the same as a scan gives them."""
    if asking.kind == "global":
        return asking.global_scores(snapshot.embedding(rows)).numpy()
    snapshot.need(asking.kind)
    scores = np.empty((asking.number, len(rows)), dtype=np.float32)
    # Piece by piece: putting their vectors together would copy them a second time.
    for piece, places, own in snapshot.by_piece(rows):
        scores[:, places] = asking.scores(piece.segment.gathered(asking.kind, own)).numpy()
    return scores


def _scores(piece: Piece, asking: Asking, rows: np.ndarray, *, whole: bool) -> Tensor:
    """Scores of rows of a piece; `whole` says that they are neighbours, read in place."""
    segment = piece.segment
    if asking.kind == "global":
        embedding = segment.embedding
        return asking.global_scores(embedding[rows[0] : rows[-1] + 1] if whole else embedding[rows])
    if not whole:
        return asking.scores(segment.gathered(asking.kind, rows))
    packed = segment.packed(asking.kind)
    first, last = int(packed.cu_seqlens[rows[0]]), int(packed.cu_seqlens[rows[-1] + 1])
    return asking.scores(
        PackedVectors(
            packed.vectors[first:last],
            None if packed.scales is None else packed.scales[first:last],
            packed.cu_seqlens[rows[0] : rows[-1] + 2] - first,
        )
    )


class BestRows:
    """The k best rows seen so far; rows come in ascending order."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._scores = np.zeros(0, dtype=np.float32)
        self._rows = np.zeros(0, dtype=np.int64)

    def take(self, scores: np.ndarray, rows: np.ndarray, counted: np.ndarray | None) -> None:
        """Look at scored rows; `counted` are those that may be found, by default all."""
        # A row that only equals the worst of k came too late.
        good = scores > self._scores[-1] if len(self._scores) == self._k else np.ones(len(scores), dtype=bool)
        places = (good if counted is None else good & counted).nonzero()[0]
        if len(places) > self._k:
            own = scores[places]
            worst = np.partition(own, len(own) - self._k)[len(own) - self._k]
            places = places[own >= worst]
        if len(places) == 0:
            return
        together = np.concatenate([self._scores, scores[places]])
        order = np.argsort(-together, kind="stable")[: self._k]
        self._scores = together[order]
        self._rows = np.concatenate([self._rows, rows[places]])[order]

    def found(self) -> Found:
        return Found(self._scores, self._rows)
