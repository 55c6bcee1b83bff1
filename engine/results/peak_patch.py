"""The sections on PeakPatch: what each part is worth, what text layers tell apart, and which is worth reading.

Both tables are made of records (`engine.results.peak_patch_arms`) that trainings leave in `docs/heads`; the shipped
head is measured anew, curves and map are drawn anew.
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
from engine.diagnostics.plots import plot_layers, require_matplotlib
from engine.engine import Engine, load
from engine.heads.base import shipped_head
from engine.heads.peak_patch import PeakPatch
from engine.heads.registry import load_head
from engine.metrics import Interval
from engine.results.caption_map import caption_map, map_section, require_scikit_learn
from engine.results.figures import Figure, check_figures, compare_renewed, write_figures
from engine.results.peak_patch_arms import (
    COLUMNS,
    HEADINGS,
    KEPT,
    SETS,
    Arm,
    Budget,
    ItemSet,
    ablation_arms,
    margin_over_seeds,
    measure,
    measure_encoder,
    over_seeds,
    read_records,
    record_figures,
    run_arms,
    sweep_arms,
    write_records,
)
from engine.results.peak_plot import plot_map, plot_sweep
from engine.results.run import Run

NAME = "peak_patch"
SEEDS = 3
QUICK_ITEMS = 60
# Of captions, for the contrast of layers, and scenes of the map: as `peaksim diagnose` has them by default.
PAIRS, FAMILIES = 300, 80
MARGIN = "margin"
NOTHING = "–"
MARGIN_WORDS = "The margin is the median of the right caption's score minus the best other's."
# Said of every table that has these rows.
BLIND_WORDS = (
    "Rows called *blind* read the captions alone, with ties shared: they find no picture, and have no margin "
    f"({NOTHING})."
)
TITLES = {
    "held_out/benchmark": "combinations that no training showed, in the benchmark's wording",
    "in_domain/benchmark": "combinations that trainings may show, in the benchmark's wording",
    "held_out/held_out": "combinations and wordings that no training showed",
}
CHANGES = (NEGATION, "existence", "denial")


def section(run: Run) -> str:
    """The tables, whose pictures are drawn into `docs`.

    A quick run measures the shipped head on few items and raises ResultsDiffer where figures differ. Raises ImportError
    saying how to get what draws when it is absent.
    """
    if not run.quick:
        require_matplotlib()
        require_scikit_learn()
    peaksim = load("scenes", device="cpu")
    path = run.figures / f"{NAME}.jsonl"
    sets = SETS[:1] if run.quick else SETS
    head = sha256(shipped_head(PeakPatch.name).read_bytes()).hexdigest()
    made_by = f"{peaksim.spec.fingerprint} {sets!r} {head} {KEPT}"
    found = run.part(NAME, made_by, lambda: _measured(run, peaksim, sets))
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
    docs = run.root / "docs"
    report = diagnose_layers(peaksim, scene_changes(PAIRS))
    plot_layers(report, docs / "scenes_layers.png")
    plot_sweep(report, sweep, docs / "peak_layers.png")
    shipped = load_head(shipped_head(PeakPatch.name), fingerprint=peaksim.spec.fingerprint)
    assert isinstance(shipped, PeakPatch)
    captions = caption_map(peaksim, shipped, families=FAMILIES)
    plot_map(captions, docs / "caption_map.png")
    parts = _shipped_tables(found), ablation_section(ablation), layers_section(report), sweep_section(report, sweep)
    return "\n\n".join([*parts, map_section(captions)])


def train(run: Run) -> None:
    """Train every arm with every seed and leave the records in `docs/heads`.

    Raises ResultsDiffer, with the records written, where those before them are not met.
    """
    peaksim = load("scenes", device="cpu")
    budget = Budget(run.folder / "peak_patch", run.folder / "features")
    records = {}
    for name, arms in arms_of(peaksim).items():

        def told(line: str, name: str = name) -> None:
            run.progress(f"{name}: {line}", 0, 1)

        records[name] = run_arms(peaksim, arms, budget, seeds=SEEDS, sets=SETS, told=told)
    before = {}
    for name, found in records.items():
        path = run.root / "docs" / "heads" / f"peakpatch-{name}.jsonl"
        before[name] = record_figures(read_records(path)) if path.is_file() else []
        write_records(path, found)
    for name, found in records.items():
        compare_renewed(f"peakpatch-{name}.jsonl", before[name], record_figures(found))


def arms_of(engine: Engine) -> dict[str, tuple[Arm, ...]]:
    """Arms of the ablation and of the sweep."""
    return {"ablation": ablation_arms(engine.spec), "sweep": sweep_arms(engine.spec.text_layers)}


def _measured(run: Run, engine: Engine, sets: Sequence[ItemSet]) -> dict[str, dict[str, Any]]:
    """Encoder, shipped head and what reads captions alone: for each set and column the interval as plain values."""
    figures = {}
    for done, items in enumerate(sets):
        run.progress(f"negation: {items.name}", done, len(sets))
        figures[items.name] = replace(items, items=run.items(items.items, QUICK_ITEMS)).figures(engine)
    encoder = measure_encoder(figures)
    found = {"global": encoder, PeakPatch.name: measure(figures, shipped_head(PeakPatch.name))}
    rows: dict[str, dict[str, Any]] = {
        scorer: {name: _cells(values) for name, values in by_set.items()} for scorer, by_set in found.items()
    }
    for name, values in encoder.items():
        for blind, columns in values["blind"].items():
            rows.setdefault(blind, {})[name] = {column: _of_share(cell) for column, cell in columns.items()}
    return rows


def _cells(values: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    margin = margin_over_seeds([values])
    cells = {column: _plain(values[column]) for column in COLUMNS}
    own = {"items": values["choice"]["items"], "value": margin.value, "low": margin.low, "high": margin.high}
    return cells | {MARGIN: own}


def _of_share(cell: Mapping[str, float]) -> dict[str, float]:
    return {"items": cell["items"], "value": cell["share"], "low": cell["low"], "high": cell["high"]}


def _plain(column: Mapping[str, Any]) -> dict[str, float]:
    interval, _, _ = over_seeds([dict(column)])
    return {"items": column["items"], "value": interval.value, "low": interval.low, "high": interval.high}


def _shipped_tables(found: Mapping[str, Any]) -> str:
    parts = [
        "## Negation: the shipped correction\n\n"
        "Per cent ± half a 95 % bootstrap interval over items. Choices among four captions (chance 25), by the kind of "
        "the right one; retrieval of a scene by its caption in full, plain (R@5) and behind a true denial (R-Neg@5). "
        f"{MARGIN_WORDS} {BLIND_WORDS}"
    ]
    for name in next(iter(found.values())):
        lines = [f"### {TITLES[name].capitalize()}\n", _header("scorer", (*HEADINGS, MARGIN))]
        for scorer, by_set in found.items():
            cells = [_percent(by_set[name].get(column)) for column in COLUMNS]
            margin = by_set[name].get(MARGIN)
            cells.append(NOTHING if margin is None else _signed(_interval(margin)))
            shown = scorer if scorer.startswith("blind") else f"`{scorer}`"
            lines.append(f"| {shown} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def ablation_section(records: Sequence[Mapping[str, Any]]) -> str:
    """The tables of what each part is worth, one for each set of items."""
    seeds = len({entry["seed"] for entry in records} - {None})
    parts = [
        "## What each part of PeakPatch is worth\n\n"
        f"Mean of {seeds} seeds ± half a 95 % bootstrap interval over items, in brackets the lowest and the highest "
        f"seed. {MARGIN_WORDS} Same rows, steps and rates; the losses too, but for the arm that says so. {BLIND_WORDS}"
    ]
    for name in records[0]["sets"]:
        parts.append(f"### {TITLES.get(name, name).capitalize()}\n\n{arms_table(records, name)}")
    return "\n\n".join(parts)


def arms_table(records: Sequence[Mapping[str, Any]], name: str) -> str:
    """One row an arm on the set of items of that name, then what reading the captions alone reaches."""
    lines = [_header("trained", (*HEADINGS, MARGIN))]
    for arm in dict.fromkeys(entry["arm"] for entry in records):
        lines.append(f"| {arm} | " + " | ".join(_arm_cells(records, arm, name)) + " |")
    return "\n".join([*lines, *(f"| {blind} | " + " | ".join(cells) + " |" for blind, cells in _blind(records, name))])


def _arm_cells(records: Sequence[Mapping[str, Any]], arm: str, name: str) -> list[str]:
    """Of each column and of the margin."""
    found = [entry["sets"][name] for entry in records if entry["arm"] == arm]
    columns = [_over_seeds([values[column] for values in found]) for column in COLUMNS]
    return [*columns, _signed(margin_over_seeds(found))]


def _blind(records: Sequence[Mapping[str, Any]], name: str) -> list[tuple[str, list[str]]]:
    """What reads the captions alone, with its cells; the records begin with the encoder's, which holds them."""
    return [
        (blind, [*(_percent(_of_share(shares[c]) if c in shares else None) for c in COLUMNS), NOTHING])
        for blind, shares in records[0]["sets"][name]["blind"].items()
    ]


