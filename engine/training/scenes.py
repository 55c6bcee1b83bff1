"""Training of the embedded `scenes` model from scratch on rendered scenes.

A symmetric contrastive loss over in-batch pairs, as in CLIP (Radford et al. 2021): no hard negatives and no label
says which attribute belongs to which object. An auxiliary loss on the class token asks only which attributes are
present somewhere in the picture (and how many objects, in pictures of one group); it fades out before the end and
its head is thrown away.

A batch is a pure function of seed and step, so a run that was stopped goes on to the same weights.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.atomic_files import written_whole
from engine.choices import check_choice, check_numbers, check_seed
from engine.encoders.scenes import WordTokenizer, pixels_from_uint8, save_scenes
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.scenes.captions import WORDS
from engine.scenes.render import training_batch
from engine.training.logs import DAMAGE, Report, check_new, cut_log, damaged, read_checkpoint
from engine.training.losses import contrastive_loss

Evaluate = Callable[[ScenesModel, WordTokenizer], dict[str, float]]
Precision = Literal["bfloat16", "float32"]

COUNTS = 4
# Punctuation is no word: the tokenizer drops it.
VOCABULARY = tuple(word for word in WORDS if word.isalnum())


@dataclass(frozen=True)
class ScenesTrainConfig:
    """Settings of one run."""

    output: Path = Path("runs/scenes")
    """Folder of checkpoint, log and weights."""
    seed: int = 0
    """Of the initial weights and of every batch."""
    steps: int = 2400
    """Length of the run; samples seen are steps times batch size."""
    batch_size: int = 128
    """Pairs of picture and caption in one step."""
    learning_rate: float = 1.2e-3
    """Of AdamW, which trains embeddings, stem, projections, norms and biases."""
    block_learning_rate: float = 0.02
    """Of Muon, for the matrices of the blocks; with AdamW alone shapes were learned several times more slowly."""
    warmup_steps: int = 200
    """Steps of linear warm-up, after which both learning rates fall to zero along a cosine."""
    weight_decay: float = 0.05
    """Of AdamW."""
    clip_norm: float = 1.0
    """Bound of the norm of the gradients."""
    presence_weight: float = 1.0
    """Weight of the auxiliary loss, a sum over attributes, at the start; it falls linearly to 0."""
    count_weight: float = 1.0
    """Weight of the count loss within the auxiliary loss."""
    presence_until: float = 0.75
    """Share of the run after which the auxiliary loss is gone."""
    one_group_until: float = 0.15
    """Share of the run in which scenes hold one group of objects."""
    two_groups_until: float = 0.3
    """Share of the run in which scenes hold at most two groups of objects."""
    max_scale: float = 100.0
    """Bound of the learned logit scale."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""
    evaluate_every: int = 400
    """Steps between evaluations."""
    precision: Precision = "bfloat16"
    """bfloat16 (computes in bfloat16 with float32 master weights) or float32."""
    threads: int = 0
    """CPU threads; 0 keeps torch's own number."""
    model: ScenesModelConfig = field(default_factory=ScenesModelConfig)
    """Sizes of the model."""

    def __post_init__(self) -> None:
        check_choice("ScenesTrainConfig", "precision", self.precision, get_args(Precision))
        if self.steps < 1 or self.batch_size < 2:
            raise ValueError(
                "ScenesTrainConfig: steps must be at least 1 and batch_size at least 2, got "
                f"{self.steps} and {self.batch_size}"
            )
        check_seed("ScenesTrainConfig", self.seed)
        check_numbers(
            self,
            above_zero=("learning_rate", "block_learning_rate", "clip_norm", "max_scale"),
            at_least_zero=("weight_decay", "presence_weight", "count_weight"),
            integers={"checkpoint_every": 1, "evaluate_every": 1, "warmup_steps": 0, "threads": 0},
            at_most={"learning_rate": 1000, "block_learning_rate": 1000, "weight_decay": 1000, "threads": 1024}
            | dict.fromkeys(("clip_norm", "presence_weight", "count_weight", "max_scale"), 1e30),
        )
        for name in ("one_group_until", "two_groups_until"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"ScenesTrainConfig: {name} must be in [0, 1], got {getattr(self, name)}")
        if not 0 < self.presence_until <= 1:
            raise ValueError(f"ScenesTrainConfig: presence_until must be in (0, 1], got {self.presence_until}")


