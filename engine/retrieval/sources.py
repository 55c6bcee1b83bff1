"""Where the images of an index come from: folders, lists, WebDataset shards, folders of embeddings.

A source gives batches for `Index.add(source.batches(...), existing="skip")`, which passes over ids that are there
before it decodes anything: an interrupted run goes on where it was. What cannot be opened is noted in `failures`, by
path and reason, and the rest goes on; pictures that cannot be decoded are in the report of `add`.

Beside the id each picture gets a column `path` that says where it lies, by which `picture_at` finds it again:
`/photos/a.jpg`, or `/shards/00000.tar!000012.jpg` inside a shard.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from engine.features import ImageFeatures
from engine.images import ImageFailure
from engine.retrieval.adding import Batch
from engine.retrieval.identifiers import as_text

SUFFIXES = frozenset({".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
LIST_SUFFIXES = (".txt", ".lst")
PATH, CAPTION = "path", "caption"
# Between the path of a shard and the name of a picture in it.
INSIDE = "!"
# A member of a shard beyond this is no picture.
MAX_MEMBER_BYTES = 1 << 28
EMBEDDING_ROWS = 4096

# Says of an id whether it is in the index already.
Known = Callable[[str], bool]


class Source(ABC):
    """Images on their way into an index.

    Attributes:
        total: number of images, None where it is not known before.
        failures: what could not be opened so far.
        skipped: images that were passed over unread because `known` knew them.
    """

    total: int | None = None

    def __init__(self) -> None:
        self.failures: list[ImageFailure] = []
        self.skipped = 0

    @abstractmethod
    def batches(self, batch_size: int = 64, *, known: Known | None = None) -> Iterator[Batch]:
        """The images, so many at a time; `known` spares reading those that are in the index."""

    def _fail(self, id: str, path: str, reason: str) -> None:
        self.failures.append(ImageFailure(id, path, reason))


class Files(Source):
    """Picture files of a list; each path is the id.

    Raises ValueError for no path.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, ids: Sequence[str] | None = None) -> None:
        super().__init__()
        if isinstance(paths, str | os.PathLike) or not paths:
            raise ValueError(f"Files: paths must be a list of at least one path, got {paths!r}")
        self._paths = [os.fspath(path) for path in paths]
        self._ids = list(self._paths if ids is None else ids)
        self.total = len(self._paths)

    @classmethod
    def of_folder(cls, folder: str | os.PathLike[str], *, prefix: str = "") -> Files:
        """The pictures below a folder in the order of their names.

        Ids are `prefix` and the path from the folder on, with slashes. Folders that cannot be read and links to
        folders, which may lead round in circles and are not followed, are in `failures`.

        Raises NotADirectoryError for what is no folder, ValueError for one without pictures.
        """
        root = Path(folder)
        if not root.is_dir():
            raise NotADirectoryError(f"Files: {root} must be a folder")
        found, passed = _walked(root)
        if not found:
            why = "".join(f"; {path}: {reason}" for path, reason in passed)
            raise ValueError(f"Files: {root} must hold pictures ({', '.join(sorted(SUFFIXES))}), got none{why}")
        made = cls(found, ids=[prefix + path.relative_to(root).as_posix() for path in found])
        for path, reason in passed:
            made._fail(prefix + path.relative_to(root).as_posix(), str(path), reason)
        return made

    @classmethod
    def of_list(cls, file: str | os.PathLike[str]) -> Files:
        """The pictures that a text file names, one a line, paths from its folder on; empty lines are left out."""
        listed = Path(file)
        lines = listed.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines()
        names = [line.strip() for line in lines if line.strip()]
        if not names:
            raise ValueError(f"Files: {listed} must name pictures, one a line, got none")
        return cls([listed.parent / name for name in names], ids=names)

    def batches(self, batch_size: int = 64, *, known: Known | None = None) -> Iterator[Batch]:
        for first in range(0, len(self._paths), batch_size):
            rows = slice(first, first + batch_size)
            # Absolute: an index may be searched from another folder.
            places = [as_text(os.path.abspath(path)) for path in self._paths[rows]]
            yield Batch([Path(path) for path in self._paths[rows]], self._ids[rows], {PATH: places})


