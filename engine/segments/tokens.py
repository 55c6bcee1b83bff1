"""Words of a caption with their offsets and the part each plays, from word lists alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.segments import lexicon as lx

# Parts: words that may stand in an object phrase ...
OPEN = frozenset({"noun", "adj", "ing", "ed", "verb_s", "verb", "maybe_verb", "adv"})
# ... words that begin one, and words that end it: prep, aux, pron, conj, punct, neg, deny, idiom.
LEADING = frozenset({"det", "num", "no"})

_WORD = re.compile(
    r"(?P<num>\d+(?:[.,]\d+)*)|(?P<neg>n['’]t\b)|(?P<suffix>['’](?:s|re|ve|m|ll|d)\b)"
    r"|(?P<word>[^\W\d_]+?(?=n['’]t\b)|[^\W\d_]+(?:-[^\W_]+)*)|(?P<other>\S)"
)


@dataclass(slots=True)
class Token:
    """One word: text, lower-case form, offsets in the caption, part; `sure` when a closed list decided it."""

    text: str
    low: str
    start: int
    end: int
    part: str = ""
    sure: bool = False


def tokenise(caption: str) -> list[Token]:
    """Split a caption into words, contractions ("is", "n't") and single signs."""
    found = []
    for match in _WORD.finditer(caption):
        text = match.group()
        found.append(Token(text, text.lower().replace("’", "'"), match.start(), match.end()))
    return found


def mark_closed(tokens: list[Token]) -> None:
    """Give every word of a closed class its part; the others stay open ("")."""
    for index, token in enumerate(tokens):
        token.part = _closed_part(tokens, index)
        token.sure = bool(token.part)


def mark_idioms(tokens: list[Token]) -> None:
    """Mark fixed expressions and places within the picture, which hold nouns but name no thing."""
    lows = [token.low for token in tokens]
    index = 0
    while index < len(tokens):
        length = max((_idiom_length(lows, index), _side_length(tokens, index)))
        for token in tokens[index : index + length]:
            token.part = "idiom"
        index += max(1, length)


def open_part(low: str) -> str:
    """Guess the part of an open word by its ending and the word lists of captions."""
    if low in lx.ATTRIBUTES:
        return "adj"
    if low.endswith("ing") and len(low) > 4 and low not in lx.ING_NOUNS:
        return "ing"
    if low in lx.PARTICIPLES or (low.endswith("ed") and len(low) > 3 and low not in lx.ED_NOUNS):
        return "ed"
    if low in lx.NO_ATTRIBUTE:
        return "adj"
    if low in lx.VERB_FORMS_S:
        return "verb_s"
    if low in lx.VERB_BASES:
        return "verb"
    if low in lx.NOUNS_TOO:
        return "maybe_verb"
    if low.endswith("ly") and low not in lx.NOT_ADVERBS:
        return "adv"
    return "noun"


def _closed_part(tokens: list[Token], index: int) -> str:
    low = tokens[index].low
    before = tokens[index - 1].low if index else ""
    if low == "'s":
        # "a doctor's office" goes on, "there's a dog" does not.
        return "aux" if before in lx.PRONOUNS or not before else "poss"
    if low == "no" or low == "neither":
        return "no"
    if low in lx.NUMBERS or low[0].isdigit():
        return "num"
    if low == "that":
        return "pron"
    for words, part in (
        (lx.NEGATIONS, "neg"),
        (lx.DENYING_VERBS, "deny"),
        (lx.DETERMINERS, "det"),
        (lx.PREPOSITIONS, "prep"),
        (lx.AUXILIARIES, "aux"),
        (lx.PRONOUNS, "pron"),
        (lx.CONJUNCTIONS, "conj"),
        (lx.ADVERBS, "adv"),
    ):
        if low in words:
            return part
    return "" if low[0].isalpha() else "punct"


def _idiom_length(lows: list[str], index: int) -> int:
    return max((len(idiom) for idiom in lx.IDIOMS if tuple(lows[index : index + len(idiom)]) == idiom), default=0)


def _side_length(tokens: list[Token], index: int) -> int:
    """Match "to the left", "on the upper right side", "in the background" where no noun follows."""
    if tokens[index].part != "prep":
        return 0
    end = index + 1
    if end < len(tokens) and tokens[end].part == "det":
        end += 1
    start = end
    while end < len(tokens) and tokens[end].low in lx.SIDES | lx.SIDE_MODIFIERS:
        end += 1
    if end == start or tokens[end - 1].low not in lx.SIDES:
        return 0
    if end < len(tokens) and tokens[end].part in ("noun", "adj", "poss"):
        return 0
    return end - index
