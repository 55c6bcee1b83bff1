"""`peaksim train peakpatch`: what a text tower drops of negation is put back, on the frozen features of any model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engine.cli.options import check_unused
from engine.cli.outputs import check_folder
from engine.cli.training_data import (
    OnData,
    check_batch,
    check_figure_items,
    report,
    report_problems,
    show_trained,
    speaking,
)
from engine.heads.peak_patch import PeakPatch, PeakPatchConfig
from engine.scenes.negation_training import TRAINING_SETS
from engine.scenes.wordings import WordingSet
from engine.training.heads import HeadTrainConfig
from engine.training.negation_data import NegationRow, photo_rows, scene_rows
from engine.training.peak_patch import (
    PAPER,
    PRETRAINING_STEPS,
    SCENES,
    SCENES_HEAD,
    SCENES_TRAINING,
    JointObjective,
    head_for,
    negation_data,
    train_peak_patch,
)
from engine.training.presets import Preset, with_preset
from engine.training.processes import processes


@dataclass(frozen=True, kw_only=True)
class TrainPeakPatch(OnData):
    """Train corrections of captions and of scores for negation; a stopped run goes on where it was."""

    model: str = "scenes"
    """Name of the frozen model; `peaksim models` lists them."""
    device: str = "auto"
    """cpu, cuda, ...; auto takes an accelerator where there is one."""
    rows: int = 5000
    """Rendered scenes, each with seven texts."""
    data_seed: int = 301
    """Decides the rows."""
    wordings: tuple[WordingSet, ...] = TRAINING_SETS
    """How the scenes' captions deny; without benchmark, its templates are never seen."""
    features: Path = Path("runs/features")
    """Folder of the store of frozen features, which runs share."""
    pretraining_steps: int = PRETRAINING_STEPS
    """Steps in which the correction of captions gets its start; 0 leaves that out."""
    skip_figures: bool = False
    """Do not evaluate on held-out negation items along the way."""
    figure_items: int = 150
    """Items that are evaluated: rendered scenes that no training shows, also where your own pictures are trained on."""
    head: PeakPatchConfig = PeakPatchConfig(dropout=SCENES_HEAD.dropout)  # noqa: RUF009 (frozen)
    """Sizes, layers and parts of the head; 0 takes what fits the model."""
    objective: JointObjective = SCENES
    """The loss once the correction of captions has its start."""
    training: HeadTrainConfig = SCENES_TRAINING
    """Settings of the training; its loss is the one above."""
    preset: Preset = "scenes"
    """Settings for the embedded model, or for CLIP those of the paper; those that you give go before either."""

    def run(self) -> int:
        """Compute the features that are missing, train, and print how the head is used."""
        from engine.benchmarks.negation_figures import NegationFigures
        from engine.engine import load

        check_unused("train peakpatch", self.training, "loss", "batch_weight")
        check_folder("--output", self.training.output)
        check_folder("--features", self.features)
        if not self.skip_figures:
            check_figure_items(self.figure_items)
        rows = self.read_rows()
        config, objective, training, first = self.settings()
        # A correction of scores alone has no first training.
        runs = (training,) if first is None or config.parts == "scn" else (training, first)
        check_batch(max(run.batch_size for run in runs), len(rows))
        shared = processes()
        peaksim = load(self.model, device=shared.place(self.device))
        config = head_for(peaksim.spec, config)
        head = PeakPatch.build(peaksim.spec, config, seed=self.training.seed).to(peaksim.encoder.device)
        head.take_readout(peaksim.encoder.text_readout())
        with speaking() as speaker, shared.main_first():
            data = negation_data(peaksim, head.needs(), rows, self.features, told=speaker.features)
        report_problems(data.problems)
        figures = None if self.skip_figures else NegationFigures(peaksim, items=self.figure_items)
        with speaking() as speaker:
            path = train_peak_patch(
                head,
                data,
                training,
                pretraining=first,
                objective=objective,
                evaluate=figures,
                report=speaker.step,
            )
        show_trained(
            as_json=self.json,
            use=f"--scorer {head.name} --option head={path}",
            facts={"head": str(path), "scorer": head.name},
            model=self.model,
        )
        return 0

    def settings(self) -> tuple[PeakPatchConfig, JointObjective, HeadTrainConfig, HeadTrainConfig | None]:
        """What the preset and the options make of the head, the joint loss, its training, and the one before it."""
        folder = self.training.output / "pretraining"
        if self.preset == "scenes":
            first = replace(self.training, output=folder, steps=self.pretraining_steps)
            return self.head, self.objective, self.training, first if self.pretraining_steps else None
        training = with_preset(PeakPatch.name, self.preset, self.training, SCENES_TRAINING)
        if self.head.parts != "both":
            training = replace(training, part_rates=())
        first = with_preset("pretraining", self.preset, replace(self.training, output=folder), SCENES_TRAINING)
        if self.pretraining_steps != PRETRAINING_STEPS:
            first = replace(first, epochs=0, steps=max(1, self.pretraining_steps))
        own = self.head.dropout != SCENES_HEAD.dropout
        head = self.head if own else replace(self.head, dropout=PeakPatchConfig.dropout)
        objective = PAPER if self.objective == SCENES else self.objective
        return head, objective, training, first if self.pretraining_steps else None

    def read_rows(self) -> list[NegationRow]:
        """What is trained on. Raises ValueError for data of which nobody knows what is absent."""
        if self.on_scenes:
            return scene_rows(self.rows, seed=self.data_seed, sets=self.wordings)
        if self.instances is None:
            raise ValueError(
                "train: peakpatch needs to know what is absent from each picture, as of --data coco:CAPTIONS.json with "
                f"--instances FILE, got --data {self.data}"
            )
        check_unused(f"train peakpatch --data {self.data}", self, "rows", "wordings")
        rows, problems = photo_rows(self.read().items, seed=self.data_seed)
        report_problems(problems)
        report(f"{len(rows)} rows")
        return rows


@dataclass(frozen=True, kw_only=True)
class TrainECN(TrainPeakPatch):
    """Train the correction of captions alone: what comes of it can be indexed."""

    head: PeakPatchConfig = replace(TrainPeakPatch.head, parts="ecn")  # noqa: RUF009 (frozen)
    """Sizes, layers and parts of the head; 0 takes what fits the model."""
    training: HeadTrainConfig = replace(SCENES_TRAINING, output=Path("runs/ecn"))  # noqa: RUF009 (frozen)
    """Settings of the training; its loss is the one above."""


@dataclass(frozen=True, kw_only=True)
class TrainSCN(TrainPeakPatch):
    """Train the correction of scores alone, on the same losses."""

    head: PeakPatchConfig = replace(TrainPeakPatch.head, parts="scn")  # noqa: RUF009 (frozen)
    """Sizes, layers and parts of the head; 0 takes what fits the model."""
    training: HeadTrainConfig = replace(SCENES_TRAINING, output=Path("runs/scn"))  # noqa: RUF009 (frozen)
    """Settings of the training; its loss is the one above."""
