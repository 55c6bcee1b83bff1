"""A search from queries to hits: scanned exactly, or candidates first and the scorer on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.engine import Engine
from engine.retrieval.candidates import find_candidates
from engine.retrieval.explaining import alignment
from engine.retrieval.queries import Asked
from engine.retrieval.recipe import Recipe
from engine.retrieval.reencoding import encoded_again, must_encode_again
from engine.retrieval.results import Hit
from engine.retrieval.scan import Asking, BestRows, Found, scan, score_rows
from engine.retrieval.snapshot import Snapshot
from engine.retrieval.stored import features_of
from engine.scorers.base import Match

# Rows turned back into features at a time, for scorers that must see both sides.
FEATURE_ROWS = 1024


@dataclass(frozen=True)
class Plan:
    """How a search goes.

    Attributes:
        k: hits wanted.
        candidates: rows of stage one that the scorer looks at; None for all rows.
        allowed: bool `(snapshot.rows,)`, rows that may be found, or None.
        explain: whether hits say what found what.
        engine: gives the engine, for a scorer that reads what is not kept: candidates are encoded again.
    """

    k: int
    candidates: int | None = None
    allowed: np.ndarray | None = None
    explain: bool = False
    engine: Callable[[], Engine] | None = None


def search(snapshot: Snapshot, asked: Asked, plan: Plan) -> list[list[Hit]]:
    """Hits of each query, best first.

    Raises:
        ValueError: the index does not keep what the scorer reads; a query or a score that is not finite.
        IndexDamaged: what was read is not what was written.
    """
    # One more than is shown: the last hit has a margin too.
    wanted = plan.k + 1
    if plan.candidates is None:
        found = _scanned(snapshot, asked, wanted, plan)
        ranks: list[dict[int, int]] = [{} for _ in found]
    else:
        rows = find_candidates(snapshot, asked, max(plan.candidates, wanted), plan.allowed)
        found = [_reranked(snapshot, _only(asked, query), own, wanted, plan) for query, own in enumerate(rows)]
        ranks = [{int(row): rank for rank, row in enumerate(own)} for own in rows]
    return [_hits(snapshot, asked, query, one, ranks[query], plan) for query, one in enumerate(found)]


def _late(snapshot: Snapshot, asked: Asked) -> Asking | None:
    """Queries for the scan, where the vectors they ask are kept and scored as the scorer would."""
    late, manifest = asked.late, snapshot.manifest
    if late is None:
        return None
    if late.kind != "global":
        snapshot.need(late.kind)
    return Asking(late, manifest.store)


def _scanned(snapshot: Snapshot, asked: Asked, k: int, plan: Plan) -> list[Found]:
    asking = _late(snapshot, asked)
    if asking is not None:
        return scan(snapshot, asking, k, allowed=plan.allowed)
    best = [BestRows(k) for _ in range(len(asked))]
    keep = snapshot.alive if plan.allowed is None else snapshot.alive & plan.allowed
    rows = keep.nonzero()[0]
    for first in range(0, len(rows), FEATURE_ROWS):
        own = rows[first : first + FEATURE_ROWS]
        scores = _by_scorer(snapshot, asked, own, plan)
        for query, one in enumerate(best):
            one.take(scores[query], own, None)
    return [one.found() for one in best]


def _reranked(snapshot: Snapshot, one: Asked, rows: np.ndarray, k: int, plan: Plan) -> Found:
    """The candidates of one query, ranked by the scorer."""
    # Ascending: of equal scores the row inserted first stands first.
    rows = np.sort(rows)
    asking = _late(snapshot, one)
    best = BestRows(k)
    if len(rows):
        scores = _by_scorer(snapshot, one, rows, plan) if asking is None else score_rows(snapshot, asking, rows)
        best.take(scores[0], rows, None)
    return best.found()


def _only(asked: Asked, query: int) -> Asked:
    """The one query alone."""
    late = asked.late
    return replace(
        asked,
        texts=None if asked.texts is None else asked.texts[query],
        images=None if asked.images is None else asked.images[query],
        late=None if late is None else replace(
            late, vectors=late.vectors[query : query + 1], weights=late.weights[query : query + 1]
        ),
    )  # fmt: skip


def _by_scorer(snapshot: Snapshot, asked: Asked, rows: np.ndarray, plan: Plan) -> np.ndarray:
    """Scores `(queries, rows)` by the scorer itself, over features made of what is kept, or of the pictures."""
    assert asked.texts is not None  # pictures ask by vectors
    if must_encode_again(asked.scorer, Recipe(snapshot.manifest)):
        if plan.candidates is None or plan.engine is None:
            raise ValueError(
                f"{asked.scorer.name}: reads of images what the index does not keep; search with candidates=, which "
                "are encoded again from their pictures"
            )
        images = encoded_again(snapshot, rows, asked.scorer, plan.engine)
    else:
        images = features_of(snapshot, rows, asked.scorer.needs())
    asked.scorer.check(images, asked.texts)
    with torch.no_grad():
        scores = asked.scorer.matrix(images, asked.texts)
    if not bool(scores.isfinite().all()):
        raise ValueError(f"{asked.scorer.name}: scores must be finite, got NaN or an infinity; check the queries")
    return np.ascontiguousarray(scores.cpu().numpy().T)


def _hits(
    snapshot: Snapshot, asked: Asked, query: int, found: Found, ranks: dict[int, int], plan: Plan
) -> list[Hit]:
    shown = found.rows[: plan.k]
    hits = []
    for place, (row, name) in enumerate(zip(shown.tolist(), snapshot.ids(shown), strict=True)):
        score = float(found.scores[place])
        margin = score - float(found.scores[place + 1]) if place + 1 < len(found.scores) else None
        matches = _explained(snapshot, _only(asked, query), row, plan) if plan.explain else None
        hits.append(Hit(name, score, margin, ranks.get(row), matches))
    return hits


def _explained(snapshot: Snapshot, one: Asked, row: int, plan: Plan) -> tuple[Match, ...]:
    images = None
    if plan.engine is not None and one.late is None and must_encode_again(one.scorer, Recipe(snapshot.manifest)):
        images = encoded_again(snapshot, np.array([row]), one.scorer, plan.engine)
    return alignment(snapshot, one, row, images)
