"""``peaksim train``: the embedded model from scratch, or a small head on the frozen features of any model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from tyro.conf import subcommand

from engine.cli.generator_training import TrainGenerator
from engine.cli.options import Shared, check_unused
from engine.cli.outputs import check_folder
from engine.cli.peak_patch_training import TrainECN, TrainPeakPatch, TrainSCN
from engine.cli.training_data import (
    SCENES,
    NegativesOption,
    OnData,
    check_batch,
    check_figure_items,
    report,
    report_problems,
    show_trained,
    speaking,
)
from engine.cli.window_head_training import TrainWindowHead
from engine.datasets.captioned import CaptionedImages
from engine.heads.base import HeadConfig
from engine.heads.linear import LinearAlignmentConfig
from engine.heads.max_sim_head import MaxSimHeadConfig
from engine.heads.tfglobal import TFGlobalConfig
from engine.heads.tflocal import TFLocalConfig
from engine.scenes.negation_training import TRAINING_SETS
from engine.scenes.wordings import WordingSet
from engine.training.captioned_data import CaptionedData, captioned_data, shape_of
from engine.training.hard_negatives import scene_denials, with_negatives
from engine.training.head_data import HeadData, ScenesQuads, scenes_data
from engine.training.heads import Evaluate, HeadTrainConfig, train_head
from engine.training.held_out import HeldOutFigures, apart, held_out
from engine.training.presets import TRAINING, Preset, head_for, with_preset
from engine.training.processes import processes
from engine.training.scenes import ScenesTrainConfig, train


@dataclass(frozen=True, kw_only=True)
class TrainScenes(Shared):
    """Train the embedded model from scratch; a stopped run goes on where it was."""

    config: ScenesTrainConfig = field(default_factory=ScenesTrainConfig)
    skip_figures: bool = False
    """Do not evaluate on the controlled benchmark along the way."""

    def run(self) -> int:
        """Train to the end; progress goes to standard error, the folder of the weights to standard output."""
        from engine.benchmarks.scenes import quick_figures

        check_folder("--output", self.config.output)
        figures = None if self.skip_figures else quick_figures
        with speaking() as speaker:
            folder: Path = train(self.config, evaluate=figures, report=speaker.step)
        model = f"scenes:{folder}"
        show_trained(as_json=self.json, use=f"--model {model}", facts={"model": model})
        return 0

if TYPE_CHECKING:
    from engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class OnQuads(Shared):
    """Options of what is trained on quads of rendered scenes; a stopped run goes on where it was."""

    items: int = ScenesQuads.items
    """Quads of each category (two pictures, two captions, one binding exchanged); with denials, scenes in all."""
    categories: tuple[str, ...] = ScenesQuads.categories
    """What the quads differ in."""
    data_seed: int = ScenesQuads.seed
    """Decides the quads."""
    described_share: float = ScenesQuads.described_share
    """Share of captions that say more than what is exchanged."""
    skip_figures: bool = False
    """Do not evaluate on held-out pairs along the way."""
    figure_items: int = 100
    """Held-out pairs of each category that are evaluated; of your own data items, at most a tenth."""
    training: HeadTrainConfig
    """Settings of the training."""

    @property
    def quads(self) -> ScenesQuads:
        """The quads of these options."""
        return ScenesQuads(self.items, self.categories, self.data_seed, self.described_share)


@dataclass(frozen=True, kw_only=True)
class WithNegatives(OnQuads, OnData):
    """Options of what can be trained on one's own data too, with hard negatives."""

    negatives: NegativesOption = "auto"
    """Hard negatives: the file's, swaps of words, negation or none; auto: scenes' quads, or what the file has."""
    wordings: tuple[WordingSet, ...] = TRAINING_SETS
    """How captions of scenes deny, with --negatives negation."""
    preset: Preset = "scenes"
    """Settings for the embedded model, or for CLIP those of the paper; those that you give go before either."""
    name: ClassVar[str]

    @property
    def config(self) -> HeadTrainConfig:
        """The settings of the training. Raises ValueError for a kind of head that no paper trained."""
        return with_preset(self.name, self.preset, self.training, TRAINING[self.name])

    def check_outputs(self, features: Path | None = None) -> None:
        """Refuse folders that cannot be written, and figures of nothing, before anything is computed."""
        check_folder("--output", self.training.output)
        if features is not None:
            check_folder("--features", features)
        # Of what else there is items are held out, or none.
        if self.data == SCENES and self.negatives == "auto" and not self.skip_figures:
            check_figure_items(self.figure_items)

    def own_items(self) -> CaptionedImages | None:
        """The items with their negatives, of which the loss can be computed; None for the quads of scenes.

        Raises ValueError for options that do not go together.
        """
        if self.on_scenes and self.negatives == "auto":
            check_unused("train --data scenes --negatives auto", self, "wordings")
            check_batch(self.config.batch_size, self.items * len(self.categories))
            return None
        if self.on_scenes:
            if self.negatives != "negation":
                raise ValueError(f"--negatives: scenes have auto (their quads) or negation, got {self.negatives}")
            check_unused("train --data scenes --negatives negation", self, "categories", "described_share")
            found = scene_denials(self.items, seed=self.data_seed, sets=self.wordings)
        else:
            unused = ("items", "categories", "described_share", "wordings")
            check_unused(f"train --data {self.data}", self, *unused)
            read = self.read()
            has = any(item.negatives for item in read.items)
            kind = ("file" if has else "none") if self.negatives == "auto" else self.negatives
            found = with_negatives(read, kind, seed=self.data_seed)
            report_problems(found.problems[len(read.problems) :])
        report(f"loss: {self.config.fitted(*shape_of(found)).loss}")
        # Of broken pictures nobody knows yet.
        trained, _ = apart(len(found), 0 if self.skip_figures else self.figure_items)
        check_batch(self.config.batch_size, len(trained))
        return found


