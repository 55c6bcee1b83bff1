"""What a section of `RESULTS.md` is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.atomic_files import written_whole

# Told (what is being done, how much of it, of how much).
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody follows."""


@dataclass(frozen=True)
class Run:
    """One making of the results.

    Attributes:
        folder: for what is computed on the way (parts, stores of features, trainings); a stopped run goes on there.
        quick: measure a few items and compare them with the committed figures, in seconds; nothing is committed.
        progress: told of what is being done.
        root: the repository, in which `docs/` holds the committed figures.
    """

    folder: Path = Path("runs/results")
    quick: bool = False
    progress: Progress = silent
    root: Path = Path()

    @property
    def figures(self) -> Path:
        """Folder of the committed figures: `<section>.jsonl`."""
        return self.root / "docs" / "results"

    def items(self, full: int, quick: int) -> int:
        """How many items this run measures."""
        return quick if self.quick else full

    def part(self, name: str, made_by: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Plain values that `make` gives, kept in `<folder>/<name>.json` for the next run.

        `made_by` says what made them (fingerprints and settings): with another one they are made again. A quick run
        neither reads nor keeps them. Raises what `make` raises.
        """
        path = self.folder / f"{name}.json"
        if not self.quick and path.exists():
            # A part that cannot be read is made again.
            with suppress(ValueError, LookupError, TypeError):
                held = json.loads(path.read_text(encoding="utf-8"))
                if held["made_by"] == made_by:
                    return dict(held["values"])
        values = dict(make())
        if not self.quick:
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(path) as unfinished:
                unfinished.write_text(json.dumps({"made_by": made_by, "values": values}) + "\n", encoding="utf-8")
        return values
