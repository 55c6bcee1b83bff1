"""What features must be to be features: shapes that fit together, masks that fit what they mask."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

# The bool mask of each thing that may be ragged along dimension 1. Padding needs it to be told from a value.
MASKS = {
    "patch_mask": ("patches",),
    "region_mask": ("regions", "boxes"),
    "token_mask": ("tokens",),
    "segment_mask": ("segments",),
}
# Other bool tensors with one value for each position or segment.
FLAGS = {"attention_mask": ("tokens",), "segment_negated": ("segments",)}
VECTORS = ("patches", "regions", "tokens", "segments")


def check_parts(features: Any) -> None:
    """Raise ValueError, naming the part, unless all parts of image or text features fit together."""
    who = type(features).__name__
    embedding = features.embedding
    if not isinstance(embedding, Tensor) or embedding.ndim != 2 or not embedding.is_floating_point():
        raise ValueError(f"{who}: embedding must be a floating-point tensor of shape (B, D), got {_shown(embedding)}")
    _check_rows(who, features, len(embedding))
    for name in VECTORS:
        value = getattr(features, name, None)
        if value is not None and (not isinstance(value, Tensor) or value.ndim != 3 or not value.is_floating_point()):
            raise ValueError(
                f"{who}: {name} must be a floating-point tensor with three dimensions, got {_shown(value)}"
            )
    boxes = getattr(features, "boxes", None)
    if boxes is not None and (boxes.ndim != 3 or boxes.shape[2] != 4):
        raise ValueError(f"{who}: boxes must have the shape (B, R, 4), got {_shown(boxes)}")
    for mask, masked in (MASKS | FLAGS).items():
        value = getattr(features, mask, None)
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.dtype != torch.bool or value.ndim != 2:
            raise ValueError(f"{who}: {mask} must be a bool tensor with two dimensions, got {_shown(value)}")
        for name in masked:
            held = getattr(features, name)
            if held is not None and held.shape[:2] != value.shape:
                raise ValueError(
                    f"{who}: {mask} must have the shape {tuple(held.shape[:2])} of {name}, got {tuple(value.shape)}"
                )


def _check_rows(who: str, features: Any, rows: int) -> None:
    for item in fields(features):
        value = getattr(features, item.name)
        if item.name == "hidden":
            sized = [(f"hidden[{layer}]", state) for layer, state in value.items()]
        elif item.name == "grid" or isinstance(value, str | bool) or value is None:
            continue
        else:
            sized = [(item.name, value)]
        for name, entry in sized:
            got = len(entry) if not isinstance(entry, Tensor) or entry.ndim else "a single number"
            if got != rows:
                raise ValueError(f"{who}: {name} must have one row for each of {rows} embeddings, got {got}")


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__
