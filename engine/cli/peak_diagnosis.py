"""`peaksim diagnose peak | ablation | map`: what PeakPatch is worth, by layer, by part and in one picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.options import OptionalFile, PlacedModel, WithModel
from engine.cli.outputs import check_file, check_folder
from engine.cli.tables import report, show_json, show_line, show_markdown, show_table

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.results.peak_patch_arms import Arm

PICTURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True, kw_only=True)
class Trained(PlacedModel):
    """Options of what trains heads; a stopped run goes on where it was."""

    seeds: int = 3
    """Heads of each kind."""
    rows: int = 5000
    """Rendered scenes that are trained on, each with seven texts."""
    steps: int = 600
    """Length of each training."""
    items: int = 400
    """Choices of each set of items, and scenes of its retrieval."""
    output: Path = Path("runs/peak_patch")
    """Folder of the runs."""
    features: Path = Path("runs/features")
    """Folder of the store of frozen features, which runs share."""
    records: OptionalFile = None
    """Write one JSON line for each run here."""

    def records_of(self, engine: Engine, arms: tuple[Arm, ...]) -> list[dict[str, Any]]:
        """Train what is missing and measure every head."""
        from dataclasses import replace

        from engine.results.peak_patch_arms import SETS, Budget, run_arms, write_records
        from engine.training.peak_patch import SCENES_TRAINING

        budget = Budget(self.output, self.features, rows=self.rows, training=replace(SCENES_TRAINING, steps=self.steps))
        sets = [replace(held, items=self.items) for held in SETS]
        found = run_arms(engine, arms, budget, seeds=self.seeds, sets=sets, told=report)
        if self.records is not None:
            write_records(self.records, found)
        return found

    def check(self) -> None:
        """Refuse what cannot be trained or measured, or written, before anything is computed."""
        from engine.training.peak_patch import SCENES_TRAINING

        least = {"seeds": 1, "rows": SCENES_TRAINING.batch_size, "steps": 1, "items": 2}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"--{name} must be at least {lowest}, got {getattr(self, name)}")
        check_folder("--output", self.output)
        check_folder("--features", self.features)
        check_file("--records", self.records)


@dataclass(frozen=True, kw_only=True)
class DiagnosePeak(Trained, WithModel):
    """Train a head that reads one text layer, for each of them, and set its figures beside what the layer holds."""

    plot: OptionalFile = None
    """Draw both here (.png, .pdf or .svg)."""

    def run(self) -> int:
        """Print the table, draw it when asked to."""
        from engine.diagnostics.changes import scene_changes
        from engine.diagnostics.layers import diagnose_layers
        from engine.diagnostics.plots import require_matplotlib
        from engine.results.peak_patch import sweep_section
        from engine.results.peak_patch_arms import sweep_arms
        from engine.results.peak_plot import plot_sweep

        self.check()
        check_file("--plot", self.plot, suffixes=PICTURES)
        if self.plot is not None:
            require_matplotlib()
        engine = self.engine()
        layers = diagnose_layers(engine, scene_changes(max(2, min(300, self.items))), batch_size=self.batch_size)
        found = self.records_of(engine, sweep_arms(engine.spec.text_layers))
        drawn = None if self.plot is None else plot_sweep(layers, found, self.plot)
        if self.json:
            show_json({"layers": layers.to_dict(), "runs": found, "drawn": None if drawn is None else str(drawn)})
            return 0
        show_markdown(sweep_section(layers, found))
        if drawn is not None:
            show_line(f"saved {drawn}")
        return 0


@dataclass(frozen=True, kw_only=True)
class DiagnoseAblation(Trained):
    """Train heads with a part left out, on one budget, and say what each part is worth."""

    def run(self) -> int:
        """Print the tables."""
        from engine.results.peak_patch import ablation_section
        from engine.results.peak_patch_arms import ablation_arms

        self.check()
        engine = self.engine()
        found = self.records_of(engine, ablation_arms(engine.spec))
        if self.json:
            show_json({"runs": found})
        else:
            show_markdown(ablation_section(found))
        return 0


@dataclass(frozen=True, kw_only=True)
class DiagnoseMap(PlacedModel):
    """Draw captions, what they affirm and what they deny, before and after their correction."""

    head: OptionalFile = None
    """A peakpatch head of this model; by default the one shipped for scenes."""
    families: int = 80
    """Scenes, each with five captions."""
    seed: int = 0
    """Of scenes and map."""
    plot: Path = Path("caption_map.png")
    """Where it is drawn (.png, .pdf or .svg)."""

    def run(self) -> int:
        """Print the cosines and where the picture is."""
        from engine.diagnostics.plots import require_matplotlib
        from engine.heads.base import shipped_head
        from engine.heads.peak_patch import PeakPatch
        from engine.heads.registry import load_head
        from engine.results.caption_map import caption_map, require_scikit_learn
        from engine.results.peak_plot import plot_map

        check_file("--plot", self.plot, suffixes=PICTURES)
        require_matplotlib()
        require_scikit_learn()
        engine = self.engine()
        path = self.head or shipped_head(PeakPatch.name)
        head = load_head(path, fingerprint=engine.spec.fingerprint).to(engine.encoder.device)
        if not isinstance(head, PeakPatch):
            raise ValueError(f"diagnose map: --head must be a peakpatch, got a {head.name}")
        found = caption_map(engine, head, families=self.families, seed=self.seed)
        drawn = plot_map(found, self.plot)
        if self.json:
            show_json({**found.to_dict(), "drawn": str(drawn)})
            return 0
        rows = [(name, f"{v.value:.3f}", f"{v.low:.3f} – {v.high:.3f}") for name, v in found.cosines.items()]
        show_table(("cosine of", "mean", "95 %"), rows, title=f"{found.model}: {self.families} families of captions")
        show_line(f"saved {drawn}")
        return 0
