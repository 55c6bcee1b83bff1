"""Two pictures of PeakPatch: figures by the layer that is read, and captions before and after their correction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.diagnostics.changes import CONTROLS
from engine.diagnostics.layers import NEGATION, LayerReport
from engine.diagnostics.plots import COLOURS, require_matplotlib, save_figure
from engine.results.peak_patch_arms import ENCODER, over_seeds

if TYPE_CHECKING:
    from engine.results.caption_map import CaptionMap

SHOWN = {"choice": "all", "choice_positive": "positive", "choice_negative": "negative", "choice_hybrid": "hybrid"}
CONTRASTS = (NEGATION, "existence", "denial", *CONTROLS[:2])


def plot_sweep(report: LayerReport, records: Sequence[Mapping[str, Any]], path: str | PathLike[str]) -> Path:
    """Beside each other what each layer tells apart, and what a head reaches that reads it; suffix gives the format.

    Figures are those of the records' first set of items; bands are 95 % intervals, dashes the encoder alone. Raises
    ImportError saying how to get matplotlib when it is absent.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    names = [name for name in CONTRASTS if any(curve.name == name for curve in report.curves)]
    for name, colour in zip(names, COLOURS, strict=False):
        curve = report.curve(name)
        layers = range(1, len(curve.values) + 1)
        left.plot(layers, curve.means, "--" if curve.role == "control" else "-", marker=".", color=colour, label=name)
        left.fill_between(
            layers, [v.low for v in curve.values], [v.high for v in curve.values], color=colour, alpha=0.15, linewidth=0
        )
    left.set_ylabel("1 − cosine of a caption and its change")
    arms = list(dict.fromkeys(entry["arm"] for entry in records if entry["arm"] != ENCODER))
    held = next(iter(records[0]["sets"]))
    for (column, label), colour in zip(SHOWN.items(), COLOURS, strict=False):
        found = [
            over_seeds([entry["sets"][held][column] for entry in records if entry["arm"] == arm])[0] for arm in arms
        ]
        layers = range(1, len(arms) + 1)
        right.plot(layers, [100 * v.value for v in found], marker=".", color=colour, label=label)
        right.fill_between(
            layers, [100 * v.low for v in found], [100 * v.high for v in found], color=colour, alpha=0.15, linewidth=0
        )
        for entry in records:
            if entry["arm"] == ENCODER:
                right.axhline(100 * entry["sets"][held][column]["share"], color=colour, linestyle=":", linewidth=1)
    right.set_ylabel("right choices, per cent")
    for axes, label in ((left, "text layer"), (right, "text layer that the head reads (dots: encoder alone)")):
        axes.set_xlabel(label)
        axes.legend(fontsize=7, frameon=False)
    figure.suptitle(f"{report.model}: {report.source}; heads: {held}", fontsize=9)
    return save_figure(figure, path, dpi=110)


def plot_map(found: CaptionMap, path: str | PathLike[str]) -> Path:
    """Captions as points, before and after their correction, by the kind of caption; suffix gives the format.

    Raises ImportError saying how to get matplotlib when it is absent.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, points) in enumerate((("before", found.before), ("after", found.after))):
        axes = figure.add_subplot(1, 2, place + 1)
        for kind, colour in zip(dict.fromkeys(found.kinds), COLOURS, strict=False):
            mine = [row for row, other in enumerate(found.kinds) if other == kind]
            axes.scatter(points[mine, 0], points[mine, 1], s=9, color=colour, label=kind, alpha=0.75, linewidths=0)
        axes.set_title(f"{title} the correction", fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.legend(fontsize=7, frameon=False)
    figure.suptitle(f"{found.model}: t-SNE of captions and their denials", fontsize=9)
    return save_figure(figure, path, dpi=110)
