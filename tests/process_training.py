"""One of the processes of a training, run by `tests/test_processes.py` as `accelerate launch` would run it."""

from __future__ import annotations

import atexit
import json
import os
import sys
import warnings
from pathlib import Path

import torch

from engine.features import ImageFeatures, TextFeatures
from engine.heads.base import Head
from engine.heads.registry import HEADS
from engine.store import FeatureStore
from engine.training.finetune import finetune as finetune_scenes
from engine.training.head_data import HeadData, ScenesQuads
from engine.training.heads import BatchLoss, HeadTrainConfig, train_head
from engine.training.losses import quad_loss, quad_rows
from engine.training.negatives import NegativesObjective
from tests.head_cases import FACTS


def own_objective(head: Head, images: ImageFeatures, texts: TextFeatures) -> torch.Tensor:
    """A mean over items, whose mean over processes is that of all."""
    size = len(images) // 2
    pair = torch.arange(size)
    return quad_loss(head.chosen(images, texts, *quad_rows(pair, pair + size)).view(size, 2, 2))


def finetune(folder: Path, case: dict[str, str]) -> Path:
    """Fine-tune the embedded model for a few steps, in-batch and within quads."""
    items = ScenesQuads(items=8, categories=("color",)).draw()
    config = HeadTrainConfig(
        folder / case["output"],
        steps=int(case["steps"]),
        batch_size=4,
        warmup_steps=2,
        learning_rate=1e-4,
        log_every=2,
        loss=case["loss"],  # type: ignore[arg-type]
    )
    return finetune_scenes(items, config)


def train(folder: Path, case: dict[str, str]) -> Path:
    """Train one case on the stores in a folder; what decides the weights is the same in every process."""
    if case["head"] == "finetune":
        return finetune(folder, case)
    data = HeadData(FeatureStore.open(folder / "images"), FeatureStore.open(folder / "texts"), 2, 2)
    config = HeadTrainConfig(
        folder / case["output"],
        steps=int(case["steps"]),
        batch_size=4,
        warmup_steps=2,
        learning_rate=2e-3,
        log_every=2,
        checkpoint_every=3,
        loss=case["loss"],  # type: ignore[arg-type]
        batch_weight=0.5 if case["loss"] == "quads" else 0.0,
    )
    head = HEADS[case["head"]].build(FACTS, seed=1)
    objectives = {
        "config": None,
        "own": own_objective,
        "negatives": BatchLoss(NegativesObjective("quads", group=2, batch_weight=0.5), whole_batch=True),
    }
    return train_head(head, data, config, objective=objectives[case["objective"]])


def threads() -> list[str]:
    """Of this process, by name; none where the system does not tell."""
    return sorted(path.read_text().strip() for path in Path("/proc").glob(f"{os.getpid()}/task/*/comm"))


def check_alone() -> None:
    """End the process with an error where threads of a process group outlive it: now and then they abort it."""
    left = [name for name in threads() if "gloo" in name or "tcpstore" in name]
    if left:
        print(f"threads that are left: {left}", file=sys.stderr, flush=True)
        os._exit(3)


if __name__ == "__main__":
    # Registered before the engine's own, so called after it.
    atexit.register(check_alone)
    # Of third parties, in a process that has no tests' settings.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for case in json.loads(sys.argv[2]):
        print(train(Path(sys.argv[1]), case))
