"""What a quantised export costs in group score on the controlled benchmark, and what it gains in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from engine.benchmarks.scenes import ScenesBenchmark, evaluate
from engine.encoders.base import Encoder
from engine.encoders.exported import ExportedEncoder
from engine.engine import Engine
from engine.export.cost import CostRow, batch_milliseconds, stated_cost
from engine.scorers.base import Scorer
from engine.scorers.learned import HeadScorer
from engine.scorers.max_sim import MaxSim
from engine.scorers.registry import get_scorer
from engine.scorers.sgi import SGI

# Where scorers tell most apart: what loses there shows.
CATEGORIES = ("color", "size", "material")
Measure = Callable[[Encoder, ExportedEncoder], Mapping[str, Any]]


def group_score_cost(items: int, told: Callable[[str], None]) -> Measure:
    """What `export_model` takes as `cost`: both models on so many items of each category, then both on a clock.

    Scored by the global cosine, max-sim where the export has patches in the text's space, SGI, and the heads that were
    exported. `told` is called with what is being done.
    """
    benchmark = ScenesBenchmark(items=items, categories=CATEGORIES)

    def cost(source: Encoder, export: ExportedEncoder) -> dict[str, Any]:
        theirs = _scorers(export)
        # The source reads the very heads that lie in the folder.
        ours = {name: _with_file(scorer, export) for name, scorer in theirs.items()}
        reports = []
        for what, encoder, scorers in (("the source", source, ours), ("the export", export, theirs)):
            told(f"group scores of {what} on {items} items of each category")
            reports.append(evaluate(Engine(encoder, segmenter="rules"), scorers, benchmark))
        rows = []
        for result in reports[0].results:
            found = reports[1].result(result.scorer, result.category).group.value
            group = result.group
            rows.append(CostRow(result.scorer, result.category, group.value, group.low, group.high, found))
        return stated_cost(f"scenes, {items} items of each category", rows, batch_milliseconds(source, export))

    return cost


def _scorers(export: ExportedEncoder) -> dict[str, Scorer]:
    scorers: dict[str, Scorer] = {"global": get_scorer("global")}
    if any(export.spec.taps.values()):
        scorers["max_sim"] = MaxSim()
    return {**scorers, "sgi native": SGI(crops="native"), **{name: get_scorer(name) for name in export.manifest.heads}}


def _with_file(scorer: Scorer, export: ExportedEncoder) -> Scorer:
    if not isinstance(scorer, HeadScorer):
        return scorer
    return replace(scorer, head=str(export.folder / export.manifest.heads[scorer.name]["file"]))
