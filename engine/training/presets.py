"""Settings of the training of each kind of head on the embedded model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.training.heads import HeadTrainConfig

TRAINING: Mapping[str, HeadTrainConfig] = {
    "max_sim_head": HeadTrainConfig(
        output=Path("runs/max_sim_head"),
        loss="auto",
        steps=1500,
        learning_rate=3e-3,
        batch_weight=1.0,
        evaluate_every=200,
    ),
    "tflocal": HeadTrainConfig(
        output=Path("runs/tflocal"),
        loss="auto",
        steps=2000,
        batch_size=16,
        learning_rate=1e-3,
        evaluate_every=400,
    ),
    "tfglobal": HeadTrainConfig(
        output=Path("runs/tfglobal"),
        loss="auto",
        steps=2000,
        learning_rate=1e-3,
        evaluate_every=400,
    ),
    "window_head": HeadTrainConfig(
        output=Path("runs/window_head"),
        steps=1000,
        learning_rate=1e-3,
        evaluate_every=250,
    ),
    "finetune": HeadTrainConfig(
        output=Path("runs/finetune"),
        loss="auto",
        steps=1500,
        learning_rate=1e-4,
        weight_decay=0.05,
        batch_weight=1.0,
        evaluate_every=500,
    ),
    # After Koishigarina et al. 2026: hard negative captions, no warm-up.
    "linear": HeadTrainConfig(
        output=Path("runs/linear"),
        steps=1000,
        batch_size=128,
        learning_rate=1e-3,
        weight_decay=0.0,
        warmup_steps=0,
        loss="captions",
        evaluate_every=200,
    ),
}
