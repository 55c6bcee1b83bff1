"""A segment: rows that were written together and never change, in files that are mapped and not loaded.

    segments/<name>/
        segment.json      rows; every file with its size and the CRC-32 of each block of 1 MiB; every section with its
                          file, dtype, shape and offset; facts that are the same for all rows
        rows.bin          ids, global embeddings, boundaries, scales, boxes, sizes: sections at multiples of 64 bytes
        windows.codes     vectors of all rows, one after the other, (total, D) int8 or bfloat16; also patches, head
        metadata.parquet  the users' columns, where there are any
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor

from engine.atomic_files import flush_folder
from engine.reference.quantize import QuantizedTokens
from engine.retrieval.checksums import BlockSums, MappedFile
from engine.retrieval.errors import IndexDamaged
from engine.retrieval.identifiers import Identifiers, packed
from engine.retrieval.manifest import SegmentEntry

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.uint64, torch.float32, torch.bfloat16)
}
ALIGNMENT = 64


class PackedVectors(NamedTuple):
    """Vectors of several images, one after the other."""

    vectors: Tensor
    """(total, D) int8 codes, or bfloat16."""
    scales: Tensor | None
    """(total,) float32, one for each int8 vector."""
    cu_seqlens: Tensor
    """(n + 1,) int64: image j has the vectors cu_seqlens[j] to cu_seqlens[j + 1]."""

    @property
    def tokens(self) -> Tensor | QuantizedTokens:
        """The vectors as ops take them."""
        return self.vectors if self.scales is None else QuantizedTokens(self.vectors, self.scales)


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


class SegmentWriter:
    """Writes a segment into a folder of its own, vectors as they come; the rest is held until `finish`.

    Args:
        folder: made by this; must not be there.
        kinds: names of the kinds of vectors.
        facts: the same for all rows; JSON.

    Raises OSError when the disk is full or the folder cannot be written.
    """

    def __init__(self, folder: Path, kinds: Sequence[str], facts: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.rows = 0
        self._facts = dict(facts)
        self._ids: list[str] = []
        self._held: dict[str, list[Tensor]] = {}
        self._metadata: list[pa.Table | int] = []
        self._codes = {kind: _Stream(folder / f"{kind}.codes") for kind in kinds}
        self._widths: dict[str, tuple[torch.dtype, int]] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of the vectors and embeddings so far."""
        held = sum(part.numel() * part.element_size() for parts in self._held.values() for part in parts)
        return held + sum(stream.sums.size for stream in self._codes.values())

    def append(self, block: RowBlock) -> None:
        """Add rows at the end."""
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
        sections, streams = {}, {}
        streams["rows.bin"] = rows = _Stream(self.folder / "rows.bin")
        for section, whole in arrays.items():
            rows.pad(ALIGNMENT)
            sections[section] = _entry("rows.bin", whole.dtype, whole.shape, rows.sums.size)
            rows.write(whole)
        for kind, stream in self._codes.items():
            streams[f"{kind}.codes"] = stream
            dtype, dim = self._widths[kind]
            total = stream.sums.size // (dim * dtype.itemsize)
            sections[f"{kind}.codes"] = _entry(f"{kind}.codes", dtype, (total, dim), 0)
        table = self._table()
        if table is not None:
            streams["metadata.parquet"] = stream = _Stream(self.folder / "metadata.parquet")
            stream.write_table(table)
        for stream in streams.values():
            stream.close()
        files = {name: {"size": s.sums.size, "crc32": s.sums.all()} for name, s in streams.items()}
        facts = {"rows": self.rows, "facts": self._facts, "files": files, "sections": sections}
        data = json.dumps(facts, separators=(",", ":")).encode()
        with _Stream(self.folder / "segment.json") as stream:
            stream.write(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        flush_folder(self.folder)
        return SegmentEntry(self.folder.name, self.rows, len(data), zlib.crc32(data))

    def abandon(self) -> None:
        """Delete what was written."""
        for stream in self._codes.values():
            stream.drop()
        shutil.rmtree(self.folder, ignore_errors=True)

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
            data = memoryview(values.view(-1).view(torch.uint8).numpy())
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
        try:
            self._file.close()
        except OSError:
            # What could not be written is not wanted any more.
            self._file = None  # type: ignore[assignment]

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


def _entry(file: str, dtype: torch.dtype, shape: Sequence[int], offset: int) -> dict[str, Any]:
    return {"file": file, "dtype": str(dtype).removeprefix("torch."), "shape": list(shape), "offset": offset}


class Segment:
    """A segment that is read. Its files are mapped at once and may be deleted afterwards.

    Args:
        folder: of the segment.
        entry: what the manifest says of it.

    Raises:
        IndexDamaged: a file is not what was written; vectors are looked at when they are first used.
        FileNotFoundError: a file is missing.
    """

    def __init__(self, folder: str | PathLike[str], entry: SegmentEntry) -> None:
        self.folder = Path(folder)
        self.entry = entry
        self.rows = entry.rows
        path = self.folder / "segment.json"
        data = path.read_bytes()
        if len(data) != entry.size or zlib.crc32(data) != entry.crc32:
            raise IndexDamaged(path, "it is not what was written (size or checksum)")
        held = json.loads(data)
        self.facts: Mapping[str, Any] = held["facts"]
        self._sections: Mapping[str, Any] = held["sections"]
        self.files = {name: MappedFile(self.folder / name, f["size"], f["crc32"]) for name, f in held["files"].items()}

    def has(self, section: str) -> bool:
        """Whether there is such a section."""
        return section in self._sections

    def section(self, name: str, *, check: bool = True) -> Tensor:
        """A section as a tensor in mapped memory, its blocks checked unless that is put off (`check_rows`)."""
        facts = self._sections[name]
        file, dtype = self.files[facts["file"]], DTYPES[facts["dtype"]]
        found = file.section(dtype, facts["shape"], facts["offset"])
        if check:
            file.check(facts["offset"], facts["offset"] + found.numel() * dtype.itemsize)
        return found

    @cached_property
    def ids(self) -> Identifiers:
        """The users' names of the rows."""
        parts = (self.section(f"ids.{part}").numpy() for part in ("bytes", "offsets", "hashes", "rows"))
        return Identifiers(*parts)

    @cached_property
    def embedding(self) -> Tensor:
        """Global embeddings `(rows, D)` float32, mapped."""
        return self.section("global")

    def packed(self, kind: str) -> PackedVectors:
        """All vectors of a kind, mapped and checked."""
        scales = self.section(f"{kind}.scales") if self.has(f"{kind}.scales") else None
        return PackedVectors(self.section(f"{kind}.codes"), scales, self.section(f"{kind}.cu_seqlens"))

    def gathered(self, kind: str, rows: np.ndarray) -> PackedVectors:
        """Vectors of the chosen rows in their order, copied; only what they lie in is read and checked."""
        bounds = self.section(f"{kind}.cu_seqlens").numpy()
        codes = self.section(f"{kind}.codes", check=False)
        width = codes.shape[1] * codes.element_size()
        file = self.files[f"{kind}.codes"]
        first, last = bounds[rows], bounds[rows + 1]
        file.check_ranges(first * width, last * width)
        places = self.places(kind, rows)
        scales = self.section(f"{kind}.scales")[places] if self.has(f"{kind}.scales") else None
        return PackedVectors(codes[places], scales, bounds_of(last - first))

    def places(self, kind: str, rows: np.ndarray) -> Tensor:
        """Where the vectors of rows stand among all of the segment, int64."""
        bounds = self.section(f"{kind}.cu_seqlens").numpy()
        return places_of(bounds[rows], bounds[rows + 1])

    def metadata(self) -> pa.Table | None:
        """The users' columns of all rows, or None where there are none."""
        file = self.files.get("metadata.parquet")
        if file is None:
            return None
        file.check()
        return parquet.read_table(pa.BufferReader(pa.py_buffer(file.data.numpy())), use_threads=False)


def places_of(first: np.ndarray, last: np.ndarray) -> Tensor:
    """The numbers of all ranges [first, last), one range after the other; int64."""
    lengths = last - first
    before = np.cumsum(lengths) - lengths
    return torch.from_numpy(np.arange(int(lengths.sum())) + np.repeat(first - before, lengths))


def bounds_of(lengths: np.ndarray) -> Tensor:
    """Boundaries `(n + 1,)` int64 of pieces of these lengths."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