@dataclass(frozen=True, kw_only=True)
class TrainHead(WithNegatives):
    """Options of every head on frozen features."""

    model: str = "scenes"
    """Name of the frozen model; `peaksim models` lists them."""
    device: str = "auto"
    """cpu, cuda, ...; auto takes an accelerator where there is one."""
    features: Path = Path("runs/features")
    """Folder of the store of frozen features, which runs share."""
    head: HeadConfig
    """Sizes of the head."""

    def run(self) -> int:
        """Compute the features that are missing, train, and print how the head is used."""
        from engine.engine import load
        from engine.heads.registry import HEADS

        self.check_outputs(self.features)
        # Read first: what is wrong with files should not wait for a model.
        own = self.own_items()
        shared = processes()
        peaksim = load(self.model, device=shared.place(self.device))
        sizes = head_for(self.name, peaksim.spec, self.head) if self.preset == "scenes" else self.head
        head = HEADS[self.name].build(peaksim.spec, sizes, seed=self.training.seed).to(peaksim.encoder.device)
        with speaking() as speaker:
            needs, told = head.needs(), speaker.features
            with shared.main_first():
                if own is None:
                    data: HeadData = scenes_data(peaksim, needs, self.quads, self.features, told=told)
                    figures = None if self.skip_figures else self.figures_of_scenes(peaksim)
                else:
                    data, figures = self.split(captioned_data(peaksim, needs, own, self.features, told=told))
            path = train_head(head, data, self.config, evaluate=figures, report=speaker.step)
        show_trained(
            as_json=self.json,
            use=f"--scorer {self.name} --option head={path}",
            facts={"head": str(path), "scorer": self.name},
            model=self.model,
        )
        return 0

    def split(self, data: CaptionedData) -> tuple[HeadData, Evaluate | None]:
        """What is trained on, and figures on what is not."""
        report_problems(data.problems)
        if self.skip_figures:
            return data, None
        seen, unseen = held_out(data, self.figure_items)
        return seen, None if unseen is None else HeldOutFigures(unseen)

    def figures_of_scenes(self, peaksim: Engine) -> Evaluate:
        """Group scores on pairs of scenes that are held out."""
        from engine.benchmarks.heads import GroupFigures
        from engine.scorers.registry import with_head

        return GroupFigures(peaksim, with_head, items=self.figure_items, categories=self.categories)


@dataclass(frozen=True, kw_only=True)
class TrainMaxSimHead(TrainHead):
    """Train the max-sim head: contextual projections of words and patches, compared late, that can be indexed."""

    name: ClassVar[str] = "max_sim_head"

    head: MaxSimHeadConfig = field(default_factory=MaxSimHeadConfig)
    training: HeadTrainConfig = TRAINING["max_sim_head"]


