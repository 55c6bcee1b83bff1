"""Files and folders that a command writes: refused before anything is computed, not after."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def check_file(option: str, path: Path | None, *, suffixes: tuple[str, ...] = ()) -> None:
    """Make the folder of a file to come and see that the file can be written.

    Arguments: ``option`` as the user wrote it, for messages; ``path``, None for nothing to check; ``suffixes`` one of
    which the name must end in, any if empty. A file that is there is left as it is.

    Raises ValueError for a folder or another suffix, OSError where nothing can be written; both name the path.
    """
    if path is None:
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{option} must end in {', '.join(suffixes)}, got {path}")
    if path.is_dir():
        raise ValueError(f"{option} must be a file to write, got the folder {path}")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{option}: {path} is there and must not be written to")
        if not path.is_file():
            return
    # Also for a file that is there: it is written anew beside itself.
    _check_writable(option, path, path.resolve().parent)


def check_apart(outputs: Iterable[tuple[str, Path | None]], inputs: Iterable[tuple[str, Path | None]]) -> None:
    """See that nothing is written over what is read, whatever the paths are called, and no two outputs are one file.

    Arguments: pairs of an option as the user wrote it and its path, None where it was not given.

    Raises ValueError naming both options and the path.
    """
    held = [(option, path) for option, path in inputs if path is not None]
    for option, path in outputs:
        if path is None:
            continue
        for other, its in held:
            if _is_same(path, its):
                raise ValueError(f"{option} must be another file than {other}, got {path} for both")
        held.append((option, path))


def check_folder(option: str, path: Path) -> None:
    """Make a folder that files are to be written into, and see that they can be.

    Raises ValueError for a file, OSError where nothing can be written; both name the path.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option} must be a folder, got the file {path}")
    _check_writable(option, path, path)


def _is_same(one: Path, other: Path) -> bool:
    # Devices and pipes keep nothing that could be lost.
    if one.exists() and other.exists():
        return one.is_file() and one.samefile(other)
    return one.resolve() == other.resolve()


def _check_writable(option: str, path: Path, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Written to see: rights alone do not tell of file systems that are read-only or full.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"{option}: {path} cannot be written ({error.strerror or error})") from error
