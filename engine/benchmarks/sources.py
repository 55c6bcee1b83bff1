"""From an image reference to what a subject is given, and rows out of lists or features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.benchmarks.subject import Subject
from engine.datasets.base import ImageRef
from engine.images import decode


def source_of(ref: ImageRef, subject: Subject, *, where: str = "") -> Any:
    """The path of a whole picture, a Pillow image of a cut-out or of a picture in no file.

    The box of a reference is a half-open rectangle of the upright picture; what of it lies outside is black,
    as in the official loaders, which cut with Pillow. Baselines get the reference itself.

    Arguments: ``where``, what the picture belongs to, for messages.

    Raises ValueError when the dataset was read without images and the subject needs them, and for a box wholly
    outside the picture; ``ImageError`` when the picture to cut cannot be read.
    """
    if not subject.reads_images:
        return ref
    if ref.load is not None:
        return ref.load()
    if ref.path is None:
        raise ValueError(
            f"evaluate: {subject.name} needs the picture {ref.name!r}, but the dataset was read without an "
            "image folder; give the reader one"
        )
    if ref.box is None:
        return str(ref.path)
    picture = decode(ref.path)
    x0, y0, x1, y1 = ref.box
    if x0 >= picture.width or y0 >= picture.height or x1 <= 0 or y1 <= 0:
        raise ValueError(
            f"evaluate: {where + ': ' if where else ''}the box {ref.box} must overlap the picture {ref.name!r} "
            f"({ref.path}) of {picture.width} x {picture.height} pixels"
        )
    return picture.crop(ref.box)


def check_words(subject: Subject, who: str, texts: Iterable[tuple[str, str]]) -> None:
    """Raise ValueError for a text in which the subject finds no word to score, before anything is scored.

    Arguments: ``who``, the dataset's name; ``texts``, pairs (what the text belongs to, text).
    """
    if subject.wordless is None:
        return
    owner: dict[str, str] = {}
    for name, text in texts:
        owner.setdefault(text, name)
    distinct = list(owner)
    rows = subject.wordless(distinct)
    if rows:
        text = distinct[rows[0]]
        more = f" (and {len(rows) - 1} more texts)" if len(rows) > 1 else ""
        raise ValueError(
            f"evaluate: {who}: {owner[text]}: every text must have a word that {subject.name} can score, got "
            f"{text!r}{more}; choose a scorer of whole captions, or leave it out of a copy of the annotations"
        )


def take(rows: Any, chosen: Sequence[int]) -> Any:
    """The chosen rows of a list, or of features that a list of row numbers selects from."""
    return [rows[row] for row in chosen] if isinstance(rows, list) else rows[list(chosen)]


def cut_rows(texts: Any) -> set[int]:
    """Rows that text features say were longer than the encoder's context; none of a list."""
    truncated = getattr(texts, "truncated", None)
    return set() if truncated is None else set(truncated.nonzero().flatten().tolist())
