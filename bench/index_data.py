"""Synthetic images for benchmarks of the index: windows around topics, in any number, a block at a time.

Each image shows `TOPICS_SHOWN` of `TOPICS` topics; each of its windows is one of them with noise, its global embedding
the mean of its windows. A query asks for windows of one image, with noise of its own: the way a caption names some of
the things that a picture shows. Everything follows from the seed; a block is the same whichever were drawn before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from engine.features import ImageFeatures, TextFeatures
from engine.retrieval.index import Index
from engine.retrieval.manifest import MANIFEST, Manifest, VectorKind
from engine.retrieval.storage import Storage

TOPICS, TOPICS_SHOWN = 2000, 5
# Length of the noise beside a topic's unit vector: of a window around its topic, of a query around its window.
WINDOW_NOISE, QUERY_NOISE = 0.7, 0.5
BLOCK = 500
FINGERPRINT = "of numbers"


@dataclass(frozen=True)
class Clusters:
    """A mixture of clusters.

    Attributes:
        images: N.
        windows: of each image, P.
        dim: D.
        seed: decides everything.
    """

    images: int = 20_000
    windows: int = 50
    dim: int = 128
    seed: int = 0

    def blocks(self) -> Iterator[ImageFeatures]:
        """The images in order, `BLOCK` at a time."""
        for first in range(0, self.images, BLOCK):
            yield self.block(first)

    def block(self, first: int) -> ImageFeatures:
        """The images from `first`, a multiple of `BLOCK`, on."""
        make = self._generator(1 + first // BLOCK)
        count = min(BLOCK, self.images - first)
        shown = torch.randint(TOPICS, (count, TOPICS_SHOWN), generator=make)
        which = torch.randint(TOPICS_SHOWN, (count, self.windows), generator=make)
        windows = self._noisy(self._topics()[shown.gather(1, which)], WINDOW_NOISE, make)
        ids = tuple(f"image {number}" for number in range(first, first + count))
        embedding = normalize(windows.mean(dim=1), dim=-1)
        return ImageFeatures(embedding, regions=windows, ids=ids, fingerprint=FINGERPRINT)

    def queries(self, number: int, tokens: int, seed: int = 1) -> TextFeatures:
        """Queries that ask for `tokens` windows of one image each."""
        make = self._generator(-seed)
        rows = torch.randint(self.images, (number,), generator=make).tolist()
        asked = []
        for row in rows:
            block = self.block(row - row % BLOCK)
            assert block.regions is not None
            windows = block.regions[row % BLOCK]
            asked.append(windows[torch.randint(self.windows, (tokens,), generator=make)])
        segments = self._noisy(torch.stack(asked), QUERY_NOISE, make)
        return TextFeatures(normalize(segments.mean(dim=1), dim=-1), segments=segments, fingerprint=FINGERPRINT)

    def _topics(self) -> Tensor:
        return normalize(torch.randn(TOPICS, self.dim, generator=self._generator(0)), dim=-1)

    def _noisy(self, vectors: Tensor, noise: float, make: torch.Generator) -> Tensor:
        drawn = torch.randn(vectors.shape, generator=make)
        return normalize(vectors + noise * self.dim**-0.5 * drawn, dim=-1)

    def _generator(self, part: int) -> torch.Generator:
        return torch.Generator().manual_seed(1_000_003 * self.seed + part + 1_000)


def index_for(folder: Path, dim: int, *, ann: str = "auto") -> Index:
    """The index in a folder, made if there is none; of windows and of no model, since features are given."""
    if not (folder / MANIFEST).exists():
        plan = {"grid": "none", "mode": "windows", "fill": "border", "full_image": True}
        kind = VectorKind("windows", dim, plan=plan)
        Storage.create(folder, Manifest(model="none", fingerprint=FINGERPRINT, dim=dim, ann=ann, vectors=(kind,)))
    return Index.open(folder)


def one_of(texts: TextFeatures) -> list[TextFeatures]:
    """Each query alone."""
    return [texts[row] for row in range(len(texts))]


def ids_of(found: list) -> list[list[str]]:
    """The ids of hits, query by query."""
    return [[hit.id for hit in hits] for hits in found]


def recall(found: list[list[str]], wanted: list[list[str]]) -> float:
    """Share of the wanted ids that were found, mean over queries."""
    shares = [len(set(own) & set(true)) / len(true) for own, true in zip(found, wanted, strict=True)]
    return sum(shares) / len(shares)
