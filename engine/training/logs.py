"""The JSON-lines log of a training."""

from __future__ import annotations

import json
from pathlib import Path


def cut_log(path: Path, step: int) -> None:
    """Drop what was logged after the checkpoint, and a line torn by a crash: those steps will be run again."""
    if not path.exists():
        return
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    unfinished = path.with_suffix(".part")
    unfinished.write_text("".join(line for line in whole if json.loads(line)["step"] <= step))
    unfinished.replace(path)
