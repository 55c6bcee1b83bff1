"""What an index gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.images import ImageFailure
from engine.scorers.base import Match


@dataclass(frozen=True)
class Hit:
    """One image that was found.

    Attributes:
        id: the user's.
        score: as the scorer gives it for the stored vectors; higher is better.
        margin: the score less that of the next image found, which need not be shown; None where there is none.
        stage_one_rank: its place, from 0, among the candidates of stage one; None where all rows were scanned.
        alignment: which part of the query found which part of the image, where it was asked for.
    """

    id: str
    score: float
    margin: float | None = None
    stage_one_rank: int | None = None
    alignment: tuple[Match, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class AddReport:
    """What became of images that were given to an index.

    Attributes:
        added: rows written.
        replaced: rows that took the place of others of the same id; counted in `added`.
        skipped: ids that were there already and were left alone.
        failures: pictures that could not be read, with path and reason.
    """

    added: int = 0
    replaced: int = 0
    skipped: int = 0
    failures: tuple[ImageFailure, ...] = ()


@dataclass(frozen=True)
class IndexStats:
    """What an index holds.

    Attributes:
        images: that can be found.
        deleted: rows of deleted images that `compact` would free.
        segments: number of segments.
        generation: number of the commit.
        size_bytes: of all files.
        vectors: of each kind how many vectors.
        model, fingerprint, store, ann: as in the manifest.
        columns: of the metadata, with their Arrow types.
        extras: structures that find candidates, with what they say of themselves.
    """

    images: int
    deleted: int
    segments: int
    generation: int
    size_bytes: int
    vectors: Mapping[str, int]
    model: str
    fingerprint: str
    store: str
    ann: str
    columns: Mapping[str, str]
    extras: Mapping[str, Mapping[str, Any]]
