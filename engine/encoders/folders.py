"""Folders that encoders are saved into."""

from __future__ import annotations

import os
from pathlib import Path


def made_folder(name: str, folder: str | os.PathLike[str]) -> Path:
    """The folder to save the encoder `name` into, made where it is not there.

    Raises:
        ValueError: an empty name, which would mean the working directory.
        OSError: a file stands there (FileExistsError), or the folder cannot be made.

    >>> made_folder("scenes", "")
    Traceback (most recent call last):
        ...
    ValueError: scenes: save wants the path of a folder, got ''
    """
    if not os.fspath(folder):
        raise ValueError(f"{name}: save wants the path of a folder, got {folder!r}")
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{name}: save wants a folder, but {target} is a file")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{name}: save wants a folder, and {target} could not be made ({error})") from error
    return target
