"""An encoder that looks pictures and captions up: equal keys are equal vectors, others are far apart."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from engine.encoders.base import Tokens
from engine.engine import Engine
from engine.features import ImageFeatures, TextFeatures
from tests.fake_encoder import FakeEncoder

WIDTH = 256
Keys = Mapping[bytes, Sequence[str]]


class KeyedEncoder(FakeEncoder):
    """A picture is the mean of the vectors of its keys, a caption the vector of ``key_of(caption)``.

    Pictures without keys are a vector of their own pixels.
    """

    def __init__(self, keys: Keys, key_of: Callable[[str], str] = str) -> None:
        super().__init__(context_length=48, name="keyed")
        self.spec = replace(self.spec, embed_dim=WIDTH)
        self._keys, self._key_of = keys, key_of

    def preprocess(self, image: Image.Image) -> Tensor:
        keys = self._keys.get(image.tobytes())
        names = [key.encode() for key in keys] if keys is not None else [image.tobytes()]
        pixels = torch.zeros(3, 16, 16)
        pixels.view(-1)[:WIDTH] = torch.stack([vector(name) for name in names]).mean(dim=0)
        return pixels

    def preprocess_region(self, image: Image.Image) -> Tensor:
        return self.preprocess(image)

    def encode_pixels(self, pixels: Tensor, *, tap: str | None = None, layers: Sequence[int] = ()) -> ImageFeatures:
        embedding = functional.normalize(pixels.flatten(1)[:, :WIDTH], dim=-1)
        return ImageFeatures(embedding=embedding, fingerprint=self.spec.fingerprint)

    def encode_tokens(self, tokens: Tokens, *, token_vectors: bool = False, layers: Sequence[int] = ()) -> TextFeatures:
        return TextFeatures(
            embedding=torch.stack([vector(self._key_of(text).encode()) for text in tokens.texts]),
            truncated=tokens.truncated,
            texts=tokens.texts,
            fingerprint=self.spec.fingerprint,
        )


def vector(key: bytes) -> Tensor:
    """A unit vector of its own for each key."""
    generator = torch.Generator().manual_seed(zlib.crc32(key))
    return functional.normalize(torch.randn(WIDTH, generator=generator), dim=0)


def keyed(keys: Keys | None = None, key_of: Callable[[str], str] = str) -> Engine:
    """An engine over it; without keys, pictures and captions have nothing to do with each other."""
    return Engine(KeyedEncoder({} if keys is None else keys, key_of), segmenter="rules")


def constant() -> Engine:
    """An engine to which everything is the same."""
    return Engine(_Constant({}, lambda text: ""), segmenter="rules")


class _Constant(KeyedEncoder):
    def preprocess(self, image: Image.Image) -> Tensor:
        return super().preprocess(Image.fromarray(np.zeros((2, 2, 3), dtype=np.uint8)))
