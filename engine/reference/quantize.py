"""Token vectors as int8 codes with one scale each: the contract, and its specification in plain torch.

    rotated = R · x,    scale = max |rotated| / 127,    codes = round(rotated / scale),    x ≈ Rᵀ · codes · scale

Vision features have a few huge dimensions, which would set the scale and leave the others two or three levels.
R is a fixed orthogonal matrix that spreads each dimension over all, after Ashkboos et al., "QuaRot" (2024):

    R = H · S₂ · P · H · S₁

with H the normalised Hadamard transform, for a D that is no power of two in blocks of the powers of two in its
binary form, the largest first (1152 = 1024 + 128); S₁ and S₂ diagonals of signs; P a permutation that carries what one
block mixed to the others. Signs and permutation depend on D alone and are the same for ever (SplitMix64, Steele et
al. 2014), so that codes may be stored. R changes no inner product: scores of codes stand for scores of the vectors.

* Arithmetic is float32, element by element: a vector's codes do not depend on the vectors beside it.
* Codes lie in [−127, 127]. A vector of zeros has codes and scale 0. One with NaN or an infinity in it has codes 0 and
  scale NaN.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

LEVELS = 127
# Elements rotated at a time: what a cache holds.
CHUNK = 2**18
SEEDS = (1, 2, 3)


class QuantizedTokens(NamedTuple):
    """Token vectors as codes; x ≈ dequantize(codes, scales)."""

    codes: Tensor
    """int8 (..., D), of the rotated vector."""
    scales: Tensor
    """float32 (...), one a vector."""


def split_mix(seed: int, count: int) -> list[int]:
    """The first `count` 64-bit numbers of SplitMix64."""
    numbers, state, mask = [], seed, 2**64 - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        numbers.append(z ^ (z >> 31))
    return numbers


@lru_cache(maxsize=16)
def pattern(dim: int) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
    """Diagonals of S₁ and S₂, and where each dimension of P's result comes from."""
    one, two = ([1.0 if x >> 63 else -1.0 for x in split_mix(seed, dim)] for seed in SEEDS[:2])
    keys = split_mix(SEEDS[2], dim)
    return tuple(one), tuple(two), tuple(sorted(range(dim), key=keys.__getitem__))


def powers(dim: int) -> list[int]:
    """The powers of two in the binary form of `dim`, largest first."""
    return [1 << b for b in reversed(range(dim.bit_length())) if dim >> b & 1]


def hadamard(x: Tensor) -> Tensor:
    """H · x along the last axis; H is its own inverse."""
    blocks = []
    for part, n in zip(x.split(powers(x.shape[-1]), -1), powers(x.shape[-1]), strict=True):
        half = 1
        while half < n:
            a, b = part.unflatten(-1, (-1, 2, half)).unbind(-2)
            part = torch.stack((a + b, a - b), -2).flatten(-3)
            half *= 2
        blocks.append(part * n**-0.5)
    return torch.cat(blocks, -1)


def rotate(x: Tensor) -> Tensor:
    """R · x along the last axis."""
    one, two, order = pattern(x.shape[-1])
    x = hadamard(x * x.new_tensor(one))
    return hadamard(x[..., list(order)] * x.new_tensor(two))


def rotate_back(x: Tensor) -> Tensor:
    """Rᵀ · x along the last axis."""
    one, two, order = pattern(x.shape[-1])
    spread = torch.empty_like(x)
    spread[..., list(order)] = hadamard(x) * x.new_tensor(two)
    return hadamard(spread) * x.new_tensor(one)


def quantize(x: Tensor) -> QuantizedTokens:
    """The contract above for `x (..., D)` of any floating dtype."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_zeros((x.shape[:-1].numel(), x.shape[-1]))
    codes = rows.new_zeros(rows.shape, dtype=torch.int8)
    scales = rows.new_zeros(rows.shape[0], dtype=torch.float32)
    step = max(1, CHUNK // max(1, rows.shape[1]))
    for first in range(0, rows.shape[0] if rows.shape[1] else 0, step):
        part = slice(first, first + step)
        codes[part], scales[part] = _codes(rotate(rows[part].to(torch.float32)))
    return QuantizedTokens(codes.view(x.shape), scales.view(x.shape[:-1]))


def _codes(rotated: Tensor) -> tuple[Tensor, Tensor]:
    greatest = rotated.abs().amax(-1)
    scale = torch.where(greatest.isfinite(), greatest / LEVELS, torch.nan)
    levels = (rotated / scale[:, None]).round().clamp(-LEVELS, LEVELS)
    # A scale of 0 or NaN gives NaN levels.
    return levels.nan_to_num(0.0).to(torch.int8), scale


def dequantize(x: QuantizedTokens) -> Tensor:
    """Vectors `(..., D)` float32 in the original dimensions."""
    levels = x.codes.to(torch.float32)
    return rotate_back(levels * x.scales[..., None]) if levels.shape[-1] else levels
