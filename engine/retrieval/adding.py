"""Images into an index: batches of whatever users have, encoded, checked, and committed a segment at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from engine.encoders.sources import as_list, encoded_batches, names_of
from engine.engine import Engine
from engine.features import ImageFeatures
from engine.images import ImageFailure, ImageSource
from engine.retrieval.identifiers import check_ids
from engine.retrieval.metadata import Metadata, as_table, encoded_schema, joined_schema
from engine.retrieval.recipe import Recipe
from engine.retrieval.results import AddReport
from engine.retrieval.segment_writer import RowBlock, SegmentWriter, cut
from engine.retrieval.storage import Change

Existing = Literal["refuse", "skip", "replace"]
# A process that is killed loses no more of slow encoding than this and a batch, at the price of segments that are not
# full, which `compact` joins.
COMMIT_S = 60.0
# Rows of features that are packed at a time.
FEATURE_ROWS = 256


@dataclass(frozen=True)
class Batch:
    """Some images on their way into an index, from a stream of such.

    Attributes:
        images: pictures as `Engine.encode_images` takes them, or their features.
        ids: one for each; by default the features' own, or the paths.
        metadata: one row for each: an Arrow table, a mapping of columns or a list of mappings.
    """

    images: ImageFeatures | Sequence[ImageSource]
    ids: Sequence[str] | None = None
    metadata: Metadata | None = None

    def names(self, *, distinct: bool = True) -> list[str]:
        """The ids. Raises ValueError for features without any, their number wrong, or (`distinct`) one twice."""
        if not isinstance(self.images, ImageFeatures):
            unnamed = [type(image).__name__ for image in self.images if not isinstance(image, str | os.PathLike)]
            if self.ids is None and unnamed:
                # Their places would be no names: the next list has the same.
                raise ValueError(f"Index: pictures that are no files need ids=, got a {unnamed[0]}")
            given = None if self.ids is None else check_ids("Index", self.ids, distinct=distinct)
            return check_ids("Index", names_of(self.images, given), distinct=distinct)
        ids = self.images.ids if self.ids is None else self.ids
        if ids is None:
            raise ValueError("Index: features without ids need ids=, one string for each row")
        found = check_ids("Index", ids, distinct=distinct)
        if len(found) != len(self.images):
            raise ValueError(f"Index: ids must name each of {len(self.images)} images, got {len(found)}")
        return found


Item: TypeAlias = "Batch | ImageFeatures | ImageSource"
Images: TypeAlias = "ImageFeatures | ImageSource | Sequence[ImageSource] | Iterable[Item]"


def batches_of(
    images: Images, ids: Iterable[str] | None, metadata: Metadata | None, batch_size: int
) -> tuple[Iterator[Batch], list[str] | None]:
    """What was given as batches, and all ids where they are known before.

    Raises:
        ValueError: nothing given, a wrong number of ids or rows of metadata.
        TypeError: metadata beside a stream, whose batches bring their own.
    """
    if isinstance(images, ImageFeatures):
        return _known(Batch(images, _as_list(ids), metadata), FEATURE_ROWS)
    if not hasattr(images, "__next__"):
        if isinstance(images, Batch):
            images = iter([images])
        else:
            sources = as_list(images)  # type: ignore[arg-type]
            if not isinstance(sources[0], Batch | ImageFeatures):
                return _known(Batch(sources, _as_list(ids), metadata), batch_size)
            images = iter(sources)
    if metadata is not None:
        raise TypeError("Index: metadata of a stream comes in its batches (engine.retrieval.adding.Batch), got both")
    return _streamed(iter(images), None if ids is None else iter(ids), batch_size), None  # type: ignore[arg-type]


def _known(whole: Batch, size: int) -> tuple[Iterator[Batch], list[str]]:
    names = whole.names()
    if whole.metadata is not None:
        as_table(whole.metadata, len(names), pa.schema([]))
    return _sliced(whole, size), names


def _as_list(ids: Iterable[str] | None) -> Sequence[str] | None:
    # One string is refused by name where ids are checked; as a list it would be letters.
    return ids if ids is None or isinstance(ids, str) else list(ids)


def _sliced(whole: Batch, size: int) -> Iterator[Batch]:
    names = whole.names(distinct=False)
    table = None
    if whole.metadata is not None:
        table = as_table(whole.metadata, len(names), pa.schema([]))
    for start in range(0, len(names), size):
        rows = slice(start, start + size)
        yield Batch(whole.images[rows], names[rows], None if table is None else table.slice(start, size))


def _streamed(
    items: Iterator[Batch | ImageFeatures | ImageSource], ids: Iterator[str] | None, size: int
) -> Iterator[Batch]:
    """Batches of a stream; single pictures are collected."""
    collected: list[ImageSource] = []
    for item in items:
        if isinstance(item, Batch | ImageFeatures):
            if ids is not None:
                raise TypeError("Index: batches and features of a stream bring their own ids, got ids= too")
            if collected:
                yield _collected(collected, ids)
                collected = []
            yield from _sliced(item if isinstance(item, Batch) else Batch(item), FEATURE_ROWS)
            continue
        collected.append(item)
        if len(collected) == size:
            yield _collected(collected, ids)
            collected = []
    if collected:
        yield _collected(collected, ids)
    if ids is not None and next(ids, None) is not None:
        raise ValueError("Index: ids must name each image of a stream, got more ids than images")


def _collected(sources: list[ImageSource], ids: Iterator[str] | None) -> Batch:
    if ids is None:
        return Batch(list(sources))
    names = list(islice(ids, len(sources)))
    if len(names) != len(sources):
        raise ValueError("Index: ids must name each image of a stream, got fewer ids than images")
    return Batch(list(sources), names)


class Adder:
    """Takes batches, writes segments, commits each when it is full or minutes old; `commit` ends it.

    After an error `keep` commits what is whole.

    Args:
        change: the writer's turn.
        recipe: of the index.
        engine: gives the engine, for pictures.
        existing: what becomes of ids that are there already.
        stop: whether a picture that cannot be read is an error.
        batch_size: pictures in one pass of the encoder.
        on_failure: told of each picture that cannot be read, at once.
    """

    def __init__(
        self,
        change: Change,
        recipe: Recipe,
        engine: Callable[[], Engine],
        *,
        existing: Existing,
        stop: bool,
        batch_size: int,
        on_failure: Callable[[ImageFailure], None] | None = None,
    ) -> None:
        self._change, self._recipe, self._engine = change, recipe, engine
        self._existing, self._stop, self._batch_size = existing, stop, batch_size
        self._on_failure = on_failure
        self._needs = recipe.needs()
        self._writer: SegmentWriter | None = None
        self._begun = time.monotonic()
        self._whole = True
        # Rows that go when the segment is committed, and where ids of the segment stand in it.
        self._going: list[int] = []
        self._places: dict[str, int] = {}
        self._schema = change.snapshot.schema
        self._added = self._replaced = self._skipped = 0
        self.failures: list[ImageFailure] = []

    def take_all(self, batches: Iterator[Batch], report: Callable[[int], None] | None = None) -> AddReport:
        """Take all batches and commit; `report` is called with the images done. Raises what `take` raises."""
        done = 0
        try:
            for batch in batches:
                self.take(batch)
                done += len(batch.images)
                if report is not None:
                    report(done)
        except BaseException:
            self.keep()
            raise
        return self.commit()

    def take(self, batch: Batch) -> None:
        """Encode and write a batch; a full segment is committed.

        Raises:
            ImageError: a picture cannot be read and that is an error.
            ValueError: ids that are there already, features that do not fit, metadata of another type.
            OSError: the disk is full or cannot be written.
        """
        names = batch.names(distinct=self._existing != "skip")
        found = self._found(names)
        there = found >= 0
        if self._existing == "refuse" and there.any():
            name = names[int(there.argmax())]
            raise ValueError(f"Index: id {name!r} is there already; update replaces it, existing='skip' passes over it")
        table = None
        if batch.metadata is not None:
            table = as_table(batch.metadata, len(names), self._schema)
        rows = np.arange(len(names))
        if self._existing == "skip":
            # An id that comes again is there by then, in this batch as in a later one.
            first = np.zeros(len(names), dtype=bool)
            first[list({name: row for row, name in reversed(list(enumerate(names)))}.values())] = True
            rows = (first & ~there).nonzero()[0]
            self._skipped += len(names) - len(rows)
        if len(rows) == 0:
            return
        if self._existing == "replace" and there.any():
            if len(self._schema) and int(found.max()) >= self._change.snapshot.rows:
                # An id that came before in this stream: its metadata is read from what is committed.
                self.commit()
                found = self._found(names)
            table = self._with_kept_metadata(table, found)
        for read, features in self._encoded(batch, rows, names):
            ids = [names[row] for row in read]
            part = None if table is None else table.take(pa.array(read))
            self._append(self._recipe.rows(features, ids, part), found[read])

    def commit(self) -> AddReport:
        """Commit what is left; the report of all that was taken."""
        if self._writer is not None and self._writer.rows:
            # Whatever happens from here on, this segment is not tried again.
            writer, self._writer = self._writer, None
            entry = writer.finish()
            self._change.commit(added=[entry], deleted=self._going, schema=encoded_schema(self._schema))
            self._added += writer.rows
            self._going, self._places = [], {}
        return AddReport(self._added, self._replaced, self._skipped, tuple(self.failures))

    def keep(self) -> None:
        """After an error: commit the rows that are whole; where writing itself failed, leave them."""
        if self._writer is None:
            return
        if self._whole:
            self.commit()
        else:
            self._writer.abandon()
            self._writer = None

    def _found(self, names: list[str]) -> np.ndarray:
        """Rows of ids that are there, those of the open segment among them; -1 where not."""
        snapshot = self._change.snapshot
        found = snapshot.find(names)
        for place, name in enumerate(names):
            if name in self._places:
                found[place] = snapshot.rows + self._places[name]
        return found

    def _with_kept_metadata(self, table: pa.Table | None, found: np.ndarray) -> pa.Table | None:
        """The metadata given; in columns that it lacks the old values of rows that are replaced, nulls for others."""
        snapshot = self._change.snapshot
        if not len(snapshot.schema):
            return table
        known = (found >= 0) & (found < snapshot.rows)
        held = snapshot.metadata_of(found[known])
        places = np.where(known, np.cumsum(known) - 1, -1)
        kept = held.take(pa.array(places, mask=places < 0))
        if table is None:
            return kept
        for name in kept.column_names:
            if name not in table.column_names:
                table = table.append_column(kept.schema.field(name), kept.column(name))
        return table

    def _encoded(
        self, batch: Batch, rows: np.ndarray, names: list[str]
    ) -> Iterator[tuple[np.ndarray, ImageFeatures]]:
        """Features of the chosen rows of a batch, with the rows that they are of."""
        if isinstance(batch.images, ImageFeatures):
            yield rows, batch.images if len(rows) == len(names) else batch.images[rows.tolist()]
            return
        sources = [batch.images[int(row)] for row in rows]
        own = [names[row] for row in rows]
        numbers = {name: row for row, name in zip(rows.tolist(), own, strict=True)}
        for _, features, failures in encoded_batches(
            self._engine().encoder, sources, own, self._needs, batch_size=self._batch_size, stop=self._stop
        ):
            self.failures += failures
            for failure in failures if self._on_failure is not None else ():
                self._on_failure(failure)  # type: ignore[misc]
            if features is not None:
                assert features.ids is not None  # the encoder names what it could read
                yield np.array([numbers[name] for name in features.ids]), features

    def _append(self, block: RowBlock, replaces: np.ndarray) -> None:
        """Write rows, as many into each segment as there is room for."""
        used = 0 if self._writer is None else self._writer.size_bytes
        for rows, full in cut(block, used, self._recipe.manifest.segment_bytes):
            self._write(block.part(rows.start, rows.stop), replaces[rows.start : rows.stop])
            if full or time.monotonic() - self._begun > COMMIT_S:
                self.commit()

    def _write(self, block: RowBlock, replaces: np.ndarray) -> None:
        schema = joined_schema(self._schema, block.metadata)
        if self._writer is None:
            self._writer = SegmentWriter(self._change.segment_folder(), self._recipe.kinds, {})
            self._begun = time.monotonic()
        self._whole = False
        self._writer.append(block)
        self._schema = schema
        for place, name in enumerate(block.ids, start=self._writer.rows - len(block.ids)):
            self._places[name] = place
        going = replaces[replaces >= 0].tolist()
        self._going += going
        self._replaced += len(going)
        self._whole = True
