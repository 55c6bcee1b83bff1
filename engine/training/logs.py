"""The files of a training that outlive a crash: its JSON-lines log, and checkpoints that may be damaged."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

from engine.atomic_files import written_whole

# What reading a cut or foreign file raises, by the place where it stops.
DAMAGE = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError)


def cut_log(who: str, path: Path, step: int) -> None:
    """Drop what was logged after the checkpoint, and a line torn by a crash: those steps will be run again.

    Raises:
        ValueError: a whole line of the log that cannot be read.
    """
    if not path.exists():
        return
    try:
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= step]
    except DAMAGE as error:
        raise damaged(who, path, error) from error
    with written_whole(path) as unfinished:
        unfinished.write_text("".join(kept))


def damaged(who: str, path: Path, error: Exception) -> ValueError:
    """The error to raise for a file of a training that cannot be read."""
    reason = (str(error).splitlines() or [""])[0] or type(error).__name__
    return ValueError(f"train {who}: {path} is damaged ({reason}); remove it, or choose another output folder")
