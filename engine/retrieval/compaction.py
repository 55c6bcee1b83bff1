"""Segments written anew without their deleted rows, and small ones joined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from engine.retrieval.manifest import SegmentEntry
from engine.retrieval.metadata import filled
from engine.retrieval.segment import RowBlock, SegmentWriter
from engine.retrieval.snapshot import Piece, Snapshot
from engine.retrieval.storage import Change

# Rows copied at a time.
COPY_ROWS = 4096
# A segment without deleted rows that is at least this full stays as it is.
FULL = 0.5


def compact(change: Change) -> Snapshot:
    """Free what deleted rows take and join small segments; the order of rows stays. One commit at the end.

    Raises:
        IndexDamaged: a file is not what was written; the index stays as it was.
        OSError: the disk is full; the index stays as it was.
    """
    snapshot = change.snapshot
    if not any(_wants(piece, snapshot) for piece in snapshot.pieces):
        return snapshot
    segments: list[SegmentEntry] = []
    run: list[Piece] = []
    for piece in snapshot.pieces:
        if _wants(piece, snapshot):
            run.append(piece)
            continue
        segments += _rewritten(change, run)
        run = []
        segments.append(piece.segment.entry)
    segments += _rewritten(change, run)
    return change.replace_segments(segments, [np.zeros(entry.rows, dtype=bool) for entry in segments])


def _wants(piece: Piece, snapshot: Snapshot) -> bool:
    return not piece.alive.all() or (
        len(snapshot.pieces) > 1 and _size(piece) < FULL * snapshot.manifest.segment_bytes
    )


def _size(piece: Piece) -> int:
    return sum(len(file.data) for file in piece.segment.files.values())


def _rewritten(change: Change, pieces: Sequence[Piece]) -> list[SegmentEntry]:
    """The rows of neighbouring segments that are not deleted, in segments of full size."""
    snapshot = change.snapshot
    done: list[SegmentEntry] = []
    writer: SegmentWriter | None = None
    try:
        for piece in pieces:
            rows = piece.alive.nonzero()[0]
            for first in range(0, len(rows), COPY_ROWS):
                if writer is None:
                    kinds = [kind.name for kind in snapshot.manifest.vectors]
                    writer = SegmentWriter(change.segment_folder(), kinds, {})
                writer.append(_copied(piece, rows[first : first + COPY_ROWS], snapshot))
                if writer.size_bytes >= snapshot.manifest.segment_bytes:
                    done.append(writer.finish())
                    writer = None
        if writer is not None:
            done.append(writer.finish())
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise
    return done


def _copied(piece: Piece, rows: np.ndarray, snapshot: Snapshot) -> RowBlock:
    segment = piece.segment
    vectors = {kind.name: segment.gathered(kind.name, rows) for kind in snapshot.manifest.vectors}
    arrays = {name: segment.section(name)[rows] for name in ("sizes", "views", "grids")}
    if segment.has("boxes"):
        arrays["boxes"] = segment.section("boxes")[segment.places("windows", rows)]
    table = segment.metadata()
    part = None
    if table is not None and len(snapshot.schema):
        part = filled(table, piece.rows, snapshot.schema).take(pa.array(rows))
    ids = [segment.ids[int(row)] for row in rows]
    return RowBlock(ids, segment.embedding[rows], vectors, arrays, part)
