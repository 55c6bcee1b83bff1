"""Training data for negation: a picture, what is true and what is false of it, and a question with four answers.

From rendered scenes, whose content is known, or from pictures with captions and the categories of what is in them, such
as COCO. A denial of an absent category is true, one of a present category is false; the two never stand in for each
other (Alhamoud et al. 2025, arXiv 2501.09425). Denials are put to captions as in Lu, Chen and Chaterji 2026; the
questions are NegBench's, with the kind of the right answer drawn evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.choices import check_seed
from engine.datasets.captioned import CaptionedItem, Problem
from engine.scenes.captions import with_article
from engine.scenes.negation_training import TRAINING_SETS, NegationExample, negation_examples
from engine.scenes.wordings import QUESTION_KINDS, WORDINGS
from engine.training.encoded_pictures import file_state

ROLES = ("caption", "denied", "contradicted")
OPTIONS = 4
TEXTS = len(ROLES) + OPTIONS
# {c} is the caption, {n} the category, {an} the category with its article.
PHOTO_DENIALS = (
    "{c}, but there is no {n}",
    "{c}, and no {n} is present",
    "No {n} is in the scene. {c}",
    "{c}, without any {n}",
    "{c}, without {an}",
    "{An} is not present. {c}",
    "There is no {n} here. {c}",
)


@dataclass(frozen=True)
class NegationRow:
    """One picture and its seven texts.

    Attributes:
        image: a file, or the scene to be rendered.
        texts: a caption, it with a true denial, one with a false denial (`ROLES`), then four answers.
        correct: the answer that alone is true, 0 to 3.
        kind: of that answer, `"positive"`, `"negative"` or `"hybrid"`.
    """

    image: Path | NegationExample
    texts: tuple[str, ...]
    correct: int
    kind: str

    def __post_init__(self) -> None:
        if len(self.texts) != TEXTS:
            raise ValueError(f"NegationRow: texts must be {TEXTS}, got {len(self.texts)}")

    def source(self) -> Path | np.ndarray:
        """What an engine encodes."""
        return self.image if isinstance(self.image, Path) else self.image.image()

    def picture(self) -> str:
        """What tells its picture from another without reading or rendering it."""
        if isinstance(self.image, Path):
            return repr((str(self.image), file_state(self.image)))
        return repr((self.image.scene, self.image.render_seed))


class PhotoRows(NamedTuple):
    """Rows of picture files, and what was left out of them."""

    rows: list[NegationRow]
    problems: tuple[Problem, ...]


def scene_rows(n: int, *, seed: int = 0, sets: tuple[str, ...] = TRAINING_SETS) -> list[NegationRow]:
    """`n` rows of rendered scenes; arguments and errors as for `negation_examples`."""
    return [
        NegationRow(example, (example.caption, example.denied, example.contradicted, *example.options),
                    example.correct, example.kind)
        for example in negation_examples(n, seed=seed, sets=sets)
    ]  # fmt: skip


def photo_rows(pictures: Sequence[CaptionedItem], *, seed: int = 0, captions_per_image: int = 3) -> PhotoRows:
    """Rows of picture files with captions and categories.

    What is denied truly is a category of other pictures that is absent from this one and that its captions do not
    name. Right places and kinds rotate. Problems are pictures of fewer than two categories, or that lack none, and
    before them how many captions there are beyond `captions_per_image` of a picture.

    Raises ValueError when no picture can be used, and for a seed below 0.
    """
    check_seed("photo_rows", seed)
    every = sorted({name for picture in pictures for name in picture.present})
    rng = np.random.default_rng((seed, 104))
    rows: list[NegationRow] = []
    problems: list[Problem] = []
    unused = 0
    for picture in pictures:
        words = " ".join(picture.captions).lower()
        absent = [name for name in every if name not in picture.present and name not in words]
        present = sorted(set(picture.present))
        if len(present) < 2 or not absent:
            few = f"two categories must be in it, got {len(present)}"
            reason = few if len(present) < 2 else "no category is absent from it"
            problems.append(Problem(str(picture.image.path or picture.image.name), reason))
            continue
        assert picture.image.path is not None  # what has categories is read from files
        unused += len(picture.captions[captions_per_image:])
        for caption in picture.captions[:captions_per_image]:
            rows.append(_photo_row(picture.image.path, caption, (present, absent), rng, len(rows)))
    if not rows:
        raise ValueError(
            f"photo_rows: needs a picture of two categories and a caption that others lack, got none in {len(pictures)}"
        )
    if unused:
        problems.insert(0, Problem(f"captions after the first {captions_per_image} of a picture", f"{unused} of them"))
    return PhotoRows(rows, tuple(problems))


def _photo_row(
    path: Path, caption: str, names: tuple[list[str], list[str]], rng: np.random.Generator, index: int
) -> NegationRow:
    present, absent = names
    a, b = (present[k] for k in rng.permutation(len(present))[:2])
    denied, missing = (absent[int(k)] for k in rng.integers(len(absent), size=2))
    template = PHOTO_DENIALS[int(rng.integers(len(PHOTO_DENIALS)))]
    kind, correct = QUESTION_KINDS[index % 3], index % OPTIONS
    right, *wrong = WORDINGS["benchmark"][0].question(kind, (a, b), missing)
    options = [wrong[int(k)] for k in rng.permutation(len(wrong))]
    options.insert(correct, right)
    texts = (caption, deny(caption, denied, template), deny(caption, a, template), *options)
    return NegationRow(path, texts, correct, kind)


def deny(caption: str, name: str, template: str) -> str:
    """A caption with the denial of a category, after one of `PHOTO_DENIALS`.

    >>> deny("Two dogs on a beach.", "umbrella", PHOTO_DENIALS[5])
    'An umbrella is not present. Two dogs on a beach.'
    >>> deny("Two dogs on a beach.", "umbrella", PHOTO_DENIALS[0])
    'Two dogs on a beach, but there is no umbrella.'
    """
    article = with_article(name)
    body = caption if template.endswith("{c}") else caption.rstrip(" .")
    text = template.format(c=body, n=name, an=article, An=article[0].upper() + article[1:])
    return text if text.endswith(".") or template.endswith("{c}") else text + "."
