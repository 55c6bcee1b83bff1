"""From tagged words to object phrases: runs of open words, cut at verbs, joined where one thing is meant."""

from __future__ import annotations

from dataclasses import dataclass

from engine.segments import lexicon as lx
from engine.segments.tokens import LEADING, OPEN, Token

_AFTER_PREDICATE = frozenset({"punct", "conj", "prep", "idiom"})
_TRAILING = lx.EXISTENCE | lx.ABSENCE | {"full", "free", "devoid", "alone"}
_ADJECTIVE_ENDINGS = tuple(["y", "ed", "ful", "ous", "al", "ic", "ive", "ish", "en", "less", "able", "ing"])


@dataclass(slots=True)
class Phrase:
    """Token indices: words `first` to `last` (half-open), open ones from `core` on, the noun at `head`."""

    first: int
    core: int
    last: int
    head: int
    negated: bool = False


def find_phrases(tokens: list[Token]) -> list[Phrase]:
    """Return the object phrases of a caption in order, image words and places left out."""
    found: list[Phrase] = []
    index = 0
    while index < len(tokens):
        if tokens[index].part not in LEADING | OPEN:
            index += 1
            continue
        core = index
        while core < len(tokens) and tokens[core].part in LEADING:
            core += 1
        end = core
        while end < len(tokens) and (tokens[end].part in OPEN or tokens[end].part == "poss"):
            end += 1
        found += _cut(tokens, index, core, end)
        index = max(end, index + 1)
    found = _join_adjectives(tokens, found)
    found = _join_of(tokens, found)
    found = _join_predicates(tokens, found)
    kept: list[Phrase] = []
    sentence = -1
    for phrase in found:
        before = sum(token.low in (".", "!", "?", ";") for token in tokens[: phrase.first])
        if not _is_image(tokens, phrase, opens=before != sentence) and not _is_quality(tokens, phrase):
            kept.append(phrase)
        sentence = before
    return kept


def count_of(tokens: list[Token], phrase: Phrase) -> int | None:
    """Read the number that the words of a phrase state."""
    words = [token.low for token in tokens[phrase.first : phrase.core]]
    head = tokens[phrase.head].low
    opening = [token.low for token in tokens[phrase.core : phrase.last]]
    if opening and opening[0] in ("pair", "couple") and "of" in opening:
        return 1 if head in lx.PAIRED else 2
    if opening and opening[0] in lx.COLLECTIVES and "of" in opening:
        return None
    for word in reversed(words):
        if word in lx.NUMBERS:
            return lx.NUMBERS[word]
        if word.isdigit():
            return int(word)
        if word in lx.VAGUE:
            return None
        if word == "both":
            return 2
    return 1 if any(word in ("a", "an", "another") for word in words) else None


def _number(tokens: list[Token], first: int, core: int) -> str:
    """Say whether the determiners ask for a "singular" or "plural" noun; "" if they leave it open."""
    for token in reversed(tokens[first:core]):
        if token.part == "num" and lx.NUMBERS.get(token.low) != 1:
            return "plural"
        if token.low in lx.PLURAL_DETERMINERS:
            return "plural"
        if token.low in lx.SINGULAR_DETERMINERS:
            return "singular"
    return ""


def _cut(tokens: list[Token], first: int, core: int, end: int) -> list[Phrase]:
    """Cut one run at its verbs: "a man riding", "Girls wash", "woman cooking pasta"."""
    found: list[Phrase] = []
    number = _number(tokens, first, core)
    start, begin = core, first
    index = core
    while index < end:
        if _is_verb(tokens, begin, start, index, end, number):
            found += _phrase(tokens, begin, start, index)
            begin = start = index + 1
            number = ""
        index += 1
    return found + _phrase(tokens, begin, start, end)


def _phrase(tokens: list[Token], first: int, core: int, last: int) -> list[Phrase]:
    """Make a phrase of words that hold at least one open word; adverbs at its end are no part of it."""
    while last > core and _trails(tokens, core, last - 1):
        last -= 1
    while core < last and first == core and tokens[core].part == "adv" and tokens[core].sure:
        first = core = core + 1
    if last <= core:
        return []
    return [Phrase(first, core, last, last - 1)]


