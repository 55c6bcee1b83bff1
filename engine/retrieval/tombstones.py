"""Which rows are deleted: one file a commit, and deletes that are one flushed write to it.

The file `deleted-<generation>.bin` holds `SLOTS` slots of `SLOT_BYTES` and after them one bit a row, of all segments
in their order, each segment beginning with a byte of its own; bit 7 is the first. A delete of a few rows fills the
next slot and is flushed; one of many, and one that finds no slot free, is a commit with a file of its own. A slot is
smaller than what disks write at once, so that it is there whole or not at all:

    uint32  slot number, from 1
    uint32  rows n, 1 to `SLOT_ROWS`
    uint32  CRC-32 of the rest of the used slot: n and the rows
    uint32  0
    n times uint32: rows, counted over all segments
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np

from engine.retrieval.errors import IndexDamaged

SLOTS = 64
SLOT_BYTES = 512
SLOT_ROWS = (SLOT_BYTES - 16) // 4
_HEAD = struct.Struct("<IIII")


def write_tombstones(path: str | PathLike[str], deleted: Sequence[np.ndarray]) -> int:
    """Write the file for bool arrays, one a segment, True = deleted; returns the CRC-32 of the bitmaps."""
    bits = b"".join(np.packbits(rows).tobytes() for rows in deleted)
    with open(path, "wb") as file:
        file.write(bytes(SLOTS * SLOT_BYTES))
        file.write(bits)
        file.flush()
        os.fsync(file.fileno())
    return zlib.crc32(bits)


def read_tombstones(path: str | PathLike[str], rows: Sequence[int], crc32: int) -> tuple[list[np.ndarray], int]:
    """Bool arrays, one for each segment of so many rows, True = deleted, and how many slots are used.

    Raises:
        IndexDamaged: the file is not what was written.
        FileNotFoundError: no file.
    """
    data = Path(path).read_bytes()
    sizes = [-(-count // 8) for count in rows]
    if len(data) != SLOTS * SLOT_BYTES + sum(sizes):
        raise IndexDamaged(path, f"{SLOTS * SLOT_BYTES + sum(sizes)} bytes were written, there are {len(data)}")
    bits = data[SLOTS * SLOT_BYTES :]
    if zlib.crc32(bits) != crc32:
        raise IndexDamaged(path, "the checksum of its bitmaps differs")
    found, first = [], 0
    for count, size in zip(rows, sizes, strict=True):
        packed = np.frombuffer(bits, dtype=np.uint8, count=size, offset=first)
        found.append(np.unpackbits(packed, count=count).astype(bool))
        first += size
    used = 0
    while used < SLOTS and any(data[used * SLOT_BYTES : (used + 1) * SLOT_BYTES]):
        mark(found, _slot_rows(path, data, used, sum(rows)))
        used += 1
    if any(data[used * SLOT_BYTES : SLOTS * SLOT_BYTES]):
        raise IndexDamaged(path, f"slot {used} is empty, but a later one is not")
    return found, used


def append_tombstones(path: str | PathLike[str], used: int, rows: Sequence[int] | np.ndarray) -> None:
    """Fill slot `used` with rows, at most `SLOT_ROWS`, and flush it: one write to the disk.

    Raises OSError when it cannot be written.
    """
    assert used < SLOTS and 0 < len(rows) <= SLOT_ROWS
    body = np.asarray(rows, dtype="<u4").tobytes()
    slot = _HEAD.pack(used + 1, len(rows), zlib.crc32(struct.pack("<I", len(rows)) + body), 0) + body
    handle = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.lseek(handle, used * SLOT_BYTES, os.SEEK_SET)
        os.write(handle, slot)
        # The size stays: nothing but these bytes has to reach the disk.
        getattr(os, "fdatasync", os.fsync)(handle)
    finally:
        os.close(handle)


def mark(deleted: Sequence[np.ndarray], rows: Sequence[int] | np.ndarray) -> None:
    """Set rows, counted over all segments, to True in the arrays of the segments."""
    bounds = np.cumsum([0, *(len(part) for part in deleted)])
    wanted = np.asarray(rows, dtype=np.int64)
    places = np.searchsorted(bounds, wanted, side="right") - 1
    for segment in np.unique(places):
        deleted[segment][wanted[places == segment] - bounds[segment]] = True


def _slot_rows(path: str | PathLike[str], data: bytes, slot: int, total: int) -> np.ndarray:
    start = slot * SLOT_BYTES
    number, count, crc, zero = _HEAD.unpack_from(data, start)
    body = data[start + 16 : start + 16 + 4 * count]
    rest = data[start + 16 + 4 * count : start + SLOT_BYTES]
    if number != slot + 1 or zero or not 0 < count <= SLOT_ROWS or any(rest):
        raise IndexDamaged(path, f"slot {slot} is no list of rows")
    if zlib.crc32(struct.pack("<I", count) + body) != crc:
        raise IndexDamaged(path, f"the checksum of slot {slot} differs")
    rows = np.frombuffer(body, dtype="<u4").astype(np.int64)
    if len(rows) and rows.max() >= total:
        raise IndexDamaged(path, f"slot {slot} deletes row {rows.max()} of {total}")
    return rows
