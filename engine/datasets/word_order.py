"""Captions with their words in another order, made at load time for ARO's order tasks (arXiv 2210.01936).

The official code draws them with spaCy, NLTK and an unseeded generator, so no fixed test set exists. These
are our own: the same four kinds, with a seed that gives the same captions on every machine, whatever the
limit or shard. Figures compare with each other; published ones come from other captions.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Sequence
from typing import TypeAlias

# Words with their class: "noun", "adjective", or "" for all else.
Tagger: TypeAlias = Callable[[str], Sequence[tuple[str, str]]]

MAX_WORDS = 30
ATTEMPTS = 8
PERTURBATIONS = ("nouns and adjectives", "all but nouns and adjectives", "within trigrams", "trigrams")
_FUNCTION_WORDS = """
a an the this that these those some any no not each every both all and or but nor so yet if while as
than then of in on at by to from for with without into onto over under above below between behind
beside near next off out up down through across along around against about after before during is
are was were be been being am do does did has have had having can could will would may might shall
should must it its he him his she her they them their we us our you your i me my who whom whose
which what where when there here very too also just only other another
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())


def prepare_caption(caption: str, max_words: int = MAX_WORDS) -> str:
    """What the official loader makes of every caption, the true one included.

    Lower case, the signs `. ! " ( ) * # : ; ~` gone, single blanks, at most `max_words` words.

    >>> prepare_caption("A dog (brown) runs:  fast!")
    'a dog brown runs fast'
    """
    return " ".join(re.sub(r'[.!"()*#:;~]', " ", caption.lower()).split()[:max_words])


def function_word_tagger(caption: str) -> list[tuple[str, str]]:
    """Words of the caption; those of a closed list of function words are "", all others count as "noun".

    Needs no model. It cannot tell nouns, adjectives and verbs apart: give a tagger of your own for that.
    """
    return [(word, "" if word.lower() in FUNCTION_WORDS else "noun") for word in caption.split()]


def reorder(caption: str, key: str, tagger: Tagger = function_word_tagger) -> tuple[str, ...]:
    """The caption in the four other orders of `PERTURBATIONS`, unprepared.

    Nouns are exchanged among the places of nouns, adjectives among those of adjectives. An order that gives
    the caption back is drawn again, a few times; a caption too short for another order comes back as it is.

    Args:
        caption: the caption.
        key: names the draw (seed and item id); the same key gives the same orders.
        tagger: splits and classifies.
    """
    tagged = tagger(caption)
    words = [word for word, _ in tagged]
    content = {kind: [i for i, (_, k) in enumerate(tagged) if k == kind] for kind in ("noun", "adjective")}
    rest = [i for i, (_, kind) in enumerate(tagged) if kind not in content]
    plain = caption.split()
    trigrams = [plain[start : start + 3] for start in range(0, len(plain), 3)]

    def inner(draw: str) -> list[str]:
        parts = (_shuffled(part, f"{draw}/{place}") for place, part in enumerate(trigrams))
        return [word for part in parts for word in part]

    ways: tuple[Callable[[str], list[str]], ...] = (
        lambda draw: _exchanged(words, list(content.values()), draw),
        lambda draw: _exchanged(words, [rest], draw),
        inner,
        lambda draw: [word for part in _shuffled(trigrams, draw) for word in part],
    )
    sources = (words, words, plain, plain)
    return tuple(
        _another(way, source, f"{key}/{name}") for way, source, name in zip(ways, sources, PERTURBATIONS, strict=True)
    )


def _another(way: Callable[[str], list[str]], source: list[str], key: str) -> str:
    drawn = source
    for attempt in range(ATTEMPTS):
        drawn = way(f"{key}/{attempt}")
        if drawn != source:
            break
    return " ".join(drawn)


def _exchanged(words: list[str], places: list[list[int]], draw: str) -> list[str]:
    result = list(words)
    for number, rows in enumerate(places):
        for row, word in zip(rows, _shuffled([words[row] for row in rows], f"{draw}/{number}"), strict=True):
            result[row] = word
    return result


def _shuffled(values: list, draw: str) -> list:
    # Sorting by hashed keys, not a library's generator: its stream may change from version to version.
    count = len(values)
    keys = struct.unpack(f"<{count}Q", hashlib.shake_128(draw.encode()).digest(8 * count))
    return [values[row] for row in sorted(range(count), key=lambda row: (keys[row], row))]
