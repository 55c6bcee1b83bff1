"""``peaksim index add``: pictures and embeddings into an index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from engine.cli.index import Folder
from engine.cli.options import OnDevice
from engine.cli.progress import Counted, counted
from engine.cli.tables import report, show_json, show_line

if TYPE_CHECKING:
    from engine.images import ImageFailure
    from engine.retrieval.adding import Batch
    from engine.retrieval.index import Index
    from engine.retrieval.sources import Source

# Failures that are named one by one; --json has them all.
NAMED = 20


@dataclass(frozen=True, kw_only=True)
class Add(OnDevice):
    """Add pictures to an index. Started again after an interruption it goes on: ids that are there are passed over."""

    index: Folder
    sources: Annotated[
        Positional[tuple[str, ...]],
        arg(
            metavar="SOURCE...",
            help="Folders of pictures, picture files, lists (.txt, .lst: a path a line), WebDataset shards (.tar), "
            "folders with img_emb/*.npy and metadata/*.parquet.",
            help_behavior_hint="(required)",
        ),
    ]
    existing: Literal["skip", "refuse", "replace"] = "skip"
    """What becomes of ids that are there already."""
    column: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
    """Field of the .json files in shards to keep as metadata; repeatable."""
    id_column: str = "image_path"
    """Column of the .parquet files beside embeddings that holds the ids."""

    def run(self) -> int:
        """Add everything that can be read; 1 when something could not."""
        from engine.retrieval.index import Index
        from engine.retrieval.sources import source_of

        if not self.sources:
            raise ValueError("give at least one source: a folder, picture files, a list, shards or embeddings")
        sources = [source_of(place, columns=self.column, id_column=self.id_column) for place in self.sources]
        opened = Index.open(self.index)
        failures: list[ImageFailure] = []
        totals = [source.total for source in sources]
        total = None if None in totals else sum(held for held in totals if held is not None)
        with counted("images", total) as advance:
            steps = _Steps(opened, sources, self, failures, advance)
            try:
                added, replaced, skipped = steps.run()
            except KeyboardInterrupt:
                report(
                    f"{len(opened)} images are in the index; up to {self.batch_size} that were being encoded are not. "
                    "The same command goes on from there"
                )
                raise
        failures = [*failures, *(failure for source in sources for failure in source.failures)]
        if self.json:
            facts = {"added": added, "replaced": replaced, "skipped": skipped, "images": len(opened)}
            show_json({"index": str(self.index), **facts, "failures": [asdict(failure) for failure in failures]})
        else:
            done = f"added {added}, replaced {replaced}, passed over {skipped} that were there"
            show_line(f"{done}; {len(opened)} in all")
        return tell(failures, named=not self.json)


class _Steps:
    """Source after source into the index, its progress told."""

    def __init__(
        self, opened: Index, sources: list[Source], options: Add, failures: list[ImageFailure], advance: Counted
    ) -> None:
        self._opened, self._sources, self._options = opened, sources, options
        self._failures, self._advance = failures, advance
        self._done = 0

    def run(self) -> tuple[int, int, int]:
        """Images added, replaced and passed over."""
        added = replaced = skipped = 0
        for source in self._sources:
            report = self._opened.add(
                self._batches(source),
                existing=self._options.existing,
                batch_size=self._options.batch_size,
                on_error=self._failures.append,
            )
            added, replaced, skipped = (
                added + report.added,
                replaced + report.replaced,
                skipped + report.skipped + source.skipped,
            )
        return added, replaced, skipped

    def _batches(self, source: Source) -> Iterator[Batch]:
        known = self._opened.__contains__ if self._options.existing == "skip" else None
        for batch in source.batches(self._options.batch_size, known=known):
            yield batch
            self._done += len(batch.images)
            others = sum(len(one.failures) for one in self._sources)
            self._advance(self._done, len(self._failures) + others)


def tell(failures: list[ImageFailure], *, named: bool) -> int:
    """Name what could not be read on standard error; the exit code."""
    for failure in failures[: NAMED if named else 0]:
        report(f"{failure.path}: {failure.reason}" if failure.id == failure.path else
               f"{failure.id} ({failure.path}): {failure.reason}")  # fmt: skip
    if failures:
        more = f", the first {NAMED} are named above" if named and len(failures) > NAMED else ""
        report(f"{len(failures)} image{'s' if len(failures) > 1 else ''} could not be read{more}")
    return 1 if failures else 0
