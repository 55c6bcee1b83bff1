"""``peaksim eval``: a model with a scorer, or a baseline, on one benchmark."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from engine.atomic_files import write_text
from engine.choices import OnMissing
from engine.cli.options import (
    OptionalFile,
    OptionalFolder,
    OptionalPath,
    WithScorer,
    check_limit,
    check_unused,
    scorer_with,
)
from engine.cli.outputs import check_apart, check_file
from engine.cli.progress import bar, steps
from engine.cli.tables import report, show_json_text, show_line, show_markdown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.benchmarks.subject import Subject
    from engine.datasets.base import Dataset, RetrievalDataset
    from engine.scorers.base import Scorer

# Those of engine.benchmarks.official and .baselines, written out: reading them there would load torch.
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
    "negbench_mcq_voc",
    "negbench_mcq_synthetic",
    "negbench_retrieval",
    "negbench_retrieval_plain",
]
Evaluated = Literal[Benchmark, "scenes_negation"]
Baseline = Literal["oracle", "constant", "random", "blind_longest", "blind_shortest", "blind_no_negation"]
STANDARD = "standard"
SCENES_ITEMS = 400


@dataclass(frozen=True, kw_only=True)
class Eval(WithScorer):
    """Evaluate a model with a scorer, or a baseline, on a benchmark.

    `scenes` and `scenes_negation` are rendered on the spot; of the others the official files are read from your disk.
    """

    benchmark: Annotated[Positional[Evaluated], arg(help="The benchmark.")]
    scorer: str = STANDARD
    """global, max_sim, max_sim_head or sgi; `standard` is the four of the table on scenes and global elsewhere."""
    baseline: Annotated[Baseline | None, arg(help_behavior_hint="(optional)")] = None
    """In place of a model: who knows the answers, who knows nothing, or who reads the texts alone. Needs no images."""
    data: OptionalFolder = None
    """Folder that holds annotations and pictures of the benchmarks at their usual places."""
    annotations: OptionalPath = None
    """Official annotation file or folder, where it lies elsewhere."""
    images: OptionalFolder = None
    """Folder of the benchmark's pictures, where it lies elsewhere."""
    tags: OptionalFile = None
    """Of winoground: its new_tag_assignments.json."""
    on_missing: OnMissing = "error"
    """What to do when a picture is not there."""
    limit: Annotated[int | None, arg(metavar="N", help_behavior_hint="(optional)")] = None
    """So many items, spread evenly; on scenes, so many of each category (400 if not given)."""
    shard: Annotated[str | None, arg(metavar="K/N", help_behavior_hint="(optional)")] = None
    """Only every N-th item from the K-th on; K counts from 0."""
    resume: OptionalFile = None
    """Keep the scores in this file as they come, and go on from it."""
    merge: Annotated[UseAppendAction[tuple[Path, ...]], arg(metavar="FILE")] = ()
    """Score file of a shard, repeatable: they are joined into the file of --resume first."""
    split: Literal["held_out", "in_domain", "shifted"] = "held_out"
    """Of scenes: combinations never trained on, those trained on, or another renderer setting."""
    segments: Literal["parsed", "oracle"] = "parsed"
    """Of scenes: segments from the captions, or those that the captions were made of."""
    wording: Literal["benchmark", "training", "held_out"] = "benchmark"
    """Of scenes_negation: sentences of NegBench, those of trainings, or such as no training shows."""
    seed: int = 2026
    """Of scenes and scenes_negation: decides the items."""
    out: OptionalFile = None
    """Write the result here as JSON, of any benchmark; `peaksim compare` reads it."""

    def run(self) -> int:
        """Print the result as a table."""
        check_limit(self.limit)
        check_file("--out", self.out)
        check_file("--resume", self.resume)
        read = [("--annotations", self.annotations), ("--tags", self.tags)]
        # The file that shards are joined into may be one of them: it keeps what it holds.
        check_apart([("--resume", self.resume)], read)
        check_apart([("--out", self.out)], [*read, ("--resume", self.resume), *(("--merge", p) for p in self.merge)])
        if self.benchmark == "scenes":
            return self._run_scenes()
        if self.benchmark == "scenes_negation":
            return self._run_negation()
        return self._run_official(self.benchmark)

    def _run_scenes(self) -> int:
        from engine.benchmarks.scenes import STANDARD_SCORERS, ScenesBenchmark, evaluate

        scorers = self._rendered_scorers(STANDARD_SCORERS)
        items = SCENES_ITEMS if self.limit is None else self.limit
        self._refuse("wording")
        settings = ScenesBenchmark(items=items, split=self.split, segments=self.segments, seed=self.seed)
        engine = self.engine(segmenter=self.segmenter)
        with steps("pictures") as advance:
            found = evaluate(engine, scorers, settings, progress=advance)
        note = (
            f"group score in per cent ± half a 95 % interval, chance 16.7; {settings.items} items each, "
            f"split {settings.split}"
        )
        # Without a scorer that looks at segments nothing was split.
        note += f", segments {settings.segments} ({found.segmenter})" if found.segmenter else ""
        self._show_rendered(found.to_dict(), found.to_markdown(), note)
        return 0

    def _run_negation(self) -> int:
        from engine.benchmarks.scenes_negation import NEGATION_SCORERS, NegationBenchmark, evaluate

        scorers = self._rendered_scorers(NEGATION_SCORERS)
        self._refuse("segments")
        items = SCENES_ITEMS if self.limit is None else self.limit
        settings = NegationBenchmark(items=items, split=self.split, wording=self.wording, seed=self.seed)
        with steps("rounds") as advance:
            found = evaluate(self.engine(segmenter=self.segmenter), scorers, settings, progress=advance)
        note = (
            f"{settings.items} choices in {settings.wording} wordings, retrieval among {settings.scenes} scenes, "
            f"split {settings.split}, seed {settings.seed}"
        )
        self._show_rendered(found.to_dict(), found.to_markdown(), note)
        return 0

    def _rendered_scorers(self, standard: Mapping[str, Scorer]) -> Mapping[str, Scorer]:
        """The scorers of a rendered benchmark; options of official files are refused."""
        from engine.benchmarks.subject import label

        self._refuse("baseline", "data", "annotations", "images", "tags", "on_missing", "shard", "resume", "merge")
        if self.scorer != STANDARD:
            scorer = self._one()
            return {label(scorer): scorer}
        self._refuse("option")
        return standard

    def _show_rendered(self, values: dict[str, Any], table: str, note: str) -> None:
        text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
        self._write(text)
        if self.json:
            show_json_text(text)
        else:
            show_markdown(table)
            show_line(note)

    def _run_official(self, name: Benchmark) -> int:
        self._refuse("split", "segments", "wording", "seed")
        if self.baseline is not None:
            self._refuse("model", "scorer", "option", "segmenter", "device", "dtype", "batch_size")
        if self.merge and self.resume is None:
            raise ValueError("--merge joins score files into that of --resume, which must be given")
        from engine.benchmarks.evaluate import evaluate
        from engine.benchmarks.official import read_official
        from engine.benchmarks.report import to_markdown
        from engine.benchmarks.score_file import merge_score_files, terms_of

        shard = None if self.shard is None else shard_of(self.shard)
        dataset = read_official(
            name,
            self.data,
            annotations=self.annotations,
            images=self.images,
            pictures=self.baseline is None,
            on_missing=self.on_missing,
            tags=self.tags,
        )
        report(in_words(dataset))
        subject = self._subject(dataset)
        if self.merge and self.resume is not None:
            merge_score_files(self.merge, self.resume, terms_of(dataset, subject, limit=self.limit))
        with bar("items") as advance:
            found = evaluate(
                dataset,
                subject,
                limit=self.limit,
                shard=shard,
                resume_path=self.resume,
                progress=None if advance is None else partial(advance, name),
            )
        self._write(found.to_json())
        if self.json:
            show_json_text(found.to_json())
        else:
            show_markdown(to_markdown(found))
        return 0

    def _subject(self, dataset: Dataset | RetrievalDataset) -> Subject:
        if self.baseline is not None:
            from engine.benchmarks.baselines import baseline

            return baseline(self.baseline, dataset)
        from engine.benchmarks.subject import subject_of

        scorer = self._one()
        return subject_of(self.engine(segmenter=self.segmenter), scorer, batch_size=self.batch_size)

    def _refuse(self, *names: str) -> None:
        """Raise ValueError for an option that this benchmark (or scorer, or baseline) would not look at."""
        who = f"--scorer {self.scorer}" if self.baseline is None else f"--baseline {self.baseline}"
        check_unused(f"eval {self.benchmark} {who}", self, *names)

    def _one(self) -> Scorer:
        return scorer_with("global" if self.scorer == STANDARD else self.scorer, self.option)

    def _write(self, text: str) -> None:
        if self.out is not None:
            write_text(self.out, text)


def shard_of(text: str) -> tuple[int, int]:
    """``k/n`` as two numbers. Raises ValueError for anything else."""
    k, slash, n = text.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal()):
        raise ValueError(f"--shard must be K/N with 0 <= K < N, got {text!r}")
    return int(k), int(n)


def in_words(dataset: Dataset | RetrievalDataset) -> str:
    """What was read: edition, counts, and how many images are missing."""
    missing = len(dataset.missing)
    lack = f"{missing} image{'' if missing == 1 else 's'} missing"
    return "; ".join([f"{dataset.name}: {dataset.edition}", f"{len(dataset)} to score", lack, *dataset.notes])
