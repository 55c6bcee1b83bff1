"""Which phrases of a caption are denied: the reach of "no", "without", "not", "absent" and their like."""

from __future__ import annotations

from engine.segments import lexicon as lx
from engine.segments.phrases import Phrase
from engine.segments.tokens import OPEN, Token

_DENYING_VERBS = lx.DENYING_VERBS | {"missing"}
_DENYING_PAIRS = frozenset(
    {
        *(("devoid", "of"), ("free", "of"), ("free", "from"), ("empty", "of"), ("absence", "of")),
        *(("lack", "of"), ("instead", "of"), ("rather", "than"), ("none", "of"), ("except", "for")),
        *((sign, "of") for sign in lx.SIGNS),
    }
)
_NO_DENIAL = frozenset({"only", "just", "merely", "simply"})
_CLAUSE_ENDS = frozenset({".", ";", ":", "!", "?", "but", "while", "whereas", "although", "though", "yet"})


def mark_negated(tokens: list[Token], phrases: list[Phrase]) -> None:
    """Set `negated` of every phrase that the caption denies.

    "no", "without", "lacks", "not a" deny the next phrase and those joined to it by "or" or "nor", or by
    "and" and commas as long as no determiner starts afresh; "not" before a verb denies its object; "is not
    present", "is absent", "cannot be seen" deny the subject.
    """
    for index, token in enumerate(tokens):
        pair = (token.low, tokens[index + 1].low if index + 1 < len(tokens) else "")
        if token.part == "no" and not _is_sign(tokens, index):
            _deny_from(tokens, phrases, _starting(phrases, index + 1, 0))
        elif pair in _DENYING_PAIRS and (pair[0] not in lx.SIGNS or tokens[index - 1].part == "no"):
            _deny_from(tokens, phrases, _next(tokens, phrases, index + 2))
        elif token.low == "without" or token.low in _DENYING_VERBS:
            target = _next(tokens, phrases, index + 1)
            if token.low == "missing" and (target is None or phrases[target].first != index + 1):
                target = None
            if target is not None:
                _deny_from(tokens, phrases, target)
            elif token.low in lx.ABSENCE:
                _deny_subject(tokens, phrases, index)
        elif token.low in lx.ABSENCE and not _inside(phrases, index):
            # "absent is a bottle" turns the order round.
            if tokens[index + 1 : index + 2] and tokens[index + 1].low in ("is", "are"):
                _deny_from(tokens, phrases, _next(tokens, phrases, index + 2))
            else:
                _deny_subject(tokens, phrases, index)
        elif token.part == "neg":
            _deny_by_not(tokens, phrases, index)


def _is_sign(tokens: list[Token], index: int) -> bool:
    following = [token.low for token in tokens[index + 1 : index + 3]]
    return len(following) == 2 and following[0] in lx.SIGNS and following[1] == "of"


def _inside(phrases: list[Phrase], index: int) -> bool:
    return any(phrase.first <= index < phrase.last for phrase in phrases)


def _starting(phrases: list[Phrase], index: int, slack: int) -> int | None:
    """Find the phrase whose open words begin at token `index`, or up to `slack` tokens later."""
    for number, phrase in enumerate(phrases):
        if phrase.first - 1 <= index <= phrase.core + slack and phrase.last > index:
            return number
    return None


def _next(tokens: list[Token], phrases: list[Phrase], index: int) -> int | None:
    """Find the first phrase from token `index` on, within the clause and with no verb between."""
    for number, phrase in enumerate(phrases):
        if phrase.first >= index:
            between = tokens[index : phrase.first]
            blocked = any(t.low in _CLAUSE_ENDS or t.part in ("aux", "conj", "punct") for t in between)
            return None if blocked else number
    return None


def _deny_from(tokens: list[Token], phrases: list[Phrase], target: int | None) -> None:
    """Deny a phrase and those joined to it."""
    if target is None:
        return
    phrases[target].negated = not phrases[target].negated
    for left, right in zip(phrases[target:], phrases[target + 1 :], strict=False):
        link = [t.low for t in tokens[left.last : right.first]]
        if link in (["or"], ["nor"], [",", "or"], [",", "nor"]) or (
            link in (["and"], [","], [",", "and"]) and right.first == right.core
        ):
            right.negated = True
        else:
            return


def _deny_subject(tokens: list[Token], phrases: list[Phrase], index: int) -> None:
    """Deny the subject before token `index`, with what is joined to it; "a dog with a collar" is the dog."""
    before = [phrase for phrase in phrases if phrase.last <= index]
    if not before or any(t.low in _CLAUSE_ENDS for t in tokens[before[-1].last : index]):
        return
    place = len(before) - 1
    while place > 0:
        gap = tokens[before[place - 1].last : before[place].first]
        if len(gap) == 1 and gap[0].part == "prep":
            place -= 1
        else:
            break
    before[place].negated = not before[place].negated
    while place > 0:
        link = [t.low for t in tokens[before[place - 1].last : before[place].first]]
        if link not in (["and"], ["or"], ["nor"], [","], [",", "and"], [",", "or"]):
            break
        place -= 1
        before[place].negated = before[place + 1].negated


def _deny_by_not(tokens: list[Token], phrases: list[Phrase], index: int) -> None:
    """Follow "not", "n't", "never", "cannot" to the object or the subject that it denies."""
    place = index + 1
    while place < len(tokens) and (tokens[place].low in ("be", "been", "being", "have") or tokens[place].part == "adv"):
        if tokens[place].low in _NO_DENIAL:
            return
        # "does not have a hat": here it is the verb itself.
        if tokens[place].low == "have" and _starting(phrases, place + 1, 0) is not None:
            break
        place += 1
    if place >= len(tokens) or tokens[place].part == "punct":
        # "a car is present, but a sink is not"
        if index and tokens[index - 1].part == "aux":
            _deny_subject(tokens, phrases, index)
        return
    following = tokens[place]
    direct = _starting(phrases, place, 0)
    if direct is not None and phrases[direct].first <= place and following.low not in lx.NO_ATTRIBUTE:
        _deny_from(tokens, phrases, direct)
    elif following.low in lx.EXISTENCE and _is_existence(tokens, place):
        _deny_subject(tokens, phrases, index)
    elif following.part in OPEN or following.low in ("have", "has"):
        target = _next(tokens, phrases, place + 1)
        if target is None:
            return
        # "not sitting on the bench" leaves the bench where it is, "not sitting on a bench" does not.
        indirect = any(t.part == "prep" for t in tokens[place + 1 : phrases[target].first])
        definite = tokens[phrases[target].first].low == "the"
        if not (indirect and definite):
            _deny_from(tokens, phrases, target)


def _is_existence(tokens: list[Token], place: int) -> bool:
    """Tell "is not in the picture" from "is not in a box"."""
    if tokens[place].low != "in":
        return True
    following = [t.low for t in tokens[place + 1 : place + 3]]
    return any(low in lx.IMAGES or low in ("sight", "view") for low in following)
