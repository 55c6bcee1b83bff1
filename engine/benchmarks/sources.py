"""From an image reference to what a subject is given, and rows out of lists or features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.benchmarks.subject import Subject
from engine.datasets.base import ImageRef
from engine.images import decode


def source_of(ref: ImageRef, subject: Subject) -> Any:
    """The path of a whole picture, a Pillow image of a cut-out or of a picture in no file.

    The box of a reference is a half-open rectangle of the upright picture; what of it lies outside is black,
    as in the official loaders. Baselines get the reference itself.

    Raises ValueError when the dataset was read without images and the subject needs them, and ``ImageError``
    when the picture to cut cannot be read.
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
    return decode(ref.path).crop(ref.box)


def take(rows: Any, chosen: Sequence[int]) -> Any:
    """The chosen rows of a list, or of features that a list of row numbers selects from."""
    return [rows[row] for row in chosen] if isinstance(rows, list) else rows[list(chosen)]


def cut_rows(texts: Any) -> set[int]:
    """Rows that text features say were longer than the encoder's context; none of a list."""
    truncated = getattr(texts, "truncated", None)
    return set() if truncated is None else set(truncated.nonzero().flatten().tolist())
