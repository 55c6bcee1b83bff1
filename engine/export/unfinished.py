"""The folder an export is written in until it is whole; what a killed export left behind is removed by the next one."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ENDING = ".unfinished-export"


@contextmanager
def unfinished_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target`, `.NAME-XXXXXXXX.unfinished-export`, gone afterwards.

    A process that is killed cannot remove its own: whoever exports to the same name next does. One that another
    process still writes in is held by a lock, which the system lets go when that process ends, and stays. Systems
    without `flock` have no such lock: leftovers stay there until someone removes them.
    """
    with _locked(target.parent):
        # Under a lock, so that nobody takes a folder for a leftover that is not held yet.
        _remove_leftovers(target)
        place = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-", suffix=_ENDING))
        held = _lock(place)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        _release(held)


def _remove_leftovers(target: Path) -> None:
    """Remove what dead exports to `target` left. What cannot be removed stays."""
    ours = re.compile(rf"\.{re.escape(target.name)}-[a-z0-9_]{{8}}{re.escape(_ENDING)}")
    for path in target.parent.iterdir():
        if ours.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            held = _lock(path)
            if held is not None:
                shutil.rmtree(path, ignore_errors=True)
                _release(held)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    held = _lock(folder, wait=True)
    try:
        yield
    finally:
        _release(held)


def _lock(folder: Path, *, wait: bool = False) -> int | None:
    """A handle of the folder that holds its lock; None where another has it or the system has no such locks."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _release(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)
