"""``peaksim compare``: models and scorers side by side on benchmarks, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, UseAppendAction, arg

from engine.atomic_files import write_text
from engine.choices import OnMissing
from engine.cli.evaluation import SCENES_ITEMS, Baseline, Benchmark, in_words
from engine.cli.options import OnDevice, OptionalFolder, check_limit, scorer_named
from engine.cli.outputs import check_apart, check_file, check_folder
from engine.cli.progress import Told, bar
from engine.cli.tables import report, show_json_text, show_markdown

if TYPE_CHECKING:
    from engine.benchmarks.comparison import Comparison
    from engine.benchmarks.summary import Result
    from engine.datasets.base import Dataset, RetrievalDataset

FORMATS = (".md", ".json", ".png")
SAVED = "Results of any benchmark that `eval --out` or `compare --out x.json` wrote."


@dataclass(frozen=True, kw_only=True)
class Compare(OnDevice):
    """Set models and scorers side by side on benchmarks, in one table.

    What the folder of --results does not hold yet is run. Files that `eval --out` wrote may stand beside, or alone.
    """

    saved: Annotated[
        Positional[tuple[Path, ...]], arg(metavar="[RESULT ...]", help=SAVED, help_behavior_hint="(optional)")
    ] = ()
    models: Annotated[tuple[str, ...], arg(metavar="NAME [NAME ...]", help_behavior_hint="(optional)")] = ()
    """Names of models; `peaksim models` lists them."""
    scorers: tuple[str, ...] = ("global",)
    """Ways of scoring, options behind a question mark: global "sgi?crops=native&exclusive=true"."""
    baselines: Annotated[tuple[Baseline, ...], arg(help_behavior_hint="(optional)")] = ()
    """Rows of who knows the answers, nothing, or the texts alone."""
    benchmarks: tuple[Benchmark, ...] = ("scenes",)
    """Columns; `scenes` gives one a category."""
    data: OptionalFolder = None
    """Folder that holds annotations and pictures of the benchmarks at their usual places."""
    on_missing: OnMissing = "error"
    """What to do when a picture is not there."""
    limit: Annotated[int | None, arg(metavar="N", help_behavior_hint="(optional)")] = None
    """So many items of each benchmark, spread evenly (of scenes 400 a category if not given)."""
    segmenter: str = "auto"
    """What splits captions into segments: spacy, spacy:<package> or rules; auto takes spaCy where it is installed."""
    results: Path = Path("results")
    """Folder of scores and results, kept from run to run."""
    out: Annotated[UseAppendAction[tuple[Path, ...]], arg(metavar="FILE")] = ()
    """Write the table here too, repeatable: .md, .json, or .png for a bar chart."""

    def run(self) -> int:
        """Print one row a model and scorer, and one column a benchmark."""
        self._check()
        from engine.benchmarks.comparison import read_results
        from engine.benchmarks.report import bar_chart, check_charts, comparison, comparison_json

        if any(path.suffix.lower() == ".png" for path in self.out):
            check_charts()
        found = [result for path in self.saved for result in read_results(path)]
        if self.models or self.baselines:
            with bar("items") as advance:
                found += self._measure(advance)
        table, whole = comparison(found), comparison_json(found)
        for path in self.out:
            if path.suffix.lower() == ".png":
                bar_chart(found, path)
            else:
                write_text(path, table if path.suffix.lower() == ".md" else whole)
        if self.json:
            show_json_text(whole)
        else:
            show_markdown(table)
        return 0

    def _check(self) -> None:
        """Refuse what would only fail when everything had been run."""
        if not (self.saved or self.models or self.baselines):
            raise ValueError("compare: give --models, --baselines, or files that `peaksim eval --out` wrote")
        for option in ("models", "scorers", "baselines", "benchmarks"):
            values = getattr(self, option)
            if len(set(values)) < len(values):
                raise ValueError(f"compare: --{option} must differ, got {' '.join(values)}")
        if not self.benchmarks or (self.models and not self.scorers):
            raise ValueError("compare: needs at least one of --benchmarks and of --scorers")
        if self.baselines and set(self.benchmarks) == {"scenes"}:
            raise ValueError("compare: --baselines need an official benchmark, got scenes alone")
        check_limit(self.limit)
        for path in self.out:
            check_file("compare: --out", path, suffixes=FORMATS)
        check_apart(
            [("compare: --out", path) for path in self.out], [("a result to read", path) for path in self.saved]
        )
        if self.models or self.baselines:
            check_folder("compare: --results", self.results)

    def _measure(self, told: Told | None) -> list[Result]:
        scorers = [scorer_named(text) for text in self.scorers]
        plan = self._plan(told)
        found: list[Result] = []
        # Models first: only they are on every benchmark, so the columns come in the order that was asked for.
        for model in self.models:
            engine = self.load(model, segmenter=self.segmenter)
            found += plan.of_engine(engine, scorers, batch_size=self.batch_size)
        for baseline in self.baselines:
            found += plan.of_baseline(baseline)
        return found

    def _plan(self, told: Told | None) -> Comparison:
        from engine.benchmarks.comparison import Comparison
        from engine.benchmarks.official import read_official
        from engine.benchmarks.scenes import ScenesBenchmark

        benchmarks: list[Dataset | RetrievalDataset | ScenesBenchmark] = []
        for name in self.benchmarks:
            if name == "scenes":
                benchmarks.append(ScenesBenchmark(items=SCENES_ITEMS if self.limit is None else self.limit))
                continue
            dataset = read_official(name, self.data, pictures=bool(self.models), on_missing=self.on_missing)
            report(in_words(dataset))
            benchmarks.append(dataset)
        return Comparison(tuple(benchmarks), self.results, self.limit, told)
