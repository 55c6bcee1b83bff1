"""The max-sim head: binding that can be indexed.

Each side is projected on its own (no cross-attention), so that projected patches can be stored and searched; the score
is late interaction (Khattab and Zaharia 2020, ColBERT) of gated, contextual word vectors with patch vectors:

    score(I, T) = Σ_u g_u(T) · max_p ⟨q_u(T), d_p(I)⟩,   Σ_u g_u = 1
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.choices import check_numbers
from engine.features import ImageFeatures, Needs, TextFeatures
from engine.heads.base import EncoderFacts, Head, HeadConfig
from engine.heads.inputs import (
    check_grid,
    check_reach,
    chosen_layers,
    encoder_sizes,
    grid_of,
    kept_tokens,
    patch_states,
    shortened,
    token_states,
    unit,
)
from engine.heads.neighbourhood import Neighbourhood
from engine.ops.max_sim import max_sim, max_sim_pairs
from engine.ops.max_sim_contrastive import max_sim_contrastive


@dataclass(frozen=True)
class MaxSimHeadConfig(HeadConfig):
    """Sizes of a `MaxSimHead`."""

    width: int = 128
    """Width of the layers inside."""
    dim: int = 64
    """Width D of the vectors that are compared, and that an index would hold."""
    heads: int = 4
    """Attention heads of the text layer."""
    reach: int = 1
    """Patches on every side that a patch's vector is made of too (1: 3 × 3); 0 is an MLP for each alone."""
    temperature: float = 0.05
    """Temperature τ of the soft maximum, τ·logsumexp(s/τ), at the start of training."""
    final_temperature: float = 0.02
    """Temperature at the end, reached geometrically; a head that is served soft keeps it."""
    initial_scale: float = 20.0
    """Scale of the contrastive logits at the start; learned."""
    # Later ones know of the whole picture, which is a shortcut around who has what.
    image_layers: tuple[int, ...] = ()
    """Image blocks, from 1, whose patches are read; none takes those at a sixth, a third and half of the depth."""
    text_layers: tuple[int, ...] = ()
    """Text blocks, from 1, whose tokens are read; none takes the last."""
    image_width: int = 0
    """Width of the encoder's image states; 0 takes its own."""
    text_width: int = 0
    """Width of the encoder's text states; 0 takes its own."""
    grid: tuple[int, ...] = ()
    """Rows and columns of the encoder's patches; none takes its own."""

    def __post_init__(self) -> None:
        sizes = {"width": 1, "dim": 1, "heads": 1, "reach": 0, "image_width": 0, "text_width": 0}
        places = {"image_layers": 1, "text_layers": 1, "grid": 1}
        # The op takes temperatures up to this.
        most = {"temperature": 1e30}
        check_numbers(self, above_zero=("initial_scale",), integers=sizes | places, at_most=most)
        check_grid("MaxSimHeadConfig", self.grid)
        if not 0 < self.final_temperature <= self.temperature:
            raise ValueError(
                "MaxSimHeadConfig: temperatures must be above 0 and fall, got "
                f"{self.temperature} to {self.final_temperature}"
            )
        if self.width % self.heads:
            raise ValueError(f"MaxSimHeadConfig: width must be a multiple of heads, got {self.width} and {self.heads}")

    def fitted(self, encoder: EncoderFacts) -> MaxSimHeadConfig:
        who, grid = MaxSimHead.name, grid_of(MaxSimHead.name, encoder)
        check_reach(who, self.reach, grid)
        sizes = {"image_width": encoder.image_width, "text_width": encoder.text_width, "grid": grid}
        default = tuple(dict.fromkeys(max(1, round(encoder.image_layers * share / 6)) for share in (1, 2, 3)))
        return replace(
            self,
            image_layers=chosen_layers(who, "image", self.image_layers, default, encoder.image_layers),
            text_layers=chosen_layers(who, "text", self.text_layers, (encoder.text_layers,), encoder.text_layers),
            **encoder_sizes(who, encoder, self, sizes),
        )


