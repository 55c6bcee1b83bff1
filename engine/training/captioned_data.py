"""Stored features of captioned pictures of one's own, for the training of heads.

Every picture and every text is encoded once and has a row of its own, whatever items share it. A picture that cannot be
read keeps its row, so that no other row moves; its items are left out of the training and named with the reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.datasets.base import ImageRef
from engine.datasets.captioned import CaptionedImages, CaptionedItem, Problem
from engine.engine import Engine
from engine.features import ImageFeatures, Needs, TextFeatures
from engine.heads.inputs import shortened
from engine.images import ImageSource
from engine.store import FeatureStore, Manifest
from engine.training.encoded_pictures import encoded_pictures, file_state, unread_rows
from engine.training.head_data import SHARD_ROWS, HeadData, Told


@dataclass(frozen=True)
class CaptionedData(HeadData):
    """Stored features of items that share pictures and texts.

    Of several captions, a batch draws one for each item, with its negative; what it draws follows from the batch alone.

    Attributes:
        image_rows: of each item, the row of its picture and, in pairs, of the negative one.
        caption_rows: of each item, for each caption its row and, where there are negatives, that of its negative.
        problems: pictures that could not be read; their items are not here.
    """

    image_rows: tuple[tuple[int, ...], ...] = ()
    caption_rows: tuple[tuple[tuple[int, ...], ...], ...] = ()
    problems: tuple[Problem, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not self.image_rows or len(self.image_rows) != len(self.caption_rows):
            raise ValueError(
                f"CaptionedData: as many items must have images as captions, and at least one, got "
                f"{len(self.image_rows)} and {len(self.caption_rows)}"
            )

    def __len__(self) -> int:
        return len(self.image_rows)

    @property
    def source(self) -> str:
        """What the items are: a run goes on with the same ones alone."""
        stores = self.images.manifest.source, self.texts.manifest.source
        facts = json.dumps([*stores, self.image_rows, self.caption_rows])
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def batch(self, items: Tensor) -> tuple[ImageFeatures, TextFeatures]:
        """As `HeadData.batch`: first the pairs, then the hard negatives of each."""
        chosen = items.tolist()
        rows = drawn_captions(items, [len(self.caption_rows[item]) for item in chosen])
        images = torch.tensor([self.image_rows[item] for item in chosen])
        texts = torch.tensor([self.caption_rows[item][row] for item, row in zip(chosen, rows, strict=True)])
        return self.images[images.T.flatten()], self.texts[texts.T.flatten()]


def drawn_captions(items: Tensor, counts: Sequence[int]) -> list[int]:
    """Which of its captions each item of a batch shows: drawn, and the same whenever this batch comes."""
    digest = hashlib.sha256(json.dumps(items.tolist()).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
    draws = torch.rand(len(counts), generator=generator).tolist()
    return [int(u * count) for u, count in zip(draws, counts, strict=True)]


def captioned_data(
    engine: Engine, needs: Needs, data: CaptionedImages, folder: Path, *, told: Told | None = None
) -> CaptionedData:
    """Features of the items by this engine, computed once into two stores below `folder`.

    Items have two images where all of them have a negative image, and two texts where all have negatives. The names of
    the stores follow from encoder, needs, pictures and texts, so that heads and seeds share them. `told` is called with
    (what is being encoded, rows done, rows in all).

    Raises ValueError when no picture can be read, and what `FeatureStore` raises.
    """
    images_each, texts_each = shape_of(data)
    refs = list({_key(ref): ref for item in data.items for ref in item.images[:images_each]}.values())
    texts = list(dict.fromkeys(text for item in data.items for text in (*item.captions, *item.negatives)))
    parts = {"images": replace(needs, tokens=False, text_layers=()), "texts": replace(needs, image_layers=())}
    contents: dict[str, Sequence[object]] = {"images": [_facts(ref) for ref in refs], "texts": texts}
    stores = {}
    for kind, content in contents.items():
        facts = json.dumps([engine.spec.fingerprint, str(parts[kind]), content])
        source = f"{kind} of {data.name} {hashlib.sha256(facts.encode()).hexdigest()[:16]}"
        manifest = Manifest(kind, len(content), engine.spec.fingerprint, source, shard_rows=SHARD_ROWS)
        stores[kind] = FeatureStore.create(folder / source.replace(" ", "-"), manifest)

    def encode_images(start: int, stop: int) -> ImageFeatures:
        loads = [partial(source_of, ref) for ref in refs[start:stop]]
        return encoded_pictures(engine, parts["images"], loads, stores["images"], start)

    def encode_texts(start: int, stop: int) -> TextFeatures:
        found = shortened(engine.encode_texts(texts[start:stop], scorer=parts["texts"]))
        return replace(found, token_texts=None, truncated=None, texts=None)

    for kind, encode in (("images", encode_images), ("texts", encode_texts)):
        told_of = None if told is None else (lambda done, total, kind=kind: told(kind, done, total))
        stores[kind].fill(encode, progress=told_of)
    row_of_text = {text: row for row, text in enumerate(texts)}
    unread = unread_rows(stores["images"])
    places = {_key(ref): row for row, ref in enumerate(refs)}
    image_rows = [tuple(places[_key(ref)] for ref in item.images[:images_each]) for item in data.items]
    kept = [row for row, rows in enumerate(image_rows) if not unread.keys() & set(rows)]
    problems = tuple(Problem(str(refs[row].path or refs[row].name), reason) for row, reason in sorted(unread.items()))
    if not kept:
        raise ValueError(f"train: {data.name} must hold a picture that can be read, got none; the first: {problems[0]}")
    return CaptionedData(
        stores["images"],
        stores["texts"],
        images_each,
        texts_each,
        tuple(image_rows[row] for row in kept),
        tuple(_caption_rows(data.items[row], texts_each, row_of_text) for row in kept),
        problems,
    )


def shape_of(data: CaptionedImages) -> tuple[int, int]:
    """Images and texts an item: 2 where every item has a negative one, else 1."""
    images = 2 if all(item.negative_image is not None for item in data.items) else 1
    return images, 2 if all(item.negatives for item in data.items) else 1


def _caption_rows(item: CaptionedItem, texts: int, rows: dict[str, int]) -> tuple[tuple[int, ...], ...]:
    if texts == 1:
        return tuple((rows[caption],) for caption in item.captions)
    return tuple((rows[a], rows[b]) for a, b in zip(item.captions, item.negatives, strict=True))


def _key(ref: ImageRef) -> tuple[object, ...]:
    """Generated pictures may have the names of those they are negatives of."""
    return ref.name, ref.path, ref.box


def _facts(ref: ImageRef) -> list[object]:
    """What tells one picture from another without reading it."""
    state = file_state(ref.path) if ref.path is not None else getattr(ref.load, "size_bytes", None)
    return [ref.name, ref.box, state]


def source_of(ref: ImageRef) -> ImageSource:
    """Where a picture is, or the picture itself where it is in no file."""
    if ref.path is not None:
        return ref.path
    assert ref.load is not None  # a reader leaves out what is neither a file nor can be made
    source: ImageSource = ref.load()  # type: ignore[assignment]
    return source
