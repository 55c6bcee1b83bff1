"""The trainings of the comparison: five arms, three kinds of negatives, three seeds, each with the same budget.

Every cell sees the same quads in the same order of its seed: `STEPS[0]` steps of `BATCH` quads against hard negatives
of its kind (`engine.training.negatives`) and the other items of the batch, then `STEPS[1]` against the hard negatives
alone. TFLocal needs both parts: on quads alone from the start it gave all pairs the same score, and beside the other
loss it did not get to them. That, and its layers, were found with seed 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from engine.metrics import bootstrap_interval
from engine.results.json_lines import read_json_lines
from engine.results.run import Run
from engine.scorers.base import Scorer
from engine.scorers.global_cosine import GlobalCosine
from engine.scorers.registry import with_head
from engine.training.finetune import PixelQuads, WholeEncoder
from engine.training.head_data import CATEGORIES, HeadData, ScenesQuads, scenes_data
from engine.training.heads import Batches, BatchLoss, HeadTrainConfig, Precision, train_head
from engine.training.negatives import NEGATIVES, Negatives, NegativesObjective
from engine.training.presets import SCENES_HEADS

STEPS, BATCH = (750, 750), 32
# Of the loss over the batch, in both parts.
BATCH_WEIGHTS = (1.0, 0.0)
SEEDS = (0, 1, 2)
SPLITS = ("in_domain", "held_out")
# Of each category; the seed is that of `ScenesBenchmark`, so they are the first of its items.
ITEMS, ITEM_SEED = 200, 2026
# Of the max-sim head: later blocks know of the whole picture (docs/heads.md). TFLocal has no layers of its own for
# either side, so it also reads the last one, which a linear map takes to the text's space.
IMAGE_LAYERS = (1, 2, 3)
FINETUNE = "finetune"


@dataclass(frozen=True)
class Arm:
    """What is trained: sizes of a head (None for the whole encoder), and how.

    `group`: items that are in-batch negatives of each other. The whole batch, but for a head that runs once a pair.
    """

    learning_rate: float
    head: HeadConfig | None = None
    weight_decay: float = 0.01
    precision: Precision = "float32"
    group: int = BATCH


ARMS: Mapping[str, Arm] = {
    "tflocal": Arm(1e-3, SCENES_HEADS["tflocal"], precision="bfloat16", group=8),
    "tfglobal": Arm(1e-3, SCENES_HEADS["tfglobal"], precision="bfloat16", group=8),
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
    first: list[Negatives] = ["quads", *(negatives for negatives in NEGATIVES if negatives != "quads")]
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
        steps: tuple[int, int] = STEPS,
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
        self._data: dict[tuple[int, ...], HeadData] = {}

    def make(self, cell: Cell) -> list[dict[str, Any]]:
        """Train a cell, or go on with it, and measure it; its lines, which are also written."""
        trained, data = self._begun(cell)
        log: list[dict[str, Any]] = []
        seconds = 0.0
        for number, weight in enumerate(BATCH_WEIGHTS):
            name = f"{cell.name}-{number + 1}"
            config = self._config(cell, name, self.steps[number])
            objective = NegativesObjective(cell.negatives, ARMS[cell.arm].group, weight)

            def report(line: str, step: int, steps: int, name: str = name) -> None:
                self.run.progress(f"{name}: {line}", step, steps)

            whole = isinstance(trained, WholeEncoder)
            loss = BatchLoss(objective.of_encoder if whole else objective, facts=asdict(objective), whole_batch=True)
            train_head(trained, data, config, objective=loss, report=report)
            entries = read_lines(config.output / "log.jsonl")[1:]  # the settings come first
            seconds += entries[-1]["seconds"]
            log += [{"part": number + 1} | line for line in entries]
        facts = {
            **cell._asdict(),
            "parameters": trained.parameter_count,
            "steps": sum(self.steps),
            "items_seen": sum(self.steps) * BATCH,
            "seconds": round(seconds, 1),
        }
        lines = [facts | line for line in self._measured(trained.eval())]
        _put(self.figures, cell, lines)
        _put(self.logs, cell, [cell._asdict() | line for line in log])
        return lines

    def _begun(self, cell: Cell) -> tuple[Trainable, Batches]:
        """What is trained, as it is at first, and what it is trained on."""
        config = ARMS[cell.arm].head
        if config is not None:
            head = HEADS[cell.arm].build(self.engine.spec, config, seed=cell.seed)
            return head, self._features(head)
        encoder = load_scenes()
        return WholeEncoder(encoder), PixelQuads(tuple(self.quads.draw()), encoder.tokenizer)

    def _config(self, cell: Cell, name: str, steps: int) -> HeadTrainConfig:
        arm = ARMS[cell.arm]
        return HeadTrainConfig(
            output=self.run.folder / "comparison" / name,
            seed=cell.seed,
            steps=steps,
            batch_size=BATCH,
            learning_rate=arm.learning_rate,
            weight_decay=arm.weight_decay,
            precision=arm.precision,
            warmup_steps=min(50, steps),
            checkpoint_every=100,
            log_every=max(1, steps // 4),
        )

    def _features(self, head: Head) -> HeadData:
        """Features of the quads; heads that read no patches take those of the max-sim head."""
        layers = head.needs().image_layers or IMAGE_LAYERS
        if layers not in self._data:
            needs = Needs(image_layers=layers, text_layers=(self.engine.spec.text_layers,))
            folder = self.run.folder / "features"
            self._data[layers] = scenes_data(self.engine, needs, self.quads, folder, told=self.run.progress)
        return self._data[layers]

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
        return GroupFigures(engine, scorer, items=self.items, categories=CATEGORIES, split=split, seed=ITEM_SEED)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file; none where there is no file."""
    return read_json_lines(path) if path.exists() else []


def _put(path: Path, cell: Cell, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write the lines of a cell in place of those it had; cells stand in their order."""
    held = [line for line in read_lines(path) if cell_of(line) != cell]
    order = {each: number for number, each in enumerate(cells())}
    # Stable: lines of a cell stay in theirs.
    ordered = sorted([*held, *lines], key=lambda line: order[cell_of(line)])
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as unfinished:
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in ordered), encoding="utf-8")


def cell_of(line: Mapping[str, Any]) -> Cell:
    """The cell whose line this is. Raises ValueError for a line of something else."""
    try:
        return Cell(line["arm"], line["negatives"], line["seed"])
    except KeyError as error:
        raise ValueError(f"results: a line of the comparison has no {error}: {str(line)[:60]}") from error
