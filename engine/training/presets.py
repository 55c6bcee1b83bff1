"""Settings of the training of each kind of head: on the embedded model, and those of the papers for CLIP on COCO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal

from engine.encoders.base import EncoderSpec
from engine.encoders.scenes_model import ScenesModelConfig
from engine.heads.base import HeadConfig
from engine.heads.tfglobal import TFGlobalConfig
from engine.heads.tflocal import TFLocalConfig
from engine.training.heads import HeadTrainConfig

Preset = Literal["scenes", "paper"]

TRAINING: Mapping[str, HeadTrainConfig] = {
    "max_sim_head": HeadTrainConfig(
        output=Path("runs/max_sim_head"),
        loss="auto",
        steps=1500,
        learning_rate=3e-3,
        batch_weight=1.0,
        evaluate_every=200,
    ),
    # On quads alone it gives all pairs the same score; beside the loss of the batch it does not get to them. A batch of
    # B costs B² + 4 B runs.
    "tflocal": HeadTrainConfig(
        output=Path("runs/tflocal"),
        loss="auto",
        steps=2000,
        batch_size=16,
        precision="bfloat16",
        learning_rate=1e-3,
        batch_weight=1.0,
        batch_until=0.5,
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

_PAIRS = HeadTrainConfig(
    epochs=10,
    batch_size=32,
    learning_rate=1e-4,
    weight_decay=0.1,
    warmup_steps=50,
    loss="auto",
)
# What papers say of theirs. Of TFLocal and TFGlobal Miranda et al. 2026 do not say it: weight decay, warm-up and epochs
# are those of the same authors' fine-tuning (BiVLC, Miranda et al. 2024, arXiv 2406.09952), rate and batch a guess.
PAPERS: Mapping[str, HeadTrainConfig] = {
    "tflocal": _PAIRS,
    "tfglobal": _PAIRS,
    "finetune": replace(_PAIRS, batch_size=400, learning_rate=1e-6, epsilon=1e-6),
    # Koishigarina et al. 2026: Adam, captions with nouns and adjectives permuted.
    "linear": replace(_PAIRS, batch_size=1024, learning_rate=1e-3, weight_decay=0.0, warmup_steps=0, loss="captions"),
    # Lu et al. 2026: the joint training of both corrections, and of the one of captions before it.
    "peakpatch": HeadTrainConfig(
        epochs=10, batch_size=1024, learning_rate=1e-4, weight_decay=0.01, part_rates=(("ecn.", 0.1),), warmup_steps=0
    ),
    "pretraining": HeadTrainConfig(
        epochs=20, batch_size=2048, learning_rate=1e-3, weight_decay=0.01, warmup_steps=0
    ),
}


# Sizes of heads on the embedded model; any other takes those that fit ViT-B/32.
SCENES_HEADS: Mapping[str, HeadConfig] = {
    "tflocal": TFLocalConfig(layers=2, heads=4, mlp=256, image_layers=(3, 6)),
    "tfglobal": TFGlobalConfig(layers=2, heads=4, mlp=256),
}


def head_for(name: str, encoder: EncoderSpec, config: HeadConfig) -> HeadConfig:
    """The sizes for this encoder: of the embedded model those measured for it, where no others were given."""
    known = SCENES_HEADS.get(name)
    if known is None or (encoder.family, encoder.text_layers) != ("scenes", ScenesModelConfig().text_layers):
        return config
    return known if config == type(config)() else config


def with_preset(name: str, preset: Preset, given: HeadTrainConfig, default: HeadTrainConfig) -> HeadTrainConfig:
    """`given`; of the paper's preset the paper's settings in place of those that are the default ones.

    Raises ValueError for a kind of head that no paper trained.
    """
    if preset == "scenes":
        return given
    if name not in PAPERS:
        raise ValueError(f"--preset: paper must be of {', '.join(sorted(PAPERS))}, got {name}, which is our own")
    # Where runs are kept and how often they are saved and measured are nothing of a paper.
    kept = {"output", "seed", "checkpoint_every", "evaluate_every", "log_every", "threads", "tensorboard", "precision"}
    changed = {field.name for field in fields(given) if getattr(given, field.name) != getattr(default, field.name)}
    return replace(PAPERS[name], **{each: getattr(given, each) for each in kept | changed})
