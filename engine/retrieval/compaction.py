"""Segments written anew without their deleted rows, and small ones joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

import numpy as np
import pyarrow as pa

from engine.encoders.base import Progress
from engine.retrieval.manifest import SegmentEntry
from engine.retrieval.metadata import filled
from engine.retrieval.segment_writer import RowBlock, SegmentWriter, cut
from engine.retrieval.snapshot import Piece, Snapshot
from engine.retrieval.storage import Change

# Rows copied at a time.
COPY_ROWS = 1024
# A segment without deleted rows that is at least this full stays as it is.
FULL = 0.5


def compact(change: Change, report: Progress | None = None) -> Snapshot:
    """Free what deleted rows take and join small segments; the order of rows stays. One commit at the end.

    `report` is called with (rows written anew, rows to be).

    Raises:
        IndexDamaged: a file is not what was written; the index stays as it was.
        OSError: the disk is full; the index stays as it was.
    """
    snapshot = change.snapshot
    grouped = groupby(snapshot.pieces, key=lambda piece: _wants(piece, snapshot))
    runs = [(wanted, list(pieces)) for wanted, pieces in grouped]
    runs = [(wanted and _is_worth(run, snapshot), run) for wanted, run in runs]
    if not any(worth for worth, _ in runs):
        return snapshot
    segments: list[SegmentEntry] = []
    total = sum(int(piece.alive.sum()) for worth, run in runs for piece in run if worth)
    done = 0
    for worth, run in runs:
        if not worth:
            segments += [piece.segment.entry for piece in run]
            continue
        segments += _rewritten(change, run, None if report is None else partial(_further, report, done, total))
        done += sum(int(piece.alive.sum()) for piece in run)
    return change.replace_segments(segments, [np.zeros(entry.rows, dtype=bool) for entry in segments])


def _wants(piece: Piece, snapshot: Snapshot) -> bool:
    return not piece.alive.all() or piece.segment.size_bytes < FULL * snapshot.manifest.segment_bytes


def _is_worth(run: Sequence[Piece], snapshot: Snapshot) -> bool:
    """Whether writing neighbours anew frees rows or makes them fewer."""
    size = sum(piece.segment.size_bytes for piece in run)
    return not all(piece.alive.all() for piece in run) or -(-size // snapshot.manifest.segment_bytes) < len(run)


def _further(report: Progress, before: int, total: int, done: int) -> None:
    report(before + done, total)


def _rewritten(change: Change, pieces: Sequence[Piece], report: Callable[[int], None] | None) -> list[SegmentEntry]:
    """The rows of neighbouring segments that are not deleted, in segments of full size."""
    manifest = change.snapshot.manifest
    done: list[SegmentEntry] = []
    rows_done = 0
    writer: SegmentWriter | None = None
    try:
        for block in _blocks(pieces, change.snapshot):
            used = 0 if writer is None else writer.size_bytes
            for rows, full in cut(block, used, manifest.segment_bytes):
                if writer is None:
                    writer = SegmentWriter(change.segment_folder(), [kind.name for kind in manifest.vectors], {})
                writer.append(block.part(rows.start, rows.stop))
                if full:
                    finished, writer = writer, None
                    done.append(finished.finish())
            rows_done += len(block)
            if report is not None:
                report(rows_done)
        if writer is not None:
            finished, writer = writer, None
            done.append(finished.finish())
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise
    return done


def _blocks(pieces: Sequence[Piece], snapshot: Snapshot) -> Iterator[RowBlock]:
    for piece in pieces:
        rows = piece.alive.nonzero()[0]
        for first in range(0, len(rows), COPY_ROWS):
            yield _copied(piece, rows[first : first + COPY_ROWS], snapshot)


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