@dataclass(frozen=True, kw_only=True)
class TrainTFLocal(TrainHead):
    """Train TFLocal: a transformer over patches and words of each pair."""

    name: ClassVar[str] = "tflocal"

    head: TFLocalConfig = field(default_factory=TFLocalConfig)
    training: HeadTrainConfig = TRAINING["tflocal"]


@dataclass(frozen=True, kw_only=True)
class TrainTFGlobal(TrainHead):
    """Train TFGlobal: a transformer over the two global embeddings of each pair."""

    name: ClassVar[str] = "tfglobal"

    head: TFGlobalConfig = field(default_factory=TFGlobalConfig)
    training: HeadTrainConfig = TRAINING["tfglobal"]


@dataclass(frozen=True, kw_only=True)
class TrainLinear(TrainHead):
    """Train the linear alignment: one matrix between the global embeddings."""

    name: ClassVar[str] = "linear"

    head: LinearAlignmentConfig = field(default_factory=LinearAlignmentConfig)
    training: HeadTrainConfig = TRAINING["linear"]


@dataclass(frozen=True, kw_only=True)
class TrainFinetune(WithNegatives):
    """Train all weights of a model: what heads on frozen features are compared with."""

    name: ClassVar[str] = "finetune"

    model: str = "scenes"
    """Name of the model to begin with; `peaksim models` lists them."""
    device: str = "auto"
    """cpu, cuda, ...; auto takes an accelerator where there is one."""
    training: HeadTrainConfig = TRAINING["finetune"]
    """Settings of the training."""

    def run(self) -> int:
        """Train, and print how the model is used."""
        from engine.training.finetune_models import (
            HeldOutItemFigures,
            finetune_model,
            held_out_items,
            quads_of_scenes,
            readable,
        )

        self.check_outputs()
        own = self.own_items()
        figures: Evaluate | None = None if self.skip_figures else self.figures
        if own is not None:
            data = readable(own)
            report_problems(data.problems[len(own.problems) :])
            if not self.skip_figures:
                data, unseen = held_out_items(data, self.figure_items)
                figures = None if unseen is None else HeldOutItemFigures(unseen)
        else:
            data = quads_of_scenes(self.quads.draw())
        with speaking() as speaker:
            model = finetune_model(
                self.model,
                data,
                self.config,
                device=processes().place(self.device),
                evaluate=figures,
                report=speaker.step,
            )
        show_trained(as_json=self.json, use=f"--model {model}", facts={"model": model})
        return 0

    def figures(self, trained: Any) -> dict[str, float]:
        """Group scores of the model as it is now on pairs of scenes that are held out."""
        from engine.benchmarks.heads import GroupFigures
        from engine.engine import Engine
        from engine.scorers.global_cosine import GlobalCosine

        peaksim = Engine(trained.encoder())
        return GroupFigures(
            peaksim, lambda _: GlobalCosine(), items=self.figure_items, categories=self.categories
        )(trained)


Train = (
    Annotated[TrainScenes, subcommand("scenes", description="The embedded model, from scratch.")]
    | Annotated[TrainMaxSimHead, subcommand("max_sim_head", description="Late interaction that can be indexed.")]
    | Annotated[TrainTFLocal, subcommand("tflocal", description="A transformer over patches and words of a pair.")]
    | Annotated[TrainTFGlobal, subcommand("tfglobal", description="The same over the two global embeddings.")]
    | Annotated[TrainLinear, subcommand("linear", description="One matrix between the global embeddings.")]
    | Annotated[TrainWindowHead, subcommand("window_head", description="All regions of an image from one pass.")]
    | Annotated[TrainPeakPatch, subcommand("peakpatch", description="Corrections of captions and of scores.")]
    | Annotated[TrainECN, subcommand("ecn", description="PeakPatch's correction of captions alone.")]
    | Annotated[TrainSCN, subcommand("scn", description="PeakPatch's correction of scores alone.")]
    | Annotated[TrainGenerator, subcommand("generator", description="Small pictures of embeddings, and their judge.")]
    | Annotated[TrainFinetune, subcommand("finetune", description="All weights of a model.")]
)
