"""The folder of an index: reading its last commit, and commits that are there whole or not at all.

    manifest.json             the commit, replaced whole; see `engine.retrieval.manifest`
    deleted-<generation>.bin  tombstones; see `engine.retrieval.tombstones`
    segments/<number>/        see `engine.retrieval.segment`
    extras/<name>-<number>/   structures that find candidates
    writer.lock               who writes now; see `engine.retrieval.writer_lock`

A commit writes new files under names that no manifest knows, flushes them and their folders to the disk, and then
puts the new manifest in the place of the old one. Whatever the old one named and the new one does not is deleted
after that: readers have mapped it already. A process killed at any moment leaves the old commit or the new one, and
files that nobody knows, which the next writer clears away.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from engine.atomic_files import flush_folder
from engine.forks import OwnLock
from engine.retrieval import manifest as manifests
from engine.retrieval.checksums import MappedFile, sums_of
from engine.retrieval.errors import IndexDamaged
from engine.retrieval.manifest import ExtraEntry, Manifest, SegmentEntry
from engine.retrieval.segment import Segment
from engine.retrieval.snapshot import Extra, Snapshot
from engine.retrieval.tombstones import (
    SLOT_ROWS,
    SLOTS,
    append_tombstones,
    mark,
    read_tombstones,
    write_tombstones,
)
from engine.retrieval.writer_lock import writing

# How often a reader begins anew because a commit came between its manifest and its files.
ATTEMPTS = 20
# A delete is one small write; how often and how long a reader that saw half of it waits.
SLOT_ATTEMPTS, SLOT_WAIT_S = 3, 0.01


class Storage:
    """The folder of an index. Reading may be done from any number of processes and threads, writing from one at a time.

    Args:
        folder: of an index that is there.

    Attributes:
        snapshot: the commit that was read last; `refresh` reads the newest.

    Raises:
        FileNotFoundError: the folder holds no index.
        IndexDamaged: a file is not what was written.
        ValueError: a newer format.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)
        self._lock = OwnLock()
        self._held: tuple[bytes, bytes] = (b"", b"")
        self._used = 0
        self.snapshot = self._read(None)

    @classmethod
    def create(cls, folder: str | PathLike[str], manifest: Manifest) -> Storage:
        """A new index.

        Raises:
            FileExistsError: the folder holds one already, or other files, or is a file.
            OSError: it cannot be made or written.
            ValueError: no folder can have this name.
        """
        path = Path(folder)
        if "\0" in str(path):
            raise ValueError(f"Index: the folder's name must hold no null character, got {str(path)!r}")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            words = f"Index: {path} must be a folder that is there or can be made, got an error ({error.strerror})"
            # The same kind of error, without the number before the words.
            raise type(error)(words) from error
        if (path / manifests.MANIFEST).exists():
            raise FileExistsError(f"Index: {path} holds an index already; Index.open opens it")
        with writing(path):
            strangers = [item.name for item in path.iterdir() if not _is_own(item.name)]
            if strangers:
                raise FileExistsError(f"Index: {path} must be empty or new, it holds {sorted(strangers)[0]!r}")
            (path / "segments").mkdir(exist_ok=True)
            (path / "extras").mkdir(exist_ok=True)
            first = manifest.following()
            name = _tombstone_name(first.generation)
            crc = write_tombstones(path / name, [])
            manifests.write(path, replace(first, deleted=name, deleted_crc32=crc))
        return cls(path)

    def refresh(self, *, deleted: Sequence[int] | np.ndarray | None = None) -> Snapshot:
        """Read the newest commit, and make it the one that is answered from.

        `deleted` are the rows of the one slot that this object has just filled: nothing else is read then.
        """
        with self._lock:
            if deleted is None:
                self.snapshot = self._read(self.snapshot)
            else:
                self._held = self._held[0], (self.folder / self.snapshot.manifest.deleted).read_bytes()
                self._used += 1
                self.snapshot = self.snapshot.without(deleted)
            return self.snapshot

    @contextmanager
    def change(self) -> Iterator[Change]:
        """Be the writer while this lasts, over the newest commit.

        Raises:
            IndexBusy: another process or `Storage` writes.
        """
        with self._lock, writing(self.folder):
            self.refresh()
            self._clear()
            yield Change(self)

    def _read(self, before: Snapshot | None) -> Snapshot:
        """The newest commit; segments of `before` that are still there are kept open."""
        for attempt in range(ATTEMPTS):
            data = manifests.read_bytes(self.folder)
            last = attempt + 1 == ATTEMPTS
            try:
                return self._read_files(data, before)
            except FileNotFoundError as error:
                # A commit may have come between manifest and files; then there is another manifest.
                if last or manifests.read_bytes(self.folder) == data:
                    raise IndexDamaged(error.filename or self.folder, "the file is missing") from error
            except IndexDamaged as error:
                # A slot may have been half written when it was read.
                if last or not error.path.endswith(".bin") or attempt >= SLOT_ATTEMPTS:
                    raise
                time.sleep(SLOT_WAIT_S)
        raise AssertionError("the last attempt returns or raises")

    def _read_files(self, data: bytes, before: Snapshot | None) -> Snapshot:
        manifest = before.manifest if before is not None and data == self._held[0] else None
        if manifest is not None and (self.folder / manifest.deleted).read_bytes() == self._held[1]:
            assert before is not None
            return before
        manifest = manifests.decoded(self.folder, data)
        open_before = {} if before is None else {p.segment.entry: p.segment for p in before.pieces}
        segments = [
            open_before.get(entry) or Segment(self.folder / "segments" / entry.name, entry)
            for entry in manifest.segments
        ]
        path = self.folder / manifest.deleted
        slots = path.read_bytes()
        deleted, used = read_tombstones(path, [entry.rows for entry in manifest.segments], manifest.deleted_crc32)
        held = {} if before is None else before.extras
        extras = {
            # One that stays is kept open: its file was checked, and is long.
            entry.name: held[entry.name]
            if entry.name in held and held[entry.name].entry == entry
            else Extra(entry, self._mapped(entry))
            for entry in manifest.extras
        }
        self._held, self._used = (data, slots), used
        return Snapshot(self.folder, manifest, segments, deleted, extras)

    def _mapped(self, entry: ExtraEntry) -> dict[str, MappedFile]:
        folder = self.folder / "extras" / entry.folder
        return {name: MappedFile(folder / name, facts["size"], facts["crc32"]) for name, facts in entry.files.items()}

    def _clear(self) -> None:
        """Delete what no manifest names: left by a writer that was killed, or replaced by a commit."""
        manifest = self.snapshot.manifest
        for folder, known in (
            ("segments", {entry.name for entry in manifest.segments}),
            ("extras", {entry.folder for entry in manifest.extras}),
        ):
            for path in (self.folder / folder).iterdir():
                if path.name not in known:
                    shutil.rmtree(path, ignore_errors=True)
        for pattern in ("deleted-*.bin", f"{manifests.MANIFEST}.*.part"):
            for path in self.folder.glob(pattern):
                if path.name != manifest.deleted:
                    # Who comes next tries again: what was committed is committed.
                    with suppress(OSError):
                        path.unlink(missing_ok=True)


