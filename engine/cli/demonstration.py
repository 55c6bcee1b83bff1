"""``peaksim demo``: the controlled benchmark, scored and drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.benchmarks.demo import ITEMS, NEGATION_ITEMS, DemoConfig, DemoResult, run
from engine.benchmarks.scenes import percent
from engine.cli.options import Shared
from engine.cli.outputs import check_folder
from engine.cli.progress import steps
from engine.cli.tables import report, show_json, show_line, show_table
from engine.metrics import Interval
from engine.scenes.items import CATEGORIES


@dataclass(frozen=True, kw_only=True)
class Demo(Shared):
    """Score the controlled benchmark with every scorer, and draw what was found."""

    config: DemoConfig = field(default_factory=DemoConfig)

    def run(self) -> int:
        """Print the group scores and where the pictures are."""
        check_folder("--output", self.config.output)
        report(in_words(self.config))
        with steps("pictures") as advance:
            found = run(self.config, progress=advance)
        if self.json:
            show_json(found.to_dict())
        else:
            show(found)
        return 0


def in_words(config: DemoConfig) -> str:
    """What is going to be done and, where it was measured, how long it takes."""
    items, choices = config.items, min(config.items, NEGATION_ITEMS)
    what = f"demo: {len(CATEGORIES)} categories of {items} items and {choices} choices with negations, scored and drawn"
    measured = (config.items, config.model) == (ITEMS, DemoConfig.model)
    return f"{what}; about a minute on two cores" if measured else what


def show(found: DemoResult) -> None:
    """The group scores, the negation set, and what to look at next."""
    report = found.report
    categories = report.benchmark.categories
    names = list(dict.fromkeys(result.scorer for result in report.results))
    rows = [(name, *(percent(report.result(name, category).group) for category in categories)) for name in names]
    title = f"{report.model}: group score, per cent ± half a 95 % interval (chance 16.7)"
    show_table(("scorer", *categories), rows, title=title)
    show_line(f"{report.benchmark.items} items each, split {report.benchmark.split}, segments by {report.segmenter}")
    if found.negation:
        show_choices(found.negation, found.negation_items)
    show_line(f"pictures: {found.page}")
    show_line(f"table: {found.table}")
    show_line(f"done in {found.seconds:.0f} s\n")
    show_line(found.next_steps)


def show_choices(negation: Mapping[str, Interval], items: int) -> None:
    """Right choices among four captions with negations."""
    rows = [(name, percent(share)) for name, share in negation.items()]
    show_table(("scorer", "right choices"), rows, title=f"{items} choices with negations, per cent (chance 25)")
