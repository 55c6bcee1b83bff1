"""The controlled benchmark on rendered scenes: who has which attribute.

After BiSCoR-Ctrl (Miranda et al. 2026, arXiv 2604.11496): every item has two images and two captions of the same
objects and the same words; only the binding differs. A scorer is right when all four comparisons are (group score,
chance 16.7 %). The negation sets are in ``engine.benchmarks.scenes_negation``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.benchmarks.shared_features import Told, features_for
from engine.benchmarks.subject import label, subject_of
from engine.encoders.scenes import ScenesEncoder, WordTokenizer
from engine.encoders.scenes_model import ScenesModel
from engine.engine import Engine
from engine.metrics import Interval, bootstrap_interval, group_scores, recall_at_k
from engine.scenes.items import CATEGORIES, ITEM_SPLITS, ControlledItem, controlled_items
from engine.scenes.negation import retrieval_items
from engine.scenes.settings import ITEMS_FORMAT
from engine.scorers.base import Scorer
from engine.scorers.max_sim import MaxSim
from engine.scorers.registry import get_scorer
from engine.scorers.sgi import SGI

# The rows of the table: what each scorer is called there.
STANDARD_SCORERS: Mapping[str, Scorer] = {
    "global": get_scorer("global"),
    "max_sim": MaxSim(),
    "sgi rescaled": SGI(crops="rescaled"),
    "sgi native": SGI(crops="native"),
}


@dataclass(frozen=True)
class ScenesBenchmark:
    """What is measured.

    Attributes
    ----------
    items: items of each category.
    split: ``"held_out"`` (combinations training never shows), ``"in_domain"`` or ``"shifted"`` (held-out pairs
        among more objects, drawn with other settings).
    categories: of ``engine.scenes.items.CATEGORIES``.
    segments: ``"parsed"`` by the engine's segmenter, or ``"oracle"`` (the phrases the captions were made of).
    seed: of the items.
    """

    items: int = 400
    split: str = "held_out"
    categories: tuple[str, ...] = CATEGORIES
    segments: str = "parsed"
    seed: int = 2026

    def __post_init__(self) -> None:
        for name, value, known in (
            ("split", self.split, ITEM_SPLITS),
            ("segments", self.segments, ("parsed", "oracle")),
            *(("categories", category, CATEGORIES) for category in self.categories),
        ):
            if value not in known:
                raise ValueError(f"ScenesBenchmark: {name} must be of {', '.join(known)}, got {value!r}")
        if self.items < 1 or not self.categories:
            raise ValueError("ScenesBenchmark: needs at least one item and one category, got none")


@dataclass(frozen=True)
class CategoryResult:
    """One scorer on one category: shares in 0..1 with 95 % bootstrap intervals over items.

    ``tie_rate``: items with an exactly equal comparison; a tie is never a win. ``margin``: median over items of the
    smallest of the four differences.
    """

    scorer: str
    category: str
    items: int
    text: Interval
    image: Interval
    group: Interval
    tie_rate: float
    margin: float


@dataclass(frozen=True)
class ScenesReport:
    """Results of one model, with what made them.

    Attributes
    ----------
    model, fingerprint: of the encoder.
    segmenter: what split the captions, ``"oracle"`` for the phrases they were made of, empty where no scorer looks at
        segments.
    benchmark: what was measured.
    results: a row for each scorer and category.
    subjects: for each scorer the name and the fingerprint that its results have beside those of other benchmarks.
    items_format: ``engine.scenes.settings.ITEMS_FORMAT`` of the items.
    """

    model: str
    fingerprint: str
    segmenter: str
    benchmark: ScenesBenchmark
    results: tuple[CategoryResult, ...] = field(default_factory=tuple)
    subjects: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    items_format: int = ITEMS_FORMAT

    def result(self, scorer: str, category: str) -> CategoryResult:
        """The row of a scorer and a category; KeyError when it was not measured."""
        for result in self.results:
            if (result.scorer, result.category) == (scorer, category):
                return result
        raise KeyError(f"no result of {scorer!r} on {category!r}")

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON; ``from_dict`` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ScenesReport:
        """What ``to_dict`` gave."""
        settings = {**values["benchmark"], "categories": tuple(values["benchmark"]["categories"])}
        results = tuple(
            CategoryResult(**{**row, **{side: Interval(**row[side]) for side in ("text", "image", "group")}})
            for row in values["results"]
        )
        return cls(
            values["model"],
            values["fingerprint"],
            values["segmenter"],
            ScenesBenchmark(**settings),
            results,
            {name: (title, made_by) for name, (title, made_by) in values.get("subjects", {}).items()},
            # Before the format was written down there was only the first.
            values.get("items_format", 1),
        )

    def to_markdown(self) -> str:
        """Group score ± half the 95 % interval, in per cent: one row a scorer, one column a category."""
        categories = self.benchmark.categories
        lines = [
            "| scorer | " + " | ".join(category.capitalize() for category in categories) + " |",
            "|---" * (len(categories) + 1) + "|",
        ]
        for scorer in dict.fromkeys(result.scorer for result in self.results):
            cells = [percent(self.result(scorer, category).group) for category in categories]
            lines.append(f"| {scorer} | " + " | ".join(cells) + " |")
        return "\n".join(lines)


@dataclass(frozen=True)
class ScoredCategory:
    """Items of one category and, by scorer, their scores ``(n, 2, 2)`` as ``[item, image, text]``."""

    category: str
    items: tuple[ControlledItem, ...]
    scores: Mapping[str, Tensor]
    segmenter: str


def evaluate(
    engine: Engine,
    scorers: Mapping[str, Scorer] = STANDARD_SCORERS,
    benchmark: ScenesBenchmark | None = None,
    *,
    progress: Told | None = None,
) -> ScenesReport:
    """Score every item with every scorer.

    ``progress`` is called with (what is being scored, pictures encoded, pictures to encode in all). Raises
    what the engine raises.
    """
    benchmark = benchmark or ScenesBenchmark()
    scored = list(score_categories(engine, scorers, benchmark, progress=progress))
    return summarise(engine, benchmark, scored, scorers)


def score_categories(
    engine: Engine,
    scorers: Mapping[str, Scorer],
    benchmark: ScenesBenchmark,
    *,
    progress: Told | None = None,
) -> Iterator[ScoredCategory]:
    """The items of each category with their scores, one category at a time."""
    oracle = benchmark.segments == "oracle"
    for number, category in enumerate(benchmark.categories):

        def told(what: str, done: int, total: int, category: str = category, number: int = number) -> None:
            if progress is not None:
                progress(f"{category}: {what}", number * total + done, len(benchmark.categories) * total)

        items = controlled_items(category, benchmark.items, seed=benchmark.seed, split=benchmark.split)
        scores, segmenter = _scores(engine, items, scorers, oracle=oracle, progress=told)
        yield ScoredCategory(category, tuple(items), scores, segmenter)


def summarise(
    engine: Engine, benchmark: ScenesBenchmark, scored: Sequence[ScoredCategory], scorers: Mapping[str, Scorer]
) -> ScenesReport:
    """The report of categories that these scorers have scored."""
    results = [_result(name, part.category, scores) for part in scored for name, scores in part.scores.items()]
    segmenter = next((part.segmenter for part in scored if part.segmenter), "")
    spec = engine.encoder.spec
    subjects = {name: _subject(engine, scorer, benchmark) for name, scorer in scorers.items()}
    return ScenesReport(spec.name, spec.fingerprint, segmenter, benchmark, tuple(results), subjects)


def _subject(engine: Engine, scorer: Scorer, benchmark: ScenesBenchmark) -> tuple[str, str]:
    """Name and fingerprint of a scorer among the results of other benchmarks."""
    if benchmark.segments == "oracle" and scorer.needs().segments:
        spec = engine.spec
        return f"{spec.name} · {label(scorer)} segments=oracle", f"{spec.fingerprint} · {scorer!r} · oracle"
    subject = subject_of(engine, scorer)
    return subject.name, subject.fingerprint


def score_items(
    engine: Engine, items: Sequence[ControlledItem], scorer: Scorer, *, oracle: bool = False
) -> tuple[Tensor, str]:
    """Scores ``(n, 2, 2)`` as ``[item, image, text]``, and the segmenter that split the captions."""
    scores, segmenter = _scores(engine, items, {scorer.name: scorer}, oracle=oracle)
    return scores[scorer.name], segmenter


def _scores(
    engine: Engine,
    items: Sequence[ControlledItem],
    scorers: Mapping[str, Scorer],
    *,
    oracle: bool,
    progress: Told | None = None,
) -> tuple[dict[str, Tensor], str]:
    pictures = [Image.fromarray(pixels) for item in items for pixels in item.images()]
    captions = [caption for item in items for caption in item.captions]
    given = [list(parts) for item in items for parts in item.segments] if oracle else None
    first = torch.arange(0, 2 * len(items), 2)
    # Four aligned pairs an item: images 0 0 1 1 with texts 0 1 0 1.
    image_rows = torch.stack([first, first, first + 1, first + 1], dim=1).flatten()
    text_rows = torch.stack([first, first + 1, first, first + 1], dim=1).flatten()
    found, segmenter = {}, ""
    shared = features_for(engine, pictures, captions, scorers, segments=given, progress=progress)
    for name, images, texts in shared:
        scores = engine.score(images[image_rows], texts[text_rows], scorer=scorers[name], pairs=True)
        found[name] = scores.view(len(items), 2, 2)
        if scorers[name].needs().segments:
            segmenter = "oracle" if oracle else texts.segmenter or segmenter
    return {name: found[name] for name in scorers}, segmenter


def quick_figures(model: ScenesModel, tokenizer: WordTokenizer) -> dict[str, float]:
    """Figures for the log of a training: global group score on 100 items a category, and retrieval among 300."""
    encoder = ScenesEncoder(model, tokenizer.words, name="scenes in training", device=torch.device("cpu"))
    engine = Engine(encoder)
    figures = {}
    for category in CATEGORIES:
        items = controlled_items(category, 100, seed=7, split="in_domain")
        scores, _ = score_items(engine, items, get_scorer("global"))
        figures[f"group_{category}"] = float(group_scores(scores).group.mean())
    figures |= retrieval_figures(engine, 300, seed=7)
    return figures


def retrieval_figures(engine: Engine, n: int, *, seed: int, split: str = "in_domain") -> dict[str, float]:
    """R@1 both ways of the global cosine among ``n`` scenes whose captions name every group in full."""
    items = retrieval_items(n, seed=seed, split=split)
    pictures = [Image.fromarray(item.image()) for item in items]
    scores = engine.score(pictures, [item.caption for item in items]).numpy()  # (images, texts)
    own = [[row] for row in range(n)]
    return {
        "image_to_text_r1": recall_at_k(lambda rows, columns: scores[rows, columns], own, n, ks=(1,))[1],
        "text_to_image_r1": recall_at_k(lambda rows, columns: scores.T[rows, columns], own, n, ks=(1,))[1],
    }


def percent(interval: Interval) -> str:
    """``93.2 ± 2.4``: value and half width of the interval, in per cent."""
    return f"{100 * interval.value:.1f} ± {50 * (interval.high - interval.low):.1f}"


def _result(scorer: str, category: str, scores: Tensor) -> CategoryResult:
    outcomes = group_scores(scores)
    return CategoryResult(
        scorer,
        category,
        len(scores),
        text=bootstrap_interval(outcomes.text),
        image=bootstrap_interval(outcomes.image),
        group=bootstrap_interval(outcomes.group),
        tie_rate=float(outcomes.tied.mean()),
        margin=float(np.median(outcomes.margin)),
    )
