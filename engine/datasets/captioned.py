"""What readers of training data make: pictures with captions, hard negatives of both, and what is known to be seen.

A benchmark's reader refuses what it cannot pair; one of training data goes on, for a corpus of many files always has a
few broken ones. Every one of those is in `problems` with its path and the reason, and nothing else moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.datasets.base import ImageRef, check_unique, fingerprint


@dataclass(frozen=True)
class Problem:
    """Something that was left out: its path, or the place in a file, and the reason in words."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class CaptionedItem:
    """A picture and what is said of it.

    Attributes:
        id: stable: it does not depend on which other items could be read.
        image: the picture.
        captions: one or more, all true of it.
        negatives: hard negatives: none, or for each caption one that is false of the picture.
        negative_image: a picture of which the negatives are true, or None.
        present: names of what is known to be in the picture; empty where nothing is known.
    """

    id: str
    image: ImageRef
    captions: tuple[str, ...]
    negatives: tuple[str, ...] = ()
    negative_image: ImageRef | None = None
    present: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.captions or len(self.negatives) not in (0, len(self.captions)):
            raise ValueError(
                f"CaptionedItem: {self.id} must have captions, and no negatives or one for each, got "
                f"{len(self.captions)} and {len(self.negatives)}"
            )
        if self.negative_image is not None and not self.negatives:
            raise ValueError(f"CaptionedItem: the negative image of {self.id} must have a caption, got none")

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """The picture, and the negative one where there is one."""
        return (self.image,) if self.negative_image is None else (self.image, self.negative_image)


@dataclass(frozen=True)
class CaptionedImages:
    """Items to train on.

    Attributes:
        name: of the data, for messages.
        items: in file order, ids unique.
        problems: what was left out.

    Raises ValueError for double ids.
    """

    name: str
    items: tuple[CaptionedItem, ...]
    problems: tuple[Problem, ...] = ()
    fingerprint: str = field(init=False, default="")

    def __post_init__(self) -> None:
        check_unique(self.name, [item.id for item in self.items])
        facts = (
            [item.id, [ref.name for ref in item.images], item.captions, item.negatives, item.present]
            for item in self.items
        )
        object.__setattr__(self, "fingerprint", fingerprint(facts))

    def __len__(self) -> int:
        return len(self.items)


def usable(name: str, items: Sequence[CaptionedItem], problems: Sequence[Problem]) -> CaptionedImages:
    """The items, of which there must be one.

    Raises ValueError with the first problem when there is none.
    """
    if not items:
        first = f"; the first of {len(problems)} problems: {problems[0]}" if problems else ""
        raise ValueError(f"{name}: there must be at least one item to train on, got none{first}")
    return CaptionedImages(name, tuple(items), tuple(problems))
