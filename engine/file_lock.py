"""Locks on files that the system lets go of when whoever holds them ends, however it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PAUSE_S = 0.05


@contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock file at `path`, made where there is none and kept, while this lasts; wait for who holds it.

    Between threads and between processes. A file system without locks has no such lock: there nobody waits.

    Raises:
        OSError: the file cannot be written.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with suppress(OSError):
            while not try_lock(handle):
                time.sleep(_PAUSE_S)
        yield
    finally:
        # Closing lets go of it, and so does dying.
        os.close(handle)


def try_lock(handle: int) -> bool:
    """Take the lock of an open file; False when another handle has it.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
