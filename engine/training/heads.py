"""Training of heads on stored features of a frozen encoder: one loop for every kind of head.

Batches, weights and dropout are pure functions of seed and step, so a run that was stopped goes on to the same weights.
The encoder takes no part: its features were computed before.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from engine.atomic_files import written_whole
from engine.choices import check_choice, check_numbers
from engine.features import ImageFeatures, TextFeatures
from engine.heads.base import Head, Trainable
from engine.training.head_data import HeadData, epochs
from engine.training.logs import DAMAGE, Log, Report, check_new, damaged, read_checkpoint
from engine.training.losses import contrastive_loss, quad_loss, quad_rows
from engine.training.parameter_groups import parameter_groups
from engine.training.processes import ALONE, Processes, SharedHead, processes

# Called with the head, or whatever is trained, in evaluation mode.
Evaluate = Callable[[Any], dict[str, float]]
# The loss of what is trained on one batch.
Objective = Callable[[Any, Any, Any], Tensor]


class Batches(Protocol):
    """Items that can be had by number; images and texts of a batch can be moved to a device."""

    @property
    def source(self) -> str: ...
    def __len__(self) -> int: ...
    def batch(self, items: Tensor) -> tuple[Any, Any]: ...


Loss = Literal["auto", "quads", "batch", "captions", "images", "pairs"]
Precision = Literal["float32", "bfloat16"]
# Images and texts an item that each loss needs.
WANTED: dict[Loss, tuple[int, int]] = {
    "quads": (2, 2),
    "batch": (1, 1),
    "captions": (1, 2),
    "images": (2, 1),
    "pairs": (2, 2),
}


@dataclass(frozen=True)
class HeadTrainConfig:
    """Settings of one run."""

    output: Path = Path("runs/head")
    """Folder of checkpoint, log and head."""
    seed: int = 0
    """Of the first weights, the order of the items and dropout."""
    steps: int = 1500
    """Length of the run."""
    epochs: int = 0
    """Passes over the items in place of `steps`; 0 counts steps."""
    batch_size: int = 32
    """Items B of one step."""
    learning_rate: float = 5e-3
    """Highest learning rate of AdamW."""
    weight_decay: float = 0.01
    """Of AdamW; biases and norms do not decay."""
    warmup_steps: int = 100
    """Steps of linear warm-up, after which the learning rate falls to zero along a cosine."""
    epsilon: float = 1e-8
    """Of AdamW."""
    part_rates: tuple[tuple[str, float], ...] = ()
    """Parts that learn at a share of the rate, by how the names of their weights begin: `ecn. 0.1`."""
    clip_norm: float = 1.0
    """Bound of the norm of the gradients."""
    loss: Loss = "quads"
    """Within 2 × 2 quads, or InfoNCE over a batch (B × B), captions (B × 2B), images, pairs; auto: by the data."""
    batch_weight: float = 0.0
    """Weight of the B × B loss that is added to that of the quads."""
    batch_until: float = 1.0
    """Share of the steps after which that loss is left out."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 evaluates at the end alone."""
    log_every: int = 20
    """Steps between lines of the log."""
    precision: Precision = "float32"
    """bfloat16 (the head runs under autocast) or float32."""
    threads: int = 0
    """CPU threads; 0 keeps torch's own number."""
    tensorboard: bool = False
    """Also write the log as TensorBoard's curves into the output folder."""

    def __post_init__(self) -> None:
        check_choice("HeadTrainConfig", "loss", self.loss, get_args(Loss))
        check_choice("HeadTrainConfig", "precision", self.precision, get_args(Precision))
        least = {"steps": 1, "epochs": 0, "batch_size": 1, "warmup_steps": 0, "threads": 0, "seed": 0}
        # Seeds are multiplied by a million, and must still be taken by generators of random numbers then.
        most = {"learning_rate": 1000, "weight_decay": 1000, "threads": 1024, "seed": 1 << 43}
        check_numbers(
            self,
            above_zero=("learning_rate", "epsilon", "clip_norm"),
            at_least_zero=("weight_decay", "batch_weight", "batch_until"),
            integers=least | {"checkpoint_every": 1, "evaluate_every": 0, "log_every": 1},
            at_most=most | dict.fromkeys(("epsilon", "clip_norm", "batch_weight"), 1e30),
        )
        if self.batch_weight and self.loss not in ("auto", "quads"):
            raise ValueError(
                "HeadTrainConfig: batch_weight adds to the loss of quads, and must be 0 with another one, got "
                f"{self.batch_weight} with {self.loss!r}"
            )

    def fitted(self, images_per_item: int, texts_per_item: int) -> HeadTrainConfig:
        """The same with a loss for such items in place of "auto".

        Raises ValueError when items of so many images and texts lack what the loss needs.
        """
        fitting = [loss for loss, (i, t) in WANTED.items() if i <= images_per_item and t <= texts_per_item]
        if self.loss == "auto":
            best = max(fitting, key=lambda loss: sum(WANTED[loss]))
            return replace(self, loss=best, batch_weight=self.batch_weight if best == "quads" else 0.0)
        if self.loss not in fitting:
            images, texts = WANTED[self.loss]
            raise ValueError(
                f"train: loss {self.loss!r} needs {images} images and {texts} texts an item, got {images_per_item} and "
                f"{texts_per_item}; these data fit auto ({' or '.join(fitting)})"
            )
        return self

    def deciding(self) -> dict[str, Any]:
        """The settings that decide the weights."""
        free = ("output", "threads", "checkpoint_every", "evaluate_every", "log_every", "tensorboard")
        return {name: value for name, value in asdict(self).items() if name not in free}

    def counted(self, items: int) -> HeadTrainConfig:
        """The same with the steps of its epochs over so many items. Raises ValueError for fewer than a batch."""
        if items < self.batch_size:
            raise ValueError(f"train: a batch of {self.batch_size} needs as many items, got {items}")
        return replace(self, steps=self.epochs * (items // self.batch_size)) if self.epochs else self

    def objective(self, head: Head, images: ImageFeatures, texts: TextFeatures, *, done: float = 0.0) -> Tensor:
        """The loss of one batch as `HeadData.batch` orders it: pairs first, then hard negatives.

        `done` is the share of the steps that were made.
        """
        size = self.batch_size
        if self.loss != "quads":
            rows, columns = (torch.arange(each * size) for each in WANTED[self.loss])
            return _contrastive(head, images[rows], texts[columns])
        pair = torch.arange(size)
        scores = head.chosen(images, texts, *quad_rows(pair, pair + size)).view(size, 2, 2)
        loss = quad_loss(head.scale() * scores)
        if self.batch_weight and done < self.batch_until:
            loss = loss + self.batch_weight * _contrastive(head, images[pair], texts[pair])
        return loss


def _contrastive(head: Any, images: ImageFeatures, texts: TextFeatures) -> Tensor:
    """The contrastive loss of all scores, fused where the head can; what shares a batch out has the scores alone."""
    if hasattr(head, "contrastive"):
        fused: Tensor = head.contrastive(images, texts)
        return fused
    return contrastive_loss(head.scale() * head.matrix(images, texts))


@dataclass(frozen=True)
class BatchLoss:
    """A loss of a batch in place of that of `HeadTrainConfig.loss`.

    Attributes:
        objective: computes it.
        facts: plain values that say what it is: a run goes on with equal ones alone.
        whole_batch: it sees what is trained through `matrix`, `chosen`, `scale` or a call alone. Of several processes
            it then gets the scores of the whole batch, as `config.loss` does; else each its own items.
    """

    objective: Objective
    facts: Mapping[str, object] = field(default_factory=dict)
    whole_batch: bool = False


class HeadRun:
    """State of one training: the head, its optimiser, and how far it is."""

    def __init__(
        self,
        head: Trainable,
        config: HeadTrainConfig,
        objective: Objective | BatchLoss | None = None,
        *,
        source: str = "",
        processes: Processes = ALONE,
    ) -> None:
        self.head = head
        self.config = config
        self.source = source
        self.processes = processes
        if objective is None:
            loss = BatchLoss(self._of_settings, whole_batch=True)
        else:
            loss = objective if isinstance(objective, BatchLoss) else BatchLoss(objective)
        self.loss = loss
        # Of several processes each scores its part of a batch; another objective has its items to itself.
        self.scored: Any = head
        self.part = slice(None)
        if processes.count > 1 and loss.whole_batch:
            self.scored = SharedHead(head, processes)
        elif processes.count > 1:
            own = processes.share(config.batch_size)
            self.part = slice(own.start, own.stop)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(head, config.weight_decay, config.part_rates),
            lr=config.learning_rate,
            betas=(0.9, 0.98),
            eps=config.epsilon,
        )
        self.step = 0
        self.seconds = 0.0

    def _of_settings(self, head: Any, images: Any, texts: Any) -> Tensor:
        return self.config.objective(head, images, texts, done=self.step / self.config.steps)

    def rate(self) -> float:
        """Share of the peak learning rate: linear warm-up, then cosine to zero."""
        config = self.config
        if self.step < config.warmup_steps:
            return (self.step + 1) / config.warmup_steps
        done = (self.step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * done))

    def advance(self, images: Any, texts: Any) -> dict[str, float]:
        """One optimiser step on a batch; what the log says of it. Raises FloatingPointError for a broken gradient."""
        config = self.config
        device = next(self.head.parameters()).device
        self.head.train()
        self.head.anneal(self.step / config.steps)
        narrow = torch.autocast(device.type, torch.bfloat16) if config.precision == "bfloat16" else nullcontext()
        # Dropout of a step depends on the step alone, and the caller's random numbers are left as they are.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(config.seed * 1_000_003 + self.step + self.processes.rank * 15_485_863)
            with narrow:
                loss = self.loss.objective(self.scored, images.to(device), texts.to(device))
            self.optimizer.zero_grad()
            loss.backward()
        self.processes.average_gradients(self.head)
        norm = nn.utils.clip_grad_norm_(self.head.parameters(), config.clip_norm)
        if not torch.isfinite(norm):
            who = f"train {self.head.name}"
            raise FloatingPointError(f"{who}: gradient is not finite at step {self.step}; lower the learning rate")
        rate = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["share"] * config.learning_rate
        self.optimizer.step()
        self.step += 1
        return {
            "loss": float(loss.detach()),
            "gradient": float(norm),
            "rate": rate,
            "scale": float(torch.as_tensor(self.head.scale()).detach()),
        }

    def save(self, path: Path) -> None:
        """Checkpoint, written aside and renamed."""
        state = {
            "weights": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "settings": self._settings(),
        }
        with written_whole(path) as unfinished:
            torch.save(state, unfinished)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same settings. Raises ValueError for one of others."""
        state = read_checkpoint(self.head.name, path, next(self.head.parameters()).device)
        if state.get("settings") != self._settings():
            raise ValueError(
                f"train {self.head.name}: {path} was written with other settings; choose another output folder or "
                "empty this one"
            )
        try:
            self.head.load_state_dict(state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds = int(state["step"]), float(state["seconds"])
            if not 0 <= self.step <= self.config.steps:
                raise ValueError(f"step {self.step} of {self.config.steps}")
        except DAMAGE as error:
            raise damaged(self.head.name, path, error) from error

    def _settings(self) -> str:
        """What must be equal for a checkpoint to be continued."""
        held = {"head": self.head.name, "fingerprint": self.head.fingerprint, "config": asdict(self.head.config)}
        held |= {"data": self.source} if self.source else {}
        held |= {"objective": self.loss.facts} if self.loss.facts else {}
        return json.dumps(self.config.deciding() | held, sort_keys=True)


def train_head(
    head: Trainable,
    data: Batches,
    config: HeadTrainConfig,
    *,
    objective: Objective | BatchLoss | None = None,
    evaluate: Evaluate | None = None,
    report: Report | None = None,
) -> Path:
    """Train a new head, or go on with one; the file of the trained head.

    Writes into `config.output`: `checkpoint.pt`, `log.jsonl` (settings first, then a line for each
    `log_every` steps and each evaluation), and at the end `<name>.safetensors`, which `load_head` reads. Under
    `accelerate launch` the processes share each batch, and the first one writes and evaluates.

    Args:
        head: as `Head.build` made it; it is trained where it is.
        data: stored features of the encoder the head was built for.
        objective: loss of a batch in place of that of `config.loss`; of one that has settings, a `BatchLoss`.
        evaluate: gets the head in evaluation mode and returns named figures.
        report: told (what a step gave, which step it is, of how many).

    Raises ValueError for data that do not fit, or a checkpoint of other settings; FloatingPointError for a gradient
    that is not finite; ModuleNotFoundError where accelerate or TensorBoard is wanted and missing.
    """
    if isinstance(data, HeadData) and objective is None:
        config = config.fitted(data.images_per_item, data.texts_per_item)
    config = config.counted(len(data))
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or threads)
    try:
        run = HeadRun(head, config, objective, source=data.source, processes=processes())
        return _train(run, data, evaluate, report)
    finally:
        torch.set_num_threads(threads)


def _train(run: HeadRun, data: Batches, evaluate: Evaluate | None, report: Report | None) -> Path:
    config, head, main = run.config, run.head, run.processes.is_main
    config.output.mkdir(parents=True, exist_ok=True)
    checkpoint = config.output / "checkpoint.pt"
    check_new(head.name, config.output)
    if checkpoint.exists():
        run.resume(checkpoint)
    # Whoever reads must have read before the first one writes.
    run.processes.wait()
    started = time.monotonic() - run.seconds
    with _log(run) if main else nullcontext() as log:
        for items in epochs(len(data), config.batch_size, config.seed, start=run.step):
            if run.step >= config.steps:
                break
            entry: dict[str, float] = run.advance(*data.batch(items[run.part]))
            run.seconds = time.monotonic() - started
            last = run.step == config.steps
            due = last or (config.evaluate_every > 0 and run.step % config.evaluate_every == 0)
            if evaluate is not None and due and main:
                entry |= _figures(head, evaluate)
            if log is not None and (run.step % config.log_every == 0 or due):
                entry |= {"step": run.step, "items": run.step * config.batch_size, "seconds": run.seconds}
                log.write(entry)
                if report is not None:
                    report(_line(run, entry), run.step, config.steps)
            if main and (run.step % config.checkpoint_every == 0 or last):
                run.save(checkpoint)
    head.eval()
    head.anneal(1.0)
    facts = {"training": json.loads(run._settings()), "steps": run.step}
    saved = head.save(config.output / f"{head.name}.safetensors", facts=facts) if main else None
    return run.processes.from_main(saved)


def _log(run: HeadRun) -> Log:
    config = run.config
    return Log(run.head.name, config.output, run.step, run._settings(), tensorboard=config.tensorboard)


def _figures(head: Trainable, evaluate: Evaluate) -> dict[str, float]:
    head.eval()
    with torch.no_grad():
        return evaluate(head)


def _line(run: HeadRun, entry: dict[str, float]) -> str:
    each = run.seconds / max(run.step, 1)
    left = (run.config.steps - run.step) * each
    known = {"loss", "gradient", "rate", "scale", "step", "items", "seconds"}
    figures = "".join(f"  {name} {value:.2f}" for name, value in entry.items() if name not in known)
    return (
        f"loss {entry['loss']:.3f}  {1000 * each:.0f} ms/step  "
        f"{left / 60:.1f} min left{figures}"
    )
