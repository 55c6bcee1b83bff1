"""Checksums of blocks, and files mapped into memory whose blocks are checked when they are first read."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.retrieval.errors import IndexDamaged

# What one checksum covers: small beside a segment, large beside what one candidate reads.
BLOCK_BYTES = 1 << 20


class BlockSums:
    """CRC-32 of every `BLOCK_BYTES` of a stream of bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._done: list[int] = []
        self._open = 0

    def update(self, data: bytes | memoryview) -> None:
        """Go on with `data`, a flat buffer of bytes."""
        view = memoryview(data)
        while len(view):
            part = view[: BLOCK_BYTES - self.size % BLOCK_BYTES]
            self._open = zlib.crc32(part, self._open)
            self.size += len(part)
            if self.size % BLOCK_BYTES == 0:
                self._done.append(self._open)
                self._open = 0
            view = view[len(part) :]

    def all(self) -> list[int]:
        """One number for each block, the last perhaps of a shorter one."""
        return [*self._done, *([self._open] if self.size % BLOCK_BYTES else [])]


def sums_of(path: str | PathLike[str]) -> BlockSums:
    """The checksums of a file as it stands."""
    sums = BlockSums()
    with open(path, "rb") as file:
        while data := file.read(BLOCK_BYTES):
            sums.update(data)
    return sums


class MappedFile:
    """A file mapped into memory, each block checked before its first use.

    Args:
        path: the file.
        size: bytes it must have.
        sums: the checksum of each block.

    The file may be deleted while it is mapped (not on Windows). May be used from several threads.

    Raises:
        IndexDamaged: another size; from `check` and `bytes`, another checksum.
        FileNotFoundError: no file.
    """

    def __init__(self, path: str | PathLike[str], size: int, sums: Sequence[int]) -> None:
        self.path = Path(path)
        found = self.path.stat().st_size
        if found != size:
            raise IndexDamaged(self.path, f"{size} bytes were written, there are {found}")
        if len(sums) != -(-size // BLOCK_BYTES):
            raise IndexDamaged(self.path, f"{-(-size // BLOCK_BYTES)} checksums were written, there are {len(sums)}")
        # A private mapping: torch takes no read-only memory without a warning, and what is mapped is never written.
        # No descriptor stays open.
        self.data = _mapped(self.path, size) if size else torch.empty(0, dtype=torch.uint8)
        self._sums = np.asarray(sums, dtype=np.uint32)
        self._checked = np.zeros(len(sums), dtype=bool)

    def check(self, first: int = 0, last: int | None = None) -> None:
        """Check the blocks that bytes [first, last) lie in, unless they were checked before."""
        last = len(self.data) if last is None else last
        if first >= last:
            return
        blocks = slice(first // BLOCK_BYTES, -(-last // BLOCK_BYTES))
        for block in (~self._checked[blocks]).nonzero()[0] + blocks.start:
            self._check_block(int(block))

    def check_ranges(self, first: np.ndarray, last: np.ndarray) -> None:
        """Check the blocks that any of the bytes [first[i], last[i]) lie in, unless they were checked before."""
        if self._checked.all():
            return
        wanted = np.zeros(len(self._sums) + 1, dtype=np.int64)
        real = first < last
        np.add.at(wanted, first[real] // BLOCK_BYTES, 1)
        np.add.at(wanted, -(-last[real] // BLOCK_BYTES), -1)
        for block in ((wanted[:-1].cumsum() > 0) & ~self._checked).nonzero()[0]:
            self._check_block(int(block))

    def faults(self) -> Iterator[str]:
        """A sentence for each block that is not what was written; looks at all of them again."""
        for block in range(len(self._sums)):
            self._checked[block] = False
            try:
                self._check_block(block)
            except IndexDamaged as error:
                yield str(error)

    def section(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
        """A part of the file as a tensor; its blocks are not checked by this."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if offset + size > len(self.data) or offset % dtype.itemsize:
            raise IndexDamaged(self.path, f"{size} bytes at {offset} were written, there are {len(self.data)} in all")
        return self.data[offset : offset + size].view(dtype).view(*shape)

    def _check_block(self, block: int) -> None:
        data = self.data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        if zlib.crc32(data.numpy().data) != int(self._sums[block]):
            raise IndexDamaged(
                self.path, f"the checksum of bytes {block * BLOCK_BYTES} to {block * BLOCK_BYTES + len(data)} differs"
            )
        self._checked[block] = True


def _mapped(path: Path, size: int) -> Tensor:
    try:
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        if path.exists():
            raise
        # It was deleted just now; torch says so in an error of its own.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
