"""What an index holds at one moment: its segments in order, and which of their rows are deleted.

Rows are counted over all segments in the order of insertion, deleted ones among them, from 0; a row keeps its number
until the index is compacted. A snapshot never changes, whatever is written to the index meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from engine.retrieval.checksums import MappedFile
from engine.retrieval.identifiers import as_bytes, hash_of
from engine.retrieval.manifest import ExtraEntry, Manifest
from engine.retrieval.metadata import decoded_schema, filled
from engine.retrieval.segment import PackedVectors, Segment, bounds_of


@dataclass(frozen=True)
class Piece:
    """One segment of a snapshot: `first` is the number of its first row, `alive` bool `(rows,)`, True = not deleted."""

    segment: Segment
    first: int
    alive: np.ndarray

    @property
    def rows(self) -> int:
        """Rows of the segment, deleted ones among them."""
        return self.segment.rows


class Snapshot:
    """One commit of an index, read through mapped files. May be used from several threads.

    Args:
        folder: of the index.
        manifest: the commit's.
        segments: in the manifest's order.
        deleted: bool arrays, one a segment, True = deleted.
        extras: files of the structures beside the segments, by name.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        segments: Sequence[Segment],
        deleted: Sequence[np.ndarray],
        extras: dict[str, Extra],
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.extras = extras
        self._first = np.cumsum([0, *(segment.rows for segment in segments)])
        self.pieces = tuple(
            Piece(segment, int(first), ~rows)
            for segment, first, rows in zip(segments, self._first, deleted, strict=False)
        )

    def without(self, rows: Sequence[int] | np.ndarray) -> Snapshot:
        """The same with rows deleted; what is not touched is shared."""
        deleted = {id(piece): piece.alive for piece in self.pieces}
        for piece, _, own in self.by_piece(rows):
            alive = piece.alive.copy()
            alive[own] = False
            deleted[id(piece)] = alive
        segments = [piece.segment for piece in self.pieces]
        return Snapshot(self.folder, self.manifest, segments, [~alive for alive in deleted.values()], self.extras)

    def __len__(self) -> int:
        """Rows that are not deleted."""
        return sum(int(piece.alive.sum()) for piece in self.pieces)

    @property
    def rows(self) -> int:
        """All rows, deleted ones among them."""
        return int(self._first[-1])

    @cached_property
    def alive(self) -> np.ndarray:
        """bool `(rows,)`, True = not deleted."""
        return np.concatenate([np.zeros(0, dtype=bool), *(piece.alive for piece in self.pieces)])

    def find(self, ids: Sequence[str]) -> np.ndarray:
        """The row of each id, int64; -1 where there is none that is not deleted."""
        data = [as_bytes(name) for name in ids]
        hashes = np.array([hash_of(one) for one in data], dtype=np.uint64)
        found = np.full(len(data), -1, dtype=np.int64)
        for piece in self.pieces:
            rows = piece.segment.ids.find(data, hashes)
            here = (rows >= 0).nonzero()[0]
            here = here[piece.alive[rows[here]]]
            found[here] = rows[here] + piece.first
        return found

    def ids(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """The ids of rows."""
        places, own = self._located(rows)
        return [self.pieces[piece].segment.ids[int(row)] for piece, row in zip(places, own, strict=True)]

    def all_ids(self) -> Iterator[str]:
        """The ids of all rows that are not deleted, in order."""
        for piece in self.pieces:
            for row in piece.alive.nonzero()[0]:
                yield piece.segment.ids[int(row)]

    def embedding(self, rows: Sequence[int] | np.ndarray) -> Tensor:
        """Global embeddings `(n, D)` float32 of rows, copied."""
        out = torch.empty(len(rows), self.manifest.dim)
        for piece, places, own in self.by_piece(rows):
            out[places] = piece.segment.embedding[own]
        return out

    def array(self, name: str, rows: Sequence[int] | np.ndarray) -> Tensor:
        """Rows of an int32 array with one entry a row: `sizes`, `views` or `grids`; copied."""
        width = {"sizes": 2, "views": 4, "grids": 2}[name]
        out = torch.zeros(len(rows), width, dtype=torch.int32)
        for piece, places, own in self.by_piece(rows):
            out[places] = piece.segment.section(name)[own]
        return out

    def gathered(self, kind: str, rows: Sequence[int] | np.ndarray) -> PackedVectors:
        """Vectors of a kind of rows in their order, copied.

        Raises:
            ValueError: the index has no vectors of this kind.
            IndexDamaged: what was read is not what was written.
        """
        self.need(kind)
        parts = [(places, piece.segment.gathered(kind, own)) for piece, places, own in self.by_piece(rows)]
        if len(parts) == 1:
            # In their order already: of one piece the places ascend.
            return parts[0][1]
        chunks: list[tuple[Tensor, Tensor | None]] = [(torch.empty(0), None)] * len(rows)
        for places, part in parts:
            bounds = part.cu_seqlens.tolist()
            for at, place in enumerate(places.tolist()):
                own = slice(bounds[at], bounds[at + 1])
                chunks[place] = part.vectors[own], None if part.scales is None else part.scales[own]
        lengths = np.array([len(vectors) for vectors, _ in chunks], dtype=np.int64)
        if not parts:
            return self._nothing(kind)
        scales = [scale for _, scale in chunks if scale is not None]
        joined = torch.cat(scales) if scales else None
        return PackedVectors(torch.cat([vectors for vectors, _ in chunks]), joined, bounds_of(lengths))

    def boxes(self, rows: Sequence[int] | np.ndarray) -> list[Tensor]:
        """For each row the rectangles of its windows, int32 `(R, 4)`; zeros where they are not known."""
        out: list[Tensor] = [torch.zeros(0, 4, dtype=torch.int32)] * len(rows)
        for piece, places, own in self.by_piece(rows):
            bounds = piece.segment.section("windows.cu_seqlens").tolist()
            boxes = piece.segment.section("boxes")
            for place, row in zip(places.tolist(), own.tolist(), strict=True):
                out[place] = boxes[bounds[row] : bounds[row + 1]].clone()
        return out

    def metadata(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The users' columns of all rows, deleted ones among them, so that a row's number is its place.

        `columns` are those wanted, by default all. Raises KeyError for one that the index does not have.
        """
        schema = self.schema
        wanted = schema.names if columns is None else list(columns)
        unknown = [name for name in wanted if name not in schema.names]
        if unknown:
            known = ", ".join(schema.names) or "none"
            raise KeyError(f"Index: metadata has no column {unknown[0]!r}; there are {known}")
        chosen = pa.schema([schema.field(name) for name in wanted])
        tables = [filled(piece.segment.metadata(), piece.rows, chosen) for piece in self.pieces]
        return pa.concat_tables([chosen.empty_table(), *tables])

    def metadata_of(self, rows: Sequence[int] | np.ndarray) -> pa.Table:
        """The users' columns of chosen rows, in their order."""
        parts, order = [self.schema.empty_table()], [np.zeros(0, dtype=np.int64)]
        for piece, places, own in self.by_piece(rows):
            parts.append(filled(piece.segment.metadata(), piece.rows, self.schema).take(pa.array(own)))
            order.append(places)
        return pa.concat_tables(parts).take(pa.array(np.argsort(np.concatenate(order))))

    @cached_property
    def schema(self) -> pa.Schema:
        """Of the users' columns."""
        return decoded_schema(self.manifest.schema)

    def need(self, kind: str) -> None:
        """Raise ValueError where the index has no vectors of this kind."""
        if self.manifest.kind(kind) is None:
            held = ", ".join(repr(held.name) for held in self.manifest.vectors) or "none"
            raise ValueError(f"Index: needs vectors of kind {kind!r}, the index was created with {held}")

    def _nothing(self, kind: str) -> PackedVectors:
        described = self.manifest.kind(kind)
        assert described is not None
        int8 = self.manifest.store == "int8"
        empty = torch.zeros(0, described.dim, dtype=torch.int8 if int8 else torch.bfloat16)
        return PackedVectors(empty, torch.zeros(0) if int8 else None, torch.zeros(1, dtype=torch.int64))

    def _located(self, rows: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each row the number of its piece and its place there."""
        wanted = np.asarray(rows, dtype=np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < self.rows):
            raise IndexError(f"Index: rows must be 0 to {self.rows - 1}, got {wanted.min()} to {wanted.max()}")
        pieces = np.searchsorted(self._first, wanted, side="right") - 1
        return pieces, wanted - self._first[pieces]

    def by_piece(self, rows: Sequence[int] | np.ndarray) -> Iterator[tuple[Piece, np.ndarray, np.ndarray]]:
        """Each piece that rows lie in, their places among `rows`, and in the piece."""
        pieces, own = self._located(rows)
        for number in np.unique(pieces):
            places = (pieces == number).nonzero()[0]
            yield self.pieces[number], places, own[places]


@dataclass(frozen=True)
class Extra:
    """A structure beside the segments: its entry in the manifest, and its files, mapped (check them before use)."""

    entry: ExtraEntry
    files: dict[str, MappedFile]
