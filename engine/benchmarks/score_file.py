"""Scores on disk as they come, so that an evaluation that stopped goes on where it was.

JSON lines. The first line is a header: format, benchmark, fingerprint of the dataset, subject and its
fingerprint. Every further line is an object with ``id`` and the item's scores. A last line that was torn by a
crash is dropped; anything else that does not fit is refused, and a file that is no score file is left as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.atomic_files import written_whole
from engine.benchmarks.records import Fault, Record, fault_of
from engine.benchmarks.subject import Subject
from engine.datasets.base import Dataset, RetrievalDataset

FORMAT = 1


@dataclass(frozen=True)
class Terms:
    """What a score file must hold to belong to an evaluation.

    Attributes
    ----------
    header: the first line; every value must be equal.
    fault: says what is wrong with a record, or None.
    """

    header: Mapping[str, object]
    fault: Fault


def terms_of(dataset: Dataset | RetrievalDataset, subject: Subject, *, limit: int | None = None) -> Terms:
    """The terms of scoring a dataset; neither a shard nor the limit of a choice or group dataset changes them.

    Arguments: ``dataset``, the whole of it; ``limit`` as in ``evaluate``.
    """
    if isinstance(dataset, RetrievalDataset):
        # A smaller gallery is another evaluation.
        dataset = dataset.select(limit=limit)
    header = {
        "format": FORMAT,
        "benchmark": dataset.name,
        "dataset": dataset.fingerprint,
        "subject": subject.name,
        "model": subject.fingerprint,
    }
    return Terms(header, fault_of(dataset))


class ScoreFile:
    """Appends records and knows those that are there. Not safe for two writers at once.

    Arguments: ``path``, or None to keep nothing on disk; ``terms`` as ``terms_of`` makes them.

    Raises ValueError, and leaves the file as it is, when it is no score file or one of another evaluation, and naming
    the line that is broken (the last one may be torn), has an id for the second time or does not fit the dataset.
    """

    def __init__(self, path: Path | None, terms: Terms) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        if path is None:
            return
        whole = 0
        if path.exists():
            self.records, whole = _read(path, terms)
            if whole < path.stat().st_size:
                with open(path, "r+b") as file:
                    file.truncate(whole)
        if whole == 0:
            self._append([terms.header])

    def add(self, records: Sequence[Record]) -> None:
        """Keep the records, in memory and at the end of the file."""
        self.records.update((record["id"], record) for record in records)
        self._append(records)

    def _append(self, records: Sequence[Mapping[str, object]]) -> None:
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.writelines(map(_line, records))


def merge_score_files(paths: Sequence[Path], target: Path, terms: Terms) -> int:
    """Join the score files of several shards; ``evaluate`` with the result to resume scores nothing again.

    What ``target`` holds already is kept, so that merging twice is merging once. Everything is checked before anything
    is written, and the file is there whole or as it was.

    Arguments: ``paths`` of the shards; ``target``, the file to come; ``terms`` as ``terms_of`` makes them.

    Returns how many records there are.

    Raises ValueError for no file, one that ``ScoreFile`` would refuse, and an item with two different scores.
    """
    if not paths:
        raise ValueError("merge_score_files: needs at least one file, got none")
    merged: dict[str, Record] = {}
    for path in [target, *paths] if target.exists() else paths:
        for name, record in _read(Path(path), terms)[0].items():
            if merged.setdefault(name, record) != record:
                raise ValueError(f"merge_score_files: item {name!r} has two different scores, one in {path}")
    with written_whole(target) as unfinished, open(unfinished, "w", encoding="utf-8") as file:
        file.writelines(map(_line, [terms.header, *merged.values()]))
    return len(merged)


def _line(values: Mapping[str, object]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"


def _read(path: Path, terms: Terms) -> tuple[dict[str, Record], int]:
    """The records and the number of bytes they and the header take."""
    records: dict[str, Record] = {}
    whole = 0
    # At line ends alone: other separators may stand in a string.
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop()
    if not lines and not _line(terms.header).encode().startswith(torn):
        raise ValueError(
            f"score file: {path} must be empty or begin with the header of a score file, got {torn[:40]!r}; "
            "give another path"
        )
    for number, line in enumerate(lines, 1):
        where = f"{path} line {number}"
        value = _object(line, where)
        if number == 1:
            _check_header(path, value, terms.header)
        else:
            fault = terms.fault(value)
            if fault is not None:
                raise ValueError(f"score file: {where}: {fault}")
            if value["id"] in records:
                raise ValueError(f"score file: {where} must be the only record of an id, got {value['id']!r}")
            records[value["id"]] = value
        whole += len(line) + 1
    return records, whole


def _check_header(path: Path, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    if "format" not in found:
        raise ValueError(f"score file: {path} line 1 must be the header of a score file; give another path")
    wrong = [key for key in wanted if found.get(key) != wanted[key]]
    if wrong:
        raise ValueError(
            f"score file: {path} belongs to another evaluation: "
            + "; ".join(f"{key} must be {wanted[key]!r}, got {found.get(key)!r}" for key in wrong)
            + "; give another path, or evaluate what it was made with"
        )


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"score file: {where} must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"score file: {where} must be an object, got {value!r:.80}")
    return value
