"""What features must be to be features: shapes that fit together, masks that fit what they mask."""

from __future__ import annotations

from collections.abc import Mapping
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

# What follows the rows in tensors of integers, and how it is written.
_INTEGERS: dict[str, tuple[tuple[int | None, ...], str]] = {
    "boxes": ((None, 4), "(B, R, 4)"),
    "sizes": ((2,), "(B, 2)"),
    "views": ((4,), "(B, 4)"),
    "end": ((), "(B,)"),
}
_WORDS = ("tap", "region_plan", "segmenter", "segment_template", "fingerprint")
_NAMES = ("ids", "texts")
_PIECES = ("segment_texts", "token_texts")


def check_parts(features: Any) -> None:
    """Raise ValueError, naming the part, unless all parts of image or text features fit together.

    Shapes and types are looked at, and of the values none but the segment mask, so that it costs next to nothing.
    """
    who = type(features).__name__
    embedding = features.embedding
    if not isinstance(embedding, Tensor) or embedding.ndim != 2 or embedding.dtype != torch.float32:
        raise ValueError(f"{who}: embedding must be float32 of shape (B, D), got {_shown(embedding)}")
    _check_plain(who, features)
    _check_rows(who, features, len(embedding))
    for name in VECTORS:
        value = getattr(features, name, None)
        if value is not None and (not isinstance(value, Tensor) or value.ndim != 3 or not value.is_floating_point()):
            raise ValueError(
                f"{who}: {name} must be a floating-point tensor with three dimensions, got {_shown(value)}"
            )
    for name, (rest, shape) in _INTEGERS.items():
        value = getattr(features, name, None)
        if value is not None and not _is_integer(value, rest):
            raise ValueError(f"{who}: {name} must be integers of shape {shape}, got {_shown(value)}")
    truncated = getattr(features, "truncated", None)
    if truncated is not None and (truncated.dtype != torch.bool or truncated.ndim != 1):
        raise ValueError(f"{who}: truncated must be bool of shape (B,), got {_shown(truncated)}")
    _check_masks(who, features)
    _check_segment_texts(who, features)


def check_embedding_finite(features: Any) -> None:
    """Raise ValueError naming the first row whose global embedding holds what is no finite number.

    For features from outside. Those an encoder makes are looked at where the picture's name is known.
    """
    bad = (~features.embedding.isfinite().all(dim=1)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"{type(features).__name__}: embedding must be finite, got none in row {bad[0]}")


def _check_plain(who: str, features: Any) -> None:
    """What is no tensor: words, names, the grid, whether patches are aligned."""
    grid, aligned = getattr(features, "grid", None), getattr(features, "aligned", False)
    whole = isinstance(grid, tuple) and all(type(side) is int and side > 0 for side in grid)
    if grid is not None and not (whole and len(grid) == 2):
        raise ValueError(f"{who}: grid must be two positive integers (rows, columns) or None, got {grid!r}")
    if not isinstance(aligned, bool):
        raise ValueError(f"{who}: aligned must be True or False, got {aligned!r}")
    for name in _WORDS:
        value = getattr(features, name, "")
        if not isinstance(value, str):
            raise ValueError(f"{who}: {name} must be a string, got {type(value).__name__}")
    for name in _NAMES:
        value = getattr(features, name, None)
        if value is not None and not _are_words(value):
            raise ValueError(f"{who}: {name} must be a tuple of strings, one for each row, got {value!r:.60}")
    for name in _PIECES:
        value = getattr(features, name, None)
        if value is not None and not (isinstance(value, tuple) and all(map(_are_words, value))):
            raise ValueError(f"{who}: {name} must be a tuple of tuples of strings, got {value!r:.60}")
    if not isinstance(features.hidden, Mapping):
        raise ValueError(f"{who}: hidden must be a mapping of layers to tensors, got {type(features.hidden).__name__}")


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
            if not isinstance(entry, Tensor | tuple):
                raise ValueError(f"{who}: {name} must be a tensor, got {type(entry).__name__}")
            got = len(entry) if not isinstance(entry, Tensor) or entry.ndim else "a single number"
            if got != rows:
                raise ValueError(f"{who}: {name} must have one row for each of {rows} embeddings, got {got}")


def _check_masks(who: str, features: Any) -> None:
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


def _check_segment_texts(who: str, features: Any) -> None:
    """Every segment that counts has its words: without a mask all of them do."""
    texts, segments = getattr(features, "segment_texts", None), getattr(features, "segments", None)
    if texts is None or segments is None or segments.is_meta:
        return
    mask, width = features.segment_mask, segments.shape[1]
    # The place of the last segment that counts, from 1; 0 where none does.
    last = [width] * len(texts)
    if mask is not None:
        places = torch.arange(1, width + 1, device=mask.device)
        last = (mask * places).amax(dim=1).tolist() if width else [0] * len(texts)
    for row, (words, wanted) in enumerate(zip(texts, last, strict=True)):
        if not wanted <= len(words) <= width:
            masked = "has no segment_mask, so that all count" if mask is None else "keeps them up to there"
            raise ValueError(
                f"{who}: segment_texts of row {row} must name {wanted} to {width} segments ({masked}), got {len(words)}"
            )


def _is_integer(value: Any, rest: tuple[int | None, ...]) -> bool:
    if not isinstance(value, Tensor) or value.ndim != 1 + len(rest):
        return False
    fits = all(want in (None, size) for size, want in zip(value.shape[1:], rest, strict=True))
    return fits and value.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _are_words(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(word, str) for word in value)


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__
