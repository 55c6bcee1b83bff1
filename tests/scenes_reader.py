"""Reads captions of scenes and says whether they are true; shares no template with the package."""

from __future__ import annotations

import re

from engine.scenes.world import SceneSpec

_ADJECTIVES = (
    ("small", "large"),
    ("red", "green", "white", "blue", "yellow", "black", "purple", "orange", "cyan"),
    ("rubber", "striped", "metal", "dotted", "glass", "checkered"),
)
_NOUNS = {
    "circle": "circles",
    "star": "stars",
    "arrow": "arrows",
    "square": "squares",
    "heart": "hearts",
    "moon": "moons",
    "triangle": "triangles",
    "cross": "crosses",
    "ring": "rings",
}
_NUMBERS = {"a": 1, "an": 1, "two": 2, "three": 3, "four": 4}
_PREFIX = re.compile(
    r"^(a (photo|picture|image|drawing) of|an image (of|showing)|a (scene|picture) with"
    r"|this (image|picture) shows|there (is|are)) (?!no )"
)
_DENIAL = re.compile(
    r"^(?:there is no (?P<a>.+?)(?: in the image)?|no (?P<b>.+) is present|an image without (?P<c>an? .+))$"
)
_ENDING = re.compile(r"^(?P<rest>.+?)(?:,| and| but) no (?P<a>.+)$|^(?P<rest2>.+) without (?P<b>an? .+)$")
_RELATION = re.compile(r"^(.+) (to the left of|to the right of|above|below) (.+)$")
_FEATURE = re.compile(r"^this image (?P<no>does not feature|features) (?P<what>.+)$")


class Unreadable(ValueError):
    """The caption is not English as this reader knows it."""


def _noun_phrase(words: list[str], plural: bool) -> dict[str, str]:
    """The attributes that the words after the number name; checks their order and the noun's form."""
    *adjectives, noun = words
    found: dict[str, str] = {}
    rank = -1
    for word in adjectives:
        place = next((k for k, group in enumerate(_ADJECTIVES) if word in group), None)
        if place is None or place <= rank:
            raise Unreadable(f"adjective {word!r} in {words}")
        rank = place
        found[("size", "color", "material")[place]] = word
    if noun == "object" and not plural:
        return found
    for singular, several in _NOUNS.items():
        if noun == (several if plural else singular):
            return {**found, "shape": singular}
    raise Unreadable(f"noun {noun!r} in {words}")


def _counted(text: str) -> tuple[int, dict[str, str]]:
    number, *words = text.split()
    if number not in _NUMBERS or not words:
        raise Unreadable(f"number in {text!r}")
    if number in ("a", "an") and (number == "an") != (words[0][0] in "aeiou"):
        raise Unreadable(f"article in {text!r}")
    return _NUMBERS[number], _noun_phrase(words, number not in ("a", "an"))


def _matches(spec: SceneSpec, wanted: dict[str, str], groups: range | tuple[int, ...]) -> list[int]:
    """Indices of the objects of ``groups`` that have every wanted attribute."""
    return [
        i
        for i, o in enumerate(spec.objects)
        if o.group in groups and all(getattr(spec.groups[o.group], k) == v for k, v in wanted.items())
    ]


def _affirmed(spec: SceneSpec, text: str) -> bool:
    number, wanted = _counted(text)
    if "size" in wanted and spec.zoomed:
        return False
    return len(_matches(spec, wanted, spec.visible)) == number


def _denied(spec: SceneSpec, text: str, article: bool) -> bool:
    wanted = _counted(text)[1] if article else _noun_phrase(text.split(), False)
    return not _matches(spec, wanted, range(len(spec.groups)))


def _related(spec: SceneSpec, first: str, relation: str, second: str) -> bool:
    if not (_affirmed(spec, first) and _affirmed(spec, second)):
        return False
    places = []
    for text in (first, second):
        number, wanted = _counted(text)
        assert number == 1
        (index,) = _matches(spec, wanted, spec.visible)
        places.append((spec.objects[index].x, spec.objects[index].y))
    (ax, ay), (bx, by) = places
    gap = {
        "to the left of": bx - ax,
        "to the right of": ax - bx,
        "above": by - ay,
        "below": ay - by,
    }[relation]
    return gap >= 24


def _body(spec: SceneSpec, text: str) -> bool:
    prefix = _PREFIX.match(text)
    rest = text[prefix.end() :] if prefix else text
    related = _RELATION.match(rest)
    if related:
        parts = [related[1], related[3]]
        holds = _related(spec, related[1], related[2], related[3])
    else:
        parts = re.split(r" and | with | next to | beside |, ", rest)
        holds = all([_affirmed(spec, part) for part in parts])
    if prefix and prefix[0].startswith("there ") and ("are" in prefix[0]) != (_counted(parts[0])[0] > 1):
        raise Unreadable(f"number of the verb in {text!r}")
    return holds


def _featured(spec: SceneSpec, negated: bool, what: str) -> bool:
    but = re.match(r"^(.+), but not (an? .+)$", what)
    if but:
        return _affirmed(spec, but[1]) and _denied(spec, but[2], True)
    if negated:
        return _denied(spec, what, True)
    return all([_affirmed(spec, part) for part in what.split(" and ")])


def is_true(caption: str, spec: SceneSpec) -> bool:
    """Whether every sentence of ``caption`` is true of ``spec``.

    Raises:
        Unreadable: if the caption is not a sentence of the kinds known here.
    """
    return all([_sentence(part, spec) for part in re.split(r"\.(?: |$)", caption.lower()) if part])


def _sentence(text: str, spec: SceneSpec) -> bool:
    feature = _FEATURE.match(text)
    if feature:
        return _featured(spec, feature["no"] != "features", feature["what"])
    denial = _DENIAL.match(text)
    if denial:
        what = denial["a"] or denial["b"] or denial["c"]
        return _denied(spec, what, denial["c"] is not None)
    ending = _ENDING.match(text)
    if ending:
        absent = _denied(spec, ending["a"] or ending["b"], ending["b"] is not None)
        return _body(spec, ending["rest"] or ending["rest2"]) and absent
    return _body(spec, text)
