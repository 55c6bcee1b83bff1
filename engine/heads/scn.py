"""PeakPatch's score correction: a small bounded step on the cosine of one image and one caption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.choices import check_numbers
from engine.heads.ecn import check_sizes
from engine.ops.peak_patch_correct import peak_patch_pairs


@dataclass(frozen=True)
class SCNConfig:
    """Sizes and layer of an `SCN`; 0 stands for what the encoder decides, see `PeakPatchConfig.fitted`.

    Raises ValueError for sizes below 0, a bound that is not positive or a dropout outside [0, 1).
    """

    embed_dim: int = 0
    """Width D of the shared space."""
    low: int = 0
    """Text layer, from 1, whose embedding stands beside the (corrected) last one."""
    score_hidden: int = 0
    """Width of the hidden layers of both context networks of the correction of scores."""
    context: int = 0
    """Width of what both context networks give."""
    dropout: float = 0.1
    """Before the last layer, while training."""
    bound: float = 0.2
    """The correction lies in (−bound, bound)."""

    def __post_init__(self) -> None:
        check_sizes(self, ("embed_dim", "low", "score_hidden", "context"))
        check_numbers(self, above_zero=("bound",))


class CorrectedScores(NamedTuple):
    """Cosines, and what the network adds to them; both `(N, K)`, float32."""

    cosine: Tensor
    correction: Tensor

    @property
    def scores(self) -> Tensor:
        """`cosine + correction`."""
        return self.cosine + self.correction


class SCN(nn.Module):
    """The score correction network of Lu, Chen and Chaterji 2026 ("PeakPatch").

        score = cos(v, t) + bound · tanh(head([cos(v, l), cos(v, t), text([l; t]), cross(v ⊙ t)]))

    with the image v, the caption's (corrected) embedding t and its embedding l at an earlier layer.
    """

    def __init__(self, config: SCNConfig) -> None:
        super().__init__()
        check_sizes(config, ("embed_dim", "score_hidden", "context"), least=1)
        self.config = config
        dim, hidden, context = config.embed_dim, config.score_hidden, config.context
        self.text = _context(2 * dim, hidden, context)
        self.cross = _context(dim, hidden, context)
        self.head = nn.Sequential(
            nn.Linear(2 + 2 * context, context), nn.GELU(), nn.Dropout(config.dropout), nn.Linear(context, 1)
        )
        # Starts out as almost no correction at all.
        last = self.head[-1]
        assert isinstance(last, nn.Linear)
        nn.init.normal_(last.weight, std=0.001)
        nn.init.zeros_(last.bias)

    def forward(self, image: Tensor, text: Tensor, low: Tensor, *, backend: str | None = None) -> CorrectedScores:
        """Scores `(N, K)` of images with their captions.

        Args:
            image: embeddings `(N, D)`.
            text: (corrected) embeddings of the K captions of each image `(N, K, D)`, or of captions `(K, D)` that all
                images are scored against.
            low: embeddings of the captions at the earlier layer, of the shape of `text`.
            backend: of the op.
        """
        # Once for each caption, however many images it meets.
        of_text = self.text(torch.cat([low, text], dim=-1))
        shape = (len(image), *text.shape[-2:])
        sims, cross = peak_patch_pairs(image, text.expand(shape), low.expand(shape), backend=backend)
        of_text = of_text.expand(*shape[:2], -1)
        found = self.head(torch.cat([sims, of_text, self.cross(cross)], dim=-1)).squeeze(-1)
        return CorrectedScores(sims[..., 1], self.config.bound * found.tanh())


def _context(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, outputs))
