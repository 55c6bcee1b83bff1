"""Writing a segment: rows come a block at a time, vectors go to their files at once, all else is held to the end.

What the files hold is told by `engine.retrieval.segment`.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor

from engine.atomic_files import flush_folder
from engine.retrieval.checksums import BlockSums
from engine.retrieval.identifiers import packed
from engine.retrieval.manifest import SegmentEntry
from engine.retrieval.segment import PackedVectors

# Where sections begin: what the widest loads of kernels like.
ALIGNMENT = 64


@dataclass(frozen=True)
class RowBlock:
    """Rows on their way into a segment.

    Attributes:
        ids: one for each row.
        embedding: global embeddings `(n, D)` float32.
        vectors: of each kind the vectors of all rows.
        arrays: int32 tensors by name: `sizes` `(n, 2)`, `views` `(n, 4)`, `grids` `(n, 2)`, and of windows `boxes`
            `(total, 4)`; 0 where not known.
        metadata: n rows, or None.
    """

    ids: list[str]
    embedding: Tensor
    vectors: Mapping[str, PackedVectors]
    arrays: Mapping[str, Tensor]
    metadata: pa.Table | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def size_bytes(self) -> int:
        """Bytes of embeddings and vectors."""
        tensors = [self.embedding, *(packed.vectors for packed in self.vectors.values())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def part(self, first: int, last: int) -> RowBlock:
        """Rows [first, last) alone."""
        vectors, arrays = {}, {name: values[first:last] for name, values in self.arrays.items() if name != "boxes"}
        for kind, (codes, scales, bounds) in self.vectors.items():
            own = slice(int(bounds[first]), int(bounds[last]))
            kept = None if scales is None else scales[own]
            vectors[kind] = PackedVectors(codes[own], kept, bounds[first : last + 1] - bounds[first])
            if kind == "windows":
                arrays["boxes"] = self.arrays["boxes"][own]
        table = None if self.metadata is None else self.metadata.slice(first, last - first)
        return RowBlock(self.ids[first:last], self.embedding[first:last], vectors, arrays, table)


def cut(block: RowBlock, used: int, limit: int) -> Iterator[tuple[range, bool]]:
    """Rows of a block for one segment after the other, the first of which holds `used` bytes already; and whether the
    segment is full with them, so that another row would make it larger than `limit` bytes."""
    each = -(-block.size_bytes // max(1, len(block)))
    done = 0
    while done < len(block):
        stop = min(len(block), done + max(1, (limit - used) // each))
        used += (stop - done) * each
        full = used + each > limit
        yield range(done, stop), full
        used, done = 0 if full else used, stop


class SegmentWriter:
    """Writes a segment into a folder of its own, vectors as they come; the rest is held until `finish`.

    Args:
        folder: made by this; must not be there.
        kinds: names of the kinds of vectors.
        facts: the same for all rows; JSON.

    Raises OSError when the disk is full or the folder cannot be written.
    """

    def __init__(self, folder: Path, kinds: Sequence[str], facts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.rows = 0
        # Of embeddings and vectors.
        self.size_bytes = 0
        self._facts = dict(facts)
        self._ids: list[str] = []
        self._held: dict[str, list[Tensor]] = {}
        self._metadata: list[pa.Table | int] = []
        self._widths: dict[str, tuple[torch.dtype, int]] = {}
        self._streams: dict[str, _Stream] = {}
        folder.mkdir(parents=True)
        try:
            self._codes = {kind: self._open(f"{kind}.codes") for kind in kinds}
        except BaseException:
            self.abandon()
            raise

    def append(self, block: RowBlock) -> None:
        """Add rows at the end."""
        self.size_bytes += block.size_bytes
        self._ids += block.ids
        self._hold("global", block.embedding)
        for kind, stream in self._codes.items():
            vectors, scales, bounds = block.vectors[kind]
            stream.write(vectors)
            self._widths[kind] = vectors.dtype, vectors.shape[1]
            self._hold(f"{kind}.lengths", bounds.diff())
            if scales is not None:
                self._hold(f"{kind}.scales", scales)
        for name, values in block.arrays.items():
            self._hold(name, values)
        self._metadata.append(len(block.ids) if block.metadata is None else block.metadata)
        self.rows += len(block.ids)

    def finish(self) -> SegmentEntry:
        """Write what was held, flush everything; the folder is whole then. Call once, with a row at least.

        After an error nothing is left of the segment.
        """
        try:
            return self._finished()
        except BaseException:
            self.abandon()
            raise

    def _finished(self) -> SegmentEntry:
        arrays: dict[str, Tensor] = {n: torch.from_numpy(a.copy()) for n, a in packed(self._ids).items()}
        for section, parts in self._held.items():
            kind, _, what = section.partition(".")
            whole = torch.cat(parts)
            if what == "lengths":
                bounds = torch.zeros(self.rows + 1, dtype=torch.int64)
                torch.cumsum(whole, 0, out=bounds[1:])
                section, whole = f"{kind}.cu_seqlens", bounds
            arrays[section] = whole
        sections, rows = {}, self._open("rows.bin")
        for section, whole in arrays.items():
            rows.pad(ALIGNMENT)
            sections[section] = _entry("rows.bin", whole.dtype, whole.shape, rows.sums.size)
            rows.write(whole)
        for kind, stream in self._codes.items():
            dtype, dim = self._widths[kind]
            total = stream.sums.size // (dim * dtype.itemsize)
            sections[f"{kind}.codes"] = _entry(f"{kind}.codes", dtype, (total, dim), 0)
        table = self._table()
        if table is not None and table.num_columns:
            self._open("metadata.parquet").write_table(table)
        for stream in self._streams.values():
            stream.close()
        files = {name: {"size": s.sums.size, "crc32": s.sums.all()} for name, s in self._streams.items()}
        facts = {"rows": self.rows, "facts": self._facts, "files": files, "sections": sections}
        data = json.dumps(facts, separators=(",", ":")).encode()
        described = self._open("segment.json")
        described.write(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        described.close()
        flush_folder(self.folder)
        return SegmentEntry(self.folder.name, self.rows, len(data), zlib.crc32(data))

    def abandon(self) -> None:
        """Delete what was written."""
        for stream in self._streams.values():
            stream.drop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self, name: str) -> _Stream:
        self._streams[name] = stream = _Stream(self.folder / name)
        return stream

    def _hold(self, section: str, values: Tensor) -> None:
        # A copy: a view would keep all it was cut from.
        self._held.setdefault(section, []).append(values.detach().clone())

    def _table(self) -> pa.Table | None:
        """The metadata of all rows; rows without any hold nulls."""
        tables = [part for part in self._metadata if isinstance(part, pa.Table)]
        if not tables:
            return None
        schema = pa.unify_schemas([table.schema for table in tables], promote_options="permissive")
        whole = [
            pa.table([pa.nulls(part, item.type) for item in schema], schema=schema) if isinstance(part, int) else part
            for part in self._metadata
        ]
        return pa.concat_tables(whole, promote_options="permissive")


class _Stream:
    """A file that is written from front to end, with its checksums, and flushed to the disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self.sums = BlockSums()
        self._file = path.open("wb")

    def write(self, values: Tensor) -> None:
        values = values.detach().cpu().contiguous()
        if values.numel():
            data = values.view(-1).view(torch.uint8).numpy().data
            self.sums.update(data)
            self._file.write(data)

    def pad(self, alignment: int) -> None:
        self.write(torch.zeros(-self.sums.size % alignment, dtype=torch.uint8))

    def write_table(self, table: pa.Table) -> None:
        sink = pa.BufferOutputStream()
        parquet.write_table(table, sink)
        self.write(torch.frombuffer(bytearray(sink.getvalue()), dtype=torch.uint8))

    def close(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def drop(self) -> None:
        # Closing writes what was held back, and is done with even where that fails; nobody wants the file any more.
        with suppress(OSError):
            self._file.close()


def _entry(file: str, dtype: torch.dtype, shape: Sequence[int], offset: int) -> dict[str, Any]:
    return {"file": file, "dtype": str(dtype).removeprefix("torch."), "shape": list(shape), "offset": offset}
