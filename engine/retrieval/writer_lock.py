"""One writer at a time: a lock file that names its owner, outlives it, and is taken over once he is dead."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from engine.file_lock import try_lock
from engine.retrieval.errors import IndexBusy

LOCK = "writer.lock"
GUARD = "writer.lock.guard"
# Whoever holds the guard reads and writes one small file.
GUARD_TIMEOUT_S = 10.0


@contextmanager
def writing(folder: str | PathLike[str]) -> Iterator[None]:
    """Be the one writer of an index while this lasts.

    The lock file holds process id, its start time and the host. One whose process is gone, or whose id belongs to
    another process by now, counts for nothing; of a process on another host nothing is known, so that it counts.

    Raises:
        IndexBusy: somebody else writes.
        OSError: the folder cannot be written.
    """
    path = Path(folder) / LOCK
    with _guarded(Path(folder) / GUARD):
        owner = _owner(path)
        if owner is not None and not _is_dead(owner):
            raise IndexBusy(
                f"Index: {folder} is being written by process {owner.get('pid')} on {owner.get('host')!r}; there can "
                f"be one writer at a time. If that process is gone, remove {path}"
            )
        path.write_text(json.dumps(_self()), encoding="utf-8")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _self() -> dict[str, Any]:
    return {"pid": os.getpid(), "started": _started(os.getpid()), "host": socket.gethostname()}


def _owner(path: Path) -> dict[str, Any] | None:
    """Who holds the lock; None where there is none. A file cut short by a crash names nobody."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return held if isinstance(held, dict) else None


def _is_dead(owner: dict[str, Any]) -> bool:
    if owner.get("host") != socket.gethostname():
        return False
    pid = owner.get("pid")
    if not isinstance(pid, int):
        return True
    started = _started(pid)
    return started is None or (started != owner.get("started"))


def _started(pid: int) -> str | None:
    """What tells a process from a later one of the same id, or None where no such process runs.

    Where the system does not tell when a process started (all but Linux), it is the same for all of them.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # The name in brackets may hold anything; the state and, nineteen on, the start follow it.
            after = file.read().rpartition(")")[2].split()
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return None if after[0] in "ZX" else f"{boot}/{after[19]}"
    except OSError:
        pass
    if os.path.isdir("/proc/self") or os.name == "nt":
        return None if os.path.isdir("/proc/self") else ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return ""


@contextmanager
def _guarded(path: Path) -> Iterator[None]:
    """Alone for the moment in which the lock is looked at and taken."""
    deadline = time.monotonic() + GUARD_TIMEOUT_S
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        words = f"Index: {path.parent} cannot be written ({error.strerror})"
        raise OSError(error.errno, words, str(path)) from error
    try:
        while not try_lock(handle):
            if time.monotonic() > deadline:
                raise IndexBusy(f"Index: {path} stayed locked for {GUARD_TIMEOUT_S:g} s; another writer hangs there")
            time.sleep(0.01)
        yield
    finally:
        # Closing lets go of it, and so does dying.
        os.close(handle)
