"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path` to write to; what was written takes the place of `path` in one step.

    A reader never sees half a file, and a full disk, an error or a power cut leaves the old one. Several processes
    and threads may write to one `path`: the last one to finish wins.

    Args:
        path: the file to write; its folder must exist.

    Returns:
        A context manager that gives the path to write to. It ends in ".part" and is gone afterwards, also after an
        error.

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
    # A name of its own for each writer: two that shared one would mix their bytes.
    unfinished = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield unfinished
        # Bytes first, name second: a power cut between the two must not leave an empty file under the good name.
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
