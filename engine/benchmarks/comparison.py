"""Several models and scorers on several benchmarks: what was scored before is read, the rest is run.

A folder keeps one score file for each benchmark and scorer (``ScoreFile``: it also resumes what was stopped) and one
result. Their names end in a digest of everything that decides the scores, so that a changed model or data set gets
files of its own and nothing stale is ever read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.atomic_files import write_text
from engine.benchmarks import scenes
from engine.benchmarks.baselines import baseline
from engine.benchmarks.evaluate import evaluate
from engine.benchmarks.scenes import ScenesBenchmark, ScenesReport
from engine.benchmarks.scenes_negation import NegationReport
from engine.benchmarks.shared_features import Told
from engine.benchmarks.subject import Subject, subject_of
from engine.benchmarks.summary import ALL, Line, Result
from engine.datasets.base import Dataset, RetrievalDataset
from engine.engine import Engine
from engine.scenes.settings import ITEMS_FORMAT
from engine.scorers.base import Scorer

NAME_LENGTH = 80


@dataclass(frozen=True)
class Comparison:
    """What is measured, and where it is kept.

    Attributes
    ----------
    benchmarks: in the order of the table's columns.
    folder: keeps scores and results; made when it is not there.
    limit: so many items of each official benchmark, spread evenly; None = all.
    progress: told what is scored.
    """

    benchmarks: tuple[Dataset | RetrievalDataset | ScenesBenchmark, ...]
    folder: Path
    limit: int | None = None
    progress: Told | None = None

    def of_engine(self, engine: Engine, scorers: Sequence[Scorer], *, batch_size: int = 64) -> list[Result]:
        """The results of a model with each scorer; the controlled scenes give one for each category.

        Raises what the engine and ``evaluate`` raise; the scores so far are on disk.
        """
        subjects = [(subject_of(engine, scorer, batch_size=batch_size), scorer) for scorer in scorers]
        found: list[Result] = []
        for benchmark in self.benchmarks:
            if isinstance(benchmark, ScenesBenchmark):
                found += self._scenes(engine, subjects, benchmark)
            else:
                found += [self._official(benchmark, subject) for subject, _ in subjects]
        return found

    def of_baseline(self, name: str) -> list[Result]:
        """The results of one of ``baselines.BASELINES`` on the official benchmarks."""
        datasets = [benchmark for benchmark in self.benchmarks if not isinstance(benchmark, ScenesBenchmark)]
        return [self._official(dataset, baseline(name, dataset)) for dataset in datasets]

    def _official(self, dataset: Dataset | RetrievalDataset, subject: Subject) -> Result:
        # Of a retrieval set a limit changes the gallery and so every score.
        chosen = dataset.select(limit=self.limit) if isinstance(dataset, RetrievalDataset) else dataset
        place = self._place(dataset.name, subject, chosen.fingerprint)
        told = None if self.progress is None else partial(self.progress, f"{dataset.name}: {subject.name}")
        result = evaluate(
            dataset, subject, limit=self.limit, resume_path=place.with_name(place.name + ".jsonl"), progress=told
        )
        # Whole or not at all: what is there counts as done.
        write_text(place.with_name(place.name + ".json"), result.to_json())
        return result

    def _scenes(
        self, engine: Engine, subjects: Sequence[tuple[Subject, Scorer]], benchmark: ScenesBenchmark
    ) -> list[Result]:
        files = {}
        for subject, _ in subjects:
            place = self._place("scenes", subject, f"{benchmark!r}, format {ITEMS_FORMAT}")
            files[subject.name] = place.with_name(place.name + ".json")
        lacking = {subject.name: scorer for subject, scorer in subjects if not files[subject.name].exists()}
        if lacking:
            report = scenes.evaluate(engine, lacking, benchmark, progress=self.progress)
            for subject, _ in subjects:
                if subject.name in lacking:
                    content = [
                        json.loads(result.to_json())
                        for result in scenes_results(report)
                        if result.subject == subject.name
                    ]
                    write_text(files[subject.name], json.dumps(content, indent=1))
        return [
            Result.from_json(json.dumps(one))
            for file in files.values()
            for one in json.loads(file.read_text(encoding="utf-8"))
        ]

    def _place(self, benchmark: str, subject: Subject, data: str) -> Path:
        folder = self.folder / benchmark
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(repr((benchmark, data, subject.name, subject.fingerprint)).encode()).hexdigest()[:12]
        words = re.sub(r"[^A-Za-z0-9.=_-]+", "-", subject.name)[:NAME_LENGTH].strip("-")
        return folder / f"{words}-{digest}"


def scenes_results(report: ScenesReport) -> list[Result]:
    """The controlled scenes in the form of the official benchmarks, one for each category; headline group score."""
    benchmark = report.benchmark
    edition = f"{benchmark.items} items, split {benchmark.split}, seed {benchmark.seed}, format {report.items_format}"
    found = []
    for row in report.results:
        # Reports of before scorers were written down have their names alone.
        subject, fingerprint = report.subjects.get(row.scorer, (f"{report.model} · {row.scorer}", report.fingerprint))
        found.append(
            Result(
                f"scenes_{row.category}",
                edition,
                subject,
                fingerprint,
                headline=(ALL, "group"),
                lines=(Line(ALL, row.items, {"text": row.text, "image": row.image, "group": row.group}),),
                rule="right when all four comparisons are, strictly",
                tie_rate=row.tie_rate,
                margin={"median": row.margin},
                baselines={"chance": 1 / 6},
            )
        )
    return found


def read_results(path: Path) -> list[Result]:
    """The results in a file that ``peaksim eval --out`` or ``peaksim compare --out`` wrote, of any benchmark.

    Raises ValueError naming the file when it holds anything else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, list):
            return [Result.from_json(json.dumps(one)) for one in values]
        settings = values["benchmark"]
        if isinstance(settings, dict) and "categories" in settings:
            return scenes_results(ScenesReport.from_dict(values))
        if isinstance(settings, dict):
            report = NegationReport.from_dict(values)
            parts = ((row.choice, row.retrieval, row.negated) for row in report.results)
            return [part for row in parts for part in row if part is not None]
        return [Result.from_json(json.dumps(values))]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"compare: {path} must be a result that `peaksim eval --out` or `compare --out` wrote ({error})"
        ) from error
