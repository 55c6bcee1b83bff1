"""Files of one JSON object a line, in which figures, logs and records are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file. Raises OSError, and ValueError naming file and line for what is no JSON object."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            held = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"results: {path}, line {number}: is damaged ({error}); restore the file") from error
        if not isinstance(held, dict):
            raise ValueError(f"results: {path}, line {number}: must be an object, got {line[:60]!r}; restore the file")
        found.append(held)
    return found
