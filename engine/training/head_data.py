"""What heads are trained on: stored features of items, each one image or two with one text or two.

An item of two images and two texts is a quad, in which image i belongs to text i and both texts hold the same words.
Its first image and text are the pair; the second ones are hard negatives of them, and a pair of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.choices import check_numbers, check_seed
from engine.engine import Engine
from engine.features import ImageFeatures, Needs, TextFeatures
from engine.heads.inputs import shortened
from engine.scenes.items import ControlledItem, controlled_items, described
from engine.store import FeatureStore, Manifest

# Told (what is being done, rows done, rows in all).
Told = Callable[[str, int, int], None]

CATEGORIES = ("color", "size", "material", "quantity")
_WORDS = ("size", "color", "material")
# Even, so that both sides of a quad lie in one shard.
SHARD_ROWS = 1024


@dataclass(frozen=True)
class HeadData:
    """Stored features of N items.

    Attributes:
        images, texts: rows `images_per_item * k` and on belong to item k.
        images_per_item, texts_per_item: 1, or 2 with a hard negative.
    """

    images: FeatureStore[ImageFeatures]
    texts: FeatureStore[TextFeatures]
    images_per_item: int = 1
    texts_per_item: int = 1

    def __post_init__(self) -> None:
        for name, held, each in (
            ("images", self.images, self.images_per_item),
            ("texts", self.texts, self.texts_per_item),
        ):
            if each not in (1, 2) or len(held) % each:
                raise ValueError(f"HeadData: {name} must come 1 or 2 an item, got {len(held)} rows, {each} an item")
        items = len(self.images) // self.images_per_item, len(self.texts) // self.texts_per_item
        if items[0] != items[1]:
            raise ValueError(f"HeadData: as many items must have images as texts, got {items[0]} and {items[1]}")

    def __len__(self) -> int:
        return len(self.images) // self.images_per_item

    @property
    def source(self) -> str:
        """What the items are: a run goes on with the same ones alone."""
        stores = json.dumps([self.images.manifest.source, self.texts.manifest.source])
        return hashlib.sha256(stores.encode()).hexdigest()[:16]

    def batch(self, items: Tensor) -> tuple[ImageFeatures, TextFeatures]:
        """Features of these items: first the B images and texts of the pairs, then the B hard negatives of each."""
        return (
            self.images[_rows(items, self.images_per_item)],
            self.texts[_rows(items, self.texts_per_item)],
        )


@dataclass(frozen=True)
class ScenesQuads:
    """Quads of rendered scenes that differ in one binding, of combinations that training may show.

    Attributes:
        items: quads of each category.
        categories: of `engine.scenes.items.CATEGORIES`.
        seed: of the items. The benchmark's are drawn with others.
        described_share: share of the quads whose captions say more of both things than what is exchanged: half of them
            all there is to say, half some of it. Retrieval by captions in full needs them.
    """

    items: int = 2000
    categories: tuple[str, ...] = CATEGORIES
    seed: int = 101
    described_share: float = 0.0

    def __post_init__(self) -> None:
        if not self.categories:
            raise ValueError(f"ScenesQuads: categories must name at least one, such as {CATEGORIES[0]}, got none")
        check_numbers(self, integers={"items": 1})
        check_seed("ScenesQuads", self.seed)
        if not 0 <= self.described_share <= 1:
            raise ValueError(f"ScenesQuads: described_share must be from 0 to 1, got {self.described_share}")

    def draw(self) -> list[ControlledItem]:
        """The quads, category after category; the same for equal settings."""
        drawn = [
            item
            for category in self.categories
            for item in controlled_items(category, self.items, seed=self.seed, split="in_domain")
        ]
        chance = np.random.default_rng((self.seed, len(drawn))).random((len(drawn), 5))
        return [
            described(item, [word for word, u in zip(_WORDS, row[2:], strict=True) if row[1] < 0.5 or u < 0.5])
            if row[0] < self.described_share
            else item
            for item, row in zip(drawn, chance.tolist(), strict=True)
        ]

    @property
    def pictures(self) -> dict[str, object]:
        """The settings that decide the pictures; the others decide the captions alone."""
        return {"items": self.items, "categories": self.categories, "seed": self.seed}


def scenes_data(
    engine: Engine, needs: Needs, quads: ScenesQuads, folder: Path, *, told: Told | None = None
) -> HeadData:
    """Features of the quads by this engine, computed once into a store below `folder`.

    The names of its two parts follow from encoder, needs and quads, so that heads and seeds share them. `told` is
    called with (what is being encoded, rows done, rows in all). Raises what `FeatureStore` raises.
    """
    items = quads.draw()
    fingerprint = engine.spec.fingerprint
    # Pictures are the same whatever is said of them.
    sources = {
        "images": f"scenes quads {json.dumps(quads.pictures)}, image layers {needs.image_layers}, tap {needs.tap}",
        "texts": f"scenes quads {json.dumps(asdict(quads))}, text layers {needs.text_layers}",
    }
    parts = {"images": replace(needs, tokens=False, text_layers=()), "texts": replace(needs, image_layers=())}

    def encode_images(start: int, stop: int) -> ImageFeatures:
        pictures = [Image.fromarray(pixels) for item in items[start // 2 : stop // 2] for pixels in item.images()]
        found = engine.encode_images(pictures, scorer=parts["images"])
        # Names and places serve explanations, which training has no use for.
        return replace(found, ids=None, sizes=None, views=None)

    def encode_texts(start: int, stop: int) -> TextFeatures:
        captions = [caption for item in items[start // 2 : stop // 2] for caption in item.captions]
        found = shortened(engine.encode_texts(captions, scorer=parts["texts"]))
        return replace(found, token_texts=None, truncated=None)

    def stored(kind: str) -> FeatureStore:
        name = hashlib.sha256(f"{fingerprint} {sources[kind]} {parts[kind]}".encode()).hexdigest()[:16]
        manifest = Manifest(kind, 2 * len(items), fingerprint, sources[kind], shard_rows=SHARD_ROWS)
        return FeatureStore.create(folder / f"{kind}-{name}", manifest)

    def reporting(kind: str) -> Callable[[int, int], None] | None:
        return None if told is None else lambda done, total: told(kind, done, total)

    images, texts = stored("images"), stored("texts")
    images.fill(encode_images, progress=reporting("images"))
    texts.fill(encode_texts, progress=reporting("texts"))
    return HeadData(images, texts, 2, 2)


def epochs(items: int, batch_size: int, seed: int, *, start: int = 0) -> Iterator[Tensor]:
    """Items of batch `start`, `start + 1`, …, without end: every item once in each pass, in an order of its own.

    A pure function of its arguments, so that a training that resumes sees what it would have seen. What is left of
    a pass that fills no batch is left out. Raises ValueError for fewer items than a batch holds.
    """
    each = items // batch_size
    if each < 1:
        raise ValueError(f"epochs: a batch of {batch_size} needs as many items, got {items}")
    step = start
    while True:
        passed, place = divmod(step, each)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + passed)
        order = torch.randperm(items, generator=generator)
        for batch in range(place, each):
            yield order[batch * batch_size : (batch + 1) * batch_size]
        step += each - place


def _rows(items: Tensor, each: int) -> Tensor:
    return torch.cat([items * each + k for k in range(each)])
