"""The sections of `RESULTS.md` in their order, and the trainings behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.results import comparison, generator, max_sim_head, onepass, peak_patch, retrieval, scorers
from engine.results.run import Run

Section = Callable[[Run], str]
Training = Callable[[Run], None]

SECTIONS: Mapping[str, Section] = {
    scorers.NAME: scorers.section,
    max_sim_head.NAME: max_sim_head.section,
    comparison.NAME: comparison.section,
    retrieval.NAME: retrieval.section,
    peak_patch.NAME: peak_patch.section,
    generator.NAME: generator.section,
    onepass.NAME: onepass.section,
}
# Each goes on where it was stopped, and leaves the figures that its section shows.
TRAININGS: Mapping[str, Training] = {
    max_sim_head.NAME: max_sim_head.train,
    peak_patch.NAME: peak_patch.train,
    generator.NAME: generator.train,
    comparison.NAME: comparison.train,
    onepass.NAME: onepass.train,
}


def chosen(names: tuple[str, ...]) -> dict[str, Section]:
    """The sections of these names, in their order; all for no name. Raises ValueError for an unknown one."""
    for name in names:
        if name not in SECTIONS:
            raise ValueError(f"results: section must be one of {', '.join(SECTIONS)}, got {name!r}")
    return {name: section for name, section in SECTIONS.items() if name in names or not names}
