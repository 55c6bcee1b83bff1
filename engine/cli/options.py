"""Options that several commands share."""

from __future__ import annotations

import codecs
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

from tyro.conf import UseAppendAction, arg

from engine.cli.printable import is_text

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.scorers.base import Scorer

OptionalFile = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(optional)")]
OptionalFolder = Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(optional)")]
OptionalPath = Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(optional)")]
IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})


@dataclass(frozen=True, kw_only=True)
class Shared(ABC):
    """Options of every command."""

    json: bool = False
    """Print JSON for machines in place of a table."""
    debug: bool = False
    """Show the traceback of an error."""

    @abstractmethod
    def run(self) -> int:
        """Do it, print what came of it, and return the exit code."""


@dataclass(frozen=True, kw_only=True)
class Placed(Shared):
    """Options of commands that run models in passes of their own."""

    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes an accelerator where there is one."""
    dtype: str = "auto"
    """float32, float16 or bfloat16; auto chooses by device."""

    def load(self, model: str, *, segmenter: str = "auto") -> Engine:
        """The model of that name where these options say."""
        from engine.engine import load

        return load(model, device=self.device, dtype=self.dtype, segmenter=segmenter)


@dataclass(frozen=True, kw_only=True)
class OnDevice(Placed):
    """Options of commands that run models."""

    batch_size: int = 64
    """Images, crops or texts in one pass."""

    def load(self, model: str, *, segmenter: str = "auto") -> Engine:
        """The model of that name where these options say."""
        if self.batch_size < 1:
            raise ValueError(f"--batch-size must be at least 1, got {self.batch_size}")
        return super().load(model, segmenter=segmenter)


@dataclass(frozen=True, kw_only=True)
class PlacedModel(Placed):
    """Options of commands that load one model and run it in passes of their own."""

    model: str = "scenes"
    """Name of the model; `peaksim models` lists them."""

    def engine(self, *, segmenter: str = "auto") -> Engine:
        """The model these options name."""
        return self.load(self.model, segmenter=segmenter)


@dataclass(frozen=True, kw_only=True)
class WithModel(OnDevice, PlacedModel):
    """Options of commands that load one model."""


@dataclass(frozen=True, kw_only=True)
class WithScorer(WithModel):
    """Options of commands that score."""

    scorer: str = "global"
    """Way of scoring: global, max_sim, max_sim_head or sgi."""
    option: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")] = ()
    """Option of the scorer, repeatable: `--option crops=native --option exclusive=true`."""
    segmenter: str = "auto"
    """What splits captions into segments: spacy, spacy:<package> or rules; auto takes spaCy where it is installed."""

    def chosen(self) -> Scorer:
        """The scorer with its options."""
        return scorer_with(self.scorer, self.option)


def scorer_with(name: str, options: tuple[str, ...]) -> Scorer:
    """The scorer of that name with ``NAME=VALUE`` options read as its fields' types.

    Raises ValueError for an unknown scorer or option, one given twice, or a value of the wrong kind.
    """
    from engine.scorers.registry import get_scorer

    kind = type(get_scorer(name))
    hints = get_type_hints(kind)
    known = {field.name: hints[field.name] for field in fields(kind)}
    values: dict[str, Any] = {}
    for option in options:
        field, equals, text = option.partition("=")
        if not equals or field not in known:
            names = ", ".join(known) or "it has none"
            raise ValueError(f"--option: must be NAME=VALUE with an option of {name!r} ({names}), got {option!r}")
        if field in values:
            raise ValueError(f"--option: {field} must be given once, got {' and '.join(options)}")
        values[field] = _value(field, text, known[field])
    return kind(**values)


def scorer_named(text: str) -> Scorer:
    """A scorer with its options in one word: ``sgi``, or ``sgi?crops=native&exclusive=true``."""
    name, _, options = text.partition("?")
    pairs = parse_qsl(options, keep_blank_values=True, strict_parsing=bool(options))
    return scorer_with(name, tuple(f"{option}={value}" for option, value in pairs))


def _value(name: str, text: str, hint: Any) -> Any:
    """``text`` as the type a field is declared with."""
    kinds = get_args(hint) or (hint,)
    if text.lower() == "none" and type(None) in kinds:
        return None
    if bool in kinds:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"--option: {name} must be true or false, got {text!r}")
        return text.lower() == "true"
    if float in kinds:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"--option: {name} must be a number, got {text!r}") from None
    numbers = text.split(",") if any(get_origin(kind) is tuple for kind in kinds) else []
    if len(numbers) == 3 and all(number.strip().isdigit() for number in numbers):
        return tuple(int(number) for number in numbers)
    return text


def image_files(paths: tuple[str, ...]) -> list[Path]:
    """The files meant: a folder stands for the pictures below it, in order of their names.

    Raises ValueError for no path and for a folder without pictures. A file is taken whatever its name is.
    """
    if not paths:
        raise ValueError("give at least one picture, or a folder of pictures")
    found: list[Path] = []
    for name in paths:
        path = Path(name)
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
        if not inside:
            suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
            raise ValueError(f"{path}: the folder must hold pictures ({suffixes}), got none")
        found += inside
    return found


def captions(texts: tuple[str, ...], file: Path | None) -> list[str]:
    """Captions given one by one and those of a file, one a line (empty lines and a byte order mark left out).

    Raises ValueError for none, for an empty file, and for what is no UTF-8.
    """
    check_text("--text", texts)
    found = [*texts, *([] if file is None else _lines(file))]
    if not found:
        raise ValueError("give at least one caption: --text '...' or --text-file FILE")
    return found


def check_text(option: str, texts: Iterable[str]) -> None:
    """Raise ValueError for words of the command line that are no text."""
    for text in texts:
        if not is_text(text):
            raise ValueError(f"{option} must be text in UTF-8, got bytes that are not: {text!r}")


def check_unused(who: str, options: Any, *names: str) -> None:
    """Raise ValueError for one of these options that has another value than its default, of which `who` sees nothing.

    `options`: a dataclass that has them as fields with plain defaults.
    """
    for field in fields(options):
        if field.name in names and getattr(options, field.name) != field.default:
            raise ValueError(f"{who}: has no use for --{field.name.replace('_', '-')}")


def check_limit(limit: int | None) -> None:
    """Raise ValueError for a number of items that leaves none."""
    if limit is not None and limit < 1:
        raise ValueError(f"--limit must be at least 1, got {limit}")


def _lines(file: Path) -> list[str]:
    """The lines of a text file that are not empty, stripped."""
    # Bytes split at line ends alone; text would split at form feeds and other separators too.
    raw = file.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    found = []
    for number, line in enumerate(raw, 1):
        try:
            found.append(line.decode("utf-8").strip())
        except UnicodeDecodeError as error:
            byte = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
            raise ValueError(f"--text-file: {file} line {number} must be UTF-8, got {byte}") from error
    kept = [line for line in found if line]
    if not kept:
        raise ValueError(f"--text-file: {file} must hold captions, one a line, got none")
    return kept


def wants_bar() -> bool:
    """Whether a progress bar would be seen by a person."""
    return sys.stderr.isatty()
