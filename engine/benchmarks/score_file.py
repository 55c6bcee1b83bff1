"""Scores on disk as they come, so that an evaluation that stopped goes on where it was.

JSON lines. The first line is a header: format, benchmark, fingerprint of the dataset, subject and its
fingerprint. Every further line is an object with ``id`` and the item's scores. A last line that was torn by a
crash is dropped; anything else that does not fit is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.benchmarks.subject import Subject
from engine.datasets.base import Dataset, RetrievalDataset

FORMAT = 1
Record = Mapping[str, Any]


def header_of(dataset: Dataset | RetrievalDataset, subject: Subject) -> dict[str, object]:
    """What must agree for scores to belong together; neither limit nor shard of a choice or group dataset."""
    return {
        "format": FORMAT,
        "benchmark": dataset.name,
        "dataset": dataset.fingerprint,
        "subject": subject.name,
        "model": subject.fingerprint,
    }


class ScoreFile:
    """Appends records and knows those that are there. Not safe for two writers at once.

    Arguments: ``path``, or None to keep nothing on disk; ``header`` as ``header_of`` makes it.

    Raises ValueError when the file has another header, a broken line that is not its last, or an id twice.
    """

    def __init__(self, path: Path | None, header: Mapping[str, object]) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        if path is None:
            return
        whole = 0
        if path.exists():
            self.records, whole = _read(path, header)
            if whole < path.stat().st_size:
                with open(path, "r+b") as file:
                    file.truncate(whole)
        if whole == 0:
            self._append([header])

    def add(self, records: Sequence[Record]) -> None:
        """Keep the records, in memory and at the end of the file."""
        self.records.update((record["id"], record) for record in records)
        self._append(records)

    def _append(self, records: Sequence[Mapping[str, object]]) -> None:
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)


def merge_score_files(paths: Sequence[Path], target: Path) -> int:
    """Join the score files of several shards; ``evaluate`` with the result to resume scores nothing again.

    Returns how many records there are. Raises ValueError when headers differ or an id has two scores.
    """
    if not paths:
        raise ValueError("merge_score_files: needs at least one file, got none")
    with open(paths[0], encoding="utf-8") as file:
        header = _object(file.readline(), f"{paths[0]} line 1")
    merged: dict[str, Record] = {}
    for path in paths:
        for name, record in _read(Path(path), header)[0].items():
            if merged.setdefault(name, record) != record:
                raise ValueError(f"merge_score_files: item {name!r} has two different scores, one in {path}")
    if target.exists():
        raise ValueError(f"merge_score_files: {target} must not exist yet")
    ScoreFile(target, header).add(list(merged.values()))
    return len(merged)


def _read(path: Path, header: Mapping[str, object]) -> tuple[dict[str, Record], int]:
    """The records and the number of bytes they and the header take."""
    records: dict[str, Record] = {}
    whole = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        where = f"{path} line {number}"
        if number == len(lines) and not line.endswith(b"\n"):
            break
        value = _object(line.decode("utf-8", errors="replace"), where)
        if number == 1:
            _check_header(path, value, header)
        elif "id" not in value or value["id"] in records:
            raise ValueError(f"score file: {where} must be the only record of an id, got {value.get('id')!r}")
        else:
            records[value["id"]] = value
        whole += len(line)
    return records, whole


def _check_header(path: Path, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    wrong = [key for key in wanted if found.get(key) != wanted[key]]
    if wrong:
        raise ValueError(
            f"score file: {path} belongs to another evaluation: "
            + "; ".join(f"{key} must be {wanted[key]!r}, got {found.get(key)!r}" for key in wrong)
            + "; give another path, or evaluate what it was made with"
        )


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"score file: {where} must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"score file: {where} must be an object, got {value!r}")
    return value
