"""The negation sets over rendered scenes: multiple choice and retrieval, in the layout of NegBench.

Multiple choice: one picture, four captions, of which some deny; the right one's place rotates over the items
and a tie is wrong, so that no place and no constant can win. Retrieval: find the picture of a caption that
names all its objects (R@k), and of the same caption after a true denial (R-Neg@k). Paper: Alhamoud et al.
2025, arXiv 2501.09425. Beside every accuracy stands what scorers reach that read the captions alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image

from engine.benchmarks.evaluate import evaluate as evaluate_dataset
from engine.benchmarks.ranking import TEXT_TO_IMAGE
from engine.benchmarks.scenes import STANDARD_SCORERS, percent
from engine.benchmarks.shared_features import Told
from engine.benchmarks.subject import subject_of
from engine.benchmarks.summary import ALL, Result
from engine.datasets.base import CHOICE, Dataset, ImageRef, Item, RetrievalDataset, Rule
from engine.engine import Engine
from engine.metrics import Interval
from engine.scenes.items import ITEM_SPLITS
from engine.scenes.negation import (
    NEGATION_TEMPLATES,
    NegationItem,
    RetrievalItem,
    negation_items,
    retrieval_items,
)
from engine.scenes.settings import ITEMS_FORMAT
from engine.scenes.wordings import check_sets
from engine.scorers.base import Scorer
from engine.scorers.sgi import SGI

# sgi leaves a denied phrase out by default; that finding it should count against the picture is an option.
NEGATION_SCORERS: Mapping[str, Scorer] = {
    **STANDARD_SCORERS,
    "sgi native, denied phrases subtracted": SGI(crops="native", negation="subtract"),
}
RECALLS = (("R@1", 1, False), ("R@5", 5, False), ("R-Neg@5", 5, True))
RULE = Rule(CHOICE, ties="wrong", source="accuracy over four captions, total and by template of the right one")


@dataclass(frozen=True)
class NegationBenchmark:
    """What is measured.

    Attributes
    ----------
    items: of the multiple choice.
    scenes: pictures of the retrieval; 0 leaves retrieval out.
    split: ``"held_out"`` (combinations training never shows), ``"in_domain"`` or ``"shifted"``.
    seed: of items and scenes.
    wording: set of sentences the choices are asked in: ``"benchmark"`` (NegBench's own), ``"training"``, or
        ``"held_out"`` (such as no training shows).

    Raises ValueError for an unknown split or wording, no items, or fewer scenes than the five that R@5 looks at.
    """

    items: int = 400
    scenes: int = 300
    split: str = "held_out"
    seed: int = 2026
    wording: str = "benchmark"

    def __post_init__(self) -> None:
        check_sets((self.wording,))
        if self.split not in ITEM_SPLITS:
            raise ValueError(f"NegationBenchmark: split must be of {', '.join(ITEM_SPLITS)}, got {self.split!r}")
        if self.items < 1 or (self.scenes != 0 and self.scenes <= 5):
            raise ValueError(
                "NegationBenchmark: items must be at least 1 and scenes 0 or above 5, got "
                f"{self.items} and {self.scenes}"
            )


@dataclass(frozen=True)
class NegationResult:
    """One scorer: multiple choice, and retrieval by plain and by negated captions (None when left out)."""

    scorer: str
    choice: Result
    retrieval: Result | None = None
    negated: Result | None = None

    def accuracy(self, template: str = ALL) -> Interval:
        """Share of right choices, ties wrong: of all items or of one template."""
        return self.choice.line(template).values["strict"]

    def recall(self, k: int, *, negated: bool = False) -> Interval | None:
        """R@k (or R-Neg@k) from text to image, ties wrong; None when retrieval was left out."""
        result = self.negated if negated else self.retrieval
        return None if result is None else result.line(TEXT_TO_IMAGE).values[f"R@{k}"]


@dataclass(frozen=True)
class NegationReport:
    """Results of one model, with what made them."""

    model: str
    fingerprint: str
    segmenter: str
    benchmark: NegationBenchmark
    results: tuple[NegationResult, ...]

    def result(self, scorer: str) -> NegationResult:
        """The results of a scorer; KeyError when it was not measured."""
        for result in self.results:
            if result.scorer == scorer:
                return result
        raise KeyError(f"no result of {scorer!r}")

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON; ``from_dict`` reads it back."""
        results = [
            {
                "scorer": result.scorer,
                **{part: _plain(getattr(result, part)) for part in ("choice", "retrieval", "negated")},
            }
            for result in self.results
        ]
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "segmenter": self.segmenter,
            "benchmark": asdict(self.benchmark),
            "results": results,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NegationReport:
        """What ``to_dict`` gave."""
        results = [
            NegationResult(
                row["scorer"],
                Result.from_json(json.dumps(row["choice"])),
                *(row[part] and Result.from_json(json.dumps(row[part])) for part in ("retrieval", "negated")),
            )
            for row in values["results"]
        ]
        benchmark = NegationBenchmark(**values["benchmark"])
        return cls(values["model"], values["fingerprint"], values["segmenter"], benchmark, tuple(results))

    def to_markdown(self) -> str:
        """Per cent ± half the 95 % interval: one row a scorer, then what text alone reaches, then chance."""
        recalls = RECALLS if self.benchmark.scenes else ()
        heads = ["all", *NEGATION_TEMPLATES, "ties", "margin", *(name for name, *_ in recalls)]
        lines = ["| scorer | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        for result in self.results:
            templates = [line.name for line in result.choice.lines]
            cells = [
                percent(result.accuracy(name)) if name in templates else "–" for name in (ALL, *NEGATION_TEMPLATES)
            ]
            cells += [f"{100 * result.choice.tie_rate:.1f}", f"{result.choice.margin['median']:+.3f}"]
            found = (result.recall(k, negated=negated) for _, k, negated in recalls)
            cells += ["–" if value is None else percent(value) for value in found]
            lines.append(f"| {result.scorer} | " + " | ".join(cells) + " |")
        # Every scorer sees the same captions, so every result holds the same baselines.
        for name, value in self.results[0].choice.baselines.items():
            chance = [f"{100 * k / self.benchmark.scenes:.1f}" for _, k, _ in recalls]
            blank = [""] * (len(NEGATION_TEMPLATES) + 2)
            lines.append(f"| {name} | " + " | ".join([f"{100 * value:.1f}", *blank, *chance]) + " |")
        return "\n".join(lines)


def evaluate(
    engine: Engine,
    scorers: Mapping[str, Scorer] = NEGATION_SCORERS,
    benchmark: NegationBenchmark | None = None,
    *,
    progress: Told | None = None,
) -> NegationReport:
    """Score the negation sets with every scorer.

    ``progress`` is called with (what is being scored, rounds done, rounds in all). Raises what the engine
    raises, and ValueError for no scorer.
    """
    if not scorers:
        raise ValueError("evaluate: needs at least one scorer, got none")
    benchmark = benchmark or NegationBenchmark()
    sets: dict[str, Dataset | RetrievalDataset] = {"choice": choice_dataset(benchmark)}
    if benchmark.scenes:
        sets["retrieval"] = retrieval_dataset(benchmark)
        sets["negated"] = retrieval_dataset(benchmark, negated=True)
    results: list[NegationResult] = []
    segmenter = ""
    for name, scorer in scorers.items():
        subject = subject_of(engine, scorer)
        found: dict[str, Result] = {}
        for part, dataset in sets.items():
            if progress is not None:
                done = len(results) * len(sets) + len(found)
                progress(f"negation, {part}: {name}", done, len(scorers) * len(sets))
            found[part] = evaluate_dataset(dataset, subject)
        results.append(NegationResult(name, **found))
        if scorer.needs().segments:
            segmenter = engine.segmenter.name
    if progress is not None:
        progress("done", len(scorers) * len(sets), len(scorers) * len(sets))
    spec = engine.spec
    return NegationReport(spec.name, spec.fingerprint, segmenter, benchmark, tuple(results))


def choice_dataset(benchmark: NegationBenchmark) -> Dataset:
    """The multiple choice as a dataset; its pictures are rendered when they are asked for."""
    items = negation_items(
        benchmark.items, seed=benchmark.seed, split=benchmark.split, wording=benchmark.wording
    )
    rows = tuple(
        Item(str(row), (_ref("choice", row, item),), item.captions, item.correct, item.template)
        for row, item in enumerate(items)
    )
    places = np.bincount([item.correct for item in items], minlength=4)
    notes = ("right option by number: " + ", ".join(f"{i}: {n}" for i, n in enumerate(places)),)
    count = f"{len(rows)} items"
    if benchmark.wording != "benchmark":
        count += f" in {benchmark.wording} wordings"
    return Dataset("scenes_negation", _edition(benchmark, count), RULE, rows, notes=notes)


def retrieval_dataset(benchmark: NegationBenchmark, *, negated: bool = False) -> RetrievalDataset:
    """One picture and one caption a scene; with ``negated`` the caption follows a true denial."""
    items = retrieval_items(benchmark.scenes, seed=benchmark.seed, split=benchmark.split)
    return RetrievalDataset(
        "scenes_retrieval_negated" if negated else "scenes_retrieval",
        _edition(benchmark, f"{len(items)} scenes"),
        tuple(_ref("retrieval", row, item) for row, item in enumerate(items)),
        tuple(item.negated_caption if negated else item.caption for item in items),
        tuple(range(len(items))),
    )


def _ref(kind: str, row: int, item: NegationItem | RetrievalItem) -> ImageRef:
    return ImageRef(f"{kind}/{row}", load=lambda: Image.fromarray(item.image()))


def _edition(benchmark: NegationBenchmark, count: str) -> str:
    return f"{count}, split {benchmark.split}, seed {benchmark.seed}, format {ITEMS_FORMAT}"


def _plain(result: Result | None) -> Any:
    return None if result is None else json.loads(result.to_json())
