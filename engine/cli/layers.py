"""`peaksim diagnose`: what the layers of a text tower hold, and what corrections that read them are worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import subcommand

from engine.cli.options import OptionalFile, WithModel, check_unused
from engine.cli.outputs import check_file
from engine.cli.peak_diagnosis import PICTURES, DiagnoseAblation, DiagnoseMap, DiagnosePeak
from engine.cli.pictures import DiagnoseGenerator
from engine.cli.tables import show_json, show_line, show_table

if TYPE_CHECKING:
    from engine.diagnostics.layers import LayerReport


@dataclass(frozen=True, kw_only=True)
class DiagnoseLayers(WithModel):
    """Say what each text layer tells apart, and which layers an embedding correction should read."""

    pairs: OptionalFile = None
    """CSV of captions with the columns kind, text, changed and image; by default rendered scenes."""
    items: int = 300
    """Pairs of each kind of the rendered scenes."""
    split: Literal["in_domain", "held_out"] = "in_domain"
    """Of the rendered scenes."""
    seed: int = 0
    """Of the rendered scenes."""
    plot: OptionalFile = None
    """Draw the curves here (.png, .pdf or .svg)."""

    def run(self) -> int:
        """Print the curves, draw them when asked to."""
        from engine.diagnostics.changes import read_changes, scene_changes
        from engine.diagnostics.layers import diagnose_layers
        from engine.diagnostics.plots import plot_layers, require_matplotlib

        check_file("--plot", self.plot, suffixes=PICTURES)
        if self.plot is not None:
            require_matplotlib()
        if self.pairs is not None:
            check_unused("diagnose layers --pairs", self, "items", "split", "seed")
            data = read_changes(self.pairs)
        else:
            data = scene_changes(self.items, seed=self.seed, split=self.split)
        found = diagnose_layers(self.engine(), data, batch_size=self.batch_size)
        drawn = None if self.plot is None else plot_layers(found, self.plot)
        if self.json:
            show_json({**found.to_dict(), "verdict": found.verdict(), "drawn": None if drawn is None else str(drawn)})
            return 0
        show_report(found)
        if drawn is not None:
            show_line(f"saved {drawn}")
        return 0


def show_report(found: LayerReport) -> None:
    """One row a curve, one column a layer: means, with half the widest 95 % interval at the end."""
    count = len(found.curves[0].values)
    rows = []
    for curve in found.curves:
        half = max(value.high - value.low for value in curve.values) / 2
        name = f"{curve.name} (control)" if curve.role == "control" else curve.name
        rows.append((name, *(f"{mean:.3f}" for mean in curve.means), f"{half:.3f}", str(curve.count)))
    header = ("text layer", *(str(layer) for layer in range(1, count + 1)), "±", "pairs")
    show_table(header, rows, title=f"{found.model}: 1 − cosine of a caption and its change, {found.source}")
    show_line(found.verdict())


Diagnose = (
    Annotated[DiagnoseLayers, subcommand("layers", description="What each text layer tells apart.")]
    | Annotated[DiagnosePeak, subcommand("peak", description="What reading each text layer is worth.")]
    | Annotated[DiagnoseAblation, subcommand("ablation", description="What each part of PeakPatch is worth.")]
    | Annotated[DiagnoseMap, subcommand("map", description="Captions before and after their correction.")]
    | Annotated[DiagnoseGenerator, subcommand("generator", description="Pictures of captions that deny.")]
)
