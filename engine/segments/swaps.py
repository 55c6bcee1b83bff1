"""Hard negatives of captions: attributes or nouns of two phrases exchanged; the words stay and the binding goes.

The kinds are those of Yuksekgonul et al. 2023 (NegCLIP, nouns) and Hsieh et al. 2023 (SugarCrepe, swaps), by rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, Protocol, get_args, runtime_checkable

from engine.choices import check_choice
from engine.segments import lexicon as lx
from engine.segments.negation import mark_negated
from engine.segments.phrases import Phrase, find_phrases, is_plural
from engine.segments.tokens import Token

SwapKind = Literal["attributes", "nouns"]
SWAP_KINDS: tuple[SwapKind, ...] = get_args(SwapKind)
# Between two phrases these say nothing that would be false the other way round.
_SYMMETRIC = frozenset(
    (
        *("and", ",", "&", "near", "beside", "with", "nearby", "alongside", "next", "to", "by"),
        *("is", "are", "sits", "sit", "sitting", "stands", "stand", "standing"),
    )
)
_VALUES = (lx.COLORS, lx.SIZES, lx.MATERIALS, lx.PATTERNS)
# Vowels that are spoken as consonants, and the reverse.
_LIKE_CONSONANT = re.compile(r"(?:uni(?!n)|use|usual|euro|one\b|ukulele|ute)", re.IGNORECASE)
_LIKE_VOWEL = re.compile(r"(?:hour|honest|heir)", re.IGNORECASE)


@runtime_checkable
class Tagger(Protocol):
    """Says which part each word of a caption plays; the segmenters do."""

    def tag(self, captions: Sequence[str]) -> list[list[Token]]: ...


@dataclass(frozen=True)
class _Thing:
    """An affirmed phrase: where its words stand, its attributes (half-open), behind them its noun, and its number."""

    place: Phrase
    attributes: tuple[int, int]
    head: int
    plural: bool


def swaps(caption: str, tokens: list[Token], kind: SwapKind) -> list[str]:
    """Every exchange of one kind between two phrases of a caption, each false where the caption is true.

    Attributes: of the same sort where both phrases have one (a color for a color), else all of both. Nouns: of the same
    number. Left out are phrases under a negation, and what would say the same again: "a red car and a red dog", or the
    nouns of "a cat and a dog". "a" and "an" follow their new neighbours.

    Args:
        caption: the words.
        tokens: of the caption, with their parts.
        kind: `"attributes"` or `"nouns"`.

    Returns:
        other captions, never the same one; none where there is nothing to exchange.
    """
    check_choice("swaps", "kind", kind, SWAP_KINDS)
    found: list[str] = []
    things = _things(tokens)
    for a, b in combinations(things, 2):
        exchanges = _attributes(tokens, a, b) if kind == "attributes" else _nouns(tokens, a, b)
        found += [_exchanged(caption, tokens, *pair) for pair in exchanges]
    return [text for text in dict.fromkeys(found) if text.lower() != caption.lower()]


def swapped(captions: Sequence[str], kind: SwapKind, tagger: Tagger) -> list[list[str]]:
    """`swaps` of every caption.

    >>> from engine.segments import RulesSegmenter
    >>> swapped(["a red cube and an old blue ball"], "attributes", RulesSegmenter())
    [['a blue cube and an old red ball']]
    """
    return [swaps(caption, tokens, kind) for caption, tokens in zip(captions, tagger.tag(captions), strict=True)]


def _things(tokens: list[Token]) -> list[_Thing]:
    """The affirmed phrases whose noun stands last."""
    phrases = find_phrases(tokens)
    mark_negated(tokens, phrases)
    found = []
    for phrase in phrases:
        # "a cup of coffee", "a man's hat", "a dog that is red": what belongs to which noun is not plain.
        if phrase.negated or phrase.head != phrase.last - 1 or tokens[phrase.head].part != "noun":
            continue
        if any(token.part == "poss" for token in tokens[phrase.first : phrase.last]):
            continue
        stop = phrase.core
        while stop < phrase.head and _is_attribute(tokens[stop]):
            stop += 1
        found.append(_Thing(phrase, (phrase.core, stop), phrase.head, is_plural(tokens[phrase.head])))
    return found


def _is_attribute(token: Token) -> bool:
    return token.part in ("adj", "ed") or token.low in lx.ATTRIBUTES


Span = tuple[int, int]


def _attributes(tokens: list[Token], a: _Thing, b: _Thing) -> Iterator[tuple[Span, Span]]:
    """Spans of words to exchange."""
    if not _is_other(tokens[a.head], tokens[b.head]):
        return
    alike = []
    for values in _VALUES:
        one, two = ([k for k in range(*thing.attributes) if tokens[k].low in values] for thing in (a, b))
        # "a dark red car": which of the two is the color is not plain.
        if len(one) == len(two) == 1 and tokens[one[0]].low != tokens[two[0]].low:
            alike.append(((one[0], one[0] + 1), (two[0], two[0] + 1)))
    if alike:
        yield from alike
        return
    words = [[tokens[k].low for k in range(*thing.attributes)] for thing in (a, b)]
    if all(words) and set(words[0]) != set(words[1]):
        yield a.attributes, b.attributes


def _nouns(tokens: list[Token], a: _Thing, b: _Thing) -> Iterator[tuple[Span, Span]]:
    """Spans of words to exchange."""
    if a.plural != b.plural or not _is_other(tokens[a.head], tokens[b.head]):
        return
    # Nouns that say what kind of thing another one is go with it.
    spans = [(thing.attributes[1], thing.place.last) for thing in (a, b)]
    said = [_said(tokens, thing) for thing in (a, b)]
    between = tokens[a.place.last : b.place.first]
    if said[0] == said[1] and all(token.low in _SYMMETRIC for token in between):
        return
    yield spans[0], spans[1]


def _said(tokens: list[Token], thing: _Thing) -> list[str]:
    """The words that stay when the noun is exchanged, but articles."""
    words = [token.low for token in tokens[thing.place.first : thing.head]]
    return [word for word in words if word not in ("a", "an", "the", "one")]


def _is_other(one: Token, two: Token) -> bool:
    """Whether two nouns differ in more than their number."""
    short, long = sorted((one.low, two.low), key=len)
    return long not in (short, short + "s", short + "es")


def _exchanged(caption: str, tokens: list[Token], a: Span, b: Span) -> str:
    """The caption with the words of two spans, the first one before the second, exchanged."""
    pieces = [caption[tokens[first].start : tokens[last - 1].end] for first, last in (a, b)]
    moved = list(pieces)
    if a[0] == 0 and caption[:1].isupper():
        # The capital stays at the start of the sentence.
        if not pieces[0].isupper():
            moved[0] = pieces[0][0].lower() + pieces[0][1:]
        moved[1] = pieces[1][0].upper() + pieces[1][1:]
    text = caption
    for (first, last), piece in ((b, moved[0]), (a, moved[1])):
        text = text[: tokens[first].start] + piece + text[tokens[last - 1].end :]
        article = tokens[first - 1] if first else None
        if article is not None and article.low in ("a", "an"):
            right = "an" if _vowel(piece) else "a"
            written = right.capitalize() if article.text[0].isupper() else right
            text = text[: article.start] + written + text[article.end :]
    return text


def _vowel(word: str) -> bool:
    """Whether "an" stands before a word."""
    if _LIKE_VOWEL.match(word):
        return True
    return word[0].lower() in "aeiou" and not _LIKE_CONSONANT.match(word)
