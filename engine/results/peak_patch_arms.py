"""PeakPatch taken apart: heads with a part left out, and heads that read one text layer, all on one budget.

Every head is trained on the same rows, for as many steps and with the same losses; what differs is said by its `Arm`.
Runs are resumable and leave one line each in a JSON-lines file: what was trained, how the loss fell, and for every set
of items what became of each of them, so that intervals and paired differences can be had later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from engine.atomic_files import write_text, written_whole
from engine.benchmarks.negation_figures import NegationFigures, NegationOutcomes
from engine.encoders.base import EncoderSpec
from engine.engine import Engine
from engine.features import Needs
from engine.heads.peak_patch import PeakPatch, PeakPatchConfig
from engine.heads.registry import load_head
from engine.metrics import Floats, Interval, bootstrap_interval
from engine.results.figures import Figure
from engine.results.json_lines import read_json_lines
from engine.scenes.negation import NEGATION_TEMPLATES
from engine.scenes.negation_training import TRAINING_SETS
from engine.scorers.global_cosine import GlobalCosine
from engine.training.heads import HeadTrainConfig
from engine.training.negation_data import scene_rows
from engine.training.peak_patch import (
    PRETRAINING_STEPS,
    SCENES,
    SCENES_HEAD,
    SCENES_TRAINING,
    JointObjective,
    NegationData,
    head_for,
    negation_data,
    train_peak_patch,
)

Told = Callable[[str], None]
ENCODER = "encoder alone"
# Items that no layer, rate or weight was chosen by.
SEED, ITEMS = 4242, 400
# What a record keeps of every item; records that keep something else are made again.
KEPT = "right or wrong, and margins"
RESAMPLES = 1000
COLUMNS = ("choice", *(f"choice_{kind}" for kind in NEGATION_TEMPLATES), "r@5", "r-neg@5")
HEADINGS = ("all", *NEGATION_TEMPLATES, "R@5", "R-Neg@5")


@dataclass(frozen=True)
class Arm:
    """One way to build and train a head.

    Attributes:
        name: in tables and file names.
        head: what is read and which parts there are.
        objective: what is trained on.
    """

    name: str
    head: PeakPatchConfig
    objective: JointObjective = SCENES

    @property
    def file_name(self) -> str:
        """The name without spaces."""
        return self.name.lower().replace(" ", "_")


@dataclass(frozen=True)
class Budget:
    """What every arm is trained with.

    Attributes:
        output: folder of the runs.
        features: folder of the frozen features, which runs share.
        rows, data_seed: rendered scenes, each with seven texts.
        training: of the joint training; its output and seed are those of the run.
        pretraining_steps: in which the correction of captions gets its start.
    """

    output: Path = Path("runs/peak_patch")
    features: Path = Path("runs/features")
    rows: int = 5000
    data_seed: int = 301
    training: HeadTrainConfig = SCENES_TRAINING
    pretraining_steps: int = PRETRAINING_STEPS


@dataclass(frozen=True)
class ItemSet:
    """Which negation items heads are measured on."""

    split: str = "held_out"
    wording: str = "benchmark"
    items: int = ITEMS
    seed: int = SEED

    @property
    def name(self) -> str:
        """As the records call it."""
        return f"{self.split}/{self.wording}"

    def figures(self, engine: Engine) -> NegationFigures:
        """Its items, whose features at every text layer will be kept."""
        layers = tuple(range(1, engine.spec.text_layers + 1))
        return NegationFigures(
            engine, items=self.items, split=self.split, wording=self.wording, seed=self.seed, layers=layers
        )


SETS = (ItemSet(), ItemSet("in_domain"), ItemSet(wording="held_out"))


def ablation_arms(encoder: EncoderSpec) -> tuple[Arm, ...]:
    """The whole head, each correction alone, and what the embedding correction reads left out, part by part.

    Layers are those measured for this encoder where they were, else those of the paper, see `PeakPatchConfig.fitted`.
    """
    whole = head_for(encoder, PeakPatchConfig(dropout=SCENES_HEAD.dropout))
    questions_alone = replace(SCENES, whole_score=False)
    return (
        Arm("ECN and SCN", whole),
        Arm("ECN alone", replace(whole, parts="ecn")),
        Arm("SCN alone", replace(whole, parts="scn")),
        Arm("SCN alone, questions only", replace(whole, parts="scn"), questions_alone),
        Arm("no anchor", replace(whole, use_anchor=False)),
        Arm("no pool", replace(whole, use_pool=False)),
    )


def sweep_arms(text_layers: int) -> tuple[Arm, ...]:
    """For each text layer a head that reads it and nothing below the end but it: no anchor, and SCN's layer too."""
    return tuple(
        Arm(f"layer {layer}", replace(SCENES_HEAD, peak=layer, anchor=layer, low=layer, use_anchor=False))
        for layer in range(1, text_layers + 1)
    )


