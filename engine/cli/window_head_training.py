"""`peaksim train window_head`: the regions of an image from one pass, on the frozen features of any model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from engine.cli.options import Shared, check_unused, image_files
from engine.cli.outputs import check_folder
from engine.cli.training_data import check_batch, check_figure_items, report_problems, show_trained, speaking
from engine.heads.window_head import WindowHeadConfig
from engine.training.heads import BatchLoss, HeadTrainConfig, train_head
from engine.training.presets import TRAINING
from engine.training.processes import processes
from engine.training.windows import (
    OwnPictures,
    WindowLoss,
    WindowObjective,
    WindowPictures,
    begun,
    readable_files,
    window_data,
    wordings_of,
)


@dataclass(frozen=True, kw_only=True)
class TrainWindowHead(Shared):
    """Train the window head: all regions of an image from one pass, by regression on native-scale crops."""

    model: str = "scenes"
    """Name of the frozen model; `peaksim models` lists them."""
    device: str = "auto"
    """cpu, cuda, ...; auto takes an accelerator where there is one."""
    features: Path = Path("runs/features")
    """Folder of the store of frozen features, which runs share."""
    images: tuple[str, ...] = ()
    """Pictures of your own, or folders of them, in place of rendered scenes."""
    pictures: WindowPictures = field(default_factory=WindowPictures)
    head: WindowHeadConfig = field(default_factory=WindowHeadConfig)
    objective: WindowObjective = field(default_factory=WindowObjective)
    training: HeadTrainConfig = TRAINING["window_head"]
    skip_figures: bool = False
    """Do not evaluate on pairs of scenes along the way; of your own pictures there are none."""
    figure_items: int = 100
    """Pairs of each category that are evaluated."""

    def run(self) -> int:
        """Compute the features that are missing, train, and print how the head is used."""
        from engine.benchmarks.heads import WindowFigures
        from engine.engine import load

        check_unused("train window_head", self.training, "loss", "batch_weight")
        check_folder("--output", self.training.output)
        check_folder("--features", self.features)
        if not (self.images or self.skip_figures):
            check_figure_items(self.figure_items)
        own = self.own_files()
        check_batch(self.training.batch_size, self.pictures.pictures if own is None else len(own))
        shared = processes()
        peaksim = load(self.model, device=shared.place(self.device))
        layers = self.head.fitted(peaksim.spec).layers
        pictures = self.pictures if own is None else OwnPictures(own, self.pictures, peaksim.spec.resize)
        with speaking() as speaker, shared.main_first():
            data = window_data(peaksim, layers, pictures, self.features, told=speaker.features)
        head = begun(peaksim, data, self.head, seed=self.training.seed)
        figures = None if self.skip_figures or own is not None else WindowFigures(peaksim, items=self.figure_items)
        # Of pictures of one's own nothing is known that captions could say.
        objective = replace(self.objective, wording=0.0) if own is not None else self.objective
        wordings = wordings_of(peaksim, objective.wordings) if objective.wording else None
        loss = BatchLoss(WindowLoss(objective, wordings), facts=asdict(objective))
        with speaking() as speaker:
            path = train_head(head, data, self.training, objective=loss, evaluate=figures, report=speaker.step)
        use = f"--scorer sgi --option crops=windows --option full_image=False --option head={path}"
        show_trained(as_json=self.json, use=use, facts={"head": str(path), "scorer": "sgi"}, model=self.model)
        return 0

    def own_files(self) -> tuple[str, ...] | None:
        """The pictures of one's own that can be read; the others are named. None for rendered scenes."""
        if not self.images:
            return None
        who = "train window_head --images"
        check_unused(who, self, "figure_items")
        check_unused(who, self.pictures, "pictures")
        check_unused(who, self.objective, "wording", "wordings")
        kept, problems = readable_files(tuple(map(str, image_files(self.images))))
        report_problems(problems)
        return kept
