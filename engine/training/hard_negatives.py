"""Hard negatives for captioned pictures: those of the file, exchanged attributes and nouns, or denials.

What serves as a negative is false of its picture. A denial of something absent is true: it is a caption, never a
negative (the caution in Alhamoud et al. 2025, NegBench, arXiv 2501.09425). What is absent is known of pictures with
categories alone; of others only what their captions name is denied, falsely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from engine.choices import check_choice, check_seed
from engine.datasets.base import ImageRef
from engine.datasets.captioned import CaptionedImages, CaptionedItem, Problem, usable
from engine.scenes.negation_training import TRAINING_SETS, NegationExample, negation_examples
from engine.scenes.wordings import QUESTION_KINDS, WORDINGS, WordingSet
from engine.segments import Segmenter, get_segmenter
from engine.segments.phrases import looks_plural
from engine.segments.swaps import Tagger, swaps
from engine.training.negation_data import PHOTO_DENIALS, deny

Negatives = Literal["file", "swaps", "negation", "none"]
# A caption and what is false of the same picture.
Pair = tuple[str, str]


def with_negatives(data: CaptionedImages, kind: Negatives, *, seed: int = 0) -> CaptionedImages:
    """The same pictures with negatives of one kind; captions that have none are left out, and their items with them.

    Args:
        data: what a reader gave.
        kind: `"file"` (the negatives that were read), `"swaps"` (attributes where two things have them, else nouns),
            `"negation"` (denials, see `denials`) or `"none"` (captions alone; negatives that were read are dropped).
        seed: decides swaps, templates and what is denied.

    Raises ValueError for an unknown kind, a seed below 0, or when nothing is left.
    """
    check_choice("with_negatives", "kind", kind, get_args(Negatives))
    check_seed("with_negatives", seed)
    if kind == "none":
        return replace(data, items=tuple(replace(x, negatives=(), negative_image=None) for x in data.items))
    if kind == "file":
        return _kept(data, [x if x.negatives else None for x in data.items], "the file has no negative of it")
    segmenter = get_segmenter("spacy")
    if kind == "swaps":
        assert isinstance(segmenter, Tagger)
        return _kept(data, _swaps(data.items, segmenter, seed), "its captions have nothing to exchange")
    return _kept(data, _denials(data.items, segmenter, seed), "nothing can be denied of it")


def _kept(data: CaptionedImages, items: Sequence[CaptionedItem | None], reason: str) -> CaptionedImages:
    left = [Problem(x.id, reason) for x, item in zip(data.items, items, strict=True) if item is None]
    return usable(data.name, [item for item in items if item is not None], [*data.problems, *left])


def _swaps(items: Sequence[CaptionedItem], tagger: Tagger, seed: int) -> list[CaptionedItem | None]:
    """One exchange of each caption that has any."""
    captions = [caption for item in items for caption in item.captions]
    tagged = zip(captions, tagger.tag(captions), strict=True)
    choices = iter([swaps(text, tokens, "attributes") or swaps(text, tokens, "nouns") for text, tokens in tagged])
    made: list[CaptionedItem | None] = []
    for row, item in enumerate(items):
        rng = np.random.default_rng((seed, 105, row))
        found = [(caption, next(choices)) for caption in item.captions]
        pairs = [(caption, texts[int(rng.integers(len(texts)))]) for caption, texts in found if texts]
        made.append(_with(item, pairs))
    return made


def _denials(items: Sequence[CaptionedItem], segmenter: Segmenter, seed: int) -> list[CaptionedItem | None]:
    """`denials` of each item."""
    every = sorted({name for item in items for name in item.present})
    named = iter(segmenter.segment([caption for item in items for caption in item.captions]))
    made: list[CaptionedItem | None] = []
    for row, item in enumerate(items):
        rng = np.random.default_rng((seed, 106, row))
        segments = [segment for _ in item.captions for segment in next(named)]
        heads = dict.fromkeys(segment.head for segment in segments if not segment.negated and _is_one(segment.head))
        words = " ".join(item.captions).lower()
        absent = [name for name in every if name not in item.present and name not in words]
        known = bool(item.present)
        pairs = denials(item.captions, item.present if known else tuple(heads), absent if known else (), rng)
        made.append(_with(item, pairs))
    return made


def denials(
    captions: Sequence[str], present: Sequence[str], absent: Sequence[str], rng: np.random.Generator
) -> list[Pair]:
    """Captions of a picture and falsehoods to set against them, with NegBench's templates.

    For each caption, something present is denied in one of `PHOTO_DENIALS`: false. Where something is known to be
    absent, the caption with its true denial in the same template is set against the same falsehood, so that a denial by
    itself tells nothing; and where two things are present, the right answer of one of NegBench's questions is set
    against a wrong one, the kinds in turn.

    Args:
        captions: all true.
        present: names of what is there; none gives no pair.
        absent: names of what is not there and not spoken of; may be empty, and then no denial is true.
        rng: draws templates and names.

    >>> denials(["Two dogs."], ["dog"], [], np.random.default_rng(0))
    [('Two dogs.', 'A dog is not present. Two dogs.')]
    """
    pairs: list[Pair] = []
    for row, caption in enumerate(captions if present else ()):
        template = PHOTO_DENIALS[int(rng.integers(len(PHOTO_DENIALS)))]
        order = [present[k] for k in rng.permutation(len(present))]
        contradicted = deny(caption, order[0], template)
        pairs.append((caption, contradicted))
        wording = WORDINGS["benchmark"][0]
        if absent:
            missing = absent[int(rng.integers(len(absent)))]
            pairs.append((deny(caption, missing, template), contradicted))
            if len(order) > 1:
                kind = QUESTION_KINDS[row % len(QUESTION_KINDS)]
                right, *wrong = wording.question(kind, (order[0], order[1]), missing)
                pairs.append((right, wrong[int(rng.integers(len(wrong)))]))
        elif len(order) > 1:
            # True and false share a template here too, but none that denies can be true.
            pairs.append((wording.affirm(order[0], order[1]), wording.affirm_and_deny(order[0], order[1])))
    return pairs


def _is_one(noun: str) -> bool:
    """Whether a noun can be denied with "a": one word (a caption in which nothing was found is its own), singular."""
    return noun.isalpha() and not looks_plural(noun)


def _with(item: CaptionedItem, pairs: Sequence[Pair]) -> CaptionedItem | None:
    """The item with these captions and negatives; None for none."""
    if not pairs:
        return None
    captions, negatives = zip(*pairs, strict=True)
    return replace(item, captions=captions, negatives=negatives, negative_image=None)


@dataclass(frozen=True)
class _Scene:
    """Renders a scene when it is asked for."""

    example: NegationExample

    def __call__(self) -> np.ndarray:
        return self.example.image()


def scene_denials(
    n: int, *, seed: int = 0, sets: tuple[WordingSet, ...] = TRAINING_SETS, split: str = "in_domain"
) -> CaptionedImages:
    """`n` rendered scenes with captions and what is false of them, denials above all.

    Args:
        n: how many.
        seed: decides everything.
        sets: the language: wordings of `engine.scenes.wordings`, those of training, or `("held_out",)` out of domain.
        split: the scenes: `"in_domain"`, or `"held_out"` for combinations that training never shows.

    Raises ValueError for `n` below 1, an unknown set or split.
    """
    items = []
    for row, example in enumerate(negation_examples(n, seed=seed, sets=sets, split=split)):
        right = example.options[example.correct]
        wrong = [text for place, text in enumerate(example.options) if place != example.correct]
        pairs = [(example.caption, example.contradicted), (example.denied, example.contradicted)]
        pairs += [(right, text) for text in wrong]
        captions, negatives = zip(*pairs, strict=True)
        name = f"scene {split} {seed} {'+'.join(sets)} {row}"
        items.append(CaptionedItem(name, ImageRef(name, load=_Scene(example)), captions, negatives))
    return CaptionedImages("scene_denials", tuple(items))
