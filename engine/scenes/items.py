"""The controlled benchmark over the scenes: pairs of pictures and captions that differ only in a binding.

It follows BiSCoR-Ctrl (Miranda et al. 2026, arXiv 2604.11496): two images and two captions with the same
objects and the same words, so that only who has which attribute tells them apart. Position is our addition.

Splits: "in_domain" holds combinations that training shows, "held_out" only such that it never shows (two shapes of one
shape group, each in a withheld look of color and material), "shifted" puts held-out pairs among two or three further
objects and draws them with ``SHIFTED`` settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from engine.scenes.captions import PREFIXES, phrase
from engine.scenes.render import render
from engine.scenes.settings import SHIFTED, STANDARD, RenderSettings
from engine.scenes.world import (
    CANVAS,
    COLOR_GROUPS,
    MATERIAL_GROUPS,
    MAX_COUNT,
    MAX_OBJECTS,
    SHAPE_GROUPS,
    SHAPES,
    SIZES,
    Group,
    Object,
    SceneSpec,
    cluster_cells,
    draw,
    pick,
    place,
    random_group,
)

CATEGORIES = ("color", "size", "material", "quantity", "position")
ITEM_SPLITS = ("held_out", "in_domain", "shifted")
Box = tuple[int, int, int, int]
T = TypeVar("T")

# Not "next to": the two things are far apart.
_JOINERS = (" and ", " and ", " with ", ", ")
# "there is" would have to become "there are" where the counts are exchanged: the words must stay the same.
_STEADY_PREFIXES = tuple(p for p in PREFIXES if "{be}" not in p)
_WORDS = {
    "color": ("color",),
    "size": ("size",),
    "material": ("material",),
    "quantity": (),
    "position": ("color",),
}
_FAR_CELLS = tuple(
    (a, b) for a in range(9) for b in range(9) if max(abs(a // 3 - b // 3), abs(a % 3 - b % 3)) == 2
)
_FACING_CELLS = tuple((a, b) for a, b in _FAR_CELLS if a // 3 == b // 3 or a % 3 == b % 3)


@dataclass(frozen=True)
class ControlledItem:
    """Two scenes and two captions; caption ``i`` is true of scene ``i`` and false of the other.

    ``segments[i]`` are the two noun phrases of caption ``i``; ``boxes[i][k]`` is the half-open pixel box
    ``(x0, y0, x1, y1)`` in picture ``i`` of what ``segments[i][k]`` names. Both pictures share one
    background.
    """

    category: str
    split: str
    scenes: tuple[SceneSpec, SceneSpec]
    captions: tuple[str, str]
    segments: tuple[tuple[str, str], tuple[str, str]]
    boxes: tuple[tuple[Box, Box], tuple[Box, Box]]
    render_seed: int

    @property
    def settings(self) -> RenderSettings:
        """How the pictures are drawn."""
        return settings_of(self.split)

    def images(self) -> np.ndarray:
        """Both pictures, uint8 ``(2, 96, 96, 3)``."""
        return np.stack([picture_of(scene, self.render_seed, self.settings) for scene in self.scenes])


def settings_of(split: str) -> RenderSettings:
    """The render settings of an item split."""
    return SHIFTED if split == "shifted" else STANDARD


def picture_of(scene: SceneSpec, render_seed: int, settings: RenderSettings) -> np.ndarray:
    """The picture `(96, 96, 3)`, uint8; the same scene and seed give the same bytes."""
    return render(scene, np.random.default_rng(render_seed), settings)


def check_request(who: str, n: int, split: str) -> None:
    """Raise ValueError for fewer than one item or an unknown split."""
    if n < 1:
        raise ValueError(f"{who}: n must be at least 1, got {n}")
    if split not in ITEM_SPLITS:
        raise ValueError(f"{who}: split must be one of {', '.join(ITEM_SPLITS)}, got {split!r}")


def controlled_items(category: str, n: int, *, seed: int, split: str = "held_out") -> list[ControlledItem]:
    """``n`` different items of one category.

    Args:
        category: what is exchanged: "color", "size", "material", "quantity" or "position".
        n: number of items; no two have both the same captions and the same groups.
        seed: decides everything; the first items of a longer list are those of a shorter one.
        split: "held_out", "in_domain" or "shifted".

    Raises:
        ValueError: for an unknown category or split, or ``n`` below 1.

    >>> item = controlled_items("color", 1, seed=0)[0]
    >>> item.images().shape
    (2, 96, 96, 3)
    >>> sorted(item.captions[0].split()) == sorted(item.captions[1].split())
    True
    """
    if category not in CATEGORIES:
        raise ValueError(
            f"controlled_items: category must be one of {', '.join(CATEGORIES)}, got {category!r}"
        )
    check_request("controlled_items", n, split)

    def make(rng: np.random.Generator, index: int) -> tuple[object, ControlledItem]:
        item = _controlled_item(rng, category, split)
        return (item.captions, item.scenes[0].groups), item

    return unique_items(
        make, n, np.random.default_rng((seed, CATEGORIES.index(category), ITEM_SPLITS.index(split)))
    )


def described(item: ControlledItem, words: Sequence[str]) -> ControlledItem:
    """The same item with captions that also say ``words``, of "size", "color" and "material", of both groups.

    Each caption stays true of its own picture and false of the other, for what is exchanged is still said.

    >>> item = controlled_items("quantity", 1, seed=0)[0]
    >>> len(described(item, ["color"]).captions[0].split()) - len(item.captions[0].split())
    2
    """
    said = _WORDS[item.category]
    now = tuple(word for word in ("size", "color", "material") if word in said or word in words)
    captions, segments = [], []
    for caption, scene, (first, second) in zip(item.captions, item.scenes, item.segments, strict=True):
        longer = {phrase(group, said): phrase(group, now) for group in scene.groups[:2]}
        before, _, rest = caption.partition(first)
        between, _, after = rest.partition(second)
        segments.append((longer[first], longer[second]))
        captions.append(before + longer[first] + between + longer[second] + after)
    return replace(item, captions=(captions[0], captions[1]), segments=(segments[0], segments[1]))


def pair_of_groups(rng: np.random.Generator, split: str, category: str) -> tuple[Group, Group]:
    """Two groups whose attributes may be exchanged without leaving the split."""
    ranks = [0, 1, 2]
    own = ranks.pop(pick(rng, 3))
    hue = pick(rng, 3)
    if split == "in_domain":
        other = ranks.pop(pick(rng, 2))
        shapes = [SHAPE_GROUPS[own][pick(rng, 3)], SHAPE_GROUPS[other][pick(rng, 3)]]
        # Of the three material groups, one is withheld for each of the two shapes: the last is for both.
        (free,) = {0, 1, 2} - {-(own + hue) % 3, -(other + hue) % 3}
        materials = MATERIAL_GROUPS[free]
    else:
        shapes = draw(rng, SHAPE_GROUPS[own], 2)
        materials = MATERIAL_GROUPS[-(own + hue) % 3]
    colors = draw(rng, COLOR_GROUPS[hue], 2)
    sizes = [SIZES[pick(rng, 2)] for _ in range(2)]
    counts = [1, 1]
    worn = [materials[pick(rng, len(materials))] for _ in range(2)]
    if category == "size":
        sizes = draw(rng, SIZES, 2)
    elif category == "material":
        worn = draw(rng, materials, 2)
    elif category == "quantity":
        sizes[1] = sizes[0]
        counts[0] = 1 + pick(rng, MAX_COUNT)
        counts[1] = _other_count(rng, counts[0])
    first, second = (Group(*looks) for looks in zip(shapes, colors, sizes, worn, counts, strict=True))
    return first, second


def _other_count(rng: np.random.Generator, count: int) -> int:
    pool = [c for c in range(1, MAX_COUNT + 1) if c != count and c + count <= MAX_OBJECTS]
    return pool[pick(rng, len(pool))]


def with_distractors(
    rng: np.random.Generator, pair: tuple[Group, ...], split: str, spared: tuple[str, ...] = ()
) -> tuple[Group, ...]:
    """The pair and, in the shifted split, two or three single objects of other shapes."""
    if split != "shifted":
        return pair
    taken = {*spared, *(g.shape for g in pair)}
    shapes = draw(rng, tuple(s for s in SHAPES if s not in taken), 2 + pick(rng, 2))
    return (*pair, *(random_group(rng, shape, 1) for shape in shapes))


def _separate_cells(
    rng: np.random.Generator, n_groups: int, pairs: tuple[tuple[int, int], ...]
) -> list[list[int]]:
    first, second = pairs[pick(rng, len(pairs))]
    free = [c for c in range(9) if c not in (first, second)]
    rest = [free.pop(pick(rng, len(free))) for _ in range(n_groups - 2)]
    return [[first], [second], *([c] for c in rest)]


def place_apart(rng: np.random.Generator, groups: tuple[Group, ...], category: str, split: str) -> SceneSpec:
    """A scene whose first two groups lie far apart: facing each other for positions, in clusters for quantities."""
    if category == "quantity":
        clusters = cluster_cells(rng, [g.count for g in groups])
    else:
        pairs = _FACING_CELLS if category == "position" else _FAR_CELLS
        clusters = _separate_cells(rng, len(groups), pairs)
    spec = place(rng, groups, settings_of(split), clusters)
    # Any object must fit where any other is, for sizes and places are exchanged.
    margin = max(o.size_px for o in spec.objects) / 2
    objects = tuple(
        o._replace(
            x=min(max(o.x, margin), CANVAS - margin),
            y=min(max(o.y, margin), CANVAS - margin),
        )
        for o in spec.objects
    )
    return SceneSpec(groups, objects, spec.visible)


def _exchanged(spec: SceneSpec, category: str) -> SceneSpec:
    """The scene with what ``category`` names exchanged between its first two groups."""
    first, second, *rest = spec.groups
    objects = list(spec.objects)
    if category == "color":
        first, second = replace(first, color=second.color), replace(second, color=first.color)
    elif category == "material":
        first, second = replace(first, material=second.material), replace(second, material=first.material)
    elif category == "size":
        first, second = replace(first, size=second.size), replace(second, size=first.size)
        objects[:2] = _swap(objects, "size_px")
    elif category == "position":
        objects[:2] = _swap(objects, "cell", "x", "y")
    else:
        assert category == "quantity"
        first, second = replace(first, count=second.count), replace(second, count=first.count)
        objects = [o._replace(group=1 - o.group) if o.group < 2 else o for o in objects]
    return SceneSpec((first, second, *rest), tuple(objects), spec.visible)


def _swap(objects: list[Object], *fields: str) -> list[Object]:
    a, b = objects[:2]
    return [
        a._replace(**{name: getattr(b, name) for name in fields}),
        b._replace(**{name: getattr(a, name) for name in fields}),
    ]


def _box(spec: SceneSpec, group: int) -> Box:
    x0, y0, x1, y1 = spec.group_box(group)
    return (
        max(0, int(np.floor(x0))),
        max(0, int(np.floor(y0))),
        min(CANVAS, int(np.ceil(x1))),
        min(CANVAS, int(np.ceil(y1))),
    )


def _relation(spec: SceneSpec) -> str:
    a, b = spec.objects[:2]
    if abs(a.x - b.x) > abs(a.y - b.y):
        return "to the left of" if a.x < b.x else "to the right of"
    return "above" if a.y < b.y else "below"


def _controlled_item(rng: np.random.Generator, category: str, split: str) -> ControlledItem:
    groups = with_distractors(rng, pair_of_groups(rng, split, category), split)
    scene = place_apart(rng, groups, category, split)
    scenes = (scene, _exchanged(scene, category))
    first = pick(rng, 2)
    if category == "position":
        # Only the order of the two nouns tells the captions apart.
        orders = ((0, 1), (1, 0))
        joiner = f" {_relation(scene)} "
    else:
        orders = ((first, 1 - first),) * 2
        joiner = _JOINERS[pick(rng, len(_JOINERS))]
    prefixes = _STEADY_PREFIXES if category == "quantity" else PREFIXES
    prefix = prefixes[pick(rng, len(prefixes))].format(be="is")
    segments, boxes = [], []
    for order, seen in zip(orders, scenes, strict=True):
        a, b = order
        segments.append((phrase(seen.groups[a], _WORDS[category]), phrase(seen.groups[b], _WORDS[category])))
        boxes.append((_box(seen, a), _box(seen, b)))
    captions = (prefix + joiner.join(segments[0]), prefix + joiner.join(segments[1]))
    return ControlledItem(
        category,
        split,
        scenes,
        captions,
        (segments[0], segments[1]),
        (boxes[0], boxes[1]),
        int(rng.integers(2**31)),
    )


def unique_items(
    make: Callable[[np.random.Generator, int], tuple[object, T]], n: int, rng: np.random.Generator
) -> list[T]:
    """`n` items of different keys; `make(rng, place)` gives one with its key and is asked again where it is known."""
    items: list[T] = []
    seen: set[object] = set()
    while len(items) < n:
        key, item = make(rng, len(items))
        if key not in seen:
            seen.add(key)
            items.append(item)
    return items
