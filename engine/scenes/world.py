"""The world of the scenes: its words, what one scene holds, and which combinations training never sees.

Shapes, colors and materials come in three groups each. A training scene never holds

* two different shapes of the same shape group,
* a shape in a color and a material that are withheld together: a third of all looks (shape, color, material), so
  chosen that any two of the three words still meet in training.

Held-out scenes hold exactly such things: two shapes of one group, each in a withheld look. So every set of shapes
and every combination of attributes in a held-out test item is new, while each word was seen thousands of times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.scenes.settings import STANDARD, RenderSettings

SHAPE_GROUPS = (("circle", "star", "arrow"), ("square", "heart", "moon"), ("triangle", "cross", "ring"))
COLOR_GROUPS = (("red", "green", "white"), ("blue", "yellow", "black"), ("purple", "orange", "cyan"))
MATERIAL_GROUPS = (("rubber", "striped"), ("metal", "dotted"), ("glass", "checkered"))
SHAPES = tuple(word for group in SHAPE_GROUPS for word in group)
COLORS = tuple(word for group in COLOR_GROUPS for word in group)
MATERIALS = tuple(word for group in MATERIAL_GROUPS for word in group)
SIZES = ("small", "large")
MAX_COUNT = 4
MAX_OBJECTS = 6
CANVAS = 96
CELL = 32
SPLITS = ("train", "in_domain", "held_out", "shifted")
ATTRIBUTES = SHAPES + COLORS + SIZES + MATERIALS

SHAPE_GROUP = {word: k for k, group in enumerate(SHAPE_GROUPS) for word in group}
COLOR_GROUP = {word: k for k, group in enumerate(COLOR_GROUPS) for word in group}
MATERIAL_GROUP = {word: k for k, group in enumerate(MATERIAL_GROUPS) for word in group}

_NEIGHBORS = tuple(
    tuple(
        other
        for other in range(9)
        if other != cell and abs(other // 3 - cell // 3) <= 1 and abs(other % 3 - cell % 3) <= 1
    )
    for cell in range(9)
)


def _span(cells: list[int]) -> int:
    """How far ``cells`` spread: the longer side of the box around them first, then its area.

    An L of three cells thus beats a row of three: it fits into a window of half the picture.
    """
    if not cells:
        return 0
    rows = [c // 3 for c in cells]
    columns = [c % 3 for c in cells]
    height, width = max(rows) - min(rows) + 1, max(columns) - min(columns) + 1
    return 10 * max(height, width) + height * width


# By the set of cells as bits.
_SPANS = tuple(_span([c for c in range(9) if bits >> c & 1]) for bits in range(512))


@dataclass(frozen=True, slots=True)
class Group:
    """Objects that look the same: ``count`` of one shape, color, size and material."""

    shape: str
    color: str
    size: str
    material: str
    count: int = 1


class Object(NamedTuple):
    """One thing: its group, cell, centre and extent in pixels, angle, and color jitter in [-1, 1]."""

    group: int
    cell: int
    x: float
    y: float
    size_px: int
    angle_deg: float
    tint: tuple[float, float, float]


class View(NamedTuple):
    """What becomes the picture: "full", a window zoomed in ("zoom") or kept at native scale ("paste")."""

    kind: str = "full"
    x: int = 0
    y: int = 0
    side: int = CANVAS


FULL_VIEW = View()


@dataclass(frozen=True)
class SceneSpec:
    """A scene: its groups, its objects, the view, and the indices of the groups wholly in view.

    Captions speak of ``visible`` groups alone; what is only partly in the view is neither affirmed nor
    denied.
    """

    groups: tuple[Group, ...]
    objects: tuple[Object, ...]
    visible: tuple[int, ...]
    view: View = FULL_VIEW

    @property
    def zoomed(self) -> bool:
        """Whether absolute scale is lost, so that size words mean nothing."""
        return self.view.kind == "zoom"

    def visible_groups(self) -> tuple[Group, ...]:
        """The groups a caption may speak of."""
        return tuple(self.groups[g] for g in self.visible)

    def group_box(self, group: int) -> tuple[float, float, float, float]:
        """Box ``(x0, y0, x1, y1)`` in scene pixels around all objects of one group."""
        mine = [o for o in self.objects if o.group == group]
        return (
            min(o.x - o.size_px / 2 for o in mine),
            min(o.y - o.size_px / 2 for o in mine),
            max(o.x + o.size_px / 2 for o in mine),
            max(o.y + o.size_px / 2 for o in mine),
        )


def pick(rng: np.random.Generator, n: int) -> int:
    """A uniform integer in ``[0, n)``; several times cheaper than ``rng.integers`` for single draws."""
    return int(rng.random() * n)


def draw(rng: np.random.Generator, items: tuple[str, ...], n: int) -> list[str]:
    """``n`` different entries of ``items`` in random order."""
    pool = list(items)
    return [pool.pop(pick(rng, len(pool))) for _ in range(n)]


def is_withheld(shape: str, color: str, material: str) -> bool:
    """Whether training never shows this look; a third of them all, and every two of the words meet elsewhere.

    >>> is_withheld("circle", "red", "rubber"), is_withheld("circle", "red", "metal")
    (True, False)
    """
    return (SHAPE_GROUP[shape] + COLOR_GROUP[color] + MATERIAL_GROUP[material]) % 3 == 0


def withheld_materials(shape: str, color: str) -> tuple[str, ...]:
    """The two materials in which training never shows ``shape`` in ``color``."""
    return MATERIAL_GROUPS[-(SHAPE_GROUP[shape] + COLOR_GROUP[color]) % 3]


def allowed_materials(shape: str, color: str) -> tuple[str, ...]:
    """The four materials in which training may show ``shape`` in ``color``."""
    return _ALLOWED_MATERIALS[-(SHAPE_GROUP[shape] + COLOR_GROUP[color]) % 3]


_ALLOWED_MATERIALS = tuple(tuple(m for m in MATERIALS if MATERIAL_GROUP[m] != k) for k in range(3))


def is_training_groups(groups: tuple[Group, ...]) -> bool:
    """Whether training may show these groups together in one scene."""
    seen: dict[int, str] = {}
    for group in groups:
        if is_withheld(group.shape, group.color, group.material):
            return False
        if seen.setdefault(SHAPE_GROUP[group.shape], group.shape) != group.shape:
            return False
    return True


def is_training_scene(spec: SceneSpec) -> bool:
    """Whether training may show this scene: nothing held out is in it, visible or not."""
    return is_training_groups(spec.groups)


def is_held_out(spec: SceneSpec) -> bool:
    """Whether the first two groups are a held-out pair: shapes of one group, both in a withheld look."""
    if len(spec.groups) < 2:
        return False
    first, second = spec.groups[:2]
    return (
        first.shape != second.shape
        and SHAPE_GROUP[second.shape] == SHAPE_GROUP[first.shape]
        and all(is_withheld(group.shape, group.color, group.material) for group in (first, second))
    )


def sample_scene(
    rng: np.random.Generator,
    *,
    split: str = "train",
    max_groups: int = 3,
    settings: RenderSettings = STANDARD,
) -> SceneSpec:
    """Draw one scene.

    Args:
        rng: source of all randomness; equal states give equal scenes.
        split: "train" (training combinations, with zoomed and pasted views), "in_domain" (the same
            combinations, whole scenes), "held_out" (two groups, a held-out pair) or "shifted" (a held-out
            pair among 4-5 groups).
        max_groups: most groups of a "train" or "in_domain" scene, 1 to 3.
        settings: sizes, angles and shares of the views.

    Raises:
        ValueError: for an unknown split or a ``max_groups`` outside 1 to 3.

    >>> scene = sample_scene(np.random.default_rng(0), split="held_out")
    >>> is_held_out(scene), is_training_scene(scene), len(scene.groups)
    (True, False, 2)
    """
    if split not in SPLITS:
        raise ValueError(f"sample_scene: split must be one of {', '.join(SPLITS)}, got {split!r}")
    if not 1 <= max_groups <= 3:
        raise ValueError(f"sample_scene: max_groups must be 1, 2 or 3, got {max_groups}")
    if split in ("held_out", "shifted"):
        return place(rng, _held_out_groups(rng, 4 + pick(rng, 2) if split == "shifted" else 2), settings)
    spec = place(rng, _training_groups(rng, max_groups), settings)
    u = rng.random()
    if split == "in_domain" or u >= settings.zoom_share + settings.paste_share:
        return spec
    kind = "zoom" if u < settings.zoom_share else "paste"
    # Not every scene has a group that fits a window: draw another scene rather than lose the view's share.
    for _ in range(6):
        seen = _looked_at(rng, spec, kind)
        if seen is not None:
            return seen
        spec = place(rng, _training_groups(rng, max_groups), settings)
    return spec


def _counts(rng: np.random.Generator, n_groups: int) -> list[int]:
    counts: list[int] = []
    left = MAX_OBJECTS
    for g in range(n_groups):
        most = max(1, min(MAX_COUNT, left - (n_groups - 1 - g)))
        # Many groups are single objects: relations and the plain "a red circle" need them.
        count = 1 if n_groups > 1 and rng.random() < 0.4 else 1 + pick(rng, most)
        counts.append(count)
        left -= count
    return counts


def _training_groups(rng: np.random.Generator, max_groups: int) -> tuple[Group, ...]:
    n_groups = 1 + pick(rng, max_groups)
    counts = _counts(rng, n_groups)
    ranks = [0, 1, 2]
    groups = []
    for count in counts:
        k = ranks.pop(pick(rng, len(ranks)))
        groups.append(random_group(rng, SHAPE_GROUPS[k][pick(rng, 3)], count))
    return tuple(groups)


def _held_out_groups(rng: np.random.Generator, n_groups: int) -> tuple[Group, ...]:
    pair = draw(rng, SHAPE_GROUPS[pick(rng, 3)], 2)
    counts = _counts(rng, n_groups)
    groups = []
    for shape, count in zip(pair, counts[:2], strict=True):
        color = COLORS[pick(rng, len(COLORS))]
        materials = withheld_materials(shape, color)
        groups.append(Group(shape, color, SIZES[pick(rng, 2)], materials[pick(rng, len(materials))], count))
    rest = draw(rng, tuple(s for s in SHAPES if s not in pair), n_groups - 2)
    for shape, count in zip(rest, counts[2:], strict=True):
        groups.append(random_group(rng, shape, count))
    return tuple(groups)


def random_group(rng: np.random.Generator, shape: str, count: int) -> Group:
    """A group of ``shape`` in a look that training may show."""
    color = COLORS[pick(rng, len(COLORS))]
    materials = allowed_materials(shape, color)
    return Group(shape, color, SIZES[pick(rng, 2)], materials[pick(rng, len(materials))], count)


def cluster_cells(rng: np.random.Generator, counts: list[int]) -> list[list[int]]:
    """Cells of the 3 x 3 layout for each group, compact where the free cells allow it."""
    free = set(range(9))
    # Large groups first, so that a block of free cells is still there; the order of the result is kept.
    order = sorted(range(len(counts)), key=lambda g: -counts[g])
    by_group: dict[int, list[int]] = {}
    for g in order:
        pool = sorted(free)
        cells = [pool[pick(rng, len(pool))]]
        free.discard(cells[0])
        for _ in range(counts[g] - 1):
            near = sorted({c for cell in cells for c in _NEIGHBORS[cell] if c in free}) or sorted(free)
            taken = sum(1 << c for c in cells)
            spans = [_SPANS[taken | 1 << c] for c in near]
            best = min(spans)
            close = [c for c, span in zip(near, spans, strict=True) if span == best]
            cells.append(close[pick(rng, len(close))])
            free.discard(cells[-1])
        by_group[g] = cells
    return [by_group[g] for g in range(len(counts))]


def place(
    rng: np.random.Generator,
    groups: tuple[Group, ...],
    settings: RenderSettings,
    clusters: list[list[int]] | None = None,
) -> SceneSpec:
    """Give every object of ``groups`` a cell, a place, a size in pixels, an angle and a tint."""
    clusters = clusters or cluster_cells(rng, [g.count for g in groups])
    objects = []
    for index, (group, cells) in enumerate(zip(groups, clusters, strict=True)):
        base = settings.small_px if group.size == "small" else settings.large_px
        middle_x = sum(c % 3 for c in cells) / len(cells) * CELL + CELL / 2
        middle_y = sum(c // 3 for c in cells) / len(cells) * CELL + CELL / 2
        # Small objects of one group move together, so that a window can hold all of them.
        pull = rng.random() * 0.42 if group.size == "small" and len(cells) > 1 else 0.0
        for cell in cells:
            u = rng.random(7).tolist()
            size_px = round(base * (1 + settings.size_jitter * (2 * u[0] - 1)))
            slack = max(1.5, (CELL - size_px) / 2 - 2) * (1 - pull)
            x = cell % 3 * CELL + CELL / 2
            y = cell // 3 * CELL + CELL / 2
            x += (middle_x - x) * pull + slack * (2 * u[1] - 1)
            y += (middle_y - y) * pull + slack * (2 * u[2] - 1)
            half = size_px / 2
            objects.append(
                Object(
                    index,
                    cell,
                    min(max(x, half), CANVAS - half),
                    min(max(y, half), CANVAS - half),
                    size_px,
                    settings.max_angle_deg * (2 * u[3] - 1),
                    (2 * u[4] - 1, 2 * u[5] - 1, 2 * u[6] - 1),
                )
            )
    return SceneSpec(groups, tuple(objects), tuple(range(len(groups))))


def _looked_at(rng: np.random.Generator, spec: SceneSpec, kind: str) -> SceneSpec | None:
    """The scene through a window that holds a whole group; None where the group drawn fits no window."""
    anchor = pick(rng, len(spec.groups))
    x0, y0, x1, y1 = spec.group_box(anchor)
    extent = max(x1 - x0, y1 - y0)
    if kind == "zoom":
        side = round(CANVAS / (1.5 + 1.5 * rng.random()))
        if extent > side:
            side = int(extent) + 2
        if side > 68:
            return None
    else:
        side = 32 if rng.random() < 0.5 and extent <= 33 else 48
        if extent > 49:
            return None
    x = _window_start(rng, x0, x1, side)
    y = _window_start(rng, y0, y1, side)
    hidden = {o.group for o in spec.objects if visible_fraction(o, x, y, side) < 0.8}
    visible = tuple(g for g in range(len(spec.groups)) if g not in hidden)
    if not visible:
        return None
    return SceneSpec(spec.groups, spec.objects, visible, View(kind, x, y, side))


def _window_start(rng: np.random.Generator, low: float, high: float, side: int) -> int:
    first, last = sorted((high - side, low))
    start = round(first + (last - first) * rng.random())
    return min(max(start, 0), CANVAS - side)


def visible_fraction(thing: Object, x: int, y: int, side: int) -> float:
    """Share of an object's box that lies in the window of ``side`` pixels at ``(x, y)``."""
    half = thing.size_px / 2
    width = min(thing.x + half, x + side) - max(thing.x - half, x)
    height = min(thing.y + half, y + side) - max(thing.y - half, y)
    return max(width, 0.0) * max(height, 0.0) / (thing.size_px * thing.size_px)
