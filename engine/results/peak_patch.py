"""The sections on PeakPatch: what each part is worth, and which text layer is worth reading.

Both tables are made of records (`engine.results.peak_patch_arms`) that trainings leave in `docs/heads`; the shipped
head is measured anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np

from engine.benchmarks.scenes import percent
from engine.diagnostics.changes import scene_changes
from engine.diagnostics.layers import NEGATION, LayerReport, diagnose_layers
from engine.diagnostics.plots import require_matplotlib
from engine.engine import Engine, load
from engine.heads.base import shipped_head
from engine.heads.peak_patch import PeakPatch
from engine.metrics import Interval
from engine.results.figures import Figure, check_figures, write_figures
from engine.results.peak_patch_arms import (
    COLUMNS,
    HEADINGS,
    SETS,
    Arm,
    Budget,
    ItemSet,
    ablation_arms,
    measure,
    measure_encoder,
    over_seeds,
    read_records,
    run_arms,
    sweep_arms,
    write_records,
)
from engine.results.peak_plot import plot_sweep
from engine.results.run import Run

NAME = "peak_patch"
SEEDS = 3
QUICK_ITEMS = 60
# Of captions, for the contrast of layers.
PAIRS = 300
TITLES = {
    "held_out/benchmark": "combinations that no training showed, in the benchmark's wording",
    "in_domain/benchmark": "combinations that trainings may show, in the benchmark's wording",
    "held_out/held_out": "combinations and wordings that no training showed",
}
CHANGES = (NEGATION, "existence", "denial")


def section(run: Run) -> str:
    """The tables. A quick run measures the shipped head on few items and raises ResultsDiffer where figures differ."""
    if not run.quick:
        require_matplotlib()
    peaksim = load("scenes", device="cpu")
    path = run.figures / f"{NAME}.jsonl"
    sets = SETS[:1] if run.quick else SETS
    head = sha256(shipped_head(PeakPatch.name).read_bytes()).hexdigest()
    found = run.part(NAME, f"{peaksim.spec.fingerprint} {sets!r} {head}", lambda: _measured(run, peaksim, sets))
    figures = [
        Figure(f"{scorer} {name} {column}", cell["items"], *(cell[part] for part in ("value", "low", "high")))
        for scorer, by_set in found.items()
        for name, columns in by_set.items()
        for column, cell in columns.items()
        # Retrieval among fewer pictures is another task.
        if not run.quick or column.startswith("choice")
    ]
    if run.quick:
        check_figures(path, figures)
        return ""
    write_figures(path, figures)
    heads = run.root / "docs" / "heads"
    ablation, sweep = (read_records(heads / f"peakpatch-{name}.jsonl") for name in ("ablation", "sweep"))
    report = diagnose_layers(peaksim, scene_changes(PAIRS))
    plot_sweep(report, sweep, run.root / "docs" / "peak_layers.png")
    return "\n\n".join([_shipped_tables(found), ablation_section(ablation), sweep_section(report, sweep)])


def train(run: Run) -> None:
    """Train every arm with every seed and leave the records in `docs/heads`."""
    peaksim = load("scenes", device="cpu")
    budget = Budget(run.folder / "peak_patch", run.folder / "features")
    for name, arms in arms_of(peaksim).items():

        def told(line: str, name: str = name) -> None:
            run.progress(f"{name}: {line}", 0, 1)

        records = run_arms(peaksim, arms, budget, seeds=SEEDS, sets=SETS, told=told)
        write_records(run.root / "docs" / "heads" / f"peakpatch-{name}.jsonl", records)


def arms_of(engine: Engine) -> dict[str, tuple[Arm, ...]]:
    """Arms of the ablation and of the sweep."""
    return {"ablation": ablation_arms(engine.spec), "sweep": sweep_arms(engine.spec.text_layers)}


def _measured(run: Run, engine: Engine, sets: Sequence[ItemSet]) -> dict[str, dict[str, Any]]:
    """Encoder and shipped head: for each set and column the interval as plain values."""
    figures = {}
    for done, items in enumerate(sets):
        run.progress(f"negation: {items.name}", done, len(sets))
        figures[items.name] = replace(items, items=run.items(items.items, QUICK_ITEMS)).figures(engine)
    found = {"global": measure_encoder(figures), PeakPatch.name: measure(figures, shipped_head(PeakPatch.name))}
    return {
        scorer: {name: {column: _plain(values[column]) for column in COLUMNS} for name, values in by_set.items()}
        for scorer, by_set in found.items()
    }


def _plain(column: Mapping[str, Any]) -> dict[str, float]:
    interval, _, _ = over_seeds([dict(column)])
    return {"items": column["items"], "value": interval.value, "low": interval.low, "high": interval.high}


def _shipped_tables(found: Mapping[str, Any]) -> str:
    parts = [
        "## Negation: the shipped correction\n\n"
        "Per cent ± half a 95 % bootstrap interval over items. Choices among four captions (chance 25), by the kind of "
        "the right one; retrieval of a scene by its caption in full, plain (R@5) and behind a true denial (R-Neg@5)."
    ]
    for name in next(iter(found.values())):
        lines = [f"### {TITLES[name].capitalize()}\n", _header("scorer", HEADINGS)]
        for scorer, by_set in found.items():
            cells = [_percent(by_set[name][column]) for column in COLUMNS]
            lines.append(f"| `{scorer}` | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def ablation_section(records: Sequence[Mapping[str, Any]]) -> str:
    """The tables of what each part is worth, one for each set of items."""
    seeds = len({entry["seed"] for entry in records} - {None})
    parts = [
        "## What each part of PeakPatch is worth\n\n"
        f"Mean of {seeds} seeds ± half a 95 % bootstrap interval over items, in brackets the lowest and the highest "
        "seed; the margin is the median of the right caption's score minus the best other's. Same rows, steps and "
        "rates; the losses too, but for the arm that says so."
    ]
    for name in records[0]["sets"]:
        parts.append(f"### {TITLES.get(name, name).capitalize()}\n\n{arms_table(records, name)}")
    return "\n\n".join(parts)


def arms_table(records: Sequence[Mapping[str, Any]], name: str) -> str:
    """One row an arm on the set of items of that name, then what reading the captions alone reaches."""
    lines = [_header("trained", (*HEADINGS, "margin"))]
    for arm in dict.fromkeys(entry["arm"] for entry in records):
        found = [entry["sets"][name] for entry in records if entry["arm"] == arm]
        margins = [values["margin"] for values in found]
        cells = [_over_seeds([values[column] for values in found]) for column in COLUMNS]
        lines.append(f"| {arm} | " + " | ".join([*cells, f"{sum(margins) / len(margins):+.3f}"]) + " |")
    for blind, shares in records[0]["sets"][name]["blind"].items():
        cells = [f"{100 * shares[column]:.1f}" if column in shares else "" for column in COLUMNS]
        lines.append(f"| {blind} | " + " | ".join([*cells, ""]) + " |")
    return "\n".join(lines)


def sweep_section(report: LayerReport, records: Sequence[Mapping[str, Any]]) -> str:
    """The table of heads that read one text layer, beside what that layer tells apart."""
    seeds = len({entry["seed"] for entry in records} - {None})
    name = next(iter(records[0]["sets"]))
    lines = [
        "## Which text layer is worth reading\n",
        f"Heads that read the tokens of one layer and the end, seeds: {seeds}, on {TITLES.get(name, name)}; beside "
        "them the layer's own contrast, 1 − cosine of a caption and its change.\n",
        _header("read", (*CHANGES, *HEADINGS)),
    ]
    contrasts = {change: report.curve(change).means for change in CHANGES}
    for arm in dict.fromkeys(entry["arm"] for entry in records):
        found = [entry["sets"][name] for entry in records if entry["arm"] == arm]
        layer = layer_of(arm)
        cells = [f"{contrasts[change][layer - 1]:.3f}" if layer else "" for change in CHANGES]
        cells += [_over_seeds([values[column] for values in found]) for column in COLUMNS]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    lines += ["", _agreement(contrasts, records, name), "", "![contrast and figures by layer](docs/peak_layers.png)"]
    return "\n".join(lines)


def _agreement(contrasts: Mapping[str, Sequence[float]], records: Sequence[Mapping[str, Any]], name: str) -> str:
    """How the contrast of layers and the right choices of heads that read them go together."""
    layers = range(1, len(next(iter(contrasts.values()))) + 1)
    means = [
        np.mean([entry["sets"][name]["choice"]["share"] for entry in records if layer_of(entry["arm"]) == layer])
        for layer in layers
    ]
    found = []
    for change, values in contrasts.items():
        flat = np.ptp(values) == 0 or np.ptp(means) == 0
        found.append(f"{change} {'–' if flat else format(np.corrcoef(values, means)[0, 1], '+.2f')}")
    return f"Correlation over the {len(means)} layers of a contrast with all right choices: {', '.join(found)}."


def layer_of(arm: str) -> int:
    """The layer that an arm of the sweep reads; 0 for another arm."""
    word, _, number = arm.partition(" ")
    return int(number) if word == "layer" and number.isdigit() else 0


def _header(first: str, names: Sequence[str]) -> str:
    return "| " + " | ".join([first, *names]) + " |\n" + "|---" * (len(names) + 1) + "|"


def _percent(cell: Mapping[str, float]) -> str:
    return percent(Interval(cell["value"], cell["low"], cell["high"]))


def _over_seeds(columns: Sequence[dict[str, Any]]) -> str:
    interval, low, high = over_seeds(columns)
    spread = f" [{100 * low:.0f}–{100 * high:.0f}]" if len(columns) > 1 else ""
    return percent(interval) + spread
