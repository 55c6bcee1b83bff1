"""The section on the max-sim head: three seeds on combinations that no training showed, served soft and hard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.benchmarks import scenes
from engine.engine import Engine, load
from engine.heads.base import Head, shipped_head
from engine.heads.max_sim_head import MaxSimHead
from engine.heads.registry import load_head
from engine.metrics import Interval
from engine.results.figures import Figure, compare_figures, read_figures, renew_figures
from engine.results.run import Run
from engine.scorers.base import Scorer
from engine.scorers.max_sim_head import MaxSimHeadScorer
from engine.training.head_data import ScenesQuads, scenes_data
from engine.training.heads import train_head
from engine.training.presets import TRAINING

NAME = "max_sim_head"
SEEDS = (0, 1, 2)
# The seed whose head is shipped, chosen before any was measured.
SHIPPED_SEED = 0
ITEMS, QUICK_ITEMS = 400, 20


def train(run: Run) -> None:
    """Train the three seeds, or go on with them, and put down their figures.

    Raises ResultsDiffer, with the new figures written, where those of any seed do not meet the ones they replace.
    """
    peaksim = load("scenes", device="cpu")
    found = []
    for seed in SEEDS:
        head = MaxSimHead.build(peaksim.spec, seed=seed)
        data = scenes_data(peaksim, head.needs(), ScenesQuads(), run.folder / "features", told=run.progress)
        output = run.folder / f"{NAME}-{seed}"
        config = replace(TRAINING[NAME], output=output, seed=seed, evaluate_every=0)

        def report(line: str, step: int, steps: int, seed: int = seed) -> None:
            run.progress(f"{NAME} seed {seed}: {line}", step, steps)

        train_head(head, data, config, report=report)
        found += _figures(run, peaksim, head.eval(), seed, ITEMS)
    renew_figures(run.figures / f"{NAME}.jsonl", found)


def section(run: Run) -> str:
    """The table of the committed figures, after the shipped head has met its own; raises ResultsDiffer otherwise."""
    peaksim = load("scenes", device="cpu")
    path = run.figures / f"{NAME}.jsonl"
    committed = read_figures(path, written_by="make results-train")
    head = load_head(shipped_head(NAME), fingerprint=peaksim.spec.fingerprint)
    found = _figures(run, peaksim, head, SHIPPED_SEED, run.items(ITEMS, QUICK_ITEMS))
    compare_figures(path.name, committed, found)
    lines = [
        "## The max-sim head\n",
        f"Three seeds of the training in [docs/heads.md](docs/heads.md), {ITEMS} items a category of combinations that "
        "no training showed. Served *hard* is what an index scores. Shipped is seed 0.\n",
        "| seed | maximum | " + " | ".join(map(str.capitalize, scenes.CATEGORIES)) + " |",
        "|---" * (2 + len(scenes.CATEGORIES)) + "|",
    ]
    held = {figure.name: figure for figure in committed}
    for seed in SEEDS:
        for maximum in ("soft", "hard"):
            own = [held[_name(seed, maximum, category)] for category in scenes.CATEGORIES]
            cells = [scenes.percent(Interval(figure.value, figure.low, figure.high)) for figure in own]
            lines.append(f"| {seed} | {maximum} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _figures(run: Run, peaksim: Engine, head: Head, seed: int, items: int) -> list[Figure]:
    served: Mapping[str, Scorer] = {
        "soft": MaxSimHeadScorer(head=head, maximum="soft"),
        "hard": MaxSimHeadScorer(head=head, maximum="hard"),
    }
    report = scenes.evaluate(peaksim, served, scenes.ScenesBenchmark(items=items), progress=run.progress)
    return [Figure.of(_name(seed, row.scorer, row.category), row.items, row.group) for row in report.results]


def _name(seed: int, maximum: str, category: str) -> str:
    return f"seed {seed} {maximum} held_out {category}"
