"""Checks of what a caller gives to be encoded: texts, rectangles, batch sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image


def check_batch_size(who: str, batch_size: int) -> None:
    """Raise ValueError for a batch size below 1, which would encode nothing; TypeError for what is no integer."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer):
        raise TypeError(f"{who}: batch_size must be an integer, got {type(batch_size).__name__}")
    if batch_size < 1:
        raise ValueError(f"{who}: batch_size must be at least 1, got {batch_size}")


def check_regions(who: str, regions: Sequence[object] | None, count: int) -> None:
    """Raise ValueError unless each of `count` images has rectangles, integers `(R, 4)` with R >= 1, or all None."""
    if regions is None:
        return
    if len(regions) != count:
        raise ValueError(f"{who}: regions must be given for each of {count} images, got {len(regions)}")
    for row, own in enumerate(regions):
        boxes = np.asarray(own)
        if boxes.ndim != 2 or boxes.shape[1] != 4 or not len(boxes) or not np.issubdtype(boxes.dtype, np.integer):
            raise ValueError(
                f"{who}: regions must be integer (R, 4) with R >= 1 for each image, got {boxes.dtype} "
                f"{boxes.shape} for image {row}"
            )


def check_inside(who: str, boxes: Sequence[np.ndarray], images: Sequence[Image.Image], names: Sequence[object]) -> None:
    """Raise ValueError, naming image and region, for a rectangle that is empty or has no pixel of its image."""
    for image, name, own in zip(images, names, boxes, strict=True):
        x0, y0, x1, y1 = np.asarray(own).T
        empty = (x0 >= x1) | (y0 >= y1)
        bad = (empty | (x1 <= 0) | (y1 <= 0) | (x0 >= image.width) | (y0 >= image.height)).nonzero()[0]
        if len(bad):
            raise ValueError(
                f"{who}: region {bad[0]} of image {name} must have x0 < x1, y0 < y1 and a pixel of the image of "
                f"{image.width} x {image.height} (width x height), got {np.asarray(own)[bad[0]].tolist()}"
            )


def check_text(who: str, what: str, text: object) -> None:
    """Raise TypeError for what is no string, ValueError for a string that is no text.

    >>> check_text("score", "text 3", "a caf\\udce9")
    Traceback (most recent call last):
        ...
    ValueError: score: text 3 must be text, got half a character ('\\udce9') at position 5: read it right
    """
    if not isinstance(text, str):
        raise TypeError(f"{who}: {what} must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # What reading with the wrong encoding leaves. Tokenizers give up over it with words of their own.
        raise ValueError(
            f"{who}: {what} must be text, got half a character ({text[error.start]!r}) at position {error.start}: "
            "read it right"
        ) from error


def as_texts(who: str, texts: str | Sequence[str]) -> list[str]:
    """One text or many as a list. Raises TypeError for what is none, and what `check_text` raises for each."""
    if isinstance(texts, bytes) or not hasattr(texts, "__iter__"):
        raise TypeError(f"{who}: texts must be a string or a list of strings, got {type(texts).__name__}")
    found = [texts] if isinstance(texts, str) else list(texts)
    for row, text in enumerate(found):
        check_text(who, f"text {row}", text)
    return found
