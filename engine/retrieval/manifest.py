"""The manifest: what an index holds, in one small file that is replaced whole. Replacing it is the commit."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from engine.atomic_files import flush_folder, written_whole
from engine.choices import check_choice
from engine.retrieval.errors import IndexDamaged

# What is written. Older ones are read by `READERS`; the next commit makes them this one.
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STORES = ("int8", "bf16")
KINDS = ("windows", "patches", "head")


@dataclass(frozen=True)
class VectorKind:
    """One kind of vectors that is kept for each image.

    Attributes:
        name: `"windows"` (embeddings of regions, in the text's space), `"patches"` (of the encoder's aligned tap) or
            `"head"` (projected by a trained max-sim head).
        dim: numbers D of a vector.
        plan: of windows, the fields of the `RegionPlan` they were made by.
        tap: of patches, the feature tap.
        head: of head vectors, the file of the head; empty for the one that is shipped.
        digest: of head vectors, BLAKE2b of the head's weights.
    """

    name: str
    dim: int
    plan: Mapping[str, Any] = field(default_factory=dict)
    tap: str = ""
    head: str = ""
    digest: str = ""


@dataclass(frozen=True)
class SegmentEntry:
    """One segment of the manifest.

    Attributes:
        name: its folder below `segments/`.
        rows: images in it, deleted ones among them.
        size, crc32: of its `segment.json`, which names its other files with their sizes and checksums.
    """

    name: str
    rows: int
    size: int
    crc32: int


@dataclass(frozen=True)
class ExtraEntry:
    """A structure beside the segments, such as one that finds candidates; it is made from them and can be made again.

    Attributes:
        name: what it is known by.
        folder: its folder below `extras/`.
        rows: it covers the first so many rows.
        facts: what its maker wants to know again.
        files: of each file its size and the CRC-32 of each block.
    """

    name: str
    folder: str
    rows: int
    facts: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Manifest:
    """What an index holds at one moment.

    Attributes:
        generation: 1 for a new index, one more with every commit.
        model: what `engine.load` was given.
        fingerprint: of the encoder.
        dim: numbers of a global embedding.
        store: how vectors are kept, `"int8"` or `"bf16"`.
        ann: how candidates are found, `"auto"` or a FAISS factory string.
        segment_bytes: a segment takes no more rows once its files are this large.
        vectors: the kinds of vectors.
        schema: of the metadata, an Arrow schema as IPC bytes in base64; empty without metadata.
        segments: in the order of insertion.
        next_segment: number of the next segment's folder.
        deleted: file with the tombstones, see `engine.retrieval.tombstones`.
        deleted_crc32: of its bitmaps.
        extras: see `ExtraEntry`.
    """

    model: str
    fingerprint: str
    dim: int
    store: str = "int8"
    ann: str = "auto"
    segment_bytes: int = 256 << 20
    generation: int = 0
    vectors: tuple[VectorKind, ...] = ()
    schema: str = ""
    segments: tuple[SegmentEntry, ...] = ()
    next_segment: int = 0
    deleted: str = ""
    deleted_crc32: int = 0
    extras: tuple[ExtraEntry, ...] = ()

    def __post_init__(self) -> None:
        check_choice("Index", "store", self.store, STORES)
        if not isinstance(self.ann, str) or not self.ann:
            raise ValueError(f"Index: ann must be 'auto' or a FAISS factory string, got {self.ann!r}")
        if type(self.segment_bytes) is not int or self.segment_bytes < 1:
            raise ValueError(f"Index: segment_bytes must be a whole number from 1, got {self.segment_bytes!r}")

    @property
    def rows(self) -> int:
        """Rows of all segments, deleted ones among them."""
        return sum(entry.rows for entry in self.segments)

    def kind(self, name: str) -> VectorKind | None:
        """The kind of vectors of this name, or None."""
        return next((kind for kind in self.vectors if kind.name == name), None)

    def following(self) -> Manifest:
        """The manifest of the next commit, so far the same."""
        return replace(self, generation=self.generation + 1)


def encoded(manifest: Manifest) -> bytes:
    """The bytes of the file: JSON without spaces, keys in order, with the CRC-32 of the manifest's own text before it.

    One text stands for one manifest, so that a reader finds any changed byte by writing it again.
    """
    body = _text(asdict(manifest))
    crc = zlib.crc32(body.encode())
    return f'{{"crc32":"{crc:08x}","format_version":{FORMAT_VERSION},"manifest":{body}}}\n'.encode()


def write(folder: str | PathLike[str], manifest: Manifest) -> bytes:
    """Commit: write the manifest aside, flush it, put it in the place of the old one; returns its bytes.

    Raises:
        OSError: the disk is full, the folder cannot be written. The old manifest stays.
    """
    data = encoded(manifest)
    with written_whole(Path(folder) / MANIFEST) as unfinished:
        unfinished.write_bytes(data)
    flush_folder(folder)
    return data


def read_bytes(folder: str | PathLike[str]) -> bytes:
    """The file as it stands. Raises FileNotFoundError where the folder holds no index."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"Index: {path} is missing; the folder holds no index (Index.create makes one)")
    return path.read_bytes()


def decoded(folder: str | PathLike[str], data: bytes) -> Manifest:
    """The manifest in the bytes of its file.

    Raises:
        IndexDamaged: they are not what was written, or name a format that never was.
        ValueError: a newer format.
    """
    path = Path(folder) / MANIFEST
    try:
        held = json.loads(data)
        version = held["format_version"]
        body, crc = held["manifest"], held["crc32"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise IndexDamaged(path, f"it is no manifest ({error!r:.200})") from error
    whole = data == f'{{"crc32":"{crc}","format_version":{_text(version)},"manifest":{_text(body)}}}\n'.encode()
    if not whole or f"{zlib.crc32(_text(body).encode()):08x}" != crc:
        raise IndexDamaged(path, "its checksum differs")
    if type(version) is int and version in READERS:
        return READERS[version](body)
    if type(version) is not int or version > FORMAT_VERSION:
        raise ValueError(
            f"Index: {path} has format {version}, this version reads up to {FORMAT_VERSION}; install a newer peaksim"
        )
    raise IndexDamaged(path, f"there is no format {version}, the first is {min(READERS)}")


def _of_format_1(body: Mapping[str, Any]) -> Manifest:
    known = {item.name for item in fields(Manifest)}
    values = {name: value for name, value in body.items() if name in known}
    for name, kind in (("vectors", VectorKind), ("segments", SegmentEntry), ("extras", ExtraEntry)):
        values[name] = tuple(kind(**entry) for entry in values[name])
    return Manifest(**values)


# The manifest of each format that is read. Whoever changes the format adds its reader, and leaves the older ones here.
READERS: dict[int, Callable[[Mapping[str, Any]], Manifest]] = {1: _of_format_1}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
