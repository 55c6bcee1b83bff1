"""Negation sets over the scenes: multiple choice and retrieval in the layout of NegBench.

Unlike the published files, where the right answer always comes first, its place rotates, so that neither ties nor
NaN can win. Paper: Alhamoud et al. 2025, arXiv 2501.09425.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.scenes.captions import PREFIXES, phrase
from engine.scenes.items import (
    ITEM_SPLITS,
    check_request,
    pair_of_groups,
    picture_of,
    place_apart,
    settings_of,
    unique_items,
    with_distractors,
)
from engine.scenes.wordings import DENIALS, QUESTION_KINDS, with_denial, wordings_of
from engine.scenes.world import (
    COLORS,
    SHAPE_GROUPS,
    SHAPES,
    Group,
    SceneSpec,
    draw,
    pick,
    random_group,
    sample_scene,
)

NEGATION_TEMPLATES = QUESTION_KINDS
_PREFIXES = tuple(p for p in PREFIXES if "{be}" not in p)


@dataclass(frozen=True)
class NegationItem:
    """One picture, four captions of which ``captions[correct]`` alone is true, and their phrases."""

    split: str
    scene: SceneSpec
    captions: tuple[str, str, str, str]
    correct: int
    template: str
    present: tuple[str, str]
    absent: str
    render_seed: int

    def image(self) -> np.ndarray:
        """The picture, uint8 ``(96, 96, 3)``."""
        return picture_of(self.scene, self.render_seed, settings_of(self.split))


@dataclass(frozen=True)
class RetrievalItem:
    """One picture with its caption, and the same caption after a true denial."""

    split: str
    scene: SceneSpec
    caption: str
    negated_caption: str
    absent: str
    render_seed: int

    def image(self) -> np.ndarray:
        """The picture, uint8 ``(96, 96, 3)``."""
        return picture_of(self.scene, self.render_seed, settings_of(self.split))


def _absent(rng: np.random.Generator, pair: tuple[Group, Group], split: str) -> str:
    """A color and a shape that the scene will not hold: a third shape, of its split's sets of shapes."""
    ranks = {k for k, group in enumerate(SHAPE_GROUPS) for g in pair if g.shape in group}
    color = COLORS[pick(rng, len(COLORS))]
    if split == "in_domain":
        (k,) = {0, 1, 2} - ranks
        return f"{color} {SHAPE_GROUPS[k][pick(rng, 3)]}"
    (k,) = ranks
    (shape,) = set(SHAPE_GROUPS[k]) - {g.shape for g in pair}
    return f"{color} {shape}"


def negation_items(
    n: int, *, seed: int, split: str = "in_domain", wording: str = "benchmark"
) -> list[NegationItem]:
    """``n`` different multiple-choice items; right places rotate over 0-3, templates over their three.

    ``wording`` is the set of ``engine.scenes.wordings`` the sentences are taken from.

    Raises:
        ValueError: for an unknown split or wording, or ``n`` below 1.
    """
    check_request("negation_items", n, split)
    wordings = wordings_of((wording,))

    def make(rng: np.random.Generator, index: int) -> tuple[object, NegationItem]:
        pair = pair_of_groups(rng, split, "color")
        absent = _absent(rng, pair, split)
        groups = with_distractors(rng, pair, split, (absent.split()[1],))
        scene = place_apart(rng, groups, "color", split)
        present = (f"{pair[0].color} {pair[0].shape}", f"{pair[1].color} {pair[1].shape}")
        template = NEGATION_TEMPLATES[index % 3]
        # Each wording takes all three templates before the next one has its turn.
        right, *wrong = wordings[index // 3 % len(wordings)].question(template, present, absent)
        captions = draw(rng, tuple(wrong), 3)
        captions.insert(index % 4, right)
        item = NegationItem(
            split,
            scene,
            (captions[0], captions[1], captions[2], captions[3]),
            index % 4,
            template,
            present,
            absent,
            int(rng.integers(2**31)),
        )
        return (present, absent, template, groups), item

    return unique_items(make, n, np.random.default_rng((seed, 101, ITEM_SPLITS.index(split))))


def retrieval_items(n: int, *, seed: int, split: str = "in_domain") -> list[RetrievalItem]:
    """``n`` pictures with captions in full, no two alike, and the same captions after a true denial.

    A caption names count, size, color, material and shape of all groups (of the first three in the shifted
    split).

    Raises:
        ValueError: for an unknown split or ``n`` below 1.
    """
    check_request("retrieval_items", n, split)

    def make(rng: np.random.Generator, index: int) -> tuple[object, RetrievalItem]:
        scene = sample_scene(rng, split=split, settings=settings_of(split))
        parts = [phrase(g) for g in scene.groups[:3]]
        prefix = _PREFIXES[pick(rng, len(_PREFIXES))]
        caption = prefix + ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
        absent = _absent_from(rng, scene.groups)
        negated = with_denial(caption, absent, DENIALS["benchmark"][0])
        item = RetrievalItem(split, scene, caption, negated, absent, int(rng.integers(2**31)))
        return tuple(sorted(parts)), item

    return unique_items(make, n, np.random.default_rng((seed, 102, ITEM_SPLITS.index(split))))


def _absent_from(rng: np.random.Generator, groups: tuple[Group, ...]) -> str:
    held = {(g.color, g.shape) for g in groups}
    while True:
        group = random_group(rng, SHAPES[pick(rng, len(SHAPES))], 1)
        if (group.color, group.shape) not in held:
            return f"{group.color} {group.shape}"
