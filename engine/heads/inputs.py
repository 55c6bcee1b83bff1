"""How heads read frozen features: layers side by side, patches apart from class tokens, and unit vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.features import ImageFeatures, TextFeatures
from engine.heads.base import EncoderFacts


def patch_states(images: ImageFeatures, layers: Sequence[int], patches: int, like: Tensor) -> Tensor:
    """Hidden states of the patches, the layers side by side: `(B, P, len(layers) * W)`, as dtype of `like`.

    Class and register tokens stand before the patches and are left out.
    """
    return torch.cat([images.hidden[layer][:, -patches:] for layer in layers], dim=-1).to(like)


def token_states(texts: TextFeatures, layers: Sequence[int], like: Tensor) -> Tensor:
    """Hidden states of all text positions, the layers side by side: `(B, T, len(layers) * W)`."""
    return torch.cat([texts.hidden[layer] for layer in layers], dim=-1).to(like)


def kept_tokens(texts: TextFeatures) -> tuple[Tensor, Tensor]:
    """Two bool masks `(B, T)`: what may be looked at (start, words, end) and the words alone.

    Features without masks are looked at whole. T is 0 for features without positions.
    """
    words, seen = texts.token_mask, texts.attention_mask
    if words is None:
        words = seen
    if words is None:
        held = next(iter(texts.hidden.values()), texts.tokens)
        length = 0 if held is None else held.shape[1]
        words = torch.ones(len(texts), length, dtype=torch.bool, device=texts.embedding.device)
    return words if seen is None else seen, words


def shortened(texts: TextFeatures) -> TextFeatures:
    """The same texts up to the last position that any of them keeps: what lies behind is padding for all of them."""
    kept, _ = kept_tokens(texts)
    used = kept.any(dim=0).nonzero()
    length = int(used[-1]) + 1 if len(used) else kept.shape[1]
    if length == kept.shape[1]:
        return texts
    words = texts.token_texts
    return replace(
        texts,
        tokens=_first(texts.tokens, length),
        token_mask=_first(texts.token_mask, length),
        attention_mask=_first(texts.attention_mask, length),
        hidden={layer: state[:, :length] for layer, state in texts.hidden.items()},
        token_texts=None if words is None else tuple(row[:length] for row in words),
    )


def _first(x: Tensor | None, length: int) -> Tensor | None:
    return None if x is None else x[:, :length]


def chosen_layers(who: str, tower: str, layers: Sequence[int], default: Sequence[int], count: int) -> tuple[int, ...]:
    """The layers asked for, or the default ones. Raises ValueError for a layer the tower does not have."""
    chosen = tuple(layers) or tuple(default)
    for layer in chosen:
        if not 1 <= layer <= count:
            raise ValueError(f"{who}: {tower} layers must be 1 to {count}, got {layer}")
    return chosen


def grid_of(who: str, encoder: EncoderFacts) -> tuple[int, int]:
    """The encoder's patch grid. Raises ValueError for one without patches."""
    if encoder.grid is None:
        raise ValueError(f"{who}: needs an encoder with a fixed patch grid, got {encoder.name} without one")
    return encoder.grid


def encoder_sizes(who: str, encoder: EncoderFacts, config: object, sizes: Mapping[str, object]) -> dict[str, Any]:
    """The encoder's `sizes`, by their names in a configuration. Raises ValueError where that was given others."""
    for name, wanted in sizes.items():
        given = getattr(config, name)
        if given and given != wanted:
            raise ValueError(f"{who}: {name} must be {encoder.name}'s {wanted}, got {given}")
    return dict(sizes)


def check_reach(who: str, reach: int, grid: tuple[int, int]) -> None:
    """Raise ValueError for a neighbourhood that goes beyond all patches: what lies there is empty."""
    if reach > max(grid):
        raise ValueError(f"{who}: reach must be at most the longer side of the grid {grid}, got {reach}")


def check_grid(who: str, grid: Sequence[int]) -> None:
    """Raise ValueError for a grid that is neither rows and columns nor, of an encoder not yet known, none."""
    if len(grid) not in (0, 2):
        raise ValueError(f"{who}: grid must be rows and columns, got {grid}")


def unit(x: Tensor) -> Tensor:
    """Rows of unit length, float32."""
    return functional.normalize(x.float(), dim=-1)
