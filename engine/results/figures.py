"""Committed figures: JSON lines with intervals, and the check that a quick measurement meets them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.atomic_files import written_whole
from engine.metrics import Interval
from engine.results.json_lines import read_json_lines


class ResultsDiffer(Exception):
    """What was measured does not meet what is committed."""


@dataclass(frozen=True)
class Figure:
    """A share in 0..1, or a median margin of scores, with its interval: of what, and over how many items."""

    name: str
    items: int
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, name: str, items: int, interval: Interval) -> Figure:
        """The figure of an interval."""
        return cls(name, items, interval.value, interval.low, interval.high)

    def meets(self, other: Figure) -> bool:
        """Whether both intervals have a value in common."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}] over {self.items} items"


def write_figures(path: Path, figures: Iterable[Figure]) -> None:
    """One JSON line for each figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as unfinished:
        unfinished.write_text("".join(json.dumps(asdict(figure)) + "\n" for figure in figures), encoding="utf-8")


def read_figures(path: Path, *, written_by: str = "make results") -> list[Figure]:
    """What `write_figures` wrote. Raises FileNotFoundError naming the command that writes it, ValueError for damage."""
    if not path.is_file():
        raise FileNotFoundError(f"results: {path} is missing; `{written_by}` writes it")
    try:
        found = [Figure(**line) for line in read_json_lines(path)]
    except TypeError as error:
        raise ValueError(f"results: {path} holds other lines than figures ({error}); restore the file") from error
    if not found:
        raise ValueError(f"results: {path} is empty; `{written_by}` writes it")
    return found


def check_figures(path: Path, found: Sequence[Figure]) -> None:
    """`compare_figures` with those that are committed in `path`; raises also what `read_figures` raises."""
    compare_figures(path.name, read_figures(path), found)


def renew_figures(path: Path, found: Sequence[Figure]) -> None:
    """Write what a training gave in the place of what is committed, then hold the new figures against the old.

    Figures that were not there before have nothing to meet. Raises ResultsDiffer, with the new ones written, where
    others are not met: nothing that was trained is lost, and the version control holds the old.
    """
    before = read_figures(path) if path.is_file() else []
    write_figures(path, found)
    compare_renewed(path.name, before, found)


def compare_renewed(what: str, before: Sequence[Figure], found: Sequence[Figure]) -> None:
    """`compare_figures` of those found that were there before."""
    known = {figure.name for figure in before}
    again = [figure for figure in found if figure.name in known]
    if again:
        compare_figures(what, before, again)


def compare_figures(what: str, committed: Sequence[Figure], found: Sequence[Figure]) -> None:
    """Raise ResultsDiffer naming every found figure that is not committed, or whose intervals lie apart.

    Raises ValueError for nothing to compare.
    """
    if not found:
        raise ValueError("compare_figures: needs at least one figure, got none")
    known = {figure.name: figure for figure in committed}
    faults = [
        f"{figure.name}: found {figure}, committed {known.get(figure.name, 'nothing')}"
        for figure in found
        if figure.name not in known or not figure.meets(known[figure.name])
    ]
    if faults:
        raise ResultsDiffer(f"{what}: {len(faults)} of {len(found)} figures are not reproduced: " + "; ".join(faults))
