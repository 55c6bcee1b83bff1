"""Runs a subject over a dataset: batches, resuming, and the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from engine.benchmarks.baselines import blind_scores
from engine.benchmarks.ranking import evaluate_retrieval
from engine.benchmarks.score_file import ScoreFile, terms_of
from engine.benchmarks.sources import check_words, cut_rows, source_of, take
from engine.benchmarks.subject import Subject
from engine.benchmarks.summary import Result, summarise_choice, summarise_group
from engine.datasets.base import GROUP, Dataset, ImageRef, Item, RetrievalDataset
from engine.metrics import as_scores

Progress = Callable[[int, int], None]
CHUNK_ITEMS = 64
CUT = "text cut by the encoder"


def evaluate(
    dataset: Dataset | RetrievalDataset,
    subject: Subject,
    *,
    limit: int | None = None,
    shard: tuple[int, int] | None = None,
    resume_path: str | PathLike[str] | None = None,
    progress: Progress | None = None,
    chunk_items: int = CHUNK_ITEMS,
) -> Result:
    """Score every item and summarise by the dataset's official rule.

    Items that share a picture are scored in one chunk, so that the encoder sees it once.

    Arguments
    ---------
    dataset: what a reader of ``engine.datasets`` gave.
    subject: what is evaluated, e.g. ``subject_of(engine, "sgi")``.
    limit: so many items, spread evenly over the file; of a retrieval dataset so many images, which makes it
        easier. None = all.
    shard: ``(k, n)``: every n-th item (or query) from the k-th on; ``merge_score_files`` joins their files.
    resume_path: scores are appended to this file as they come, and those that it holds are not made again.
    progress: called with (items done, items in all).
    chunk_items: items scored at once.

    Raises
    ------
    ValueError: nothing to score, a subject that gives other than finite scores of the agreed shape (the
        message names item, image and text), a text without a word for a subject that needs words, a box outside
        its picture, or a file that is no score file of this evaluation.
    Whatever the subject raises, e.g. for a picture that cannot be read; the scores so far are on disk.
    """
    if chunk_items < 1:
        raise ValueError(f"evaluate: chunk_items must be >= 1, got {chunk_items}")
    chosen = dataset.select(limit=limit, shard=shard)
    if not len(chosen):
        raise ValueError(f"evaluate: {dataset.name} has no items to score ({chosen.edition})")
    scores = ScoreFile(None if resume_path is None else Path(resume_path), terms_of(dataset, subject, limit=limit))
    if isinstance(chosen, RetrievalDataset):
        return evaluate_retrieval(chosen, subject, scores, progress)
    pending = [item for item in chosen.items if item.id not in scores.records]
    # Items of one picture come together, whatever their place in the file.
    pending.sort(key=lambda item: [ref.name for ref in item.images])
    check_words(subject, dataset.name, ((f"item {item.id!r}", text) for item in pending for text in item.texts))
    for start in range(0, len(pending), chunk_items):
        _report(progress, len(chosen) - len(pending) + start, len(chosen))
        chunk = pending[start : start + chunk_items]
        scores.add(list(score_items(chunk, subject)))
    _report(progress, len(chosen), len(chosen))
    return _summarise(chosen, scores, subject)


def score_items(items: Sequence[Item], subject: Subject) -> Iterator[dict[str, Any]]:
    """The record of each item: ``id``, ``scores[image][text]``, and ``cut`` where the encoder cut a text.

    All pairs are scored in one call of the subject. Raises ValueError naming item, image and text when a
    score is not finite, and when the subject gives another number of scores than pairs.
    """
    pairs = [_Pair(item.id, ref, text) for item in items for ref in item.images for text in item.texts]
    refs = list(dict.fromkeys(pair.ref for pair in pairs))
    texts = list(dict.fromkeys(pair.text for pair in pairs))
    image_row = {ref: row for row, ref in enumerate(refs)}
    text_row = {text: row for row, text in enumerate(texts)}
    owner = {pair.ref: pair.item for pair in reversed(pairs)}
    images: Any = [source_of(ref, subject, where=f"item {owner[ref]!r}") for ref in refs]
    captions: Any = texts
    if subject.encode_images is not None and subject.encode_texts is not None:
        images, captions = subject.encode_images(images), subject.encode_texts(texts)
    given = subject.score(
        take(images, [image_row[pair.ref] for pair in pairs]),
        take(captions, [text_row[pair.text] for pair in pairs]),
        pairs=True,
    )
    if np.shape(given) != (len(pairs),):
        raise ValueError(f"evaluate: {subject.name} must give one score a pair, ({len(pairs)},), got {np.shape(given)}")
    flat = as_scores(given, who=f"evaluate: {subject.name}", ids=[str(pair) for pair in pairs])
    cut = {texts[row] for row in cut_rows(captions)}
    start = 0
    for item in items:
        shape = len(item.images), len(item.texts)
        cells = flat[start : start + shape[0] * shape[1]].reshape(shape)
        start += shape[0] * shape[1]
        record: dict[str, Any] = {"id": item.id, "scores": cells.tolist()}
        yield record | {"cut": True} if cut.intersection(item.texts) else record


def _with_cuts(dataset: Dataset, file: ScoreFile) -> Dataset:
    """The dataset with a tag on, and a note of, the items one of whose texts was cut."""
    cut = {item.id for item in dataset.items if file.records[item.id].get("cut")}
    if not cut:
        return dataset
    items = tuple(replace(item, tags=(*item.tags, CUT)) if item.id in cut else item for item in dataset.items)
    note = f"{len(cut)} items have a text that the encoder cut at its context length; cut texts may tie"
    return replace(dataset, items=items, notes=(*dataset.notes, note))


def _summarise(dataset: Dataset, file: ScoreFile, subject: Subject) -> Result:
    dataset = _with_cuts(dataset, file)
    cells = [np.asarray(file.records[item.id]["scores"], dtype=np.float64) for item in dataset.items]
    shapes = {array.shape for array in cells}
    wanted = {(len(item.images), len(item.texts)) for item in dataset.items}
    if shapes != wanted or len(wanted) != 1:
        raise ValueError(
            f"evaluate: items of {dataset.name} must have scores of one shape {sorted(wanted)}, got {sorted(shapes)}"
        )
    scores = np.stack(cells)
    identity = (subject.name, subject.fingerprint)
    if dataset.rule.kind == GROUP:
        return summarise_group(dataset, scores, identity)
    return summarise_choice(dataset, scores[:, 0], identity, blind_scores(dataset))


@dataclass(frozen=True)
class _Pair:
    item: str
    ref: ImageRef
    text: str

    def __str__(self) -> str:
        return f"{self.item} (image {self.ref.name}, text {self.text!r})"


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
