"""Captions that deny, for training, with what is true of the picture and what is false told apart.

A denial of something absent is *true* of its picture and must never serve as its negative; a denial of something
present is *false* (the caution in Alhamoud et al. 2025, arXiv 2501.09425). Scenes, denied phrases and wordings keep to
what training may show unless others are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.choices import check_choice, check_seed
from engine.scenes.captions import absent_phrase, caption_for, phrase
from engine.scenes.items import picture_of
from engine.scenes.settings import STANDARD
from engine.scenes.wordings import DENIALS, QUESTION_KINDS, WordingSet, check_sets, with_denial, wordings_of
from engine.scenes.world import Group, SceneSpec, pick, sample_scene

TRAINING_SETS: tuple[WordingSet, ...] = ("training", "benchmark")
EXAMPLE_SPLITS = ("in_domain", "held_out")


@dataclass(frozen=True)
class NegationExample:
    """One training picture and what is said of it.

    Attributes:
        caption: true, denies nothing.
        denied: the caption with a true denial.
        contradicted: a caption with a false denial, of something it does not mention.
        options: four answers, of which `options[correct]` alone is true.
        kind: of the right answer, `"positive"`, `"negative"` or `"hybrid"`.
    """

    scene: SceneSpec
    caption: str
    denied: str
    contradicted: str
    options: tuple[str, str, str, str]
    correct: int
    kind: str
    render_seed: int

    def image(self) -> np.ndarray:
        """The picture, uint8 `(96, 96, 3)`."""
        return picture_of(self.scene, self.render_seed, STANDARD)


def negation_examples(
    n: int, *, seed: int, sets: tuple[str, ...] = TRAINING_SETS, split: str = "in_domain"
) -> list[NegationExample]:
    """`n` examples; kinds rotate over their three, right places over 0-3.

    Args:
        n: how many; the first of a longer list are those of a shorter one.
        seed: decides everything.
        sets: the wordings used, of `engine.scenes.wordings.WORDINGS`.
        split: `"in_domain"`, or `"held_out"` for combinations that training never shows.

    Raises ValueError for `n` below 1, a seed below 0, an unknown set or split.

    >>> example = negation_examples(1, seed=0)[0]
    >>> example.kind, len(set(example.options))
    ('positive', 4)
    """
    if n < 1:
        raise ValueError(f"negation_examples: n must be at least 1, got {n}")
    check_seed("negation_examples", seed)
    check_sets(sets)
    check_choice("negation_examples", "split", split, EXAMPLE_SPLITS)
    rng = np.random.default_rng((seed, 103))
    found: list[NegationExample] = []
    while len(found) < n:
        example = _example(rng, len(found), sets, split)
        if example is not None:
            found.append(example)
    return found


def _example(rng: np.random.Generator, index: int, sets: tuple[str, ...], split: str) -> NegationExample | None:
    scene = sample_scene(rng, split=split)
    groups = scene.groups
    absent, denied = absent_phrase(groups, rng), absent_phrase(groups, rng)
    if len(groups) < 2 or absent is None or denied is None:
        return None
    order = rng.permutation(len(groups)).tolist()
    first, left_out = groups[order[0]], groups[order[1]]
    names = _name(first, rng), _name(left_out, rng)
    partial = _told([group for group in groups if group is not left_out], rng)
    # Not all true captions name everything: length must not tell true denials from false ones.
    caption = _told(groups, rng) if rng.random() < 0.6 else partial
    templates = [template for name in sets for template in DENIALS[name]]
    template = templates[pick(rng, len(templates))]
    wordings = wordings_of(sets)
    kind, correct = QUESTION_KINDS[index % 3], index % 4
    right, *wrong = wordings[pick(rng, len(wordings))].question(kind, names, absent)
    options = [wrong[k] for k in rng.permutation(3)]
    options.insert(correct, right)
    return NegationExample(
        scene,
        caption,
        with_denial(caption, denied, template),
        with_denial(partial, names[1], template),
        (options[0], options[1], options[2], options[3]),
        correct,
        kind,
        int(rng.integers(2**31)),
    )


def _name(group: Group, rng: np.random.Generator) -> str:
    """Words for a thing that is there: color and shape, or material and shape, or the shape alone."""
    u = rng.random()
    if u < 0.7:
        return f"{group.color} {group.shape}"
    return f"{group.material} {group.shape}" if u < 0.85 else group.shape


def _told(groups: Sequence[Group], rng: np.random.Generator) -> str:
    """A true caption: half of them name every attribute of every group, half are as the encoder saw them."""
    if rng.random() < 0.5:
        return caption_for(groups, rng, negated_share=0.0)
    parts = [phrase(groups[g]) for g in rng.permutation(len(groups))]
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