def shared_data(engine: Engine, budget: Budget, *, told: Told | None = None) -> NegationData:
    """Frozen features of the budget's rows at every text layer."""
    rows = scene_rows(budget.rows, seed=budget.data_seed, sets=TRAINING_SETS)
    needs = Needs(text_layers=tuple(range(1, engine.spec.text_layers + 1)))
    report = None if told is None else (lambda what, done, total: told(f"features of {what}: {done}/{total}"))
    return negation_data(engine, needs, rows, budget.features, told=report)


def train_arm(
    engine: Engine, arm: Arm, seed: int, budget: Budget, data: NegationData, *, told: Told | None = None
) -> Path:
    """The file of the arm's head with this seed; trained now, or what is missing of it.

    Raises what `train_peak_patch` raises, such as for a folder whose run was begun on another budget.
    """
    folder = run_folder(budget, arm, seed)
    config = replace(budget.training, output=folder, seed=seed)
    head = PeakPatch.build(engine.spec, arm.head, seed=seed).to(engine.encoder.device)
    head.take_readout(engine.encoder.text_readout())
    first = None
    if budget.pretraining_steps:
        first = replace(config, output=folder / "pretraining", steps=budget.pretraining_steps)
    read = replace(data, texts=data.texts.with_layers(head.needs().text_layers))
    report = None if told is None else (
        lambda line, step, steps: told(f"{arm.name}, seed {seed}: step {step}/{steps}  {line}")
    )
    return train_peak_patch(head, read, config, pretraining=first, objective=arm.objective, report=report)


def run_folder(budget: Budget, arm: Arm, seed: int) -> Path:
    """Where a run keeps its files."""
    return budget.output / f"{arm.file_name}-seed{seed}"


def run_arms(
    engine: Engine,
    arms: Sequence[Arm],
    budget: Budget,
    *,
    seeds: int,
    sets: Sequence[ItemSet] = SETS,
    told: Told | None = None,
) -> list[dict[str, Any]]:
    """Records of the encoder alone, then of every arm with every seed; what was trained already is not trained again.

    One seed of all arms comes before the next, so that a run that was stopped has balanced tables. `told` gets lines
    of progress. Raises ValueError for fewer than one seed, and what `train_arm` raises.
    """
    if seeds < 1:
        raise ValueError(f"run_arms: seeds must be at least 1, got {seeds}")
    data = shared_data(engine, budget, told=told)
    paths = {
        (arm.name, seed): train_arm(engine, arm, seed, budget, data, told=told) for seed in range(seeds) for arm in arms
    }
    held = Measured(engine, sets)
    found = [held.encoder(budget.output / "encoder.json")]
    return found + [held.head(arm, seed, paths[arm.name, seed]) for arm in arms for seed in range(seeds)]


class Measured:
    """Records of heads and of the encoder, each kept in a file and not made again while nothing it is of has changed.

    Items are encoded once, when the first record is made.
    """

    def __init__(self, engine: Engine, sets: Sequence[ItemSet] = SETS) -> None:
        self.engine = engine
        self.sets = tuple(sets)
        self._figures: dict[str, NegationFigures] = {}

    def head(self, arm: Arm, seed: int, path: Path) -> dict[str, Any]:
        """The record of a run, kept beside its head."""
        weights = sha256(path.read_bytes()).hexdigest()
        return self._kept(
            path.parent / "record.json", weights, lambda: record(arm, seed, path, measure(self.figures, path))
        )

    def encoder(self, path: Path) -> dict[str, Any]:
        """The record of the encoder alone, with what scorers reach that read the captions alone; kept in this file."""
        return self._kept(path, "", self._encoder)

    @property
    def figures(self) -> dict[str, NegationFigures]:
        """The sets of items by name."""
        self._figures = self._figures or {items.name: items.figures(self.engine) for items in self.sets}
        return self._figures

    def _encoder(self) -> dict[str, Any]:
        found = measure_encoder(self.figures)
        return {"arm": ENCODER, "seed": None, "fingerprint": self.engine.spec.fingerprint, "sets": found}

    def _kept(self, path: Path, weights: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        made_by = f"{self.engine.spec.fingerprint} {self.sets!r} {weights} {KEPT}"
        if path.exists():
            held = json.loads(path.read_text(encoding="utf-8"))
            if held["made_by"] == made_by:
                return dict(held["record"])
        found = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"made_by": made_by, "record": found}))
        return found


def measure(figures: dict[str, NegationFigures], path: Path) -> dict[str, dict[str, Any]]:
    """For each set of items what became of them under a stored head, as plain values for JSON."""
    head = load_head(path)
    return {name: packed(held.outcomes(head.to(held.engine.encoder.device))) for name, held in figures.items()}


