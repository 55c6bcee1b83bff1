"""A small index for tests: features without a network, and what the index must answer by brute force."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from os import PathLike

import torch
from torch import Tensor
from torch.nn.functional import normalize

from engine.engine import Engine
from engine.features import ImageFeatures, TextFeatures
from engine.retrieval.index import Index
from engine.scorers.base import Scorer
from engine.scorers.sgi import SGI
from tests.fake_encoder import WIDTH, FakeEncoder

SPACE = SGI(crops="native")
KINDS: tuple[str | Scorer, ...] = (SPACE, "patches")
FINGERPRINT = "fake-1"


def engine() -> Engine:
    """An engine over the tiny encoder."""
    return Engine(FakeEncoder(), segmenter="rules")


def images(ids: Sequence[str], *, seed: int = 0, regions: int = 4, ragged: bool = True) -> ImageFeatures:
    """Random features with windows (up to `regions`) and patches; an id has the same features wherever it comes."""
    drawn = [_drawn(name, seed, regions, ragged) for name in ids]
    return ImageFeatures(
        torch.stack([embedding for embedding, *_ in drawn]),
        patches=torch.stack([patches for _, patches, _, _ in drawn]),
        grid=(2, 3),
        aligned=True,
        tap="projected",
        regions=torch.stack([own for *_, own, _ in drawn]),
        region_mask=torch.stack([mask for *_, mask in drawn]),
        boxes=torch.arange(4).expand(len(ids), regions, 4).int() + torch.arange(regions)[:, None].int(),
        region_plan=str(SPACE.needs().regions),
        sizes=torch.tensor([[30, 40]]).expand(len(ids), 2).int(),
        views=torch.tensor([[0, 0, 40, 30]]).expand(len(ids), 4).int(),
        ids=tuple(ids),
        fingerprint=FINGERPRINT,
    )


def _drawn(name: str, seed: int, regions: int, ragged: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode("utf-8", "surrogateescape")) + seed)
    numbers = normalize(torch.randn(1 + 6 + regions, WIDTH, generator=generator), dim=1)
    kept = int(torch.randint(1, regions + 1, (1,), generator=generator)) if ragged else regions
    return numbers[0], numbers[1:7], numbers[7:], torch.arange(regions) < kept


def texts(number: int, *, seed: int = 5, segments: int = 3) -> TextFeatures:
    """Random captions with segments and tokens."""
    generator = torch.Generator().manual_seed(seed)
    vectors = normalize(torch.randn(number, 1 + 2 * segments, WIDTH, generator=generator), dim=2)
    mask = torch.ones(number, segments, dtype=torch.bool)
    mask[:, -1] = torch.arange(number) % 2 == 0
    return TextFeatures(
        vectors[:, 0],
        tokens=vectors[:, 1 + segments :],
        token_mask=mask,
        segments=vectors[:, 1 : 1 + segments],
        segment_mask=mask,
        texts=tuple(f"caption {row}" for row in range(number)),
        fingerprint=FINGERPRINT,
    )


def index_at(
    path: str | PathLike[str],
    *,
    vectors: Sequence[str | Scorer] = KINDS,
    store: str = "int8",
    segment_bytes: int = 4096,
) -> Index:
    """A new index with segments of a few rows."""
    return Index.create(path, model=engine(), vectors=vectors, store=store, segment_bytes=segment_bytes)  # type: ignore[arg-type]


def names(start: int, stop: int) -> list[str]:
    """Ids that differ in length."""
    return [f"picture {number}{'é' * (number % 3)}" for number in range(start, stop)]
