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
import math
import zlib
from collections.abc import Mapping
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor

from engine.reference.quantize import QuantizedTokens
from engine.retrieval.checksums import MappedFile
from engine.retrieval.errors import IndexDamaged
from engine.retrieval.identifiers import Identifiers
from engine.retrieval.manifest import SegmentEntry

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.uint64, torch.float32, torch.bfloat16)
}


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

    @property
    def size_bytes(self) -> int:
        """Bytes of embeddings and vectors, which decide how many rows a segment takes."""
        counted = [facts for name, facts in self._sections.items() if name == "global" or name.endswith(".codes")]
        return sum(math.prod(facts["shape"]) * DTYPES[facts["dtype"]].itemsize for facts in counted)

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
        # Not codes[places]: indexing by a tensor goes number by number, this copies rows.
        return PackedVectors(codes.index_select(0, places), scales, bounds_of(last - first))

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