class Trainee(nn.Module):
    """The model and the head of the auxiliary loss, trained together."""

    def __init__(self, config: ScenesModelConfig, attributes: int, count_weight: float) -> None:
        super().__init__()
        self.model = ScenesModel(config)
        self.count_weight = count_weight
        self.presence = nn.Linear(config.width, attributes + COUNTS)

    def forward(
        self, pixels: Tensor, ids: Tensor, end: Tensor, present: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Contrastive loss, auxiliary loss, and the share of images that pick their own caption."""
        state = self.model.image.norm(self.model.image.class_state(pixels))
        f = functional.normalize(self.model.image.projection(state).float(), dim=-1)
        g = functional.normalize(self._embed_texts(ids, end).float(), dim=-1)
        logits = self.model.log_scale.float().exp() * (f @ g.T)
        target = torch.arange(len(f))
        contrastive = contrastive_loss(logits)
        guess = self.presence(state).float()
        auxiliary = functional.binary_cross_entropy_with_logits(guess[:, :-COUNTS], present, reduction="none")
        auxiliary = auxiliary.sum(dim=1).mean()
        single = counts > 0
        if single.any():
            count_loss = functional.cross_entropy(guess[single, -COUNTS:], counts[single] - 1)
            auxiliary = auxiliary + self.count_weight * count_loss
        return contrastive, auxiliary, (logits.argmax(dim=1) == target).float().mean()

    def _embed_texts(self, ids: Tensor, end: Tensor) -> Tensor:
        """Text embeddings, the shorter half of the captions apart: it need not be padded to the longest."""
        order = end.argsort()
        halves = [
            self.model.embed_texts(ids[rows, : int(end[rows].max()) + 1], end[rows]) for rows in order.chunk(2)
        ]
        return torch.cat(halves)[order.argsort()]


class Run:
    """State of one training: float32 master weights, the copy that computes, and the optimiser."""

    def __init__(self, config: ScenesTrainConfig, attributes: int) -> None:
        self.config = config
        # The seed is of these weights alone: the caller's random numbers go on as if nothing had happened.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.master = Trainee(config.model, attributes, config.count_weight)
            self.worker = Trainee(config.model, attributes, config.count_weight)
        self.worker.load_state_dict(self.master.state_dict())
        if config.precision == "bfloat16":
            self.worker.to(torch.bfloat16)
        matrices = [p for name, p in self.master.named_parameters() if ".blocks." in name and p.ndim == 2]
        others = [p for name, p in self.master.named_parameters() if not (".blocks." in name and p.ndim == 2)]
        plain = [p for p in others if p.ndim < 2]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.AdamW(
                [
                    {"params": [p for p in others if p.ndim >= 2], "weight_decay": config.weight_decay},
                    {"params": plain, "weight_decay": 0.0},
                ],
                betas=(0.9, 0.98),
                fused=True,
            ),
            torch.optim.Muon(matrices, weight_decay=config.weight_decay),
        )
        self.peak_rates = (config.learning_rate, config.block_learning_rate)
        self.step = 0
        self.seconds = 0.0

    def rate(self) -> float:
        """Share of the peak learning rates: linear warm-up, then cosine to zero."""
        config = self.config
        if self.step < config.warmup_steps:
            return (self.step + 1) / config.warmup_steps
        done = (self.step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * done))

    def max_groups(self) -> int:
        """Groups of objects that a scene may have at this step: one, then two, then three."""
        share = self.step / self.config.steps
        return 1 if share < self.config.one_group_until else 2 if share < self.config.two_groups_until else 3

    def advance(self, batch: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> dict[str, float]:
        """One optimiser step; the losses of the batch. Raises FloatingPointError for a gradient that is not finite."""
        config = self.config
        contrastive, auxiliary, accuracy = self.worker(*batch)
        share = self.step / config.steps
        weight = config.presence_weight * max(0.0, 1 - share / config.presence_until)
        (contrastive + weight * auxiliary).backward()
        for ours, theirs in zip(self.master.parameters(), self.worker.parameters(), strict=True):
            ours.grad = torch.zeros_like(ours) if theirs.grad is None else theirs.grad.float()
            theirs.grad = None
        norm = nn.utils.clip_grad_norm_(self.master.parameters(), config.clip_norm)
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"train scenes: gradient is not finite at step {self.step}; lower the learning rates"
            )
        rate = self.rate()
        for optimizer, peak in zip(self.optimizers, self.peak_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * peak
            optimizer.step()
        with torch.no_grad():
            self.master.model.log_scale.clamp_(max=math.log(config.max_scale))
            for ours, theirs in zip(self.master.parameters(), self.worker.parameters(), strict=True):
                theirs.copy_(ours)
        self.step += 1
        return {
            "loss": contrastive.item(),
            "presence_loss": auxiliary.item(),
            "accuracy": accuracy.item(),
            "scale": self.master.model.log_scale.exp().item(),
            "rate": rate,
        }

    def save(self, path: Path) -> None:
        """Checkpoint, written aside and renamed."""
        state = {
            "weights": self.master.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "settings": _settings(self.config),
        }
        with written_whole(path) as unfinished:
            torch.save(state, unfinished)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same settings.

        Raises:
            ValueError: naming the file, for other settings and for a file that is damaged.
        """
        state = read_checkpoint("scenes", path)
        if state.get("settings") != _settings(self.config):
            raise ValueError(
                f"train scenes: {path} was written with other settings; choose another output folder or empty this one"
            )
        try:
            self.master.load_state_dict(state["weights"])
            self.worker.load_state_dict(state["weights"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.seconds = int(state["step"]), float(state["seconds"])
            if not 0 <= self.step <= self.config.steps:
                raise ValueError(f"step {self.step} of {self.config.steps}")
        except DAMAGE as error:
            raise damaged("scenes", path, error) from error


def train(
    config: ScenesTrainConfig, *, evaluate: Evaluate | None = None, report: Report | None = None
) -> Path:
    """Train, or go on with, one seed; the folder of the finished weights.

    Writes `checkpoint.pt`, `log.jsonl` (one line for each 20 steps and each evaluation), and at the end
    `model.safetensors` and `model.json`, which `engine.load("scenes:<folder>")` reads. The first checkpoint is written
    before the first step: a folder that holds any of the others without one is another's, and is left as it is.

    `evaluate` gets the model in float32 and returns named figures; `report` is told (what a step gave,
    which step it is, of how many).

    Raises:
        ValueError: a checkpoint that is damaged or of other settings, a folder that holds a model or a log without a
            checkpoint, and for a vocabulary too small.
        FloatingPointError: a gradient that is not finite.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or threads)
    try:
        return _train(config, evaluate, report)
    finally:
        torch.set_num_threads(threads)


def _train(config: ScenesTrainConfig, evaluate: Evaluate | None, report: Report | None) -> Path:
    config.output.mkdir(parents=True, exist_ok=True)
    check_new("scenes", config.output, "model.json", "log.jsonl")
    tokenizer = WordTokenizer(VOCABULARY, config.model.context_length)
    if tokenizer.size > config.model.vocabulary:
        raise ValueError(
            f"train scenes: vocabulary must hold {tokenizer.size} words, got {config.model.vocabulary}"
        )
    attributes = training_batch(config.seed, 0, 2, max_groups=1)[2].shape[1]
    run = Run(config, attributes)
    checkpoint = config.output / "checkpoint.pt"
    if checkpoint.exists():
        run.resume(checkpoint)
    else:
        run.save(checkpoint)
    log_path = config.output / "log.jsonl"
    cut_log("scenes", log_path, run.step)
    started = time.monotonic() - run.seconds
    with log_path.open("a") as log:
        while run.step < config.steps:
            entry = run.advance(_batch(config, run.step, run.max_groups(), tokenizer))
            run.seconds = time.monotonic() - started
            last = run.step == config.steps
            due = run.step % config.evaluate_every == 0 or last
            if evaluate is not None and due:
                entry |= evaluate(_float_model(run), tokenizer)
            if run.step % 20 == 0 or due:
                entry |= {"step": run.step, "samples": run.step * config.batch_size, "seconds": run.seconds}
                log.write(json.dumps(entry) + "\n")
                log.flush()
                if report is not None:
                    report(_line(config, run, entry), run.step, config.steps)
            if run.step % config.checkpoint_every == 0 or last:
                run.save(checkpoint)
    save_scenes(config.output, _float_model(run), VOCABULARY)
    return config.output


def _batch(
    config: ScenesTrainConfig, step: int, max_groups: int, tokenizer: WordTokenizer
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    images, captions, present, counts = training_batch(
        config.seed, step, config.batch_size, max_groups=max_groups
    )
    pixels = pixels_from_uint8(torch.from_numpy(images))
    if config.precision == "bfloat16":
        pixels = pixels.to(torch.bfloat16)
    tokens = tokenizer(captions)
    length = int(tokens.end.max()) + 1
    return (
        pixels,
        tokens.ids[:, :length],
        tokens.end,
        torch.from_numpy(present).float(),
        torch.from_numpy(counts).long(),
    )


def _float_model(run: Run) -> ScenesModel:
    # Made without memory: initial weights would be drawn for nothing, and from the caller's generator.
    with torch.device("meta"):
        model = ScenesModel(run.config.model)
    model.load_state_dict({key: value.clone() for key, value in run.master.model.state_dict().items()}, assign=True)
    return model.eval().requires_grad_(False)


def _settings(config: ScenesTrainConfig) -> dict[str, object]:
    """What must be equal for a checkpoint to be continued."""
    settings = asdict(config)
    for free in ("output", "threads", "checkpoint_every", "evaluate_every"):
        settings.pop(free)
    return settings


def _line(config: ScenesTrainConfig, run: Run, entry: dict[str, float]) -> str:
    rate = run.step * config.batch_size / max(run.seconds, 1e-9)
    left = (config.steps - run.step) * config.batch_size / rate
    return (
        f"loss {entry['loss']:.3f}  presence {entry['presence_loss']:.3f}  "
        f"in-batch {entry['accuracy']:.2f}  {rate:.0f} samples/s  {left / 60:.0f} min left"
    )
