"""`peaksim results`: the tables of RESULTS.md from the committed model and heads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import UseAppendAction, arg

from engine.cli.options import Shared
from engine.cli.progress import steps
from engine.cli.tables import report, show_json, show_line


@dataclass(frozen=True, kw_only=True)
class Results(Shared):
    """Measure the committed model and heads, and write the tables into RESULTS.md."""

    section: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
    """A section, repeatable; by default all of them."""
    quick: bool = False
    """Measure a few items and fail where the committed figures are not met; nothing is written."""
    train: bool = False
    """First train the heads of these sections from scratch; a stopped training goes on where it was."""
    work: Path = Path("runs/results")
    """Folder for what is computed on the way; a stopped run goes on there."""
    root: Path = Path()
    """The repository: its RESULTS.md is written, its docs/results holds the committed figures."""

    def run(self) -> int:
        """Make the sections; 1 when a quick run finds other figures than the committed ones."""
        from engine.results.figures import ResultsDiffer
        from engine.results.page import write_sections
        from engine.results.registry import TRAININGS, chosen
        from engine.results.run import Run

        if self.quick and self.train:
            raise ValueError("--quick measures what is committed; leave it out to --train")
        page = self.root / "RESULTS.md"
        if not page.is_file():
            raise FileNotFoundError(f"{page} is missing; call this in the repository, or give its folder as --root")
        sections = chosen(self.section)
        if self.train and not sections.keys() & TRAININGS.keys():
            raise ValueError(
                f"--train: one of the sections must have heads to train ({', '.join(TRAININGS)}), got "
                f"{', '.join(sections)}"
            )
        outcomes: dict[str, str] = {}
        with steps("steps") as told:
            run = Run(self.work, quick=self.quick, progress=told, root=self.root)
            for name, section in sections.items():
                started = time.monotonic()
                outcomes[name] = "met" if self.quick else "written"
                if self.train and name in TRAININGS:
                    try:
                        TRAININGS[name](run)
                    except ResultsDiffer as difference:
                        # Its figures are written all the same, and so is the section that shows them.
                        outcomes[name] = str(difference)
                try:
                    body = section(run)
                except ResultsDiffer as difference:
                    outcomes[name] = str(difference)
                    continue
                if not self.quick:
                    write_sections(page, {name: body})
                report(f"results: {name} took {time.monotonic() - started:.0f} s")
        if self.json:
            show_json(outcomes)
        else:
            for name, outcome in outcomes.items():
                show_line(f"{name}: {outcome}")
        return 0 if set(outcomes.values()) <= {"met", "written"} else 1
