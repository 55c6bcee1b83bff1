"""Retrieval benchmarks: where the right image or text of every query stands, a block of queries at a time.

Two right answers are counted. *Own*: the official one, the query's own image (or any of the image's own
captions). *Any*: also what carries the very same text, for several images share a caption and *own* is then
decided by ties.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.benchmarks.score_file import ScoreFile
from engine.benchmarks.sources import check_words, cut_rows, source_of, take
from engine.benchmarks.subject import Subject
from engine.benchmarks.summary import Result, make_lines, margins
from engine.datasets.base import RetrievalDataset
from engine.metrics import Floats, RankCounts, as_scores, rank_counts, recall_credit

KS = (1, 5, 10)
PART_ROWS = 256
BLOCK_VALUES = 1 << 22
TEXT_TO_IMAGE, IMAGE_TO_TEXT = "text → image", "image → text"
SIDES = {"text": TEXT_TO_IMAGE, "image": IMAGE_TO_TEXT}


def evaluate_retrieval(dataset: RetrievalDataset, subject: Subject, scores: ScoreFile, progress: Any = None) -> Result:
    """Ranks of every query and their recall; the official figure is R@5 from text to image, ties wrong.

    Arguments: ``scores`` keeps the rank counts of each query; ``progress`` is called with (queries done, in
    all). Both sides are encoded once, in parts, and kept; of the scores one block of queries is held.
    """
    pending = {
        side: [
            int(name.split("/")[1])
            for name in dataset.queries
            if name.startswith(f"{side}/") and name not in scores.records
        ]
        for side in SIDES
    }
    done = len(dataset.queries) - sum(map(len, pending.values()))
    if any(pending.values()):
        check_words(subject, dataset.name, ((f"query 'text/{row}'", text) for row, text in enumerate(dataset.texts)))
        images, texts = _encoded(dataset, subject)
        for side, rows in pending.items():
            queries, candidates = (texts, images) if side == "text" else (images, texts)
            rights = _rights(dataset, side)
            for part, local in _blocks(queries, rows, sum(len(part.rows) for part in candidates)):
                if progress is not None:
                    progress(done, len(dataset.queries))
                names = [f"{side}/{part.rows[row]}" for row in local]
                data = take(part.data, local)
                block = _score_block(subject, side, data, candidates, names)
                cut = cut_rows(data) if side == "text" else set()
                scores.add(_records(names, block, rights, cut))
                done += len(local)
    if progress is not None:
        progress(len(dataset.queries), len(dataset.queries))
    return _summarise(dataset, subject, scores)


@dataclass(frozen=True)
class _Part:
    """Some rows of one side, as sources or as features."""

    rows: range
    data: Any


@dataclass(frozen=True)
class _Rights:
    """Right candidates of each query: its own, and any with the same text."""

    own: Sequence[Sequence[int]]
    any: Sequence[Sequence[int]]


def _encoded(dataset: RetrievalDataset, subject: Subject) -> tuple[list[_Part], list[_Part]]:
    images, texts = [], []
    for start in range(0, len(dataset.images), PART_ROWS):
        rows = range(start, min(start + PART_ROWS, len(dataset.images)))
        sources = [source_of(dataset.images[row], subject, where=f"query 'image/{row}'") for row in rows]
        encode = subject.encode_images
        images.append(_Part(rows, sources if encode is None else encode(sources)))
    for start in range(0, len(dataset.texts), PART_ROWS):
        rows = range(start, min(start + PART_ROWS, len(dataset.texts)))
        captions = list(dataset.texts[rows.start : rows.stop])
        texts.append(_Part(rows, captions if subject.encode_texts is None else subject.encode_texts(captions)))
    return images, texts


def _blocks(parts: Sequence[_Part], rows: Sequence[int], n_candidates: int) -> Iterator[tuple[_Part, list[int]]]:
    """The wanted rows, part by part, few enough that their scores against every candidate fit."""
    height = max(1, BLOCK_VALUES // n_candidates)
    wanted = set(rows)
    for part in parts:
        local = [place for place, row in enumerate(part.rows) if row in wanted]
        for start in range(0, len(local), height):
            yield part, local[start : start + height]


def _score_block(
    subject: Subject, side: str, queries: Any, candidates: Sequence[_Part], names: Sequence[str]
) -> Floats:
    """Scores ``(queries, all candidates)``."""
    columns = []
    for part in candidates:
        pair = (part.data, queries) if side == "text" else (queries, part.data)
        given = as_scores(subject.score(*pair, pairs=False), who=f"evaluate: {subject.name}")
        wanted = (len(part.rows), len(names)) if side == "text" else (len(names), len(part.rows))
        if given.shape != wanted:
            raise ValueError(
                f"evaluate: {subject.name} must give scores (n_images, n_texts) = {wanted}, got {given.shape}"
            )
        columns.append(given.T if side == "text" else given)
    return np.concatenate(columns, axis=1)


def _rights(dataset: RetrievalDataset, side: str) -> _Rights:
    texts_of: list[list[int]] = [[] for _ in dataset.images]
    rows_of: dict[str, list[int]] = {}
    for row, (text, image) in enumerate(zip(dataset.texts, dataset.owner, strict=True)):
        texts_of[image].append(row)
        rows_of.setdefault(text, []).append(row)
    if side == "text":
        own = [[image] for image in dataset.owner]
        return _Rights(own, [sorted({dataset.owner[row] for row in rows_of[text]}) for text in dataset.texts])
    same = [sorted({other for row in rows for other in rows_of[dataset.texts[row]]}) for rows in texts_of]
    return _Rights(texts_of, same)


def _records(names: Sequence[str], block: Floats, rights: _Rights, cut: Collection[int]) -> list[dict[str, Any]]:
    rows = [int(name.split("/")[1]) for name in names]
    own = rank_counts(block, [rights.own[row] for row in rows], ids=names)
    every = rank_counts(block, [rights.any[row] for row in rows], ids=names)
    return [
        {"id": name, "own": _triple(own, row), "any": _triple(every, row), "margin": _finite(own.margin[row])}
        | ({"cut": True} if row in cut else {})
        for row, name in enumerate(names)
    ]


def _triple(counts: RankCounts, row: int) -> list[int]:
    return [int(counts.greater[row]), int(counts.equal[row]), int(counts.right_equal[row])]


def _finite(margin: float) -> float | None:
    # A query to which every candidate is right has no wrong one to keep a distance from.
    return float(margin) if np.isfinite(margin) else None


def _summarise(dataset: RetrievalDataset, subject: Subject, scores: ScoreFile) -> Result:
    records = [scores.records[name] for name in dataset.queries]
    own, every = _counts(records, "own"), _counts(records, "any")
    columns = {}
    for k in KS:
        columns[f"R@{k}"] = recall_credit(own, k)
        columns[f"R@{k} shared"] = recall_credit(own, k, ties="share")
        columns[f"R@{k} any"] = recall_credit(every, k)
    lines = make_lines(columns, [[SIDES[name.split("/")[0]]] for name in dataset.queries])
    tied = own.equal > 0
    cut = sum(bool(record.get("cut")) for record in records)
    margin = np.array([record["margin"] for record in records if record["margin"] is not None], dtype=np.float64)
    return Result(
        dataset.name,
        dataset.edition,
        subject.name,
        subject.fingerprint,
        headline=(lines[0].name, "R@5"),
        lines=lines,
        rule="NegBench: share of queries whose own image is among the first k; ties wrong",
        tie_rate=float(tied.mean()),
        tied_ids=tuple(dataset.queries[row] for row in np.flatnonzero(tied)[:20]),
        margin=margins(margin, margin > 0) if len(margin) else {},
        # To a scorer that reads the text alone every image is the same.
        baselines={"chance and blind, R@5 of text → image": min(1.0, 5 / len(dataset.images))},
        missing=len(dataset.missing),
        notes=(*dataset.notes, *([f"{cut} texts were cut at the encoder's context length"] if cut else [])),
    )


def _counts(records: Sequence[Mapping[str, Any]], key: str) -> RankCounts:
    cells = np.array([record[key] for record in records], dtype=np.int64).reshape(-1, 3)
    return RankCounts(cells[:, 0], cells[:, 1], cells[:, 2], np.zeros(len(cells)))