class Change:
    """One writer's turn: any number of commits. Made by `Storage.change`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def snapshot(self) -> Snapshot:
        """The last commit."""
        return self._storage.snapshot

    def segment_folder(self) -> Path:
        """The folder for the next segment, not there yet."""
        taken = self.snapshot.manifest.next_segment
        while (folder := self._storage.folder / "segments" / f"{taken:06d}").exists():
            taken += 1
        return folder

    def commit(
        self,
        *,
        added: Sequence[SegmentEntry] = (),
        deleted: Sequence[int] | np.ndarray = (),
        schema: str | None = None,
    ) -> Snapshot:
        """Commit, at once, whole segments at the end, rows deleted (new ones too), and the schema of metadata."""
        before = self.snapshot
        marks = [~piece.alive for piece in before.pieces]
        marks += [np.zeros(entry.rows, dtype=bool) for entry in added]
        mark(marks, deleted)
        manifest = before.manifest
        segments = (*manifest.segments, *added)
        schema = manifest.schema if schema is None else schema
        return self._write(replace(manifest.following(), segments=segments, schema=schema), marks)

    def delete(self, rows: Sequence[int] | np.ndarray) -> Snapshot:
        """Commit that rows are deleted: one flushed write where they are few."""
        storage = self._storage
        if len(rows) == 0:
            return self.snapshot
        if len(rows) > SLOT_ROWS or storage._used >= SLOTS:
            return self.commit(deleted=rows)
        append_tombstones(storage.folder / self.snapshot.manifest.deleted, storage._used, rows)
        return storage.refresh(deleted=rows)

    def replace_segments(self, segments: Sequence[SegmentEntry], deleted: Sequence[np.ndarray]) -> Snapshot:
        """Commit that these are all segments. Rows get other numbers, so that extras go."""
        return self._write(replace(self.snapshot.manifest.following(), segments=tuple(segments), extras=()), deleted)

    def put_extra(
        self, name: str, write: Callable[[Path], None], *, rows: int, facts: Mapping[str, Any] | None = None
    ) -> Snapshot:
        """Commit a structure beside the segments in the place of the one of this name.

        Args:
            name: letters, digits and dashes.
            write: writes files (no folders) into the empty folder it is given.
            rows: the structure covers the rows before this one.
            facts: kept in the manifest; JSON.
        """
        before = self.snapshot.manifest
        folder = self._storage.folder / "extras" / f"{name}-{before.generation + 1:06d}"
        folder.mkdir(parents=True)
        write(folder)
        files = {}
        for path in sorted(folder.iterdir()):
            with path.open("rb+") as file:
                _flush(file)
            sums = sums_of(path)
            files[path.name] = {"size": sums.size, "crc32": sums.all()}
        flush_folder(folder)
        flush_folder(folder.parent)
        entry = ExtraEntry(name, folder.name, rows, dict(facts or {}), files)
        others = tuple(held for held in before.extras if held.name != name)
        marks = [~piece.alive for piece in self.snapshot.pieces]
        return self._write(replace(before.following(), extras=(*others, entry)), marks)

    def drop_extra(self, name: str) -> Snapshot:
        """Commit without the structure of this name."""
        before = self.snapshot.manifest
        kept = tuple(held for held in before.extras if held.name != name)
        return self._write(replace(before.following(), extras=kept), [~piece.alive for piece in self.snapshot.pieces])

    def _write(self, manifest: Manifest, deleted: Sequence[np.ndarray]) -> Snapshot:
        storage = self._storage
        flush_folder(storage.folder / "segments")
        name = _tombstone_name(manifest.generation)
        crc = write_tombstones(storage.folder / name, deleted)
        numbers = [int(entry.name) + 1 for entry in manifest.segments]
        following = max([manifest.next_segment, *numbers])
        manifests.write(
            storage.folder, replace(manifest, deleted=name, deleted_crc32=crc, next_segment=following)
        )
        found = storage.refresh()
        storage._clear()
        return found


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _tombstone_name(generation: int) -> str:
    return f"deleted-{generation:08d}.bin"


def _is_own(name: str) -> bool:
    """Whether a writer that was killed while it created an index may have left this."""
    return name in ("segments", "extras", "writer.lock", "writer.lock.guard") or (
        name.startswith(("deleted-", f"{manifests.MANIFEST}."))
    )
