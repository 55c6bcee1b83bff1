"""What a line of a score file must hold, by the item it is of."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from typing import Any

from engine.datasets.base import Dataset, RetrievalDataset

Record = Mapping[str, Any]
# What is wrong with a record, or None.
Fault = Callable[[Record], str | None]


def fault_of(dataset: Dataset | RetrievalDataset) -> Fault:
    """Says what of a record does not fit the dataset: an item that it does not have, or scores of another form.

    A record of choice and group items is ``{"id", "scores": [[a number for each text] for each image]}``; one of a
    query is ``{"id", "own": [greater, equal, right_equal], "any": the same, "margin": a number or null}``. Either may
    hold ``"cut": true``.

    >>> from engine.datasets.base import CHOICE, ImageRef, Item, Rule
    >>> item = Item("7", (ImageRef("a.png"),), ("a", "b"), 0)
    >>> fault_of(Dataset("d", "1 item", Rule(CHOICE), (item,)))({"id": "8"})
    "id must be an item of d, got '8'"
    """
    if isinstance(dataset, RetrievalDataset):
        sizes = {"text": len(dataset.texts), "image": len(dataset.images)}
        queries = {f"{side}/{row}" for side, size in sizes.items() for row in range(size)}
        return lambda record: _foreign(record, queries, dataset.name) or _no_counts(record)
    shapes = {item.id: (len(item.images), len(item.texts)) for item in dataset.items}
    return lambda record: _foreign(record, shapes, dataset.name) or _no_scores(record, shapes[record["id"]])


def _foreign(record: Record, known: Container[str], name: str) -> str | None:
    found = record.get("id")
    if not isinstance(found, str) or found not in known:
        return f"id must be an item of {name}, got {_shown(found)}"
    if not isinstance(record.get("cut", False), bool):
        return f"cut must be true or false, got {_shown(record['cut'])}"
    return None


def _no_scores(record: Record, shape: tuple[int, int]) -> str | None:
    rows = record.get("scores")
    if isinstance(rows, list) and len(rows) == shape[0]:
        fits = (isinstance(row, list) and len(row) == shape[1] and all(map(_is_number, row)) for row in rows)
        if all(fits):
            return None
    return f"scores must be {shape[0]} x {shape[1]} finite numbers, got {_shown(rows)}"


def _no_counts(record: Record) -> str | None:
    for name in ("own", "any"):
        counts = record.get(name)
        if not isinstance(counts, list) or len(counts) != 3 or not all(map(_is_count, counts)):
            return f"{name} must be three whole numbers of at least 0, got {_shown(counts)}"
    margin = record.get("margin", "nothing")
    if margin is not None and not _is_number(margin):
        return f"margin must be a finite number or null, got {_shown(margin)}"
    return None


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        # A whole number in JSON may be longer than any double.
        return False


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
