"""``peaksim eval`` and ``peaksim compare``: benchmarks, and saved results side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from engine.cli.options import Shared, WithScorer, scorer_with
from engine.cli.progress import bar
from engine.cli.tables import show_json_text, show_line, show_markdown

if TYPE_CHECKING:
    from engine.datasets.base import Dataset, RetrievalDataset
    from engine.scorers.base import Scorer

Benchmark = Literal[
    "scenes",
    "sugarcrepe",
    "winoground",
    "bivlc",
    "vg_relation",
    "vg_attribution",
    "coco_order",
    "flickr30k_order",
    "negbench_mcq",
    "negbench_retrieval",
]
STANDARD = "standard"


@dataclass(frozen=True, kw_only=True)
class Eval(WithScorer):
    """Evaluate a model with a scorer on a benchmark.

    `scenes` is rendered on the spot; of the others the official files are read from your disk.
    """

    benchmark: Annotated[Positional[Benchmark], arg(help="The benchmark.")]
    scorer: str = STANDARD
    """global, max_sim or sgi; `standard` is the four of the table on scenes and global elsewhere."""
    annotations: Path | None = None
    """Official annotation file or folder."""
    images: Path | None = None
    """Folder of the benchmark's pictures."""
    on_missing: Literal["error", "skip"] = "error"
    """What to do when a picture is not there."""
    limit: int | None = None
    """So many items, spread evenly; on scenes, so many of each category (400 if not given)."""
    split: Literal["held_out", "in_domain", "shifted"] = "held_out"
    """Of scenes: combinations never trained on, those trained on, or another renderer setting."""
    segments: Literal["parsed", "oracle"] = "parsed"
    """Of scenes: segments from the captions, or those that the captions were made of."""
    resume: Path | None = None
    """Keep the scores in this file as they come, and go on from it."""
    save: Path | None = None
    """Write the result here as JSON."""

    def run(self) -> int:
        """Print the result as a table."""
        if self.benchmark == "scenes":
            return self._run_scenes()
        return self._run_official()

    def _run_scenes(self) -> int:
        standard = self.scorer == STANDARD
        self._refuse("annotations", "images", "on_missing", "resume", *(["option"] if standard else []))
        from engine.benchmarks.scenes import STANDARD_SCORERS, ScenesBenchmark, evaluate

        scorers = STANDARD_SCORERS if standard else {self.scorer: self._one()}
        settings = ScenesBenchmark(
            items=400 if self.limit is None else self.limit, split=self.split, segments=self.segments
        )
        engine = self.engine(segmenter=self.segmenter)
        with bar("items") as advance:
            found = evaluate(engine, scorers, settings, progress=advance)
        text = _json(found.to_dict())
        if self.save is not None:
            self.save.write_text(text + "\n", encoding="utf-8")
        if self.json:
            show_json_text(text)
        else:
            show_markdown(found.to_markdown())
            show_line(
                f"group score in per cent ± half a 95 % interval, chance 16.7; {settings.items} items each, "
                f"split {settings.split}, segments {settings.segments} ({found.segmenter})"
            )
        return 0

    def _run_official(self) -> int:
        self._refuse("split", "segments")
        from engine.benchmarks.evaluate import evaluate
        from engine.benchmarks.report import to_markdown
        from engine.benchmarks.subject import subject_of

        dataset = read_dataset(self.benchmark, self.annotations, self.images, self.on_missing)
        engine = self.engine(segmenter=self.segmenter)
        subject = subject_of(engine, self._one(), batch_size=self.batch_size)
        with bar("items") as advance:
            found = evaluate(
                dataset,
                subject,
                limit=self.limit,
                resume_path=self.resume,
                progress=None if advance is None else partial(advance, self.benchmark),
            )
        if self.save is not None:
            self.save.write_text(found.to_json() + "\n", encoding="utf-8")
        if self.json:
            show_json_text(found.to_json())
        else:
            show_markdown(to_markdown(found))
        return 0

    def _refuse(self, *names: str) -> None:
        """Raise ValueError for an option that this benchmark (or the standard scorers) would not look at."""
        for field in fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                option = "--" + field.name.replace("_", "-")
                raise ValueError(f"eval {self.benchmark} --scorer {self.scorer}: has no use for {option}")

    def _one(self) -> Scorer:
        return scorer_with("global" if self.scorer == STANDARD else self.scorer, self.option)


@dataclass(frozen=True, kw_only=True)
class Compare(Shared):
    """Set saved results of official benchmarks side by side."""

    results: Annotated[Positional[tuple[Path, ...]], arg(metavar="RESULT...", help="Files of `eval --save`.")]
    chart: Path | None = None
    """Draw the official figures into this PNG file."""

    def run(self) -> int:
        """Print one row a scorer and one column a benchmark."""
        if not self.results:
            raise ValueError("compare: give at least one file that `peaksim eval --save` wrote")
        from engine.benchmarks.report import bar_chart, comparison, comparison_json
        from engine.benchmarks.summary import Result

        found = []
        for path in self.results:
            try:
                found.append(Result.from_json(path.read_text(encoding="utf-8")))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"compare: {path} must be a result of an official benchmark ({error})") from error
        if self.json:
            show_json_text(comparison_json(found))
        else:
            show_markdown(comparison(found))
        if self.chart is not None:
            bar_chart(found, self.chart)
        return 0


def read_dataset(
    benchmark: str, annotations: Path | None, images: Path | None, on_missing: str
) -> Dataset | RetrievalDataset:
    """The benchmark from its official files. Raises ValueError when one of the two paths is not given."""
    if annotations is None or images is None:
        raise ValueError(f"eval {benchmark}: needs --annotations and --images, the official files on your disk")
    from engine.datasets import aro, bivlc, negbench, sugarcrepe, winoground

    readers: dict[str, Callable[..., Dataset | RetrievalDataset]] = {
        "sugarcrepe": sugarcrepe.read_sugarcrepe,
        "winoground": winoground.read_winoground,
        "bivlc": bivlc.read_bivlc,
        "vg_relation": aro.read_vg_relation,
        "vg_attribution": aro.read_vg_attribution,
        "coco_order": partial(aro.read_order, name="coco_order"),
        "flickr30k_order": partial(aro.read_order, name="flickr30k_order"),
        "negbench_mcq": negbench.read_negbench_mcq,
        "negbench_retrieval": negbench.read_negbench_retrieval,
    }
    return readers[benchmark](annotations, images, on_missing=on_missing)


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
