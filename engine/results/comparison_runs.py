"""The trainings of the comparison: five arms, three kinds of negatives, three seeds, each with the same budget.

Every cell sees the same quads in the same order of its seed: `STEPS` steps of `BATCH` quads. What differs is what is
trained (a head on frozen features, or the whole encoder) and what a score is held against
(`engine.training.negatives`). Learning rates were chosen by the loss of seed 0 on quads; nothing else was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.atomic_files import written_whole
from engine.benchmarks.heads import GroupFigures
from engine.encoders.scenes import load_scenes
from engine.engine import Engine, load
from engine.features import Needs
from engine.heads.base import Head, HeadConfig, Trainable
from engine.heads.linear import LinearAlignmentConfig
from engine.heads.max_sim_head import MaxSimHeadConfig
from engine.heads.registry import HEADS
from engine.heads.tfglobal import TFGlobalConfig
from engine.heads.tflocal import TFLocalConfig
from engine.metrics import bootstrap_interval
from engine.results.run import Run
from engine.scorers.base import Scorer
from engine.scorers.global_cosine import GlobalCosine
from engine.scorers.learned import HeadScorer
from engine.scorers.registry import get_scorer
from engine.training.finetune import PixelQuads, WholeEncoder
from engine.training.head_data import CATEGORIES, HeadData, ScenesQuads, scenes_data
from engine.training.heads import HeadTrainConfig, Precision, train_head
from engine.training.negatives import NEGATIVES, Negatives, NegativesObjective

STEPS, BATCH, GROUP = 1500, 16, 4
SEEDS = (0, 1, 2)
SPLITS = ("in_domain", "held_out")
ITEMS = 200
# The first half of the blocks: later ones know of the whole picture (docs/heads.md).
IMAGE_LAYERS = (1, 2, 3)
FINETUNE = "finetune"


@dataclass(frozen=True)
class Arm:
    """What is trained: sizes of a head (None for the whole encoder), and how."""

    learning_rate: float
    head: HeadConfig | None = None
    weight_decay: float = 0.01
    precision: Precision = "float32"


ARMS: Mapping[str, Arm] = {
    "tflocal": Arm(
        1e-3, TFLocalConfig(layers=2, heads=4, mlp=256, reach=1, image_layers=IMAGE_LAYERS), precision="bfloat16"
    ),
    "tfglobal": Arm(1e-3, TFGlobalConfig(layers=2, heads=4, mlp=256), precision="bfloat16"),
    FINETUNE: Arm(3e-4, weight_decay=0.05, precision="bfloat16"),
    "max_sim_head": Arm(3e-3, MaxSimHeadConfig(image_layers=IMAGE_LAYERS)),
    "linear": Arm(3e-3, LinearAlignmentConfig(initial_scale=20.0), weight_decay=0.0),
}


class Cell(NamedTuple):
    """One training of the comparison."""

    arm: str
    negatives: Negatives
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.arm}-{self.negatives}-{self.seed}"


def cells() -> list[Cell]:
    """All of them; a seed as a whole before the next, so that what is there at any time can be compared."""
    first = ("quads", *(negatives for negatives in NEGATIVES if negatives != "quads"))
    return [Cell(arm, negatives, seed) for seed in SEEDS for negatives in first for arm in ARMS]


class Comparison:
    """Trains cells and measures them; features of pictures are computed once.

    Args:
        run: whose folder holds the trainings.
        figures: the JSON lines of measured cells. Lines of cells that are measured anew are replaced.
        logs: the JSON lines of their trainings.
        quads, steps, items: smaller ones for a test.
    """

    def __init__(
        self,
        run: Run,
        figures: Path,
        logs: Path,
        *,
        quads: ScenesQuads | None = None,
        steps: int = STEPS,
        items: int = ITEMS,
    ) -> None:
        self.run = run
        self.figures = figures
        self.logs = logs
        self.quads = quads or ScenesQuads()
        self.steps = steps
        self.items = items
        self.engine = load("scenes", device="cpu")
        self._measures: dict[str, GroupFigures] = {}
        self._data: HeadData | None = None

    def missing(self, wanted: Sequence[Cell]) -> list[Cell]:
        """The cells that are not measured yet."""
        held = {_cell_of(line) for line in read_lines(self.figures)}
        return [cell for cell in wanted if cell not in held]

    def make(self, cell: Cell) -> list[dict[str, Any]]:
        """Train a cell, or go on with it, and measure it; its lines, which are also written."""
        arm = ARMS[cell.arm]
        config = HeadTrainConfig(
            output=self.run.folder / "comparison" / cell.name,
            seed=cell.seed,
            steps=self.steps,
            batch_size=BATCH,
            learning_rate=arm.learning_rate,
            weight_decay=arm.weight_decay,
            precision=arm.precision,
            warmup_steps=min(50, self.steps),
            log_every=max(1, self.steps // 8),
        )
        objective = NegativesObjective(cell.negatives, GROUP)
        trained = self._trained(cell, arm, config, objective)
        log = read_lines(config.output / "log.jsonl")
        facts = {
            **cell._asdict(),
            "parameters": trained.parameter_count,
            "steps": self.steps,
            "items_seen": self.steps * BATCH,
            "seconds": round(log[-1]["seconds"], 1),
        }
        lines = [facts | line for line in self._measured(trained)]
        _put(self.figures, cell, lines)
        _put(self.logs, cell, [cell._asdict() | line for line in log[1:]])
        return lines

    def _trained(self, cell: Cell, arm: Arm, config: HeadTrainConfig, objective: NegativesObjective) -> Trainable:
        def report(line: str) -> None:
            self.run.progress(f"{cell.name}: {line}", 0, 1)

        if arm.head is not None:
            head = HEADS[cell.arm].build(self.engine.spec, arm.head, seed=cell.seed)
            train_head(head, self._features(), config, objective=objective, report=report)
            return head.eval()
        encoder = load_scenes()
        whole = WholeEncoder(encoder)
        data = PixelQuads(tuple(self.quads.draw()), encoder.tokenizer)
        train_head(whole, data, config, objective=objective.of_encoder, report=report)
        return whole.eval()

    def _features(self) -> HeadData:
        """Features of the quads that all heads read, in one store."""
        if self._data is None:
            last = self.engine.spec.text_layers
            needs = Needs(image_layers=IMAGE_LAYERS, text_layers=(last,))
            folder = self.run.folder / "features"
            self._data = scenes_data(self.engine, needs, self.quads, folder, told=self.run.progress)
        return self._data

    def _measured(self, trained: Trainable) -> Iterator[dict[str, Any]]:
        """A line for each split and category: group score with its interval over items."""
        for split in SPLITS:
            with torch.no_grad():
                found = self._measure(trained, split).outcomes(trained)
            for category, outcome in found.items():
                interval = bootstrap_interval(outcome)
                shares = {key: round(getattr(interval, key), 4) for key in ("value", "low", "high")}
                yield {"split": split, "category": category, "items": self.items, **shares}

    def _measure(self, trained: Trainable, split: str) -> GroupFigures:
        """What measures on a split; that of heads keeps the features of its pictures."""
        if isinstance(trained, WholeEncoder):
            return self._figures_of(Engine(trained.encoder()), lambda _: GlobalCosine(), split)
        if split not in self._measures:
            self._measures[split] = self._figures_of(self.engine, with_head, split)
        return self._measures[split]

    def _figures_of(self, engine: Engine, scorer: Callable[[Any], Scorer], split: str) -> GroupFigures:
        # The seed of `ScenesBenchmark`: the first of its items.
        return GroupFigures(engine, scorer, items=self.items, categories=CATEGORIES, split=split, seed=2026)


def with_head(head: Head) -> Scorer:
    """The scorer of a head."""
    plain = get_scorer(head.name)
    assert isinstance(plain, HeadScorer)
    return replace(plain, head=head)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file; none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _put(path: Path, cell: Cell, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write the lines of a cell in place of those it had; cells stand in their order."""
    held = [line for line in read_lines(path) if _cell_of(line) != cell]
    order = {each: number for number, each in enumerate(cells())}
    # Stable: lines of a cell stay in theirs.
    ordered = sorted([*held, *lines], key=lambda line: order[_cell_of(line)])
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as unfinished:
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in ordered), encoding="utf-8")


def _cell_of(line: Mapping[str, Any]) -> Cell:
    return Cell(line["arm"], line["negatives"], line["seed"])
