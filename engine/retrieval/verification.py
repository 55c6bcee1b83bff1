"""Looking at every byte of an index."""

from __future__ import annotations

from collections.abc import Iterator

from engine.encoders.base import Progress
from engine.retrieval.checksums import MappedFile
from engine.retrieval.errors import IndexDamaged
from engine.retrieval.snapshot import Piece, Snapshot

MIB = 1 << 20


def faults(snapshot: Snapshot, report: Progress | None = None) -> Iterator[str]:
    """A sentence, naming the file, for each thing that is not what was written. Manifest, tombstones and each segment's
    table were looked at when the snapshot was opened. `report` is called with (MiB looked at, MiB in all)."""
    seen: dict[str, str] = {}
    files = [file for piece in snapshot.pieces for file in piece.segment.files.values()]
    files += [file for extra in snapshot.extras.values() for file in extra.files.values()]
    total = sum(len(file.data) for file in files)
    looked_at = 0

    def look(file: MappedFile) -> Iterator[str]:
        nonlocal looked_at
        yield from file.faults()
        looked_at += len(file.data)
        if report is not None:
            report(-(-looked_at // MIB), -(-total // MIB))

    for piece in snapshot.pieces:
        whole = True
        for file in piece.segment.files.values():
            for fault in look(file):
                whole = False
                yield fault
        if whole:
            yield from _row_faults(piece, seen)
    for extra in snapshot.extras.values():
        for file in extra.files.values():
            yield from look(file)


def _row_faults(piece: Piece, seen: dict[str, str]) -> Iterator[str]:
    """Parts of a segment that do not fit together, and ids that are there twice."""
    segment = piece.segment
    try:
        if len(segment.ids) != piece.rows or len(segment.embedding) != piece.rows:
            yield f"Index: {segment.folder} is damaged: it has {piece.rows} rows, its ids or embeddings do not"
        table = segment.metadata()
        # A file without columns, such as earlier versions wrote, has no rows.
        if table is not None and table.num_columns and table.num_rows != piece.rows:
            yield f"Index: {segment.folder}/metadata.parquet is damaged: {table.num_rows} rows for {piece.rows} images"
    except IndexDamaged as error:
        yield str(error)
        return
    for row in piece.alive.nonzero()[0]:
        name = segment.ids[int(row)]
        if name in seen:
            yield f"Index: {segment.folder} is damaged: id {name!r} is in {seen[name]} too"
        seen[name] = str(segment.folder)
