"""A small generator of pictures of scenes from a caption's embedding: what is in an embedding, made visible.

A rectified flow (Liu, Gong and Liu 2022, arXiv 2209.03003): from noise x₀ to a picture x₁ along straight lines,

    x_t = (1 − t) · x₀ + t · x₁,      v(x_t, t, e) ≈ x₁ − x₀

whose velocity a transformer over patches predicts (Peebles and Xie 2022, arXiv 2212.09748; one modulation shared by all
blocks as in Chen et al. 2023, arXiv 2310.00426). The embedding e steers it twice: through the modulation, and as a few
tokens beside the patches. A share of the training leaves e out, so that sampling can be guided (Ho and Salimans 2022,
arXiv 2207.12598).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.heads.base import Trainable
from engine.heads.picture_files import built_from_header, read_float16, save_float16, with_weights

FREQUENCIES = 32


@dataclass(frozen=True)
class SceneGeneratorConfig:
    """Sizes of a `SceneGenerator`.

    Attributes:
        embed_dim: width D of the embeddings.
        side: of the pictures in pixels; `patch` divides it.
        patch: side of a patch.
        width, depth, heads: of the transformer.
        expansion: width of the hidden layers over `width`.
        context: tokens made of the embedding.

    Raises ValueError for a size below 1, a side that patches do not fill or a width that heads do not share out.
    """

    embed_dim: int
    side: int = 32
    patch: int = 4
    width: int = 128
    depth: int = 4
    heads: int = 4
    expansion: int = 2
    context: int = 4

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"SceneGeneratorConfig: {name} must be at least 1, got {value}")
        if self.side % self.patch or self.width % self.heads:
            raise ValueError(
                "SceneGeneratorConfig: patch must divide side and heads width, got "
                f"{self.side} / {self.patch} and {self.width} / {self.heads}"
            )

    @property
    def patches(self) -> int:
        """Patches of a picture."""
        return (self.side // self.patch) ** 2


class Block(nn.Module):
    """Attention and an MLP, each on modulated norms; `shift`, `scale` and `gate` of both are `(B, 6, width)`."""

    def __init__(self, config: SceneGeneratorConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, config.expansion * width)
        self.down = nn.Linear(config.expansion * width, width)
        self.bias = nn.Parameter(torch.zeros(6, width))

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """States `(B, T, width)`."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = (modulation + self.bias)[:, :, None].unbind(1)
        x = x + gate * self._attention(_normed(x) * (1 + scale) + shift)
        hidden = functional.gelu(self.up(_normed(x) * (1 + scale_mlp) + shift_mlp), approximate="tanh")
        return x + gate_mlp * self.down(hidden)

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class SceneGenerator(Trainable):
    """Pictures from embeddings of captions.

    Args:
        config: sizes.
        encoder, fingerprint: name and fingerprint of the encoder whose embeddings it was trained on.
    """

    name: ClassVar[str] = "scene_generator"
    config: SceneGeneratorConfig

    def __init__(self, config: SceneGeneratorConfig, *, encoder: str = "", fingerprint: str = "") -> None:
        super().__init__()
        self.config, self.encoder, self.fingerprint = config, encoder, fingerprint
        width, pixels = config.width, 3 * config.patch**2
        self.patches_in = nn.Linear(pixels, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, config.context + config.patches, width))
        self.context = nn.Linear(config.embed_dim, config.context * width)
        self.steer = nn.Sequential(
            nn.Linear(config.embed_dim + 2 * FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.modulation = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.last = nn.Linear(width, 2 * width)
        self.patches_out = nn.Linear(width, pixels)
        # Stands for no caption at all.
        self.nothing = nn.Parameter(torch.zeros(config.embed_dim))
        for layer in (self.modulation, self.last, self.patches_out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, t: Tensor, embeddings: Tensor) -> Tensor:
        """Velocities `(B, 3, S, S)` at pictures `x (B, 3, S, S)`, times `t (B,)` and unit `embeddings (B, D)`."""
        config = self.config
        # Unit vectors have tiny entries; noise and pictures do not.
        steering = embeddings * config.embed_dim**0.5
        context = self.context(steering).view(len(x), config.context, config.width)
        states = torch.cat([context, self.patches_in(_patches(x, config.patch))], dim=1) + self.positions
        steered = self.steer(torch.cat([steering, _waves(t)], dim=1))
        modulation = self.modulation(steered).view(len(x), 6, config.width)
        for block in self.blocks:
            states = block(states, modulation)
        shift, scale = self.last(steered)[:, None].chunk(2, dim=-1)
        states = _normed(states[:, config.context :]) * (1 + scale) + shift
        return _picture(self.patches_out(states), config.patch)

    @torch.no_grad()
    def sample(self, embeddings: Tensor, *, seed: int, steps: int = 16, guidance: float = 2.0) -> Tensor:
        """Pictures `(B, 3, S, S)` in [−1, 1] of unit embeddings `(B, D)`, a pure function of its arguments.

        Row i starts from the i-th noise of the seed whatever the other rows are, so that two ways to embed one caption
        can be compared on the same noise. `steps` of Euler; `guidance` 1 follows the caption as it was trained to,
        more exaggerates what sets it apart from no caption. Raises ValueError for embeddings of another width or
        fewer than one step.
        """
        config = self.config
        if embeddings.ndim != 2 or embeddings.shape[1] != config.embed_dim or steps < 1:
            raise ValueError(
                f"{self.name}: embeddings must have shape (B, {config.embed_dim}) and steps be at least 1, got "
                f"{tuple(embeddings.shape)} and {steps}"
            )
        noise = torch.Generator().manual_seed(seed)
        x = torch.randn(len(embeddings), 3, config.side, config.side, generator=noise).to(embeddings.device)
        nothing = self.nothing.expand_as(embeddings)
        for step in range(steps):
            t = torch.full((len(x),), step / steps, device=x.device)
            velocity = self(x, t, embeddings)
            if guidance != 1:
                free = self(x, t, nothing)
                velocity = free + guidance * (velocity - free)
            x = x + velocity / steps
        return x.clamp(-1, 1)

    def save(self, path: str | PathLike[str], *, facts: Mapping[str, object] | None = None) -> Path:
        """Write one safetensors file of float16 weights, which `load_generator` reads."""
        return save_float16(self, path, encoder=self.encoder, facts=facts)


def load_generator(path: str | PathLike[str], *, fingerprint: str = "") -> SceneGenerator:
    """The generator of a file, on the CPU and in evaluation mode.

    `fingerprint`: of the encoder whose embeddings it is wanted for; empty takes any.

    Raises FileNotFoundError, and ValueError for a file that holds something else, is damaged, or belongs to another
    encoder.
    """
    header, state = read_float16("load_generator", path, SceneGenerator.name)
    if fingerprint and header["fingerprint"] != fingerprint:
        raise ValueError(
            f"load_generator: {path} belongs to the encoder {header['encoder']} ({header['fingerprint']}), wanted "
            f"one for {fingerprint}; `peaksim train generator` trains it"
        )
    with built_from_header("load_generator", path):
        generator = SceneGenerator(
            SceneGeneratorConfig(**header["config"]), encoder=header["encoder"], fingerprint=header["fingerprint"]
        )
    with_weights("load_generator", path, generator, state)
    return generator


def _normed(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def _waves(t: Tensor) -> Tensor:
    """Cosines and sines of times `(B,)`, `(B, 2 · FREQUENCIES)`."""
    rates = torch.exp(torch.arange(FREQUENCIES, device=t.device) * (math.log(1000.0) / FREQUENCIES))
    angles = t[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _patches(x: Tensor, patch: int) -> Tensor:
    """Pictures `(B, 3, S, S)` as `(B, P, 3 · patch²)`, row by row."""
    return functional.pixel_unshuffle(x, patch).flatten(2).transpose(1, 2)


def _picture(patches: Tensor, patch: int) -> Tensor:
    """What `_patches` took apart."""
    side = math.isqrt(patches.shape[1])
    return functional.pixel_shuffle(patches.transpose(1, 2).unflatten(2, (side, side)), patch)
