"""Reading annotation files and finding the images they name: literally, safely, and never a wrong one."""

from __future__ import annotations

import ast
import codecs
import csv
import io
import json
from collections.abc import Iterator, Sequence
from os import PathLike
from os.path import isfile
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, get_args

from engine.choices import OnMissing, check_choice

FilePath: TypeAlias = str | PathLike[str]
MAX_CELL_CHARS = 100_000


def read_text(path: FilePath, *, who: str = "read_text") -> str:
    """The text of a file in UTF-8, its byte order mark left out and its line ends as they are.

    Raises:
        ValueError: a folder, or bytes that are not UTF-8, with their line.
        OSError: the file cannot be read.
    """
    if Path(path).is_dir():
        raise ValueError(f"{who}: {path} must be a file, got a folder")
    data = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{who}: {path} line {line} must be UTF-8, got byte 0x{data[error.start]:02x}") from error


def read_json(path: FilePath) -> Any:
    """A JSON file in UTF-8.

    Raises ValueError naming the file for broken JSON, a key that comes twice in one object, and what `read_text`
    refuses.
    """
    text = read_text(path, who="read_json")
    try:
        return json.loads(text, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"read_json: {path} must be JSON without double keys: {error}") from error


def read_json_lines(path: FilePath) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line that is not blank.

    Raises ValueError naming file and line, also for what `read_text` refuses.
    """
    for number, line in enumerate(io.StringIO(read_text(path, who="read_json_lines"), newline=None), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"read_json_lines: {path} line {number} must be JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"read_json_lines: {path} line {number} must be an object, got {value!r:.80}")
        yield number, value


def read_csv(path: FilePath, columns: Sequence[str], *, delimiter: str = ",") -> list[dict[str, str]]:
    """Rows of a CSV file with a header, by column name; the columns' order is free, further ones are kept.

    Raises:
        ValueError: naming the file, a wanted column is absent, a column comes twice or a row has another number of
            cells than the header; broken quotes, or a cell longer than the `csv` module takes (131072 characters, the
            usual sign of a quote that is never closed), with the line where the row begins; what `read_text` refuses.
    """
    reader = csv.reader(io.StringIO(read_text(path, who="read_csv"), newline=""), delimiter=delimiter, strict=True)
    header: list[str] = []
    rows: list[dict[str, str]] = []
    while True:
        start = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ValueError(
                f"read_csv: {path} line {start} must begin a row of CSV with its quotes closed, got: {error}"
            ) from error
        if cells is None:
            break
        # Blank lines are no rows.
        if not cells:
            continue
        if not header:
            header = cells
            _check_columns(path, header, columns)
        elif len(cells) != len(header):
            raise ValueError(
                f"read_csv: {path} line {start} must have {len(header)} cells like the header, got {len(cells)}"
            )
        else:
            rows.append(dict(zip(header, cells, strict=True)))
    if not header:
        _check_columns(path, header, columns)
    return rows


def _check_columns(path: FilePath, header: Sequence[str], columns: Sequence[str]) -> None:
    if any(column not in header for column in columns):
        raise ValueError(f"read_csv: {path} must have columns {list(columns)}, got {list(header)}")
    # Columns without a name are left by programs that number rows, and nothing reads them.
    double = [column for column in header if column and header.count(column) > 1]
    if double:
        raise ValueError(f"read_csv: {path} must have column {double[0]!r} once, got {list(header)}")


def parse_text_list(cell: str, *, where: str) -> list[str]:
    """The strings of a cell that holds a list, as JSON or as a Python literal. Nothing is ever evaluated.

    Raises ValueError beginning with `where` for anything else, or for more than `MAX_CELL_CHARS` characters.

    >>> parse_text_list('["a"]', where="row 1"), parse_text_list("['it', \\"it's\\"]", where="row 2")
    (['a'], ['it', "it's"])
    """
    if len(cell) > MAX_CELL_CHARS:
        raise ValueError(f"{where}: a list cell may hold {MAX_CELL_CHARS} characters, got {len(cell)}")
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(cell)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError(f"{where}: wanted a list of texts as a literal, got {cell[:80]!r}") from error
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{where}: wanted a list of texts as a literal, got {cell[:80]!r}")
    return value


def text_field(row: dict[str, Any], name: str, *, where: str, empty: bool = False) -> str:
    """The string in field `name`, with every blank it has; `empty=True` also allows one of blanks only.

    Raises:
        ValueError: it is absent, of another type or empty.
    """
    value = row.get(name)
    if not isinstance(value, str) or (not empty and not value.strip()):
        raise ValueError(f"{where}: field {name!r} must be a text that is not empty, got {value!r}")
    return value


def int_field(row: dict[str, Any], name: str, *, where: str) -> int:
    """The integer in field `name`, written as a number or as text. Raises ValueError otherwise."""
    value = row.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().removeprefix("-").isdecimal():
        return int(value)
    raise ValueError(f"{where}: field {name!r} must be an integer, got {value!r}")


class ImageFolder:
    """Finds the files that an annotation file names, below one folder of the user's.

    A name is taken literally: no URL decoding, no case folding. Annotation files often carry the path of
    somebody else's machine (`data/coco/images/val2017/x.jpg`): the longest tail of the name that exists
    below the folder is the file. Two different names that would end at one file are refused, for then one of
    them shows the wrong picture.

    Arguments: `folder`, or None to read the annotations alone (every path stays None, nothing is missing);
    `who` reads, for messages.
    """

    def __init__(self, folder: FilePath | None, who: str) -> None:
        self.folder = None if folder is None else Path(folder)
        self.who = who
        self._found: dict[str, Path | None] = {}
        self._taken: dict[Path, str] = {}
        if self.folder is not None and not self.folder.is_dir():
            raise FileNotFoundError(f"{who}: the image folder {self.folder} must be a folder, it is none")

    def find(self, name: str) -> Path | None:
        """The file, or None when it is missing (`missing` then lists it) or there is no folder.

        Raises ValueError for a name that leads out of the folder or to the file of another name.
        """
        if self.folder is None:
            return None
        if name not in self._found:
            path = self._search(name)
            if path is not None:
                other = self._taken.setdefault(path, name)
                if other != name:
                    raise ValueError(
                        f"{self.who}: images {other!r} and {name!r} would both be {path}; give the folder "
                        "that holds them apart"
                    )
            self._found[name] = path
        return self._found[name]

    @property
    def missing(self) -> tuple[str, ...]:
        """Names that were asked for and have no file."""
        if self.folder is None:
            return ()
        return tuple(name for name, path in self._found.items() if path is None)

    def check(self, on_missing: OnMissing) -> tuple[str, ...]:
        """The missing names.

        Raises FileNotFoundError if there are any and `on_missing` is `"error"`, or if all are missing; ValueError for
        another `on_missing`.
        """
        check_choice(self.who, "on_missing", on_missing, get_args(OnMissing))
        gone = self.missing
        if gone and (on_missing == "error" or len(gone) == len(self._found)):
            raise FileNotFoundError(
                f"{self.who}: {len(gone)} of {len(self._found)} images are not in {self.folder}, e.g. "
                f"{', '.join(gone[:3])}; check that this is the folder and split the annotations belong to"
                + ("" if on_missing == "skip" else ", or leave them out with on_missing='skip'")
            )
        return gone

    def _search(self, name: str) -> Path | None:
        assert self.folder is not None
        parts = [part for part in PurePosixPath(name).parts if part not in ("/", ".")]
        if not parts or ".." in parts:
            raise ValueError(f"{self.who}: an image name must stay inside its folder, got {name!r}")
        for start in range(len(parts)):
            path = self.folder.joinpath(*parts[start:])
            # os.path.isfile answers False, where Path.is_file raises, for a name the file system cannot hold.
            if isfile(path):
                return path
        return None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} comes twice")
        result[key] = value
    return result
