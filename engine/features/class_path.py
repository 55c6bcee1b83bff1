"""How an image tower's class token goes through its blocks, for heads that begin as a copy of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ClassPath:
    """Frozen blocks of an image tower as its class token uses them, and what makes an embedding of its last state.

    Attributes:
        heads: attention heads of each block.
        activation: of their MLPs, `"gelu"`, `"quick_gelu"` or `"hard_swish"`.
        blocks: weights of each pre-norm block by name: `norm_attention`, `qkv`, `out`, `norm_mlp`, `up` and `down`,
            each with `.weight` and `.bias`.
        norm_weight, norm_bias: `(W,)` of the final layer norm.
        projection: `(D, W)`.
    """

    heads: int
    activation: str
    blocks: tuple[Mapping[str, Tensor], ...]
    norm_weight: Tensor
    norm_bias: Tensor
    projection: Tensor

    @property
    def hidden(self) -> int:
        """Width inside the MLPs."""
        return len(self.blocks[0]["up.weight"])
