"""Results as people read them: a table for one, a table and a bar chart for several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from engine.atomic_files import written_whole
from engine.benchmarks.summary import ALL, MACRO, Line, Result
from engine.metrics import Interval

MAX_LINES = 40
# The metrics shown with their interval; those beside them would only repeat its width.
WITH_INTERVAL = frozenset({"accuracy", "text", "image", "group", "R@1", "R@5", "R@10"})


def to_markdown(result: Result, *, max_lines: int = MAX_LINES) -> str:
    """One result as Markdown: the official figure, the slices with 95 % intervals, and what to doubt.

    Slices beyond ``max_lines`` are counted, not shown (VG-Attribution has hundreds); ``Result.to_json`` has
    them all.
    """
    metrics = list(result.lines[0].values)
    shown = result.lines[:max_lines]
    rows = [["", "n", *metrics]]
    for line in shown:
        cells = [_cell(metric, line.values[metric]) for metric in metrics]
        rows.append([_line_name(line, result), str(line.count), *cells])
    parts = [
        f"### {result.benchmark}: {result.subject}",
        f"**{result.headline[1]} ({result.headline[0]}): {percent(result.score)} %** – {result.rule}.",
        _table(rows),
    ]
    if len(result.lines) > len(shown):
        parts.append(f"{len(result.lines) - len(shown)} further slices are in the JSON.")
    parts.append("\n".join(f"- {fact}" for fact in _facts(result)))
    return "\n\n".join(parts) + "\n"


def comparison(results: Sequence[Result]) -> str:
    """Markdown table of the official figures: one row a subject, one column a benchmark.

    Each column's head names the metric; a last row holds what the best text-only scorer or chance reaches.
    Raises ValueError for no results, two of one subject on one benchmark, or two editions of a benchmark.
    """
    subjects, benchmarks = _grid(results)
    found = {(result.subject, result.benchmark): result for result in results}
    heads = {name: next(result for result in results if result.benchmark == name) for name in benchmarks}
    rows = [["", *(f"{name} ({_metric(heads[name])})" for name in benchmarks)]]
    for subject in subjects:
        cells = [found.get((subject, name)) for name in benchmarks]
        rows.append([subject, *("–" if cell is None else percent(cell.score) for cell in cells)])
    floors = [max(heads[name].baselines.values(), default=None) for name in benchmarks]
    floor_cells = ["–" if floor is None else f"{100 * floor:.1f}" for floor in floors]
    rows.append(["*best text-only scorer or chance*", *floor_cells])
    editions = "\n".join(f"- {name}: {heads[name].edition}" for name in benchmarks)
    return f"{_table(rows)}\n\nPer cent with 95 % intervals.\n\n{editions}\n"


def comparison_json(results: Sequence[Result]) -> str:
    """Every result in full, as a JSON list."""
    _grid(results)
    return json.dumps([json.loads(result.to_json()) for result in results], indent=1, ensure_ascii=False)


def bar_chart(results: Sequence[Result], path: str | PathLike[str]) -> Path:
    """Draw the official figures as grouped bars with their intervals and floors into a PNG file.

    Raises ImportError saying how to get matplotlib when it is absent, and ValueError as ``comparison`` does.
    """
    check_charts()
    # Not pyplot: it would choose a window system and keep global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    subjects, benchmarks = _grid(results)
    found = {(result.subject, result.benchmark): result for result in results}
    figure = Figure(figsize=(max(5.0, 1.6 * len(benchmarks) * max(1.0, len(subjects) / 3)), 4.2), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / len(subjects)
    for number, subject in enumerate(subjects):
        at = [(x, found.get((subject, name))) for x, name in enumerate(benchmarks)]
        held = [(x, result.score) for x, result in at if result is not None]
        axes.bar(
            [x - 0.4 + width * (number + 0.5) for x, _ in held],
            [100 * score.value for _, score in held],
            width,
            yerr=[
                # A bootstrap interval of a few items can leave its own value outside.
                [100 * max(0.0, score.value - score.low) for _, score in held],
                [100 * max(0.0, score.high - score.value) for _, score in held],
            ],
            capsize=2,
            label=subject,
        )
    for x, name in enumerate(benchmarks):
        floor = max(next(r for r in results if r.benchmark == name).baselines.values(), default=None)
        if floor is not None:
            label = "best text-only scorer or chance" if x == 0 else None
            axes.plot([x - 0.42, x + 0.42], [100 * floor] * 2, color="black", linestyle=":", label=label)
    axes.set_xticks(range(len(benchmarks)), [name.replace("_", "\n", 1) for name in benchmarks])
    axes.set_ylim(0, 100)
    axes.set_ylabel("official figure, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    target = Path(path)
    with written_whole(target) as unfinished:
        figure.savefig(unfinished, format="png", bbox_inches="tight")
    return target


def check_charts() -> None:
    """Raise ImportError saying how to get matplotlib when it is absent: better before an evaluation than after."""
    try:
        import matplotlib.figure  # noqa: F401 (only whether it is there)
    except ImportError as error:
        raise ImportError("bar_chart: needs matplotlib, which is missing; pip install 'peaksim[plots]'") from error


def percent(interval: Interval) -> str:
    """``75.8 [74.3, 77.4]``: value and interval in per cent.

    >>> percent(Interval(0.758, 0.743, 0.774))
    '75.8 [74.3, 77.4]'
    """
    return f"{100 * interval.value:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _cell(metric: str, interval: Interval) -> str:
    return percent(interval) if metric in WITH_INTERVAL else f"{100 * interval.value:.1f}"


def _facts(result: Result) -> list[str]:
    facts = [f"edition: {result.edition}; fingerprint of the scorer: {result.fingerprint}"]
    if result.baselines:
        floors = ", ".join(f"{name} {100 * value:.1f}" for name, value in result.baselines.items())
        facts.append(f"without looking (ties shared): {floors} %")
    ties = f"ties in {100 * result.tie_rate:.2f} % of the items"
    facts.append(ties + (f", e.g. {', '.join(result.tied_ids[:5])}" if result.tied_ids else ""))
    if result.margin:
        facts.append("deciding differences: " + ", ".join(f"{k} {v:.4g}" for k, v in result.margin.items()))
    if result.picked:
        shares = (f"{option}: {100 * share:.1f} %" for option, share in result.picked.items())
        facts.append("options picked: " + ", ".join(shares))
    if result.missing:
        facts.append(f"{result.missing} images were missing: this is no official figure")
    return [*facts, *result.notes]


def _line_name(line: Line, result: Result) -> str:
    name = {MACRO: "macro (n = types)", ALL: "all (micro)"}.get(line.name, line.name)
    return f"**{name}**" if line.name == result.headline[0] else name


def _metric(result: Result) -> str:
    return result.headline[1] if result.headline[0] != MACRO else f"macro {result.headline[1]}"


def _grid(results: Sequence[Result]) -> tuple[list[str], list[str]]:
    if not results:
        raise ValueError("comparison: needs at least one result, got none")
    seen: dict[tuple[str, str], Result] = {}
    editions: dict[str, str] = {}
    for result in results:
        if seen.setdefault((result.subject, result.benchmark), result) is not result:
            raise ValueError(f"comparison: {result.subject} comes twice on {result.benchmark}")
        edition = editions.setdefault(result.benchmark, result.edition)
        if edition != result.edition:
            raise ValueError(
                f"comparison: {result.benchmark} must be one edition throughout, got {edition!r} and {result.edition!r}"
            )
    return list(dict.fromkeys(result.subject for result in results)), list(editions)


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(rows[0]) - 1), *lines[1:]])
