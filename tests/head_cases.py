"""A tiny encoder's facts, and random features as it would make them, for tests of heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.features import ImageFeatures, TextFeatures

LENGTH = 7
WIDTH = 16


@dataclass(frozen=True)
class Facts:
    """What ``engine.heads.base.EncoderFacts`` asks for."""

    name: str = "tiny"
    fingerprint: str = "tiny-1"
    embed_dim: int = 12
    grid: tuple[int, int] | None = (2, 3)
    image_layers: int = 2
    text_layers: int = 2
    image_width: int = WIDTH
    text_width: int = WIDTH


FACTS = Facts()


def unit(*shape: int) -> torch.Tensor:
    return functional.normalize(torch.randn(*shape), dim=-1)


def make_images(n: int, seed: int = 1) -> ImageFeatures:
    """``n`` images: a class token before 2 × 3 patches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ImageFeatures(
            unit(n, FACTS.embed_dim),
            patches=unit(n, 6, FACTS.embed_dim),
            grid=(2, 3),
            aligned=True,
            tap="projected",
            hidden={layer: torch.randn(n, 7, WIDTH) for layer in (1, 2)},
            sizes=torch.tensor([[20, 30]] * n, dtype=torch.int32),
            views=torch.tensor([[0, 0, 30, 20]] * n, dtype=torch.int32),
            fingerprint=FACTS.fingerprint,
        )


def make_texts(n: int, seed: int = 2) -> TextFeatures:
    """``n`` texts of 1 to 4 words between a start and an end, padded to ``LENGTH``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        end = 2 + torch.arange(n) % 4
        place = torch.arange(LENGTH)
        words = (place > 0) & (place < end[:, None])
        return TextFeatures(
            unit(n, FACTS.embed_dim),
            tokens=unit(n, LENGTH, FACTS.embed_dim),
            token_mask=words,
            attention_mask=place <= end[:, None],
            end=end,
            hidden={layer: torch.randn(n, LENGTH, WIDTH) for layer in (1, 2)},
            token_texts=tuple(tuple(f"word{i}{t}" for t in range(LENGTH)) for i in range(n)),
            texts=tuple(f"caption {i}" for i in range(n)),
            fingerprint=FACTS.fingerprint,
        )
