"""`Index`: images on disk, found by late interaction with texts or images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from engine.choices import check_choice
from engine.encoders.base import Progress
from engine.encoders.inputs import check_batch_size
from engine.encoders.progress import reporting
from engine.encoders.sources import OnError, report_failures
from engine.engine import Engine, load
from engine.features import Needs
from engine.forks import OwnLock, one_thread_after_fork
from engine.retrieval.adding import Adder, Existing, Images, batches_of
from engine.retrieval.ann import check_ann
from engine.retrieval.candidates import keep_up
from engine.retrieval.compaction import compact
from engine.retrieval.filters import rows_where
from engine.retrieval.identifiers import check_ids
from engine.retrieval.manifest import Manifest
from engine.retrieval.metadata import Metadata
from engine.retrieval.queries import Queries, asked
from engine.retrieval.recipe import Recipe, check_gives, described
from engine.retrieval.reencoding import CANDIDATES as ENCODED_CANDIDATES
from engine.retrieval.reencoding import must_encode_again
from engine.retrieval.results import AddReport, Hit, IndexStats
from engine.retrieval.searching import Plan, search
from engine.retrieval.snapshot import Snapshot
from engine.retrieval.storage import Storage
from engine.retrieval.verification import faults
from engine.scorers.base import Scorer

# Up to so many rows a search looks at all stored vectors unless it is told otherwise.
EXACT_ROWS = 200_000
# Candidates of stage one beyond that: 0.984 of the ten best of 100,000 synthetic images (bench/index_recall.py).
CANDIDATES = 1000


class Index:
    """Images that are found by late interaction, kept in a folder. May be used from several threads.

    An index object answers from the commit it was opened at, or that it made itself; `reload` takes up what others
    have committed. One process or object writes at a time, any number read.

    Example:
        >>> import tempfile, engine
        >>> from PIL import Image
        >>> index = engine.Index.create(tempfile.mkdtemp(), model="scenes")
        >>> pictures = [Image.new("RGB", (96, 96), colour) for colour in ("red", "blue")]
        >>> index.add(pictures, ids=["first", "second"]).added
        2
        >>> [hit.id for hit in index.search("a blue square", k=1)[0]]
        ['second']
    """

    def __init__(self, storage: Storage, engine: Engine | None) -> None:
        self._storage = storage
        self._engine = engine
        self._loading = OwnLock()

    @classmethod
    def create(
        cls,
        path: str | PathLike[str],
        *,
        model: str | Engine = "scenes",
        vectors: Sequence[str | Scorer] = ("windows",),
        store: Literal["int8", "bf16"] = "int8",
        ann: str = "auto",
        segment_bytes: int = 256 << 20,
    ) -> Index:
        """A new, empty index in a folder that is new or empty.

        Args:
            path: the folder; missing folders above it are made too.
            model: name of the encoder as for `engine.load`, or an `Engine`.
            vectors: what is kept of each image beside its global embedding, any of `"windows"` (embeddings of
                regions, each from the encoder's one pass; for `sgi`), `"patches"` (for `max_sim`) and `"head"`
                (patches projected by the trained head, for `max_sim_head`); or the scorers they are for, with their
                options: `SGI(crops="native")` keeps the embedding of every crop.
            store: how vectors are kept: int8 codes with a scale each, or bfloat16, twice as large.
            ann: how candidates are found in a large index: `"auto"` or a FAISS factory string.
            segment_bytes: a segment takes no more rows, and is committed, once its files are this large.

        Raises:
            FileExistsError: the folder holds an index or other files.
            ValueError: an unknown option, or vectors that the encoder cannot give.
            OSError: the folder cannot be made or written.
        """
        engine = load(model) if isinstance(model, str) else model
        if not isinstance(engine, Engine):
            raise TypeError(f"Index: model must be a name or an Engine, got {type(model).__name__}")
        spec = engine.spec
        check_ann(ann, spec.embed_dim)
        manifest = Manifest(
            model=spec.name, fingerprint=spec.fingerprint, dim=spec.embed_dim, store=store, ann=ann,
            segment_bytes=segment_bytes, vectors=described(vectors, engine),
        )  # fmt: skip
        check_gives(manifest, engine)
        return cls(Storage.create(path, manifest), engine)

    @classmethod
    def open(cls, path: str | PathLike[str], *, model: str | Engine | None = None) -> Index:
        """The index in a folder.

        Args:
            path: the folder.
            model: an `Engine`, or its name where that has changed; by default the recorded one is loaded when it
                is first needed. Searching with features needs none.

        Raises:
            FileNotFoundError: no index.
            IndexDamaged: a file is not what was written.
            ValueError: a newer format, or another model than the one whose features are kept.
        """
        index = cls(Storage(path), None)
        if model is not None:
            index._take(load(model) if isinstance(model, str) else model)
        return index

    @property
    def path(self) -> Path:
        """The folder."""
        return self._storage.folder

    @property
    def snapshot(self) -> Snapshot:
        """The commit that is answered from."""
        return self._storage.snapshot

    @property
    def recipe(self) -> Recipe:
        """What is kept of an image."""
        return Recipe(self.snapshot.manifest)

    @property
    def engine(self) -> Engine:
        """The engine whose features are kept; loaded when it is first asked for.

        Raises ValueError when the model of that name is not the one that made the index.
        """
        with self._loading:
            if self._engine is None:
                self._take(load(self.snapshot.manifest.model))
            assert self._engine is not None
            return self._engine

    def __len__(self) -> int:
        return len(self.snapshot)

    def __contains__(self, id: object) -> bool:
        try:
            return isinstance(id, str) and bool(self.snapshot.find([id])[0] >= 0)
        except UnicodeEncodeError:
            # Half a character is no id.
            return False

    def ids(self) -> Iterator[str]:
        """All ids, in the order of insertion."""
        return self.snapshot.all_ids()

    def needs(self) -> Needs:
        """What `Engine.encode_images(..., scorer=index.needs())` must encode for `add`."""
        return self.recipe.needs()

    def reload(self) -> Index:
        """Take up what others have committed since; returns the index itself."""
        self._storage.refresh()
        return self

    def add(
        self,
        images: Images,
        ids: Iterable[str] | None = None,
        metadata: Metadata | None = None,
        *,
        existing: Existing = "refuse",
        batch_size: int = 64,
        on_error: OnError = "raise",
        progress: bool | Progress = False,
    ) -> AddReport:
        """Encode images and add them at the end; full segments are committed as they come, others every minute.

        After an error or an interruption (ctrl-C) whole batches are committed, unless it was the writing that failed:
        the batch in flight, `batch_size` pictures, is lost. A process that is killed loses the last minute's besides.

        Args:
            images: pictures as for `Engine.encode_images`, `ImageFeatures`, or an iterator of pictures, features or
                `engine.retrieval.adding.Batch`, of which a batch at a time is held.
            ids: a string for each image, kept as it is; by default the path, or the features' ids.
            metadata: a row for each image: an Arrow table, a mapping of columns, or a list of mappings. A column
                keeps the type it came with first.
            existing: what becomes of ids that are there: `"refuse"` (ValueError, before anything is encoded unless
                images come from an iterator), `"skip"` (not encoded again: how to resume) or `"replace"` (as `update`).
            batch_size: pictures in one pass of the encoder.
            on_error: as for `Engine.encode_images`, a function is called at once; pictures left out are in the report
                too.
            progress: True shows a bar, a function is called with (images done, images in all, or 0 if not known).

        Raises:
            ImageError: a picture cannot be read.
            ValueError: ids twice or there already, features that do not fit or are not finite, metadata that does
                not fit.
            IndexBusy: somebody else writes.
            OSError: the disk is full or the folder cannot be written; what was committed stays.
        """
        check_choice("Index", "existing", existing, get_args(Existing))
        check_batch_size("Index", batch_size)
        check_choice("Index", "on_error", "skip" if callable(on_error) else on_error, ("raise", "skip"))
        batches, names = batches_of(images, ids, metadata, batch_size)
        total = 0 if names is None else len(names)
        with one_thread_after_fork(), self._storage.change() as change, reporting(progress, "images") as report:
            if names is not None and existing == "refuse":
                self._refuse_known(change.snapshot, names)
            adder = Adder(
                change, self.recipe, lambda: self.engine,
                existing=existing, stop=on_error == "raise", batch_size=batch_size,
                on_failure=on_error if callable(on_error) else None,
            )  # fmt: skip
            result = adder.take_all(batches, None if report is None else lambda done: report(done, total))
            keep_up(change)
        if result.failures and not callable(on_error):
            report_failures(result.failures, on_error, result.added + len(result.failures))
        return result

    def update(
        self,
        images: Images,
        ids: Iterable[str] | None = None,
        metadata: Metadata | None = None,
        *,
        batch_size: int = 64,
        on_error: OnError = "raise",
        progress: bool | Progress = False,
    ) -> AddReport:
        """Replace images that are there, each in one commit with its removal; arguments as for `add`.

        Columns of the metadata that are not given keep their old values; a null that is given replaces them. An image
        that cannot be read leaves the old one. In ties an image that was replaced counts as inserted now.

        Raises:
            KeyError: an id that is not there.
            Else as `add`.
        """
        if hasattr(images, "__next__"):
            raise TypeError("Index: update takes no iterator of images; add(..., existing='replace') does")
        _, names = batches_of(images, ids, None, batch_size)
        self._rows(self._storage.refresh(), names or [])
        return self.add(
            images, names, metadata,
            existing="replace", batch_size=batch_size, on_error=on_error, progress=progress,
        )  # fmt: skip

    def delete(self, ids: Sequence[str]) -> int:
        """Delete images by id, at once and together; returns how many. Their space is freed by `compact`.

        Raises:
            KeyError: an id that is not there; none is deleted then.
            IndexBusy: somebody else writes.
            OSError: the folder cannot be written.
        """
        names = check_ids("Index", ids)
        with self._storage.change() as change:
            change.delete(self._rows(change.snapshot, names))
        return len(names)

    def search(
        self,
        queries: Queries,
        k: int = 10,
        *,
        scorer: str | Scorer = "sgi",
        candidates: int | Literal["auto"] | None = "auto",
        where: str | None = None,
        explain: bool = False,
    ) -> list[list[Hit]]:
        """The best images for each query.

        Args:
            queries: one text or many (any iterable of strings), `TextFeatures`; or pictures (path objects, PIL images,
                arrays, bytes), `ImageFeatures`. A string is always a text.
            k: hits a query; fewer come back where fewer are there.
            scorer: that ranks, by name (with the options the index was made for) or with options of its own.
            candidates: so many rows (`k` where that is more) are found by their global embeddings first and the
                scorer looks at them alone; None: it looks at all rows; `"auto"`: at all rows up to `EXACT_ROWS`, beyond
                at `CANDIDATES`. A scorer of what is not kept (`tflocal`) has the candidates encoded again from their
                pictures, fewer.
            where: a condition on the metadata, SQL as in `"year > 2020 and tag = 'cat'"`.
            explain: also say which part of the query found which part of the image.

        Returns:
            a list of hits for each query, best first; of equal scores the image inserted first.

        Raises:
            ValueError: k below 1, an unknown scorer, one that reads what is not kept, a query that is not finite.
            IndexDamaged: what was read is not what was written.
        """
        _check_count("k", k)
        if candidates is not None and candidates != "auto":
            _check_count("candidates", candidates)
        snapshot = self.snapshot
        recipe = Recipe(snapshot.manifest)
        chosen = recipe.scorer(scorer)
        recipe.check_scorer(chosen)
        if candidates == "auto":
            candidates = None if len(snapshot) <= EXACT_ROWS else CANDIDATES
            if must_encode_again(chosen, recipe):
                candidates = ENCODED_CANDIDATES
        with one_thread_after_fork():
            asking = asked(queries, chosen, recipe, lambda: self.engine)
            allowed = None if where is None else rows_where(snapshot, where)
            return search(snapshot, asking, Plan(k, candidates, allowed, explain, lambda: self.engine))

    def compact(self, *, progress: bool | Progress = False) -> int:
        """Free the space of deleted images and join small segments; returns how many bytes that gave.

        Searches go on meanwhile, and readers that have the index open keep what they see. `progress`: True shows a
        bar, a function is called with (images written anew, images to be).

        Raises:
            IndexBusy: somebody else writes.
            OSError, IndexDamaged: the disk is full, a file is damaged; the index stays as it was.
        """
        before = self.stats().size_bytes
        with one_thread_after_fork(), self._storage.change() as change, reporting(progress, "images") as report:
            compact(change, report)
            keep_up(change)
        return before - self.stats().size_bytes

    def verify(self, *, progress: bool | Progress = False) -> list[str]:
        """Look at every byte of the newest commit: a sentence for each fault, naming the file; none if all is well.

        `progress`: True shows a bar, a function is called with (MiB looked at, MiB in all).
        """
        try:
            with reporting(progress, "MiB") as report:
                return list(faults(Storage(self.path).snapshot, report))
        except (ValueError, FileNotFoundError) as error:
            return [str(error)]

    def stats(self) -> IndexStats:
        """What the index holds."""
        snapshot = self.snapshot
        manifest = snapshot.manifest
        vectors = {
            kind.name: sum(int(piece.segment.section(f"{kind.name}.cu_seqlens")[-1]) for piece in snapshot.pieces)
            for kind in manifest.vectors
        }
        size = sum(len(file.data) for piece in snapshot.pieces for file in piece.segment.files.values())
        size += sum(len(file.data) for extra in snapshot.extras.values() for file in extra.files.values())
        return IndexStats(
            images=len(snapshot), deleted=snapshot.rows - len(snapshot), segments=len(snapshot.pieces),
            generation=manifest.generation, size_bytes=size, vectors=vectors, model=manifest.model,
            fingerprint=manifest.fingerprint, store=manifest.store, ann=manifest.ann,
            columns={item.name: str(item.type) for item in snapshot.schema},
            extras={name: extra.entry.facts for name, extra in snapshot.extras.items()},
        )  # fmt: skip

    def _take(self, engine: Engine) -> None:
        if not isinstance(engine, Engine):
            raise TypeError(f"Index: model must be a name or an Engine, got {type(engine).__name__}")
        wanted = self.snapshot.manifest
        if engine.spec.fingerprint != wanted.fingerprint:
            raise ValueError(
                f"Index: {self.path} was made by {wanted.model} with the fingerprint {wanted.fingerprint}, got "
                f"{engine.spec.name} with {engine.spec.fingerprint}; weights, preprocessing or text rules differ"
            )
        self._engine = engine

    def _refuse_known(self, snapshot: Snapshot, names: list[str]) -> None:
        found = snapshot.find(names)
        if len(found) and found.max() >= 0:
            name = names[int((found >= 0).argmax())]
            raise ValueError(f"Index: id {name!r} is there already; update replaces it, existing='skip' passes over it")

    def _rows(self, snapshot: Snapshot, names: Sequence[str]) -> np.ndarray:
        found = snapshot.find(names)
        if len(found) and found.min() < 0:
            raise KeyError(f"Index: id {names[int((found < 0).argmax())]!r} is not there; nothing was changed")
        return found


def _check_count(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"Index: {what} must be an integer, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"Index: {what} must be at least 1, got {value}")
