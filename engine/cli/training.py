"""``peaksim train``: the embedded model from scratch, or a small head on the frozen features of any model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import subcommand

from engine.cli.options import OptionalFolder, Shared
from engine.cli.outputs import check_folder
from engine.cli.peak_patch_training import TrainPeakPatch
from engine.cli.tables import report, show_json, show_line
from engine.heads.base import Head, HeadConfig
from engine.heads.linear import LinearAlignmentConfig
from engine.heads.max_sim_head import MaxSimHeadConfig
from engine.heads.tfglobal import TFGlobalConfig
from engine.heads.tflocal import TFLocalConfig
from engine.heads.window_head import WindowHeadConfig
from engine.training.head_data import ScenesQuads, scenes_data
from engine.training.heads import HeadTrainConfig, train_head
from engine.training.presets import TRAINING
from engine.training.scenes import ScenesTrainConfig, train
from engine.training.windows import WindowObjective, WindowPictures, begun, window_data


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
        folder: Path = train(self.config, evaluate=None if self.skip_figures else quick_figures, report=report)
        if self.json:
            show_json({"model": f"scenes:{folder}"})
        else:
            show_line(f"trained; use it as --model scenes:{folder}")
        return 0


@dataclass(frozen=True, kw_only=True)
class OnQuads(Shared):
    """Options of what is trained on quads of rendered scenes; a stopped run goes on where it was."""

    items: int = ScenesQuads.items
    """Quads of each category (two pictures and two captions that differ in one binding)."""
    categories: tuple[str, ...] = ScenesQuads.categories
    """What the quads differ in."""
    data_seed: int = ScenesQuads.seed
    """Decides the quads."""
    described_share: float = ScenesQuads.described_share
    """Share of captions that say more than what is exchanged."""
    skip_figures: bool = False
    """Do not evaluate on held-out pairs along the way."""
    figure_items: int = 100
    """Held-out pairs of each category that are evaluated."""
    training: HeadTrainConfig
    """Settings of the training."""

    @property
    def quads(self) -> ScenesQuads:
        """The quads of these options."""
        return ScenesQuads(self.items, self.categories, self.data_seed, self.described_share)


@dataclass(frozen=True, kw_only=True)
class TrainHead(OnQuads):
    """Options of every head on frozen features."""

    name: ClassVar[str]

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
        from engine.benchmarks.heads import GroupFigures
        from engine.engine import load
        from engine.heads.registry import HEADS
        from engine.scorers.base import Scorer
        from engine.scorers.learned import HeadScorer
        from engine.scorers.registry import get_scorer

        peaksim = load(self.model, device=self.device)
        head = HEADS[self.name].build(peaksim.spec, self.head, seed=self.training.seed).to(peaksim.encoder.device)
        data = scenes_data(
            peaksim,
            head.needs(),
            self.quads,
            self.features,
            told=lambda what, done, total: report(f"features of {what}: {done}/{total}"),
        )
        plain = get_scorer(self.name)
        assert isinstance(plain, HeadScorer)

        def with_head(trained: Head) -> Scorer:
            return replace(plain, head=trained)

        figures = (
            None
            if self.skip_figures
            else GroupFigures(peaksim, with_head, items=self.figure_items, categories=self.categories)
        )
        path = train_head(head, data, self.training, evaluate=figures, report=report)
        if self.json:
            show_json({"head": str(path), "scorer": self.name})
        else:
            show_line(f"trained; use it as --scorer {self.name} --option head={path}")
        return 0


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
class TrainWindowHead(Shared):
    """Train the window head: all regions of an image from one pass, by regression on native-scale crops."""

    model: str = "scenes"
    """Name of the frozen model; `peaksim models` lists them."""
    device: str = "auto"
    """cpu, cuda, ...; auto takes an accelerator where there is one."""
    features: Path = Path("runs/features")
    """Folder of the store of frozen features, which runs share."""
    pictures: WindowPictures = field(default_factory=WindowPictures)
    head: WindowHeadConfig = field(default_factory=WindowHeadConfig)
    objective: WindowObjective = field(default_factory=WindowObjective)
    training: HeadTrainConfig = TRAINING["window_head"]
    skip_figures: bool = False
    """Do not evaluate on pairs of training's combinations along the way."""
    figure_items: int = 100
    """Pairs of each category that are evaluated."""

    def run(self) -> int:
        """Compute the features that are missing, train, and print how the head is used."""
        from engine.benchmarks.heads import WindowFigures
        from engine.engine import load

        peaksim = load(self.model, device=self.device)
        data = window_data(
            peaksim,
            self.head.fitted(peaksim.spec).layers,
            self.pictures,
            self.features,
            told=lambda what, done, total: report(f"features of {what}: {done}/{total}"),
        )
        head = begun(peaksim, data, self.head, seed=self.training.seed)
        figures = None if self.skip_figures else WindowFigures(peaksim, items=self.figure_items)
        path = train_head(head, data, self.training, objective=self.objective, evaluate=figures, report=report)
        if self.json:
            show_json({"head": str(path), "scorer": "sgi"})
        else:
            show_line(f"trained; use it as --scorer sgi --option crops=windows --option head={path}")
        return 0


@dataclass(frozen=True, kw_only=True)
class TrainFinetune(OnQuads):
    """Train all weights of a scenes model on quads: what heads on frozen features are compared with."""

    start: OptionalFolder = None
    """Folder of the scenes model to begin with; by default the embedded one."""
    training: HeadTrainConfig = TRAINING["finetune"]

    def run(self) -> int:
        """Train, and print how the model is used."""
        from engine.benchmarks.heads import GroupFigures
        from engine.engine import Engine
        from engine.scorers.global_cosine import GlobalCosine
        from engine.training.finetune import WholeEncoder, finetune

        def figures(trained: WholeEncoder) -> dict[str, float]:
            return GroupFigures(
                Engine(trained.encoder()),
                lambda _: GlobalCosine(),
                items=self.figure_items,
                categories=self.categories,
            )(trained)

        folder = finetune(
            self.quads.draw(),
            self.training,
            model=self.start,
            evaluate=None if self.skip_figures else figures,
            report=report,
        )
        if self.json:
            show_json({"model": f"scenes:{folder}"})
        else:
            show_line(f"trained; use it as --model scenes:{folder}")
        return 0


Train = (
    Annotated[TrainScenes, subcommand("scenes", description="The embedded model, from scratch.")]
    | Annotated[TrainMaxSimHead, subcommand("max_sim_head", description="Late interaction that can be indexed.")]
    | Annotated[TrainTFLocal, subcommand("tflocal", description="A transformer over patches and words of a pair.")]
    | Annotated[TrainTFGlobal, subcommand("tfglobal", description="The same over the two global embeddings.")]
    | Annotated[TrainLinear, subcommand("linear", description="One matrix between the global embeddings.")]
    | Annotated[TrainWindowHead, subcommand("window_head", description="All regions of an image from one pass.")]
    | Annotated[TrainPeakPatch, subcommand("peakpatch", description="Corrections of captions and of scores.")]
    | Annotated[TrainFinetune, subcommand("finetune", description="All weights of a scenes model, on quads.")]
)
