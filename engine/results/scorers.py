"""The section on the embedded model as it is shipped: scorers on the controlled benchmark, zero-shot, retrieval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any

from engine.benchmarks import scenes
from engine.benchmarks.scenes_zero_shot import zero_shot_figures
from engine.engine import Engine, load
from engine.heads.base import shipped_head
from engine.metrics import Interval, wilson_interval
from engine.results.figures import Figure, check_figures, write_figures
from engine.results.run import Run
from engine.scorers.base import Scorer
from engine.scorers.registry import get_scorer

NAME = "scorers"
# The shipped heads that score pairs; `peakpatch` is for negation and has a section of its own.
TRAINED = ("max_sim_head", "linear", "tflocal", "tfglobal")
# Items a category of each split, and of the quick run's only split.
SPLITS: Mapping[str, int] = {"held_out": 400, "in_domain": 100, "shifted": 100}
QUICK_SPLIT, QUICK_ITEMS = "held_out", 12
LABELS = 1000
RETRIEVAL = 500
TITLES = {
    "held_out": "combinations that no training showed (`held_out`)",
    "in_domain": "combinations that trainings may show (`in_domain`)",
    "shifted": "other renderer settings and more objects (`shifted`)",
}


def scorers() -> dict[str, Scorer]:
    """The rows of the tables."""
    return {**scenes.STANDARD_SCORERS, **{name: get_scorer(name) for name in TRAINED}}


def section(run: Run) -> str:
    """The tables. A quick run measures few items of one split and raises ResultsDiffer where the figures differ."""
    peaksim = load("scenes", device="cpu")
    path = run.figures / f"{NAME}.jsonl"
    if run.quick:
        report = _report(run, peaksim, QUICK_SPLIT, QUICK_ITEMS)
        check_figures(path, _figures(report))
        return _table(report)
    reports = [_report(run, peaksim, split, items) for split, items in SPLITS.items()]
    words = run.part(f"{NAME}-words", f"{peaksim.spec.fingerprint} {LABELS} {RETRIEVAL}", lambda: _words(peaksim))
    write_figures(path, [figure for report in reports for figure in _figures(report)])
    head = (
        "## The embedded model: scorers\n\n"
        "Group score in per cent ± half a 95 % bootstrap interval over items; chance 16.7; strict comparisons, a tie "
        "is never a win. The model is frozen; heads are those shipped with it, trained on other pairs."
    )
    return "\n\n".join([head, *map(_table, reports), _words_table(words)])


def _report(run: Run, peaksim: Engine, split: str, items: int) -> scenes.ScenesReport:
    """The report of a split, in parts of one category each, heads apart: a stopped run loses a minute."""
    benchmark = scenes.ScenesBenchmark(items=items, split=split)
    parts = [
        _part(run, peaksim, replace(benchmark, categories=(category,)), heads=heads)
        for heads in (False, True)
        for category in benchmark.categories
    ]
    return replace(parts[0], benchmark=benchmark, results=tuple(row for part in parts for row in part.results))


def _part(run: Run, peaksim: Engine, benchmark: scenes.ScenesBenchmark, *, heads: bool) -> scenes.ScenesReport:
    rows = {name: scorer for name, scorer in scorers().items() if (name in TRAINED) == heads}
    files = [sha256(shipped_head(name).read_bytes()).hexdigest() for name in rows if heads]
    made_by = f"{peaksim.spec.fingerprint} {benchmark!r} {peaksim.segmenter.name} {rows!r} {files}"
    (category,) = benchmark.categories

    def make() -> dict[str, Any]:
        return scenes.evaluate(peaksim, rows, benchmark, progress=run.progress).to_dict()

    name = f"{NAME}-{benchmark.split}-{category}-{'heads' if heads else 'frozen'}"
    return scenes.ScenesReport.from_dict(run.part(name, made_by, make))


def _figures(report: scenes.ScenesReport) -> list[Figure]:
    split = report.benchmark.split
    return [Figure.of(f"{row.scorer} {split} {row.category}", row.items, row.group) for row in report.results]


def _table(report: scenes.ScenesReport) -> str:
    asked = report.benchmark
    return (
        f"### {TITLES[asked.split].capitalize()}\n\n{asked.items} items a category, segments {report.segmenter}\n\n"
        f"{report.to_markdown()}"
    )


def _words(peaksim: Engine) -> dict[str, Any]:
    """Zero-shot classification (looks that training showed, and withheld ones) and retrieval."""
    return {
        "seen in training": {k: asdict(v) for k, v in zero_shot_figures(peaksim, LABELS, seed=5).items()},
        "withheld": {k: asdict(v) for k, v in zero_shot_figures(peaksim, LABELS, seed=5, withheld=True).items()},
        "retrieval": scenes.retrieval_figures(peaksim, RETRIEVAL, seed=5),
    }


def _words_table(words: Mapping[str, Any]) -> str:
    looks = [key for key in words if key != "retrieval"]
    names = list(words[looks[0]])
    lines = [
        f"### Zero-shot ({LABELS:,} scenes of one group) and retrieval\n",
        "| looks | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for look in looks:
        cells = [scenes.percent(Interval(**words[look][name])) for name in names]
        lines.append(f"| {look} | " + " | ".join(cells) + " |")
    both = ", ".join(
        f"{scenes.percent(wilson_interval(round(words['retrieval'][key] * RETRIEVAL), RETRIEVAL))} {ways}"
        for key, ways in (("image_to_text_r1", "image→text"), ("text_to_image_r1", "text→image"))
    )
    recall = (
        f"R@1 among {RETRIEVAL} scenes whose captions name every group in full, {RETRIEVAL} queries each way (± half a "
        f"95 % Wilson interval): {both}."
    )
    return "\n".join([*lines, "", recall])
