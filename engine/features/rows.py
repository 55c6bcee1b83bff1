"""Rows of features: some of them, all of them elsewhere, those of several features in one."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.features.checks import FLAGS, MASKS, VECTORS

if TYPE_CHECKING:
    from engine.features.types import ImageFeatures, TextFeatures

Features = TypeVar("Features", "ImageFeatures", "TextFeatures")
Rows = SupportsIndex | slice | Sequence[int] | Tensor

_AGREED = ("fingerprint", "aligned", "tap", "region_plan", "segmenter", "segment_template")
_RAGGED = {*MASKS, *FLAGS, *VECTORS, "boxes"}


def select(features: Features, rows: Rows) -> Features:
    """The chosen rows as features of their own; see `ImageFeatures.__getitem__`."""
    index = _index(type(features).__name__, rows, len(features))
    picked = index.tolist()
    changes: dict[str, Any] = {}
    for item in fields(features):
        value = getattr(features, item.name)
        if isinstance(value, Tensor):
            changes[item.name] = value[index.to(value.device)]
        elif item.name == "hidden":
            changes[item.name] = {k: v[index.to(v.device)] for k, v in value.items()}
        elif isinstance(value, tuple) and item.name != "grid":
            changes[item.name] = tuple(value[i] for i in picked)
    return replace(features, **changes)


def _index(who: str, rows: Any, count: int) -> Tensor:
    """Row numbers from 0, int64, on the CPU."""
    if isinstance(rows, slice):
        return torch.arange(count)[range(count)[rows]]
    if isinstance(rows, bool) or not hasattr(rows, "__len__") or getattr(rows, "ndim", 1) == 0:
        if isinstance(rows, bool) or str(getattr(rows, "dtype", "")).endswith("bool"):
            raise TypeError(f"{who}: a row must be an integer, got a bool")
        rows = [operator.index(rows)]
    index = torch.as_tensor(rows).cpu()
    if index.ndim != 1 or (index.numel() and (index.is_floating_point() or index.is_complex())):
        kind = f"{str(index.dtype).removeprefix('torch.')} {tuple(index.shape)}"
        raise TypeError(f"{who}: rows must be a slice, integers or one bool for each row, got {kind}")
    if index.dtype == torch.bool:
        if len(index) != count:
            raise IndexError(f"{who}: a bool selection must have {count} entries, one for each row, got {len(index)}")
        return index.nonzero().flatten()
    index = index.to(torch.int64)
    outside = index[(index < -count) | (index >= count)]
    if len(outside):
        raise IndexError(f"{who}: row {int(outside[0])} is out of range for {count} rows")
    return torch.where(index < 0, index + count, index)


def moved(features: Features, device: torch.device | str) -> Features:
    """The same features with every tensor on `device`."""
    changes: dict[str, Any] = {}
    for item in fields(features):
        value = getattr(features, item.name)
        if isinstance(value, Tensor):
            changes[item.name] = value.to(device)
        elif item.name == "hidden":
            changes[item.name] = {k: v.to(device) for k, v in value.items()}
    return replace(features, **changes)


def joined(cls: type[Features], parts: Sequence[Features]) -> Features:
    """Rows of all parts in order; arguments and errors as for `ImageFeatures.cat`."""
    who = f"{cls.__name__}.cat"
    if not parts:
        raise ValueError(f"{who}: needs at least one part, got none")
    for part in parts:
        if not isinstance(part, cls):
            raise TypeError(f"{who}: parts must be {cls.__name__}, got {type(part).__name__}")
    first = parts[0]
    for name in _AGREED:
        held = {getattr(part, name, None) for part in parts}
        if len(held) > 1:
            raise ValueError(f"{who}: parts must agree on {name}, got {sorted(map(str, held))}")
    changes: dict[str, Any] = {}
    for item in fields(first):
        values = [getattr(part, item.name) for part in parts]
        if item.name == "grid":
            # One grid for all rows or none: what the parts are joined in what order makes no difference.
            changes["grid"] = values[0] if len(set(values)) == 1 else None
            continue
        if item.name == "hidden":
            layers = set(values[0])
            if any(set(value) != layers for value in values):
                raise ValueError(f"{who}: parts must hold hidden states of the same layers")
            changes["hidden"] = {
                k: _stacked(who, f"hidden[{k}]", [value[k] for value in values], ragged=True) for k in sorted(layers)
            }
            continue
        if item.name in MASKS:
            values = _filled(parts, item.name)
        if all(value is None for value in values):
            continue
        if any(value is None for value in values):
            raise ValueError(f"{who}: {item.name} is present in some parts and missing in others")
        if isinstance(values[0], Tensor):
            changes[item.name] = _stacked(who, item.name, values, ragged=item.name in _RAGGED)
        elif isinstance(values[0], tuple):
            changes[item.name] = tuple(entry for value in values for entry in value)
    return replace(first, **changes)


def _filled(parts: Sequence[Any], mask: str) -> list[Tensor | None]:
    """The parts' masks: written out where a part has none but another has one, or padding will need one."""
    masks = [getattr(part, mask) for part in parts]
    for name in MASKS[mask]:
        held = [getattr(part, name) for part in parts]
        if any(value is None for value in held):
            continue
        if any(value is not None for value in masks) or len({value.shape[1] for value in held}) > 1:
            ones = [torch.ones(value.shape[:2], dtype=torch.bool, device=value.device) for value in held]
            return [full if value is None else value for value, full in zip(masks, ones, strict=True)]
    return masks


def _stacked(who: str, name: str, values: Sequence[Tensor], *, ragged: bool) -> Tensor:
    """All rows in one tensor; `ragged` ones are padded along dimension 1 with zeros (False)."""
    start = 2 if ragged else 1
    shapes = sorted({tuple(value.shape[start:]) for value in values})
    if len(shapes) > 1:
        raise ValueError(f"{who}: parts must agree on the width of {name}, got {shapes}")
    if ragged:
        width = max(value.shape[1] for value in values)
        values = [functional.pad(v, (0, 0) * (v.ndim - 2) + (0, width - v.shape[1])) for v in values]
    return torch.cat(list(values))