class Shards(Source):
    """WebDataset shards: tar files in which neighbouring members of one name, up to its first dot, are one sample.

    The id is `<shard>/<name>`; the caption of `.txt`, or of the field `caption` in `.json`, becomes a column, and so do
    `columns` of the `.json`. A sample without a picture is left out, a damaged shard is reported and left.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, columns: Sequence[str] = ()) -> None:
        super().__init__()
        if isinstance(paths, str | os.PathLike) or not paths:
            raise ValueError(f"Shards: paths must be a list of at least one tar file, got {paths!r}")
        self._paths = [Path(path) for path in paths]
        self._columns = tuple(columns)

    def batches(self, batch_size: int = 64, *, known: Known | None = None) -> Iterator[Batch]:
        pictures: list[bytes] = []
        ids: list[str] = []
        rows: list[dict[str, Any]] = []
        for path in self._paths:
            for name, picture, row in self._samples(path, known):
                pictures.append(picture)
                ids.append(name)
                rows.append(row)
                if len(pictures) == batch_size:
                    yield Batch(pictures, ids, self._table(rows))
                    pictures, ids, rows = [], [], []
        if pictures:
            yield Batch(pictures, ids, self._table(rows))

    def _samples(self, path: Path, known: Known | None) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
        shard = re.sub(r"\.(tar|tar\.gz|tgz)$", "", path.name)
        try:
            with tarfile.open(path) as tar:
                for key, members in _groups(tar):
                    name = f"{shard}/{key}"
                    image = next((member for ending, member in members if f".{ending}" in SUFFIXES), None)
                    if image is None:
                        continue
                    if known is not None and known(name):
                        self.skipped += 1
                        continue
                    place = f"{os.path.abspath(path)}{INSIDE}{image.name}"
                    if image.size > MAX_MEMBER_BYTES:
                        self._fail(name, place, f"{image.size} bytes are too many, at most {MAX_MEMBER_BYTES}")
                        continue
                    yield name, _read(tar, image), {PATH: as_text(place), **self._described(tar, members, name, place)}
        except (OSError, tarfile.TarError, EOFError) as error:
            first = str(error).partition("\n")[0] or repr(error)
            self._fail(shard, str(path), f"the shard is damaged or cannot be read ({first})")

    def _described(
        self, tar: tarfile.TarFile, members: list[tuple[str, tarfile.TarInfo]], name: str, place: str
    ) -> dict[str, Any]:
        texts = {ending: member for ending, member in members if ending in ("txt", "json")}
        row: dict[str, Any] = dict.fromkeys((CAPTION, *self._columns))
        if "json" in texts:
            try:
                held = json.loads(_read(tar, texts["json"]))
            except ValueError as error:
                held = {}
                self._fail(name, place, f"the .json beside the picture cannot be read ({error}); the picture was kept")
            if isinstance(held, dict):
                row |= {column: held.get(column) for column in row}
        if "txt" in texts:
            row[CAPTION] = _read(tar, texts["txt"]).decode("utf-8", "replace").strip()
        return row

    def _table(self, rows: list[dict[str, Any]]) -> pa.Table:
        return pa.table({name: [row[name] for row in rows] for name in (PATH, CAPTION, *self._columns)})


class Embeddings(Source):
    """Global embeddings that clip-retrieval or img2dataset left: `img_emb/*.npy` beside `metadata/*.parquet`.

    For an index of `vectors=()`: there is nothing to rerank. Ids are the column `id_column`, the other columns become
    metadata. Rows that are not finite are reported and left out.

    Raises:
        FileNotFoundError: a part is missing.
        ValueError: files that do not belong together.
    """

    def __init__(self, folder: str | os.PathLike[str], *, id_column: str = "image_path") -> None:
        super().__init__()
        root = Path(folder)
        arrays = {_number(path): path for path in (root / "img_emb").glob("*.npy")}
        tables = {_number(path): path for path in (root / "metadata").glob("*.parquet")}
        if not arrays or arrays.keys() != tables.keys():
            lone = sorted(arrays.keys() ^ tables.keys())
            wanted = f"part {lone[0]} in both" if lone else "at least one part"
            raise FileNotFoundError(f"Embeddings: {root} must hold {wanted}, img_emb/*.npy and metadata/*.parquet")
        self._parts = [(arrays[number], tables[number]) for number in sorted(arrays)]
        self._id_column = id_column
        self.total = sum(self._checked(*part) for part in self._parts)

    def batches(self, batch_size: int = EMBEDDING_ROWS, *, known: Known | None = None) -> Iterator[Batch]:
        for array, described in self._parts:
            vectors, table = np.load(array, mmap_mode="r"), parquet.read_table(described)
            ids = [str(name) for name in table.column(self._id_column).to_pylist()]
            table = table.drop_columns([name for name in table.column_names if name.lower() == "id"])
            for first in range(0, len(vectors), batch_size):
                rows = torch.from_numpy(np.asarray(vectors[first : first + batch_size], dtype=np.float32))
                whole = rows.isfinite().all(dim=1) & (rows != 0).any(dim=1)
                for row in (~whole).nonzero().flatten().tolist():
                    reason = "the embedding is not finite, or zero"
                    self._fail(ids[first + row], f"{array} row {first + row}", reason)
                kept = whole.nonzero().flatten()
                if len(kept):
                    names = tuple(ids[first + row] for row in kept.tolist())
                    unit = torch.nn.functional.normalize(rows[kept], dim=1)
                    yield Batch(ImageFeatures(unit, ids=names), names, table.take(pa.array(kept.numpy() + first)))

    def _checked(self, array: Path, described: Path) -> int:
        """Rows of a part."""
        vectors = np.load(array, mmap_mode="r")
        facts = parquet.read_metadata(described)
        if vectors.ndim != 2 or vectors.dtype.kind != "f" or len(vectors) != facts.num_rows:
            raise ValueError(
                f"Embeddings: {array} must hold one row of floating numbers for each of {facts.num_rows} rows of "
                f"{described}, got {vectors.dtype} {vectors.shape}"
            )
        names = parquet.read_schema(described).names
        if self._id_column not in names:
            raise ValueError(
                f"Embeddings: {described} must have a column {self._id_column!r} for the ids, it has {', '.join(names)}"
            )
        return len(vectors)


def source_of(place: str, *, columns: Sequence[str] = (), id_column: str = "image_path") -> Source:
    """The source that a path looks like: embeddings, a folder of pictures, a tar shard, a list, or one picture file.

    Ids of a folder begin with `place` as it is written, so that those of two folders do not meet.

    Args:
        columns: of the `.json` in shards.
        id_column: of embeddings.

    Raises what the sources raise, FileNotFoundError for a path that is not there.
    """
    path = Path(place)
    if (path / "img_emb").is_dir():
        return Embeddings(path, id_column=id_column)
    if path.is_dir():
        return Files.of_folder(path, prefix=path.as_posix().rstrip("/") + "/")
    if path.name.lower().endswith(SHARD_SUFFIXES):
        return Shards([path], columns=columns)
    if path.suffix.lower() in LIST_SUFFIXES:
        return Files.of_list(path)
    if not path.exists():
        raise FileNotFoundError(f"source_of: {path} is not there")
    return Files([place])


def picture_at(path: str) -> Path | bytes:
    """What a column `path` names: the file, or the bytes of a picture in a shard.

    Raises FileNotFoundError where nothing is there.
    """
    file = Path(os.fsdecode(os.fsencode(path)))
    if file.is_file():
        return file
    shard, inside, name = path.rpartition(INSIDE)
    if inside and Path(shard).is_file():
        with tarfile.open(shard) as tar:
            try:
                return _read(tar, tar.getmember(name))
            except KeyError:
                raise FileNotFoundError(f"picture_at: {shard} holds no {name}") from None
    raise FileNotFoundError(f"picture_at: {path} is not there")


def _walked(root: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The pictures below a folder in the order of their names, and folders that were passed over, with the reason."""
    passed: list[tuple[Path, str]] = []

    def unreadable(error: OSError) -> None:
        passed.append((Path(error.filename), f"the folder cannot be read ({error.strerror})"))

    found: list[Path] = []
    for place, folders, files in os.walk(root, onerror=unreadable):
        for name in folders:
            if os.path.islink(os.path.join(place, name)):
                passed.append((Path(place, name), "a link to a folder is not followed; add the folder itself"))
        paths = (Path(place, name) for name in files if Path(name).suffix.lower() in SUFFIXES)
        found += [path for path in paths if _is_file(path)]
    return sorted(found), sorted(passed)


def _is_file(path: Path) -> bool:
    """Whether something is a file, or a link to nothing, which is reported when it is read and not passed over."""
    return path.is_file() or (path.is_symlink() and not path.exists())


def _groups(tar: tarfile.TarFile) -> Iterator[tuple[str, list[tuple[str, tarfile.TarInfo]]]]:
    """Samples of a shard: the name, and the endings (in lower case) and members that share it."""
    held: list[tuple[str, tarfile.TarInfo]] = []
    before = None
    for member in tar:
        if not member.isreg():
            continue
        folder, _, base = member.name.rpartition("/")
        stem, _, ending = base.partition(".")
        if base.startswith(".") or not ending:
            continue
        key = f"{folder}/{stem}" if folder else stem
        if before is not None and key != before:
            yield before, held
            held = []
        before = key
        held.append((ending.lower(), member))
    if before is not None:
        yield before, held


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file: IO[bytes] | None = tar.extractfile(member)
    assert file is not None  # regular files alone are asked for
    return file.read()


def _number(path: Path) -> str:
    """The digits a part's name ends with, which its two files share."""
    found = re.search(r"(\d+)$", path.stem)
    return found.group(1) if found else path.stem
