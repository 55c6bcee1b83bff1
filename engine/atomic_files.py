"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path` to write to; what was written takes the place of `path` in one step.

    A reader never sees half a file, and a full disk, an error or a power cut leaves the old one. Several processes
    and threads may write to one `path`: the last one to finish wins. Of a symbolic link the file it stands for is
    written; what is neither file nor folder (a pipe, `/dev/null`) is written to as it is. Permissions are those of
    the old file, of a new one those that the umask leaves, whatever the writing library gave its own.

    Args:
        path: the file to write; its folder must exist.

    Returns:
        A context manager that gives the path to write to. Beside a file it ends in ".part" and is gone afterwards,
        also after an error.

    Raises:
        FileNotFoundError: nothing was written.
        OSError: the file cannot take its place (a folder stands there, no right to write).

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with written_whole(f"{folder}/numbers.txt") as unfinished:
        ...         _ = unfinished.write_text("1 2 3")
        ...     os.listdir(folder)
        ['numbers.txt']
    """
    target = Path(path)
    if target.exists() and not target.is_file() and not target.is_dir():
        # Nothing can take the place of a device or a pipe.
        yield target
        return
    target = target.resolve()
    # A name of its own for each writer: two that shared one would mix their bytes.
    unfinished = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.part")
    permissions = _permissions(target, unfinished)
    try:
        yield unfinished
        # Bytes first, name second: a power cut between the two must not leave an empty file under the good name.
        with unfinished.open("rb+") as file:
            # Libraries that write by way of a temporary file leave one that only its owner may read.
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) != permissions:
                os.chmod(unfinished, permissions)
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _permissions(target: Path, unfinished: Path) -> int:
    """Permission bits of the file that stands at `target`, or of a new one."""
    if target.is_file():
        return stat.S_IMODE(target.stat().st_mode)
    # The umask cannot be read without being changed for all threads: a file that is made shows what it leaves.
    unfinished.touch()
    try:
        return stat.S_IMODE(unfinished.stat().st_mode)
    finally:
        unfinished.unlink()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` and a line end as UTF-8, whole or not at all.

    What UTF-8 cannot hold (the bytes of a file name that is none) is written as an escape, which JSON reads back.

    Args:
        path: the file to write; its folder must exist.
        text: without the last line end.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> import json, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_text(f"{folder}/name.json", json.dumps("na\\udcefve", ensure_ascii=False))
        ...     json.loads(Path(folder, "name.json").read_text(encoding="utf-8")) == "na\\udcefve"
        True
    """
    with written_whole(path) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def flush_folder(path: str | os.PathLike[str]) -> None:
    """Make new names and renames in a folder last, where the system can (Windows cannot open folders)."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