def layers_section(report: LayerReport) -> str:
    """The table of the curves of `peaksim diagnose layers`."""
    count = len(report.curves[0].values)
    lines = [
        "## What each text layer tells apart\n",
        "Every layer, read at the end token through the tower's own final norm and projection: 1 − cosine of a caption "
        f"and its change ({report.source}), for alignment the cosine with the caption's picture, and that minus the "
        "cosine with another picture; mean ± half a 95 % bootstrap interval over pairs.\n",
        _header("text layer", (*map(str, range(1, count + 1)), "pairs")),
    ]
    for curve in report.curves:
        name = f"{curve.name} (control)" if curve.role == "control" else curve.name
        lines.append(f"| {name} | " + " | ".join([*map(_mean, curve.values), str(curve.count)]) + " |")
    verdict = report.verdict()
    picture = "![contrast and alignment by layer](docs/scenes_layers.png)"
    return "\n".join([*lines, "", f"{verdict[0].upper()}{verdict[1:]}.", "", picture])


def sweep_section(report: LayerReport, records: Sequence[Mapping[str, Any]]) -> str:
    """The table of heads that read one text layer, beside what that layer tells apart."""
    seeds = len({entry["seed"] for entry in records} - {None})
    name = next(iter(records[0]["sets"]))
    lines = [
        "## Which text layer is worth reading\n",
        f"Heads that read the tokens of one layer and the end, seeds: {seeds}, on {TITLES.get(name, name)}; beside "
        f"them the layer's own contrast, 1 − cosine of a caption and its change. {MARGIN_WORDS} {BLIND_WORDS}\n",
        _header("read", (*CHANGES, *HEADINGS, MARGIN)),
    ]
    contrasts = {change: report.curve(change).means for change in CHANGES}
    curves = [report.curve(change).values for change in CHANGES]
    for arm in dict.fromkeys(entry["arm"] for entry in records):
        layer = layer_of(arm)
        cells = [_mean(values[layer - 1]) if layer else NOTHING for values in curves]
        lines.append(f"| {arm} | " + " | ".join([*cells, *_arm_cells(records, arm, name)]) + " |")
    for blind, cells in _blind(records, name):
        lines.append(f"| {blind} | " + " | ".join([*(NOTHING for _ in CHANGES), *cells]) + " |")
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


def _percent(cell: Mapping[str, float] | None) -> str:
    return NOTHING if cell is None else percent(_interval(cell))


def _interval(cell: Mapping[str, float]) -> Interval:
    return Interval(cell["value"], cell["low"], cell["high"])


def _mean(value: Interval) -> str:
    """``0.152 ± 0.006``."""
    return f"{value.value:.3f} ± {(value.high - value.low) / 2:.3f}"


def _signed(margin: Interval) -> str:
    """``+0.045 ± 0.006``; without the interval where the records hold none."""
    half = (margin.high - margin.low) / 2
    return f"{margin.value:+.3f}" + ("" if np.isnan(half) else f" ± {half:.3f}")


def _over_seeds(columns: Sequence[dict[str, Any]]) -> str:
    interval, low, high = over_seeds(columns)
    spread = f" [{100 * low:.0f}–{100 * high:.0f}]" if len(columns) > 1 else ""
    return percent(interval) + spread
