"""How a text tower reads an embedding off a hidden state: its final layer norm, then a linear map."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional


class TextReadout(NamedTuple):
    """The frozen end of a text tower, which may be applied to the states of any of its layers.

        readout(h) = projection · layer_norm(h) + projection_bias

    At the end position of the last layer it gives the encoder's own embedding before it is normalised; at an
    earlier layer, what that layer already holds of it (the layer features of Lu, Chen and Chaterji 2026).
    """

    norm_weight: Tensor
    """(W,)."""
    norm_bias: Tensor
    """(W,)."""
    projection: Tensor | None
    """(D, W); None where the normalised state is the embedding."""
    projection_bias: Tensor | None = None
    """(D,) or None."""
    norm_eps: float = 1e-5

    def normalised(self, states: Tensor) -> Tensor:
        """States `(..., W)` after the final layer norm, float32."""
        weight, bias = self.norm_weight.float(), self.norm_bias.float()
        return functional.layer_norm(states.float(), weight.shape, weight, bias, self.norm_eps)

    def embed(self, states: Tensor) -> Tensor:
        """States `(..., W)` as vectors `(..., D)` of the shared space, float32, unit norm."""
        states = self.normalised(states)
        if self.projection is not None:
            bias = None if self.projection_bias is None else self.projection_bias.float()
            states = functional.linear(states, self.projection.float(), bias)
        return functional.normalize(states, dim=-1)
