"""The curves of a layer report as a picture."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from engine.atomic_files import written_whole
from engine.diagnostics.layers import NEGATION, LayerReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that people with any colour vision tell apart (after Okabe and Ito 2008).
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999933", "#882255")
_GREYS = ("#555555", "#888888", "#BBBBBB")


def require_matplotlib() -> None:
    """Raise ImportError saying how to get matplotlib when it is absent: better before the work than after it."""
    try:
        import matplotlib.figure  # noqa: F401 (only whether it is there)
    except ImportError as error:
        raise ImportError("plot_layers: needs matplotlib, which is missing; pip install 'peaksim[plots]'") from error


def plot_layers(report: LayerReport, path: str | PathLike[str]) -> Path:
    """Draw contrast by layer, beside it visual alignment if it was measured; the format follows the suffix.

    Raises ImportError saying how to get matplotlib when it is absent.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups: list[tuple[str, tuple[str, ...]]] = [("logical contrast 1 − cos", ("change", "control"))]
    if any(curve.role == "alignment" for curve in report.curves):
        groups.append(("cosine of caption and picture", ("alignment",)))
    figure = Figure(figsize=(6.2 * len(groups), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (label, roles) in enumerate(groups):
        axes = figure.add_subplot(1, len(groups), place + 1)
        shown = [curve for curve in report.curves if curve.role in roles]
        colours, greys = iter(COLOURS * len(shown)), iter(_GREYS * len(shown))
        for curve in shown:
            layers = range(1, len(curve.values) + 1)
            control = curve.role == "control"
            colour = next(greys) if control else next(colours)
            width = 2.6 if curve.name == NEGATION else 1.4
            axes.plot(
                layers, curve.means, "--" if control else "-", marker=".", color=colour, linewidth=width,
                label=curve.name,
            )  # fmt: skip
            low, high = ([getattr(value, side) for value in curve.values] for side in ("low", "high"))
            axes.fill_between(layers, low, high, color=colour, alpha=0.15, linewidth=0)
        if "change" in roles and report.peak:
            for layer, name in ((report.anchor, "anchor"), (report.peak, "peak")):
                axes.axvline(layer, color="black", linewidth=0.8, linestyle=":")
                axes.annotate(name, (layer, axes.get_ylim()[1]), ha="center", va="bottom", fontsize=8)
        axes.set_xlabel("text layer")
        axes.set_ylabel(label)
        axes.set_xticks(list(range(1, len(report.curves[0].values) + 1)))
        axes.legend(fontsize=7, frameon=False)
    figure.suptitle(f"{report.model} · {report.source}", fontsize=9)
    return save_figure(figure, path, dpi=150)


def save_figure(figure: Figure, path: str | PathLike[str], *, dpi: int) -> Path:
    """Write a figure, whole or not at all; the format follows the suffix, without one it is PNG.

    Raises ValueError for a suffix of no format that matplotlib writes.
    """
    target = Path(path)
    with written_whole(target) as unfinished:
        figure.savefig(unfinished, dpi=dpi, format=target.suffix[1:] or "png")
    return target
