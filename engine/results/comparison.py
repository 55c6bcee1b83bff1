"""The section on what is worth training: heads and full fine-tuning, three kinds of negatives, equal budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from engine.atomic_files import write_text
from engine.benchmarks import scenes
from engine.benchmarks.heads import GroupFigures
from engine.engine import load
from engine.heads.base import shipped_head
from engine.heads.registry import load_head
from engine.metrics import Interval, bootstrap_interval
from engine.results.comparison_runs import (
    ARMS,
    BATCH,
    CATEGORIES,
    FINETUNE,
    ITEM_SEED,
    ITEMS,
    SPLITS,
    STEPS,
    Comparison,
    cell_of,
    cells,
    read_lines,
)
from engine.results.figures import (
    Figure,
    check_figures,
    compare_figures,
    compare_renewed,
    read_figures,
    write_figures,
)
from engine.results.run import Run
from engine.scorers.registry import with_head
from engine.training.negatives import NEGATIVES

NAME = "comparison"
# Shipped are those of seed 0 trained on quads, a rule fixed before any was measured.
SHIPPED = ("tflocal", "tfglobal", "linear")
SHIPPED_NEGATIVES, SHIPPED_SEED = "quads", 0
# Scorers beside the heads, and those that a quick run measures: SGI encodes every crop.
UNTRAINED = scenes.STANDARD_SCORERS
QUICK_UNTRAINED = ("global", "max_sim")
QUICK_ITEMS = 25
CHANCE = 1 / 6
TITLES = {"in_domain": "In domain", "held_out": "Held-out combinations"}
NEGATIVES_IN_WORDS = {
    "in_batch": "in-batch",
    "captions": "captions",
    "quads": "2 × 2 pairs",
}


class Claim(NamedTuple):
    """That one arm (with its negatives) is above another on held-out combinations; None stands for chance."""

    words: str
    better: tuple[str, str]
    worse: tuple[str, str] | None


CLAIMS = (
    Claim("`tflocal` above `tfglobal`", ("tflocal", "quads"), ("tfglobal", "quads")),
    Claim("`tflocal` above full fine-tuning", ("tflocal", "quads"), (FINETUNE, "quads")),
    Claim("`tflocal`: 2 × 2 pairs above captions", ("tflocal", "quads"), ("tflocal", "captions")),
    Claim("`tflocal`: captions above chance", ("tflocal", "captions"), None),
    Claim("`tflocal`: in-batch negatives above chance", ("tflocal", "in_batch"), None),
    Claim("`max_sim_head` above `tflocal`", ("max_sim_head", "quads"), ("tflocal", "quads")),
)


def train(run: Run) -> None:
    """Train every cell, or go on with it, measure all of them, and put their lines where the section reads.

    Raises ResultsDiffer, with the new lines written, where a line of any seed does not meet the one it replaced.
    """
    path = run.figures / f"{NAME}.jsonl"
    # Lines are replaced cell by cell: those of before wait here until every cell has been made, over stopped runs too.
    before = run.folder / NAME / "before.jsonl"
    if path.exists() and not before.exists():
        before.parent.mkdir(parents=True, exist_ok=True)
        write_text(before, path.read_text(encoding="utf-8").rstrip("\n"))
    comparison = Comparison(run, path, run.figures / f"{NAME}-logs.jsonl")
    for cell in cells():
        comparison.make(cell)
    held = line_figures(read_lines(before))
    before.unlink(missing_ok=True)
    compare_renewed(path.name, held, line_figures(read_lines(path)))


def line_figures(lines: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """The figures of lines, each under the name of its cell."""
    return [
        Figure(
            f"{cell_of(line).name} {line['split']} {line['category']}",
            *(line[key] for key in ("items", "value", "low", "high")),
        )
        for line in lines
    ]


def section(run: Run) -> str:
    """The tables of the committed lines, after the shipped heads have met theirs; raises ResultsDiffer otherwise.

    Scorers that are not trained are measured; a quick run measures some of them and raises ResultsDiffer where figures
    differ.
    """
    path = run.figures / f"{NAME}.jsonl"
    lines = read_lines(path)
    if not lines:
        raise FileNotFoundError(f"results: {path} is missing or empty; `make results-train` writes it")
    compare_figures(path.name, _committed(lines), _shipped(run))
    untrained, kept = _untrained(run), run.figures / f"{NAME}-untrained.jsonl"
    if run.quick:
        check_figures(kept, untrained)
        untrained = read_figures(kept)
    else:
        write_figures(kept, untrained)
    return "\n\n".join([_head(lines), *(_table(lines, untrained, split) for split in SPLITS), _claims(lines)])


def _committed(lines: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """The figures of the shipped heads."""
    return [
        Figure(
            f"{line['arm']} {line['split']} {line['category']}",
            line["items"],
            line["value"],
            line["low"],
            line["high"],
        )
        for line in lines
        if (line["negatives"], line["seed"]) == (SHIPPED_NEGATIVES, SHIPPED_SEED)
    ]


def _shipped(run: Run) -> list[Figure]:
    """The shipped heads, measured."""
    peaksim = load("scenes", device="cpu")
    items = run.items(ITEMS, QUICK_ITEMS)
    found = []
    for split in SPLITS[1:] if run.quick else SPLITS:
        measure = GroupFigures(peaksim, with_head, items=items, categories=CATEGORIES, split=split, seed=ITEM_SEED)
        for name in SHIPPED:
            run.progress(f"{split}: {name}", 0, 1)
            head = load_head(shipped_head(name), fingerprint=peaksim.spec.fingerprint)
            for category, outcome in measure.outcomes(head).items():
                found.append(Figure.of(f"{name} {split} {category}", items, bootstrap_interval(outcome)))
    return found


def _untrained(run: Run) -> list[Figure]:
    """Scorers that are not trained, on the items of the heads; in parts, for SGI takes a minute or two."""
    peaksim = load("scenes", device="cpu")
    rows = {name: scorer for name, scorer in UNTRAINED.items() if not run.quick or name in QUICK_UNTRAINED}
    items = run.items(ITEMS, QUICK_ITEMS)
    found = []
    for split in SPLITS[1:] if run.quick else SPLITS:
        for category in CATEGORIES:
            asked = scenes.ScenesBenchmark(items=items, split=split, categories=(category,), seed=ITEM_SEED)
            made_by = f"{peaksim.spec.fingerprint} {asked!r} {peaksim.segmenter.name} {rows!r}"

            def make(asked: scenes.ScenesBenchmark = asked) -> dict[str, Any]:
                report = scenes.evaluate(peaksim, rows, asked, progress=run.progress)
                return {row.scorer: asdict(row.group) for row in report.results}

            held = run.part(f"{NAME}-{split}-{category}-untrained", made_by, make)
            found += [Figure.of(f"{name} {split} {category}", items, Interval(**cell)) for name, cell in held.items()]
    return found


def _head(lines: Sequence[Mapping[str, Any]]) -> str:
    absent = [cell.name for cell in cells() if cell not in {cell_of(line) for line in lines}]
    words = (
        "## What is worth training\n\n"
        "Heads on the frozen model and full fine-tuning of it, each with three kinds of negatives and one budget: "
        f"{sum(STEPS)} steps of {BATCH} quads ({BATCH * sum(STEPS):,} seen, 8,000 different ones, the same for each "
        "seed). A pair is held against the rest of the batch (*in-batch*: symmetric InfoNCE; for TFLocal and "
        f"TFGlobal, which run once a pair, in groups of {ARMS['tflocal'].group}), against its hard-negative caption "
        "(*captions*), or in both choices within its quad (*2 × 2 pairs*); the latter two beside the batch in the "
        "first half, alone in the second. Group score in per cent: mean over seeds ± half the mean 95 % interval "
        f"over {ITEMS} items of one seed (lowest–highest seed, where there are several); chance 16.7. The first rows "
        "are scorers of the frozen model that are not trained, on the same items. Every run stands in "
        "`docs/results/comparison.jsonl`, its log in `comparison-logs.jsonl`."
    )
    return words + (f" Not run: {', '.join(absent)}." if absent else "")


def _table(lines: Sequence[Mapping[str, Any]], untrained: Sequence[Figure], split: str) -> str:
    rows = [
        f"### {TITLES[split]}\n",
        "| trained | negatives | seeds | parameters | " + " | ".join(map(str.capitalize, CATEGORIES)) + " |",
        "|---" * (4 + len(CATEGORIES)) + "|",
    ]
    held = {figure.name: figure for figure in untrained}
    for name in UNTRAINED:
        figures = [held[f"{name} {split} {category}"] for category in CATEGORIES]
        shares = [scenes.percent(Interval(figure.value, figure.low, figure.high)) for figure in figures]
        rows.append(f"| `{name}` | – | – | – | " + " | ".join(shares) + " |")
    for arm in ARMS:
        for negatives in NEGATIVES:
            own = [line for line in lines if (line["arm"], line["negatives"], line["split"]) == (arm, negatives, split)]
            if not own:
                continue
            cells_ = [_range([line for line in own if line["category"] == category]) for category in CATEGORIES]
            words, seeds = NEGATIVES_IN_WORDS[negatives], len({line["seed"] for line in own})
            rows.append(f"| `{arm}` | {words} | {seeds} | {own[0]['parameters']:,} | " + " | ".join(cells_) + " |")
    return "\n".join(rows)


def _range(lines: Sequence[Mapping[str, Any]]) -> str:
    """``52.0 ± 6.8 (49–57)``; without the range for a single seed."""
    values = [100 * line["value"] for line in lines]
    half = 50 * sum(line["high"] - line["low"] for line in lines) / len(lines)
    words = f"{sum(values) / len(values):.1f} ± {half:.1f}"
    return words + (f" ({min(values):.0f}–{max(values):.0f})" if len(values) > 1 else "")


def _claims(lines: Sequence[Mapping[str, Any]]) -> str:
    """Which expectations hold on held-out combinations, in every seed and by more than the intervals."""
    rows = [
        "### What was expected, on held-out combinations\n",
        "*yes*: above in every seed, intervals apart; *no*: in no seed; otherwise in how many seeds.\n",
        "| expected | " + " | ".join(map(str.capitalize, CATEGORIES)) + " |",
        "|---" * (1 + len(CATEGORIES)) + "|",
    ]
    held = {
        (line["arm"], line["negatives"], line["seed"], line["category"]): line
        for line in lines
        if line["split"] == "held_out"
    }
    for claim in CLAIMS:
        verdicts = [_verdict(claim, held, category) for category in CATEGORIES]
        rows.append(f"| {claim.words} | " + " | ".join(verdicts) + " |")
    return "\n".join(rows)


def _verdict(claim: Claim, held: Mapping[tuple[str, str, int, str], Mapping[str, Any]], category: str) -> str:
    found = []
    for seed in sorted({key[2] for key in held}):
        better = held.get((*claim.better, seed, category))
        worse = {"high": CHANCE} if claim.worse is None else held.get((*claim.worse, seed, category))
        if better is not None and worse is not None:
            found.append(better["low"] > worse["high"])
    if not found:
        return "not run"
    return "yes" if all(found) else f"{sum(found)} of {len(found)}" if any(found) else "no"
