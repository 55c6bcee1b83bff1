"""What a segment is and what every splitter of captions promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Segment:
    """One object phrase of a caption with its attributes: "two large cyan glass stars".

    Attributes:
        text: the phrase exactly as written, `caption[start:end]`; a word that only denies ("no", "any") is
            not part of it, so that the text names what would be seen.
        start, end: half-open character offsets into the caption.
        negated: whether the caption says that this is not there ("no blue arrows", "a fork is absent").
        count: how many, where the words say it ("a" and "one" 1, "two" 2, "a pair of" 2), else None.
        head: the noun in lower case ("stars").
    """

    text: str
    start: int
    end: int
    negated: bool = False
    count: int | None = None
    head: str = ""


@runtime_checkable
class Segmenter(Protocol):
    """Splits captions into object–attribute segments; may be shared between threads."""

    @property
    def name(self) -> str:
        """Which splitter this is, with model and version: "spacy:en_core_web_sm 3.8.0" or "rules"."""
        ...

    def segment(self, captions: Sequence[str]) -> list[list[Segment]]:
        """Return the segments of every caption in reading order, at least one each.

        A caption in which nothing is found is its own only segment; so is an empty one (official files hold
        one), because a list per row keeps rows together.

        Raises:
            TypeError: `captions` is one string, or an entry is not a string.
        """
        ...