class TextLayer(nn.Module):
    """One pre-norm self-attention layer with its MLP, `(B, T, width)` to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        """`kept` bool `(B, T)`: the positions that may be looked at."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, width / heads)
        logits = (q * (q.shape[-1] ** -0.5)) @ k.transpose(-2, -1)  # (B, heads, T, T)
        mixed = logits.masked_fill(~kept[:, None, None], -torch.inf).softmax(dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class MaxSimHead(Head):
    """Contextual projections of frozen tokens and frozen patches, compared by `engine.ops.max_sim`.

    Args:
        config: fitted to an encoder.
        encoder, fingerprint: the encoder it belongs to.
    """

    name: ClassVar[str] = "max_sim_head"
    config_type = MaxSimHeadConfig
    config: MaxSimHeadConfig

    def __init__(self, config: MaxSimHeadConfig, *, encoder: str = "", fingerprint: str = "") -> None:
        super().__init__(config, encoder=encoder, fingerprint=fingerprint)
        patch_width = len(config.image_layers) * config.image_width
        token_width = len(config.text_layers) * config.text_width
        self.image_side = Neighbourhood(
            patch_width, config.grid, width=config.width, reach=config.reach, out=config.dim
        )
        self.text_in = nn.Sequential(nn.LayerNorm(token_width), nn.Linear(token_width, config.width))
        self.text_layer = TextLayer(config.width, config.heads)
        self.text_norm = nn.LayerNorm(config.width)
        self.text_out = nn.Linear(config.width, config.dim)
        self.gate = nn.Linear(config.width, 1)
        self.log_scale = nn.Parameter(torch.tensor(config.initial_scale).log())
        # Served as trained: the temperature at the end of the training.
        self.temperature = config.final_temperature

    @property
    def patches(self) -> int:
        """Patches P of the encoder's grid."""
        return math.prod(self.config.grid)

    def needs(self) -> Needs:
        """Hidden states of the layers it was configured with."""
        return Needs(image_layers=self.config.image_layers, text_layers=self.config.text_layers)

    def encode_images(self, images: ImageFeatures) -> Tensor:
        """Patch vectors `(B, P, D)`, unit norm, float32: what an index holds."""
        states = patch_states(images, self.config.image_layers, self.patches, self.gate.weight)
        return unit(self.image_side(states))

    def encode_texts(self, texts: TextFeatures) -> tuple[Tensor, Tensor, Tensor]:
        """Word vectors `(B, T, D)`, unit norm; their gates `(B, T)`, which sum to 1; the bool mask of words.

        T reaches to the last position that any of the texts uses.
        """
        texts = shortened(texts)
        return self.read_tokens(token_states(texts, self.config.text_layers, self.gate.weight), *kept_tokens(texts))

    def read_tokens(self, states: Tensor, seen: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `encode_texts` gives, from token states `(B, T, states)` and the masks of `kept_tokens`."""
        x = self.text_in(states)
        x = self.text_norm(self.text_layer(x, seen))
        # A caption without a word is asked by its start and end: a softmax over nothing would be NaN.
        words = words | (seen & ~words.any(dim=1, keepdim=True))
        gates = self.gate(x)[..., 0].float().masked_fill(~words, -torch.inf).softmax(dim=1)
        return unit(self.text_out(x)), gates, words

    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Scores `(n_images, n_texts)` with the soft maximum at the head's `temperature`."""
        self.check(images, texts)
        return self.compare(self.encode_images(images), self.encode_texts(texts), self.temperature).T

    def pairs(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Scores `(n,)` of image i with text i, as `matrix` has them."""
        self.check_pairs(images, texts)
        return self.compare(self.encode_images(images), self.encode_texts(texts), self.temperature, pairs=True)

    def chosen(self, images: ImageFeatures, texts: TextFeatures, image_rows: Tensor, text_rows: Tensor) -> Tensor:
        """Scores `(n,)` of image `image_rows[k]` with text `text_rows[k]`; every row is projected once."""
        self.check(images, texts)
        d, (q, gates, words) = self.encode_images(images), self.encode_texts(texts)
        asking = q[text_rows], gates[text_rows], words[text_rows]
        return self.compare(d[image_rows], asking, self.temperature, pairs=True)

    def contrastive(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """The contrastive loss `()` of `matrix`, without the scores of single words being kept for the gradient."""
        self.check(images, texts)
        d, (q, gates, words) = self.encode_images(images), self.encode_texts(texts)
        return max_sim_contrastive(
            q, d, logit_scale=self.scale(), q_mask=words, q_weights=gates, temperature=self.temperature
        )

    def compare(
        self,
        d: Tensor,
        asking: tuple[Tensor, Tensor, Tensor],
        temperature: float | None,
        *,
        pairs: bool = False,
        backend: str | None = None,
    ) -> Tensor:
        """Scores `(n_texts, n_images)`, or `(n,)` of pairs, of vectors encoded before.

        `temperature` None is the hard maximum, which an index scores.
        """
        q, gates, words = asking
        found = (max_sim_pairs if pairs else max_sim)(
            q, d, q_mask=words, q_weights=gates, temperature=temperature, backend=backend
        )
        assert isinstance(found, Tensor)  # no alignment was asked for
        return found

    def scale(self) -> Tensor:
        """The learned scale of the contrastive logits, at most 200."""
        return self.log_scale.exp().clamp(max=200.0)

    def anneal(self, share: float) -> None:
        """Move the temperature from the first to the final one, geometrically."""
        first, last = self.config.temperature, self.config.final_temperature
        self.temperature = first * (last / first) ** min(max(share, 0.0), 1.0)