def _trails(tokens: list[Token], core: int, index: int) -> bool:
    """Tell whether the last word of a run is no part of the phrase: "full (of)", "nearby", a lone "'s"."""
    token = tokens[index]
    if token.part == "poss" or token.low in _TRAILING:
        return True
    # A noun that the tagger called an adverb is still the noun that the phrase needs.
    return token.part == "adv" and (
        token.sure
        or token.low.endswith("ly")
        or any(t.part == "noun" and t.low not in lx.ATTRIBUTES for t in tokens[core:index])
    )


def is_plural(token: Token) -> bool:
    """Tell whether a word looks like a plural noun."""
    return looks_plural(token.low)


def looks_plural(low: str) -> bool:
    """Tell whether a word in lower case looks like a plural noun."""
    return (low.endswith("s") and not low.endswith(("ss", "us", "is"))) or low in (
        "men",
        "women",
        "people",
        "children",
    )


def _is_verb(tokens: list[Token], first: int, core: int, index: int, end: int, number: str) -> bool:
    """Decide whether an open word is the verb after a phrase, rather than an attribute or the noun of it.

    A small tagger calls "striped", "stars" or "rings" a verb now and then; position and grammatical number
    say more: after "two" a noun in -s is due, after "a dog" it cannot come.
    """
    token, before = tokens[index], tokens[core:index]
    led = core > first
    things = [t for t in before if t.part in ("noun", "maybe_verb") and t.low not in lx.ATTRIBUTES]
    maybe = [t for t in before if t.low in lx.THINGS_TOO]
    last = index + 1 == end
    if token.part == "noun":
        # "a dog rides", "shorts bends": a plural ends neither a phrase that "a" began nor one after a plural.
        twice = number == "singular" or (not led and things and is_plural(things[-1]))
        fits = token.low in lx.PAIRED or (things and things[-1].low in lx.S_MODIFIERS)
        return bool(last and twice and things and is_plural(token) and not fits)
    if token.part in ("ing", "ed"):
        # "a cream colored couch", "a shabby looking shower", but "a cat looking perturbed"
        if token.low in lx.COMPOUNDING and not last and before:
            return token.low == "looking" and before[-1].part != "adj"
        if things:
            return True
        if maybe and token.low not in lx.ATTRIBUTES and number != "plural" and (last or token.part == "ing"):
            return True
        # "parked cars" is what they are, "wearing glasses" what somebody does.
        bare = not led and not before
        return (bare and (last or token.part == "ing")) or (last and not led and token.part == "ing")
    if token.part == "verb_s":
        if not before:
            return not led
        if number == "singular":
            return True
        if number == "plural":
            return any(is_plural(t) for t in things)
        return bool(things)
    if token.part == "verb":
        if not before:
            return not led
        return bool(things or maybe) and (number != "singular" or token.low in lx.VERB_BASES)
    if token.part == "maybe_verb":
        if not before:
            return not led and core > 0 and tokens[core - 1].part in ("neg", "aux", "pron")
        return any(is_plural(t) for t in things)
    if token.part == "adv":
        return bool(things)
    return False


def _joined_by(tokens: list[Token], left: Phrase, right: Phrase, *ways: tuple[str, ...]) -> bool:
    return tuple(token.low for token in tokens[left.last : right.first]) in ways


def _describes(token: Token) -> bool:
    return token.low in lx.ATTRIBUTES or token.part in ("adj", "ed", "ing", "adv")


def _join_adjectives(tokens: list[Token], phrases: list[Phrase]) -> list[Phrase]:
    """Join "an orange and white cat", "a red, white and blue flag": adjectives before one noun."""
    found: list[Phrase] = []
    for phrase in phrases:
        left = found[-1] if found else None
        if (
            left is not None
            and phrase.first == phrase.core
            and _joined_by(tokens, left, phrase, ("and",), (",",), (",", "and"), ("or",))
            and all(_describes(t) or t.part in ("punct", "conj") for t in tokens[left.core : left.last])
            and tokens[left.last - 1].low.endswith(_ADJECTIVE_ENDINGS + tuple(lx.ATTRIBUTES))
            and _describes(tokens[phrase.core])
            and (phrase.last - phrase.core > 1 or _describes(tokens[phrase.head]))
            and (left.core > left.first or not all(_describes(t) for t in tokens[phrase.core : phrase.last]))
        ):
            found[-1] = Phrase(left.first, left.core, phrase.last, phrase.head)
        else:
            found.append(phrase)
    return found


