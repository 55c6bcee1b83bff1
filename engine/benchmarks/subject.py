"""What is evaluated: something that scores images against texts, with a name and a fingerprint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from engine.encoders.base import Encoder
from engine.metrics import Scores
from engine.scorers.base import Scorer
from engine.scorers.registry import get_scorer

if TYPE_CHECKING:
    from engine.engine import Engine

TOKENIZED_AT_ONCE = 4096


class ScoreFunction(Protocol):
    """Scores images against texts; ``Engine.score`` is one.

    ``pairs=True`` scores image i with text i, ``(n,)``; ``pairs=False`` all against all,
    ``(n_images, n_texts)``.
    """

    def __call__(self, images: Any, texts: Any, *, pairs: bool) -> Scores:
        """The scores, finite, of any float dtype."""


@dataclass(frozen=True)
class Subject:
    """A scorer under evaluation.

    Attributes
    ----------
    name: what tables call it.
    fingerprint: changes whenever its scores may change; resuming checks it.
    score: the scores. It is given image files by path, cut-outs as Pillow images, and texts as strings; or
        the features below.
    encode_images, encode_texts: make features that ``score`` takes in place of sources and that a list of row
        numbers selects from. With both, every image and text of a chunk is encoded once however many
        pairs it is in; without, ``score`` sees it once a pair.
    reads_images: False for baselines: they are given the ``ImageRef`` and nothing is decoded.
    wordless: rows of the texts that it cannot score because it finds no word in them; None when it takes any text.
    """

    name: str
    fingerprint: str
    score: ScoreFunction
    encode_images: Callable[[Sequence[Any]], Any] | None = None
    encode_texts: Callable[[Sequence[str]], Any] | None = None
    reads_images: bool = True
    wordless: Callable[[Sequence[str]], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if (self.encode_images is None) != (self.encode_texts is None):
            raise ValueError(f"Subject {self.name!r}: encode_images and encode_texts must be given together")


def subject_of(engine: Engine, scorer: str | Scorer = "global", *, batch_size: int = 64) -> Subject:
    """An engine with one of its scorers as a subject.

    Arguments: ``scorer``, a name or an object with its options, of which those that are not the default become
    part of the name; ``batch_size`` of the encoder.
    """
    chosen = get_scorer(scorer)
    # Without a segment the whole caption is scored; without a word piece there is nothing.
    needs_words = chosen.needs().tokens
    segmenter = f" · {engine.segmenter.name}" if chosen.needs().segments else ""
    return Subject(
        f"{engine.spec.name} · {label(chosen)}",
        f"{engine.spec.fingerprint} · {chosen!r}{segmenter}",
        partial(engine.score, scorer=chosen, batch_size=batch_size),
        partial(engine.encode_images, scorer=chosen, batch_size=batch_size),
        partial(_encode_texts, partial(engine.encode_texts, scorer=chosen, batch_size=batch_size)),
        wordless=partial(_wordless, engine.encoder) if needs_words else None,
    )


def label(scorer: Scorer) -> str:
    """What tables call a scorer: its name and the options that are not its default ones.

    >>> from engine.scorers.sgi import SGI
    >>> label(SGI()), label(SGI(exclusive=True))
    ('sgi', 'sgi exclusive=True')
    """
    shown = [
        f"{option.name}={value}"
        for option in fields(scorer)
        for value in (getattr(scorer, option.name),)
        if value != option.default and isinstance(value, str | int | float | tuple | None)
    ]
    return " ".join([scorer.name, *shown])


def _wordless(encoder: Encoder, texts: Sequence[str]) -> list[int]:
    """Rows of the texts in which the encoder finds no word piece."""
    found = []
    for start in range(0, len(texts), TOKENIZED_AT_ONCE):
        words = encoder.tokenize(texts[start : start + TOKENIZED_AT_ONCE]).word_mask.any(dim=1)
        found += [start + row for row in (~words).nonzero().flatten().tolist()]
    return found


def _encode_texts(encode: Callable[[Sequence[str]], Any], texts: Sequence[str]) -> Any:
    with warnings.catch_warnings():
        # Results count the texts that were cut and name the items that tie; a warning a chunk adds nothing. The
        # filters are the process's: evaluations in several threads at once may lose or keep a warning too many.
        warnings.filterwarnings("ignore", "encode_texts: longer than the model's context", UserWarning)
        return encode(texts)
