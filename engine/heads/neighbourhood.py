"""Patch vectors made of the patches around: an object rarely lies within one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional


class Neighbourhood(nn.Module):
    """Frozen patch states to vectors, each made of its neighbourhood: `(B, P, states)` to `(B, P, out)`.

    Args:
        states: width of the patch states.
        grid: rows and columns of the P patches.
        width: of the layers inside.
        reach: how many patches beyond itself, on every side, a vector is made of; 0 is an MLP for each patch.
        out: width of the vectors.
    """

    def __init__(self, states: int, grid: Sequence[int], *, width: int, reach: int, out: int) -> None:
        super().__init__()
        self.grid = tuple(grid)
        self.inward = nn.Sequential(nn.LayerNorm(states), nn.Linear(states, width), nn.GELU())
        self.around = nn.Conv2d(width, width, 2 * reach + 1, padding=reach)
        self.outward = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        x = self.around(x.transpose(1, 2).unflatten(2, self.grid)).flatten(2).transpose(1, 2)
        return self.outward(functional.gelu(x))
