"""Examples of the demonstration: items chosen by rule, with their scores and drawn explanations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from engine.benchmarks.scenes import ScoredCategory
from engine.engine import Engine
from engine.metrics import Bools, Floats, group_scores, multiple_choice
from engine.scenes.negation import NegationItem
from engine.scorers.base import Scorer

# What is looked for: of the items that sgi gets right and global does not the one that sgi decides most clearly, and of
# those that sgi gets wrong the one that it gets most clearly wrong. The first of them might be decided by a hair.
FOUND, MISSED = "global wrong, sgi right", "sgi wrong"
VERDICTS = (FOUND, MISSED)
GLOBAL, SGI_NATIVE = "global", "sgi native"
_THUMBNAIL = 288


@dataclass(frozen=True)
class Drawing:
    """A drawn explanation: its file, and which caption was looked for in which picture."""

    file: str
    picture: int
    caption: int


@dataclass(frozen=True)
class Example:
    """One item, shown.

    Attributes
    ----------
    category: of the controlled benchmark, or ``"negation"``.
    verdict: one of ``VERDICTS``.
    item: its number in the benchmark.
    captions: what is chosen from.
    right: for each picture the number of its own caption.
    pictures: files of the plain pictures.
    scores: by scorer, ``[picture][caption]``.
    drawings: the explanations of sgi at native scale: own caption first.
    """

    category: str
    verdict: str
    item: int
    captions: tuple[str, ...]
    right: tuple[int, ...]
    pictures: tuple[str, ...]
    scores: Mapping[str, Sequence[Sequence[float]]]
    drawings: tuple[Drawing, ...]


@dataclass(frozen=True)
class Sheet:
    """Where drawings go and what draws them; ``folder`` is below ``root``, to which file names are relative."""

    root: Path
    folder: Path
    engine: Engine
    scorer: Scorer


def controlled_examples(part: ScoredCategory, sheet: Sheet) -> list[Example]:
    """The clearest item of each verdict in a category by sgi's smallest difference; none where no item has it."""
    outcomes = {name: group_scores(scores) for name, scores in part.scores.items()}
    found = []
    for verdict in VERDICTS:
        margin = np.asarray(outcomes[SGI_NATIVE].margin)
        row = _clearest(verdict, outcomes[GLOBAL].group, outcomes[SGI_NATIVE].group, margin)
        if row is None:
            continue
        item = part.items[row]
        decisive = outcomes[GLOBAL if verdict == FOUND else SGI_NATIVE]
        # The picture that prefers the wrong caption is the one to show; where both are right, it is the texts
        # that prefer the wrong picture.
        shown = 1 if decisive.ipos_2t[row] and not decisive.ineg_2t[row] else 0
        pictures = [Image.fromarray(pixels) for pixels in item.images()]
        found.append(
            _example(
                (part.category, verdict, row),
                pictures,
                item.captions,
                (0, 1),
                {name: scores[row] for name, scores in part.scores.items()},
                [(shown, shown), (shown, 1 - shown)],
                sheet,
            )
        )
    return found


def negation_examples(items: Sequence[NegationItem], scores: Mapping[str, Tensor], sheet: Sheet) -> list[Example]:
    """The clearest item of each verdict in the multiple choice; ``scores`` by scorer ``(n, 4)``."""
    right = [item.correct for item in items]
    outcomes = {name: multiple_choice(cells, right) for name, cells in scores.items()}
    cells = np.asarray(scores[SGI_NATIVE], dtype=np.float64)
    own = np.eye(cells.shape[1], dtype=bool)[right]
    margin = cells[own] - np.where(own, -np.inf, cells).max(axis=1)
    found = []
    for verdict in VERDICTS:
        won = {name: outcome.credit > 0 for name, outcome in outcomes.items()}
        row = _clearest(verdict, won[GLOBAL], won[SGI_NATIVE], margin)
        if row is None:
            continue
        item = items[row]
        mistaken = scores[GLOBAL if verdict == FOUND else SGI_NATIVE][row].clone()
        mistaken[item.correct] = -np.inf
        found.append(
            _example(
                ("negation", verdict, row),
                [Image.fromarray(item.image())],
                item.captions,
                (item.correct,),
                {name: cells[row][None] for name, cells in scores.items()},
                [(0, item.correct), (0, int(mistaken.argmax()))],
                sheet,
            )
        )
    return found


def _clearest(verdict: str, by_global: Bools, by_sgi: Bools, margin: Floats) -> int | None:
    """The row of a verdict whose margin is largest, or most negative where sgi is wrong; the first of equals."""
    rows = np.flatnonzero(~by_global & by_sgi if verdict == FOUND else ~by_sgi)
    if not len(rows):
        return None
    order = margin[rows] if verdict == FOUND else -margin[rows]
    return int(rows[order.argmax()])


def _example(
    name: tuple[str, str, int],
    pictures: Sequence[Image.Image],
    captions: Sequence[str],
    right: tuple[int, ...],
    scores: Mapping[str, Tensor],
    drawn: Sequence[tuple[int, int]],
    sheet: Sheet,
) -> Example:
    """Save pictures and explanations, and say where they are."""
    category, verdict, row = name
    stem = f"{category}-{'found' if verdict == FOUND else 'missed'}"
    plain, drawings = [], []
    for number, picture in enumerate(pictures):
        file = sheet.folder / f"{stem}-picture-{'ab'[number]}.png"
        factor = max(1, _THUMBNAIL // max(picture.size))
        size = (picture.width * factor, picture.height * factor)
        picture.resize(size, Image.Resampling.NEAREST).save(file)
        plain.append(file.relative_to(sheet.root).as_posix())
    for number, caption in drawn:
        own = "own" if caption == right[number] else "other"
        file = sheet.folder / f"{stem}-{own}-caption.png"
        sheet.engine.explain(pictures[number], captions[caption], scorer=sheet.scorer).draw(file)
        drawings.append(Drawing(file.relative_to(sheet.root).as_posix(), number, caption))
    return Example(
        category,
        verdict,
        row,
        tuple(captions),
        right,
        tuple(plain),
        {scorer: cells.tolist() for scorer, cells in scores.items()},
        tuple(drawings),
    )
