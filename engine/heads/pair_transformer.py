"""A small transformer that reads an image and a text together and gives one score: the body of TFLocal and TFGlobal.

    [score token; projected image vectors; projected text vectors] → pre-norm layers → LayerNorm → Linear → score

Each side's projection, and its part of the first layer's queries, keys and values, do not depend on the other side:
they are computed once for each image and each text, not for each pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

# Numbers of the widest tensor that are held at once while many pairs are scored: 2^24 float32 are 64 MiB.
BLOCK_VALUES = 1 << 24


@dataclass(frozen=True)
class PairSizes:
    """Sizes of a `PairTransformer`: widths of both inputs and of the inside, layers, heads, width of the MLP."""

    image_width: int
    text_width: int
    width: int
    layers: int
    heads: int
    mlp: int


class Side(NamedTuple):
    """One side, projected: `x (B, L, width)`, `qkv (B, L, 3 * width)` of the first layer, bool `kept (B, L)`."""

    x: Tensor
    qkv: Tensor
    kept: Tensor

    def rows(self, index: Tensor) -> Side:
        """The chosen rows."""
        return Side(*(part[index] for part in self))


class PairLayer(nn.Module):
    """Pre-norm self-attention and MLP with residuals, `(B, L, width)` to the same."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, mlp)
        self.down = nn.Linear(mlp, width)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of each position, `(B, L, 3 * width)`."""
        return self.qkv(self.norm_attention(x))

    def forward(self, x: Tensor, qkv: Tensor, kept: Tensor, *, first_alone: bool = False) -> Tensor:
        """The layer's output given its `project`-ed input; `first_alone`: of the first position only."""
        q, k, v = self._heads(qkv)
        asking = q[:, :, :1] if first_alone else q
        mixed = _attend(asking, k, v, kept[:, None, None])
        x = (x[:, :1] if first_alone else x) + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))

    def attention(self, qkv: Tensor, kept: Tensor) -> Tensor:
        """Who looks at whom, mean over heads: `(B, L, L)`, rows sum to 1."""
        q, k, _ = self._heads(qkv)
        logits = (q * (q.shape[-1] ** -0.5)) @ k.transpose(-2, -1)  # (B, heads, L, L)
        return logits.masked_fill(~kept[:, None, None], -torch.inf).softmax(dim=-1).mean(dim=1)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, width = qkv.shape
        q, k, v = qkv.view(batch, length, 3, self.heads, width // (3 * self.heads)).permute(2, 0, 3, 1, 4)
        return q, k, v


class PairTransformer(nn.Module):
    """Scores of pairs of an image (vectors `(P, image_width)`) and a text (vectors `(T, text_width)`)."""

    def __init__(self, sizes: PairSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.image_in = nn.Linear(sizes.image_width, sizes.width)
        self.text_in = nn.Linear(sizes.text_width, sizes.width)
        self.score_token = nn.Parameter(0.02 * torch.randn(1, 1, sizes.width))
        self.sides = nn.Parameter(0.02 * torch.randn(2, sizes.width))
        self.layers = nn.ModuleList(PairLayer(sizes.width, sizes.heads, sizes.mlp) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.score = nn.Linear(sizes.width, 1)

    def image_side(self, x: Tensor, kept: Tensor) -> Side:
        """Images `(B, P, image_width)` with the bool mask of what is there."""
        return self._side(self.image_in(_centred(x)) + self.sides[0], kept)

    def text_side(self, x: Tensor, kept: Tensor) -> Side:
        """Texts `(B, T, text_width)` with the bool mask of what is there."""
        return self._side(self.text_in(_centred(x)) + self.sides[1], kept)

    def pairs(self, images: Side, texts: Side) -> Tensor:
        """Scores `(B,)` of image i with text i, float32."""
        x, qkv, kept = self._joined(images, texts)
        for number, layer in enumerate(self._layers()):
            if number:
                qkv = layer.project(x)
            # Of the last layer only the score token is read.
            x = layer(x, qkv, kept, first_alone=number == self.sizes.layers - 1)
        return self.score(self.norm(x[:, 0]))[:, 0].float()

    def matrix(self, images: Side, texts: Side) -> Tensor:
        """Scores `(n_images, n_texts)`, float32, a block of pairs at a time."""
        n_images, n_texts = len(images.x), len(texts.x)
        each = (1 + images.x.shape[1] + texts.x.shape[1]) * max(self.sizes.mlp, 3 * self.sizes.width)
        block = max(1, BLOCK_VALUES // each)
        pair = torch.arange(n_images * n_texts, device=images.x.device)
        scores = [self.pairs(images.rows(rows // n_texts), texts.rows(rows % n_texts)) for rows in pair.split(block)]
        return torch.cat(scores).view(n_images, n_texts)

    def attention(self, images: Side, texts: Side) -> Tensor:
        """Where each text position looks in the image, mean over heads and layers: `(B, T, P)`.

        Rows sum to less than 1: the rest goes to the text and the score token.
        """
        x, qkv, kept = self._joined(images, texts)
        first = 1 + images.x.shape[1]
        total = x.new_zeros(len(x), texts.x.shape[1], images.x.shape[1])
        for number, layer in enumerate(self._layers()):
            if number:
                qkv = layer.project(x)
            total = total + layer.attention(qkv, kept)[:, first:, 1:first]
            x = layer(x, qkv, kept)
        return total / self.sizes.layers

    def _side(self, x: Tensor, kept: Tensor) -> Side:
        return Side(x, next(self._layers()).project(x), kept)

    def _joined(self, images: Side, texts: Side) -> Side:
        """The sequences of all pairs, the score token first."""
        first = self._side(self.score_token, torch.ones(1, 1, dtype=torch.bool, device=images.x.device))
        parts = zip(first, images, texts, strict=True)
        return Side(*(torch.cat([x.expand(y.shape[0], *x.shape[1:]), y, z], dim=1) for x, y, z in parts))

    def _layers(self) -> Iterator[PairLayer]:
        for layer in self.layers:
            assert isinstance(layer, PairLayer)
            yield layer


def _attend(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """Attention of `q` over the kept positions, `(B, heads, Lq, head width)`."""
    if q.dtype != torch.bfloat16 or q.device.type != "cpu":
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)
    # On CPUs the fused backward is slow in bfloat16: a step takes half as long again as with plain products.
    logits = (q * (q.shape[-1] ** -0.5)) @ k.transpose(-2, -1)  # (B, heads, Lq, L)
    return logits.masked_fill(~kept, -torch.inf).softmax(dim=-1).to(v.dtype) @ v


def head_count(width: int) -> int:
    """Heads of 64 numbers each, as in CLIP; of all in one where the width has no such heads."""
    return width // 64 if width % 64 == 0 else 1


def _centred(x: Tensor) -> Tensor:
    """Zero mean and unit variance: hidden states of encoders differ in scale by orders of magnitude."""
    # As a number: a graph that is traced of this must know the width.
    return functional.layer_norm(x, (int(x.shape[-1]),))


def parameter_count(sizes: PairSizes) -> int:
    """Numbers of a `PairTransformer` of these sizes, without building it.

    >>> parameter_count(PairSizes(768, 512, 512, 4, 8, 2048))
    13268993
    """
    w, m = sizes.width, sizes.mlp
    layer = 4 * w * w + 4 * w + 2 * w * m + w + m + 4 * w
    inward = (sizes.image_width + sizes.text_width + 2) * w
    return sizes.layers * layer + inward + 3 * w + 2 * w + w + 1
