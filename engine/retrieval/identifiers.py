"""The users' names of rows: packed strings with a sorted table of hashes, looked up in mapped memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def check_ids(who: str, ids: Sequence[str], *, distinct: bool = True) -> list[str]:
    """The ids as a list.

    Raises:
        TypeError: one that is no string, or one string in the place of a list.
        ValueError: an empty one, one that is no text, or (`distinct`) the same one twice.
    """
    if isinstance(ids, str | bytes):
        raise TypeError(f"{who}: ids must be a list of strings, got {type(ids).__name__}")
    found = list(ids)
    seen: set[str] = set()
    for row, name in enumerate(found):
        if not isinstance(name, str):
            raise TypeError(f"{who}: ids must be strings, got {type(name).__name__} for row {row}")
        if not name:
            raise ValueError(f"{who}: ids must not be empty, got an empty one for row {row}")
        try:
            as_bytes(name)
        except UnicodeEncodeError:
            raise ValueError(f"{who}: ids must be text, got half a character in {name!r} (row {row})") from None
        if distinct and name in seen:
            raise ValueError(f"{who}: ids must be distinct, got {name!r} twice (row {row})")
        seen.add(name)
    return found


def as_bytes(name: str) -> bytes:
    """UTF-8; names of files that are none keep their bytes."""
    return name.encode("utf-8", "surrogateescape")


def as_text(name: str) -> str:
    """A name as text that Arrow can hold: bytes that are no UTF-8 become escapes, and are not found again."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def hash_of(data: bytes) -> int:
    """64 bits of BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def packed(ids: Sequence[str]) -> dict[str, np.ndarray]:
    """Sections of a segment's file: `ids.bytes` uint8, `ids.offsets` int64 (n + 1,), and for looking up `ids.hashes`
    uint64 (n,) ascending with `ids.rows` int32 (n,), the row of each."""
    data = [as_bytes(name) for name in ids]
    offsets = np.zeros(len(data) + 1, dtype=np.int64)
    np.cumsum([len(one) for one in data], out=offsets[1:])
    hashes = np.array([hash_of(one) for one in data], dtype=np.uint64)
    rows = np.argsort(hashes, kind="stable")
    return {
        "ids.bytes": np.frombuffer(b"".join(data), dtype=np.uint8),
        "ids.offsets": offsets,
        "ids.hashes": hashes[rows],
        "ids.rows": rows.astype(np.int32),
    }


class Identifiers:
    """The ids of one segment, from the sections that `packed` made."""

    def __init__(self, data: np.ndarray, offsets: np.ndarray, hashes: np.ndarray, rows: np.ndarray) -> None:
        self._data, self._offsets, self._hashes, self._rows = data, offsets, hashes, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> str:
        return self._raw(row).decode("utf-8", "surrogateescape")

    def find(self, data: Sequence[bytes], hashes: np.ndarray) -> np.ndarray:
        """The row of each name, -1 where it is not here; int64 (n,). `hashes` are the names' hashes, uint64."""
        found = np.full(len(data), -1, dtype=np.int64)
        first = np.searchsorted(self._hashes, hashes, side="left")
        last = np.searchsorted(self._hashes, hashes, side="right")
        for place in (first < last).nonzero()[0].tolist():
            for at in range(int(first[place]), int(last[place])):
                row = int(self._rows[at])
                if self._raw(row) == data[place]:
                    found[place] = row
        return found

    def _raw(self, row: int) -> bytes:
        return self._data[self._offsets[row] : self._offsets[row + 1]].tobytes()