def measure_encoder(figures: dict[str, NegationFigures]) -> dict[str, dict[str, Any]]:
    """The same of the encoder alone, with what scorers reach that read the captions alone."""
    return {
        name: {**packed(held.outcomes(GlobalCosine())), "blind": _blind(held.blind())} for name, held in figures.items()
    }


def _blind(found: dict[str, dict[str, Floats]]) -> dict[str, dict[str, dict[str, float]]]:
    """Shares with their 95 % intervals over items, as plain values."""
    return {
        name: {column: _share(len(values), bootstrap_interval(values)) for column, values in columns.items()}
        for name, columns in found.items()
    }


def _share(items: int, interval: Interval) -> dict[str, float]:
    return {"share": interval.value, "items": items, "low": interval.low, "high": interval.high}


def record(arm: Arm, seed: int, path: Path, outcomes: dict[str, Any]) -> dict[str, Any]:
    """One line of a JSON-lines file: a run and its figures."""
    head = load_head(path)
    assert isinstance(head, PeakPatch)
    return {
        "arm": arm.name,
        "seed": seed,
        "fingerprint": head.fingerprint,
        "parameters": head.parameter_count,
        "head": asdict(head.config),
        "objective": asdict(arm.objective),
        "loss": losses(path.parent),
        "sets": outcomes,
    }


def losses(folder: Path) -> dict[str, list[list[float]]]:
    """`[step, loss]` of a run's log and of its pretraining's, about eight of each."""
    found = {}
    for name, path in (("pretraining", folder / "pretraining" / "log.jsonl"), ("joint", folder / "log.jsonl")):
        if path.exists():
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            curve = [[line["step"], round(line["loss"], 4)] for line in lines if "loss" in line]
            found[name] = curve[: -1 : max(1, len(curve) // 8)] + curve[-1:]
    return found


def packed(outcomes: NegationOutcomes) -> dict[str, Any]:
    """Outcomes as plain values: each column's mean and, for every item, whether it was right, in hexadecimal.

    Margins are those of float16, little-endian, in hexadecimal; their median is that of all digits.
    """
    found: dict[str, Any] = {
        name: {"share": float(values.mean()), "items": len(values), "right": np.packbits(values > 0).tobytes().hex()}
        for name, values in outcomes.columns().items()
    }
    margins = outcomes.margins.astype("<f2").tobytes().hex()
    return found | {"margin": float(np.median(outcomes.margins)), "margins": margins}


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """One JSON line for each run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as unfinished:
        unfinished.write_text("".join(json.dumps(entry) + "\n" for entry in records), encoding="utf-8")


def read_records(path: Path) -> list[dict[str, Any]]:
    """What `write_records` wrote. Raises FileNotFoundError."""
    if not path.is_file():
        raise FileNotFoundError(f"peak patch: {path} is missing; `peaksim results --train` writes it")
    return read_json_lines(path)


def unpacked(column: dict[str, Any]) -> Floats:
    """For every item of a packed column 1 where it was right."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(column["right"]), np.uint8))[: column["items"]]
    return bits.astype(np.float64)


def over_seeds(columns: Sequence[dict[str, Any]]) -> tuple[Interval, float, float]:
    """Mean over seeds with its 95 % interval over items, and the lowest and the highest seed's share."""
    shares = [column["share"] for column in columns]
    return bootstrap_interval(np.mean([unpacked(column) for column in columns], axis=0)), min(shares), max(shares)


def margin_over_seeds(found: Sequence[Mapping[str, Any]]) -> Interval:
    """Mean over seeds of the median margin, with its 95 % bootstrap interval over items.

    Records of before margins were kept for each item give NaN for both bounds.
    """
    value = float(np.mean([values["margin"] for values in found]))
    if not all("margins" in values for values in found):
        return Interval(value, np.nan, np.nan)
    margins = np.stack([np.frombuffer(bytes.fromhex(values["margins"]), "<f2") for values in found])  # (seeds, items)
    items = margins.shape[1]
    rows = np.random.default_rng(0).integers(items, size=(RESAMPLES, items))
    medians = np.median(margins.astype(np.float64)[:, rows], axis=-1).mean(axis=0)  # (resamples,)
    low, high = np.quantile(medians, [0.025, 0.975])
    # Of the rounded margins: the bounds must hold the value of all digits.
    return Interval(value, min(float(low), value), max(float(high), value))


def record_figures(records: Iterable[Mapping[str, Any]]) -> list[Figure]:
    """Every share of every run and set of items with its 95 % interval; the margin too where items' own are kept."""
    found = []
    for entry in records:
        for name, values in entry["sets"].items():
            words = f"{entry['arm']}, seed {entry['seed']}: {name}"
            for column in COLUMNS:
                interval, _, _ = over_seeds([values[column]])
                found.append(Figure.of(f"{words} {column}", values[column]["items"], interval))
            if "margins" in values:
                found.append(Figure.of(f"{words} margin", values["choice"]["items"], margin_over_seeds([values])))
    return found
