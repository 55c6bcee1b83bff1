"""Vectors of length 1, as the ops define them: a vector that has no direction becomes zeros.

    unit(x) = x / ‖x‖ where ‖x‖ ≥ 1e-12, else 0

NaN in a vector makes all of it NaN; an infinity gives inf / inf = NaN in its place and 0 beside it. A vector
without direction passes no gradient, where dividing by a small constant would pass an enormous one.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Shorter vectors count as zero.
SHORTEST = 1e-12


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic and results for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x (..., D)` at length 1, and the lengths `(..., 1)` that it had."""
    length = x.square().sum(-1, keepdim=True).sqrt()
    # A NaN length is not shorter than anything and stays.
    return torch.where(length < SHORTEST, 0, x / length), length


def unit_backward(y: Tensor, length: Tensor, grad: Tensor) -> Tensor:
    """Gradient of x, given `unit(x)` and the gradient of its first result."""
    tangent = grad - y * (y * grad).sum(-1, keepdim=True)
    return torch.where(length < SHORTEST, 0, tangent / length)
