"""English captions of scenes: what is to be seen, how many, where, and what is not.

Word order is count, size, color, material, shape: "two small red striped circles". Every caption is true of
its scene: affirmed groups are wholly visible with exactly that count, relations hold by at least 24 pixels,
and what is denied matches no group of the scene, seen or not. "next to" and "beside" only join, without a
claim on distance. Not even a denied phrase names a held-out combination.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.scenes.world import (
    COLORS,
    MATERIALS,
    SHAPE_GROUP,
    SHAPES,
    SIZES,
    Group,
    SceneSpec,
    pick,
)

COUNT_WORDS = ("", "a", "two", "three", "four")
PLURALS = {shape: shape + ("es" if shape.endswith("s") else "s") for shape in SHAPES}
PREFIXES = (
    "",
    "",
    "",
    "a photo of ",
    "a picture of ",
    "an image of ",
    "an image showing ",
    "a scene with ",
    "a picture with ",
    "a drawing of ",
    "this image shows ",
    "this picture shows ",
    "there {be} ",
)
JOINERS = (" and ", " and ", " and ", " with ", " next to ", ", ", " beside ")
RELATIONS = ("to the left of", "to the right of", "above", "below")
MIN_SEPARATION_PX = 24
COLOR_SHARE, SIZE_SHARE, MATERIAL_SHARE = 0.75, 0.45, 0.45
_DENIAL_ENDINGS = (" and no {}", " but no {}", " without {}", ", no {}")
_DENIALS = ("there is no {}", "no {} is present", "there is no {} in the image", "an image without {}")
_TEMPLATE_WORDS = (
    "a an the of in on with and no not without but is are there this that it photo picture image scene "
    "drawing showing shows show next to beside left right above below present absent included excluded "
    "feature features featured does do contain contains object objects thing things shape shapes we see "
    "any only one two three four five six many several some all other near under over between both "
    "neither nor or side top bottom has have none rendering render painting illustration depicts depicted "
    "visible color colored size material made which where than more less same different big little"
)
WORDS = tuple(
    dict.fromkeys(
        [*_TEMPLATE_WORDS.split(), *SHAPES, *PLURALS.values(), *COLORS, *MATERIALS, *SIZES, ",", "."]
    )
)


def with_article(noun_phrase: str) -> str:
    """``noun_phrase`` with "a" or "an" before it."""
    return ("an " if noun_phrase[0] in "aeiou" else "a ") + noun_phrase


def phrase(group: Group, words: Sequence[str] = ("size", "color", "material")) -> str:
    """A group in words: "two small red striped circles".

    Args:
        group: what is described.
        words: which of "size", "color", "material" are said; count and shape always are.

    >>> phrase(Group("circle", "orange", "small", "glass", 2))
    'two small orange glass circles'
    >>> phrase(Group("circle", "orange", "small", "glass"), ["color"])
    'an orange circle'
    """
    parts = []
    if "size" in words:
        parts.append(group.size)
    if "color" in words:
        parts.append(group.color)
    if "material" in words:
        parts.append(group.material)
    if group.count == 1:
        return with_article(" ".join([*parts, group.shape]))
    return " ".join([COUNT_WORDS[group.count], *parts, PLURALS[group.shape]])


def _random_phrase(group: Group, rng: np.random.Generator, sizes: bool) -> str:
    u, v, w = rng.random(3).tolist()
    words = []
    if sizes and u < SIZE_SHARE:
        words.append("size")
    if v < COLOR_SHARE:
        words.append("color")
    if w < MATERIAL_SHARE:
        words.append("material")
    return phrase(group, words)


def with_prefix(body: str, plural: bool, rng: np.random.Generator) -> str:
    """``body`` after one of ``PREFIXES``; ``plural`` is the number of its first noun."""
    prefix = PREFIXES[pick(rng, len(PREFIXES))]
    if prefix == "there {be} ":
        prefix = "there are " if plural else "there is "
    return prefix + body


def relations_between(first: tuple[float, float], second: tuple[float, float]) -> list[str]:
    """The relations in which a thing at ``first`` clearly stands to one at ``second`` (centres in pixels)."""
    dx, dy = second[0] - first[0], second[1] - first[1]
    found = []
    if abs(dx) >= MIN_SEPARATION_PX:
        found.append(RELATIONS[0] if dx > 0 else RELATIONS[1])
    if abs(dy) >= MIN_SEPARATION_PX:
        found.append(RELATIONS[2] if dy > 0 else RELATIONS[3])
    return found


def absent_phrase(groups: Sequence[Group], rng: np.random.Generator) -> str | None:
    """A noun phrase without article that matches none of ``groups``, or None where a few draws find none.

    It is a shape, a color and a shape, a material and a shape, or a color or material and "object".
    Together with ``groups`` it names no held-out set of shapes: its shape is one of the scene's or of an
    unused shape group.
    """
    taken = {SHAPE_GROUP[g.shape]: g.shape for g in groups}
    for _ in range(6):
        shape = SHAPES[pick(rng, len(SHAPES))]
        shape = taken.get(SHAPE_GROUP[shape], shape)
        color, material = COLORS[pick(rng, len(COLORS))], MATERIALS[pick(rng, len(MATERIALS))]
        kind = rng.random()
        same_shape = [g for g in groups if g.shape == shape]
        if kind < 0.3:
            if not same_shape:
                return shape
        elif kind < 0.7:
            if all(g.color != color for g in same_shape):
                return f"{color} {shape}"
        elif kind < 0.85:
            if all(g.material != material for g in same_shape):
                return f"{material} {shape}"
        elif kind < 0.95:
            if all(g.color != color for g in groups):
                return f"{color} object"
        elif all(g.material != material for g in groups):
            return f"{material} object"
    return None


def _deny(template: str, noun_phrase: str) -> str:
    return template.format(with_article(noun_phrase) if "without" in template else noun_phrase)


def _mention(rng: np.random.Generator, n_groups: int) -> list[int]:
    u = rng.random()
    if n_groups == 1:
        n = 1
    elif n_groups == 2:
        n = 1 if u < 0.35 else 2
    else:
        n = 1 if u < 0.25 else 2 if u < 0.75 else 3
    pool = list(range(n_groups))
    return [pool.pop(pick(rng, len(pool))) for _ in range(n)]


def caption_for(
    groups: Sequence[Group],
    rng: np.random.Generator,
    *,
    sizes: bool = True,
    centres: Sequence[tuple[float, float] | None] | None = None,
    others: Sequence[Group] = (),
    negated_share: float = 0.06,
) -> str:
    """A true caption of one, two or three of ``groups``.

    Args:
        groups: the groups that may be spoken of.
        rng: source of all randomness.
        sizes: whether size words may be used.
        centres: for each group the centre of its single object, None for several objects; needed for
            relations.
        others: groups that are in the picture but not to be spoken of; nothing that matches them is denied.
        negated_share: share of captions that also, or only, deny something.

    Raises:
        ValueError: if ``groups`` is empty.
    """
    if not groups:
        raise ValueError("caption_for: groups must hold at least one group, got none")
    chosen = _mention(rng, len(groups))
    absent = absent_phrase([*groups, *others], rng) if rng.random() < negated_share else None
    if absent is not None and rng.random() < 0.3:
        return _deny(_DENIALS[pick(rng, len(_DENIALS))], absent)
    plural = groups[chosen[0]].count > 1
    parts = [_random_phrase(groups[g], rng, sizes) for g in chosen]
    if len(parts) == 1:
        body = parts[0]
    else:
        relation = _relation(chosen, rng, centres) if len(parts) == 2 else None
        joiner = f" {relation} " if relation else JOINERS[pick(rng, len(JOINERS))]
        body = parts[0] + joiner + parts[1]
        if len(parts) == 3:
            body += " and " + parts[2]
    caption = with_prefix(body, plural, rng)
    if absent is None:
        return caption
    return caption + _deny(_DENIAL_ENDINGS[pick(rng, len(_DENIAL_ENDINGS))], absent)


def _relation(
    chosen: list[int], rng: np.random.Generator, centres: Sequence[tuple[float, float] | None] | None
) -> str | None:
    if centres is None:
        return None
    first, second = centres[chosen[0]], centres[chosen[1]]
    if first is None or second is None:
        return None
    found = relations_between(first, second)
    if not found or rng.random() >= 0.25:
        return None
    return found[pick(rng, len(found))]


def caption_of(spec: SceneSpec, rng: np.random.Generator, *, negated_share: float = 0.06) -> str:
    """A true caption of a scene as its view shows it: ``caption_for`` its visible groups."""
    centres: list[tuple[float, float] | None] = []
    for g in spec.visible:
        if spec.groups[g].count == 1:
            thing = next(o for o in spec.objects if o.group == g)
            centres.append((thing.x, thing.y))
        else:
            centres.append(None)
    others = [group for g, group in enumerate(spec.groups) if g not in spec.visible]
    return caption_for(
        spec.visible_groups(),
        rng,
        sizes=not spec.zoomed,
        centres=centres,
        others=others,
        negated_share=negated_share,
    )
