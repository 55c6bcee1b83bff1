"""Pairs of captions that differ in one known way: what a layer should tell apart, and controls it should not.

Changes: "negation" ("X and a Y" → "X and no Y"), "existence" ("there is a X" → "there is no X"), "denial" (a true
denial of something absent is added), "color swap", "size swap" and "material swap" (two things exchange it), "relation"
(left ↔ right, above ↔ below) and "word order" (the same words shuffled). Controls: "paraphrase" (another opening, the
same content), "filler" (as many words added as a denial has, which say nothing) and "unrelated" (the captions of two
pictures): how far apart captions are at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import numpy as np

from engine.datasets.files import read_csv
from engine.scenes.captions import RELATIONS, phrase, with_article
from engine.scenes.items import controlled_items
from engine.scenes.negation import RetrievalItem, retrieval_items
from engine.scenes.world import pick

CHANGES = (
    "negation", "existence", "denial", "color swap", "size swap", "material swap", "relation", "word order",
)  # fmt: skip
CONTROLS = ("paraphrase", "filler", "unrelated")
COLUMNS = ("kind", "text", "changed")
_OPENINGS = ("a photo of", "a picture of", "an image of", "a drawing of", "an image showing", "this image shows")


@dataclass(frozen=True)
class Change:
    """A caption and what became of it. `kind` is of `CHANGES` or `CONTROLS`, or the user's own."""

    kind: str
    text: str
    changed: str


@dataclass(frozen=True)
class ChangeSet:
    """Pairs of captions, and captions with the pictures they are true of.

    Attributes:
        changes: the pairs, of any kinds.
        captions: captions of `images`, one each.
        images: pictures: paths, or uint8 arrays `(H, W, 3)`.
        source: what they were made of, for the report.
    """

    changes: tuple[Change, ...]
    captions: tuple[str, ...] = ()
    images: tuple[Path | np.ndarray, ...] = field(default=(), repr=False)
    source: str = ""

    def __post_init__(self) -> None:
        if not self.changes:
            raise ValueError("ChangeSet: needs at least one pair of captions, got none")
        if len(self.captions) != len(self.images):
            raise ValueError(
                f"ChangeSet: captions and images must be as many, got {len(self.captions)} and {len(self.images)}"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds in order of appearance, controls last."""
        found = dict.fromkeys(change.kind for change in self.changes)
        return tuple(sorted(found, key=lambda kind: kind in CONTROLS))


def scene_changes(n: int = 300, *, seed: int = 0, split: str = "in_domain") -> ChangeSet:
    """`n` pairs of each kind over rendered scenes, and `n` pictures with their captions.

    The captions are plain English, so any encoder can be asked; the pictures are 96 × 96. Raises ValueError for `n`
    below 2 or an unknown split.
    """
    if n < 2:
        raise ValueError(f"scene_changes: n must be at least 2, got {n}")
    rng = np.random.default_rng((seed, 201))
    items = retrieval_items(n, seed=seed, split=split)
    changes = [change for item in items for change in _of_scene(item, rng)]
    for category in ("color", "size", "material"):
        found = controlled_items(category, n, seed=seed, split=split)
        changes += [Change(f"{category} swap", *item.captions) for item in found]
    for item in controlled_items("position", n, seed=seed, split=split):
        first, second = item.segments[0]
        k = pick(rng, len(RELATIONS))
        # left and right, above and below stand side by side in RELATIONS.
        texts = [f"{first} {RELATIONS[relation]} {second}" for relation in (k, k ^ 1)]
        changes.append(Change("relation", *texts))
    changes += [
        Change("unrelated", item.caption, other.caption)
        for item, other in zip(items, items[1:] + items[:1], strict=True)
    ]
    captions, images = (item.caption for item in items), (item.image() for item in items)
    return ChangeSet(tuple(changes), tuple(captions), tuple(images), f"scenes, split {split}, seed {seed}")


def _of_scene(item: RetrievalItem, rng: np.random.Generator) -> Iterator[Change]:
    first = phrase(item.scene.groups[0])
    # The name of something else, of which the caption may be denied or not.
    other = item.absent
    yield Change("negation", f"{first} and {with_article(other)}", f"{first} and no {other}")
    yield Change("existence", f"there is {with_article(other)}", f"there is no {other}")
    yield Change("denial", first, f"{first} but no {other}")
    # As many words as "but no red circle".
    yield Change("filler", first, f"{first} that we see there")
    words = [*first.split(), "and", *with_article(other).split()]
    yield Change("word order", " ".join(words), " ".join(_shuffled(words, rng)))
    a, b = rng.permutation(len(_OPENINGS))[:2].tolist()
    yield Change("paraphrase", f"{_OPENINGS[a]} {first}", f"{_OPENINGS[b]} {first}")


def _shuffled(words: list[str], rng: np.random.Generator) -> list[str]:
    """The words in another order; `words` must hold two different ones."""
    while True:
        shuffled = [words[k] for k in rng.permutation(len(words))]
        if shuffled != words:
            return shuffled


def read_changes(path: str | PathLike[str]) -> ChangeSet:
    """Pairs of one's own: a CSV file with the columns kind, text, changed and, if there are pictures, image.

    `image` is a path, relative to the file's folder, of a picture that `text` is true of; empty for none. Kinds
    named like `CONTROLS` are shown as controls, and "negation" decides which layers are proposed. A caption with its
    picture counts once, whatever rows it stands in.

    Raises ValueError naming the row for an empty cell, and what `read_csv` refuses.
    """
    file = Path(path)
    changes: list[Change] = []
    pictures: dict[tuple[str, Path], None] = {}
    for number, row in enumerate(read_csv(file, COLUMNS), 1):
        cells = [row[name].strip() for name in COLUMNS]
        if not all(cells):
            raise ValueError(f"read_changes: {file} row {number}: {COLUMNS[cells.index('')]} is empty")
        changes.append(Change(*cells))
        if image := row.get("image", "").strip():
            pictures[cells[1], file.parent / image] = None
    if not changes:
        raise ValueError(f"read_changes: {file} must hold at least one pair, got none")
    captions, images = (text for text, _ in pictures), (image for _, image in pictures)
    return ChangeSet(tuple(changes), tuple(captions), tuple(images), file.name)
