"""Stage one of a search: rows whose global embeddings are nearest to a query, as candidates for the scorer.

What asks is one vector for each query. Of a scorer that compares segments it is their weighted mean: its cosine with an
image's one embedding is the mean of their cosines. On 20,000 rendered scenes it held a right image among 1000
candidates for every caption, with denials and without, where the embedding of the whole caption lost one in six of the
captions with a denial. Asking all windows of an image in the place of its one embedding lost one in three of them and
was nowhere better (`python -m bench.scenes_stage_one`).
"""

from __future__ import annotations

import warnings
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from engine.forks import OwnLock
from engine.retrieval.ann import EXACT_ROWS, FILE, Structure, factory_for
from engine.retrieval.checksums import MappedFile
from engine.retrieval.queries import Asked
from engine.retrieval.scan import Asking, BestRows, scan, score_rows
from engine.retrieval.snapshot import Snapshot
from engine.retrieval.storage import Change
from engine.scorers.late import LateQueries

NAME = "candidates"
# Rows are looked at one by one where a condition leaves no more than these, and no more than this share of all.
FEW_ROWS = EXACT_ROWS
FEW_SHARE = 0.25
# A structure is made anew once so large a share of its rows came after it, and more than `FEW_ROWS`.
GROWN = 0.25

_opened: WeakKeyDictionary[MappedFile, Structure] = WeakKeyDictionary()
_opening = OwnLock()


def asking_vectors(asked: Asked) -> Tensor:
    """What asks the global embeddings, `(B, D)` float32; see above."""
    late = asked.late
    if asked.texts is not None and late is not None and late.kind in ("global", "windows"):
        return (late.vectors.float() * late.weights[..., None]).sum(dim=1)
    return asked.embedding.float()


def find_candidates(snapshot: Snapshot, asked: Asked, count: int, allowed: np.ndarray | None) -> list[np.ndarray]:
    """Rows for each query, int64, nearest first by the exact cosine; fewer than `count` only where fewer may be found.

    Args:
        allowed: bool `(snapshot.rows,)`, rows that may be found, or None.

    Raises:
        ImportError: the index has a structure and FAISS is missing.
        IndexDamaged: what was read is not what was written.
    """
    vectors = asking_vectors(asked)
    asking = _asking(vectors, snapshot)
    structure = structure_of(snapshot)
    keep = snapshot.alive if allowed is None else snapshot.alive & allowed
    if structure is None or not _is_worth_it(structure, keep):
        return [found.rows for found in scan(snapshot, asking, count, allowed=allowed)]
    covered = structure.facts.rows
    inside = keep[:covered]
    found = structure.search(vectors.numpy(), count, allowed=None if inside.all() else inside)
    later = _later(snapshot, asking, count, keep, covered)
    wanted = min(count, int(keep.sum()))
    rows = []
    for query, own in enumerate(found):
        one = _asking(vectors[query : query + 1], snapshot)
        own = np.sort(np.concatenate([own, later[query]]))
        if len(own) < wanted:
            # A structure looks at some of its lists; a condition may leave too few rows in them.
            rows.append(scan(snapshot, one, count, allowed=allowed)[0].rows)
            continue
        best = BestRows(count)
        best.take(score_rows(snapshot, one, own)[0], own, None)
        rows.append(best.found().rows)
    return rows


def structure_of(snapshot: Snapshot) -> Structure | None:
    """The structure that a snapshot has, opened once; None where all embeddings are looked at."""
    extra = snapshot.extras.get(NAME)
    if extra is None:
        return None
    file = extra.files[FILE]
    with _opening:
        if file not in _opened:
            file.check()
            _opened[file] = Structure.load(file.data, extra.entry.facts)
        return _opened[file]


def keep_up(change: Change) -> None:
    """Make the structure that the index should have by now, or drop the one it should not; commits.

    A structure that cannot be trained or searched is left out with a UserWarning: all embeddings are looked at.

    Raises:
        ImportError: FAISS is missing.
        OSError: the disk is full.
    """
    snapshot = change.snapshot
    manifest, held = snapshot.manifest, snapshot.extras.get(NAME)
    factory = factory_for(manifest.ann, snapshot.rows, manifest.dim)
    if factory is None:
        if held is not None:
            change.drop_extra(NAME)
        return
    if held is not None and snapshot.rows - held.entry.rows <= max(FEW_ROWS, GROWN * held.entry.rows):
        return
    if snapshot.rows == 0:
        return
    try:
        structure = Structure.build(factory, snapshot.rows, manifest.dim, snapshot.embedding)
    except ValueError as error:
        warnings.warn(f"{error}; candidates are found by looking at all rows", stacklevel=2)
        return
    change.put_extra(NAME, structure.save, rows=snapshot.rows, facts=structure.facts.as_dict())


def _is_worth_it(structure: Structure, keep: np.ndarray) -> bool:
    count = int(keep.sum())
    few = count <= FEW_ROWS and count <= FEW_SHARE * len(keep)
    return count > 0 and not few and bool(keep[: structure.facts.rows].any())


def _later(snapshot: Snapshot, asking: Asking, count: int, keep: np.ndarray, covered: int) -> list[np.ndarray]:
    """Candidates among the rows that came after the structure."""
    late = keep.copy()
    late[:covered] = False
    if not late.any():
        return [np.zeros(0, dtype=np.int64)] * asking.number
    return [found.rows for found in scan(snapshot, asking, count, allowed=late)]


def _asking(vectors: Tensor, snapshot: Snapshot) -> Asking:
    return Asking(LateQueries("global", vectors[:, None], torch.ones(len(vectors), 1)), snapshot.manifest.store)