def _join_of(tokens: list[Token], phrases: list[Phrase]) -> list[Phrase]:
    """Join "a group of people", "a cup of coffee", "a cube made of red metal"."""
    found: list[Phrase] = []
    for phrase in phrases:
        left = found[-1] if found else None
        if left is None:
            found.append(phrase)
            continue
        head = tokens[left.head].low
        stuff = phrase.first == phrase.core and all(
            token.low in lx.ATTRIBUTES for token in tokens[phrase.core : phrase.last]
        )
        made = _joined_by(tokens, left, phrase, ("made", "of"), ("made", "from"), ("made", "out", "of"), ("of",))
        if stuff and made:
            found[-1] = Phrase(left.first, left.core, phrase.last, left.head)
        elif _joined_by(tokens, left, phrase, ("of",)) and head in lx.COLLECTIVES:
            found[-1] = Phrase(left.first, left.core, phrase.last, phrase.head)
        elif _joined_by(tokens, left, phrase, ("of",)) and head in lx.CONTAINERS and phrase.first == phrase.core:
            found[-1] = Phrase(left.first, left.core, phrase.last, left.head)
        else:
            found.append(phrase)
    return found


def _join_predicates(tokens: list[Token], phrases: list[Phrase]) -> list[Phrase]:
    """Extend a phrase by what "is" says of it: "the car is red", "a cube that is small and blue"."""
    found: list[Phrase] = []
    extended = None
    for phrase in phrases:
        left = found[-1] if found else None
        between = [t.low for t in tokens[left.last : phrase.first]] if left is not None else []
        if between and between[0] in ("that", "which"):
            between = between[1:]
        words = tokens[phrase.first : phrase.last]
        if (
            left is not None
            and (between in (["is"], ["are"], ["was"], ["were"]) or (between == ["and"] and extended is left))
            and phrase.first == phrase.core
            and all((_describes(t) and t.part not in ("ing", "ed")) or t.low in lx.ATTRIBUTES for t in words)
            and not any(t.low in lx.NO_ATTRIBUTE or t.low.endswith("er") for t in words)
            and (phrase.last == len(tokens) or tokens[phrase.last].part in _AFTER_PREDICATE)
        ):
            found[-1] = extended = Phrase(left.first, left.core, phrase.last, left.head)
        elif left is None or not _is_bare_predicate(tokens, phrase):
            found.append(phrase)
    return found


def _is_bare_predicate(tokens: list[Token], phrase: Phrase) -> bool:
    """Recognise "is present", "is not red": adjectives after "is" that could not be joined."""
    words = tokens[phrase.first : phrase.last]
    before = [t.low for t in tokens[max(0, phrase.first - 2) : phrase.first]]
    after_is = any(low in lx.AUXILIARIES for low in before)
    return after_is and phrase.first == phrase.core and all(_describes(t) and t.part != "noun" for t in words)


def _is_quality(tokens: list[Token], phrase: Phrase) -> bool:
    """Recognise "decorated in white", "looks clean": a quality alone is no thing."""
    words = tokens[phrase.first : phrase.last]
    before = tokens[phrase.first - 1].part if phrase.first else ""
    bare = phrase.first == phrase.core and all(t.low in lx.ATTRIBUTES - lx.THINGS_TOO for t in words)
    return bare and before in ("prep", "verb_s", "verb", "maybe_verb", "ing", "ed")


def _is_image(tokens: list[Token], phrase: Phrase, opens: bool) -> bool:
    """Recognise the words that speak of the picture itself, of absence, or of nothing in particular."""
    words = [token.low for token in tokens[phrase.core : phrase.last]]
    head, others = words[-1], words[:-1]
    leading = [token.low for token in tokens[phrase.first : phrase.core]]
    if head in ("absence", "lack") or (
        head in lx.SIGNS and tokens[phrase.last : phrase.last + 1] and tokens[phrase.last].low == "of"
    ):
        return True
    told = [word for word in words if not word.endswith("ly")]
    if len(told) == 1 and told[0] in lx.NO_ATTRIBUTE:
        return True
    if not all(word in lx.IMAGE_MODIFIERS for word in others):
        return False
    after = tokens[phrase.last].low if phrase.last < len(tokens) else ""
    if head in lx.IMAGES and ("this" in leading or "the" in leading):
        return True
    return head in lx.IMAGES | lx.MEDIUMS and opens and (after in lx.SHOWING or not after)
