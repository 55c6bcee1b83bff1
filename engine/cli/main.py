"""Reads the command line, runs one command, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import importlib
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Union, get_args

import tyro

from engine.cli.printable import printable

if TYPE_CHECKING:
    from engine.cli.options import Shared

# 0: done. 1: something could not be done (a picture, a file, a model). 2: the call itself is wrong.
FAILED, WRONG_CALL, INTERRUPTED = 1, 2, 130
DESCRIPTION = "Fine-grained image-text scores from frozen vision-language encoders."
CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)


class Place(NamedTuple):
    """Where a command lives. Only the one that is called is imported: the others may need torch."""

    module: str
    kind: str
    help: str


COMMANDS = {
    "demo": Place("demonstration", "Demo", "Score the controlled benchmark and draw what was found."),
    "score": Place("commands", "Score", "Score pictures against captions."),
    "explain": Place("commands", "Explain", "Show which words found which region of a picture."),
    "classify": Place("commands", "Classify", "Say which label fits each picture best, without training."),
    "eval": Place("evaluation", "Eval", "Evaluate a model with a scorer on a benchmark."),
    "compare": Place("comparison", "Compare", "Set models and scorers side by side on benchmarks."),
    "models": Place("commands", "Models", "List the encoders and what each of them offers, or look at one."),
    "train": Place("training", "Train", "Train the embedded model, or small heads on frozen features."),
    "diagnose": Place("layers", "Diagnose", "Say what text layers hold, and what it is worth to read them."),
    "export": Place("export", "Export", "Write a model as ONNX graphs for ONNX Runtime, or check such a folder."),
    "results": Place("results", "Results", "Measure the committed model and heads for RESULTS.md."),
    "index": Place("", "Index", "Keep pictures in an index and find them by captions or pictures."),
    "doctor": Place("commands", "Doctor", "Say what this installation can do here, and how to get the rest."),
}
# Commands of a command: `peaksim index add ...`.
GROUPS = {
    "index": {
        "create": Place("index", "Create", "Make an empty index."),
        "add": Place("index_add", "Add", "Add pictures: folders, files, lists, tar shards, embeddings."),
        "search": Place("index_search", "Search", "Find pictures by captions or by pictures."),
        "delete": Place("index", "Delete", "Delete pictures from an index."),
        "stats": Place("index", "Stats", "Say what an index holds."),
        "verify": Place("index", "Verify", "Look at every byte of an index."),
        "compact": Place("index", "Compact", "Free what deleted pictures take, and join small segments."),
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``peaksim`` with these arguments (default: those of the process) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        command = _parse(arguments or ["--help"])
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else WRONG_CALL
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _show_warning
        return _run(command)


def _parse(
    arguments: list[str],
    commands: Mapping[str, Place] = MappingProxyType(COMMANDS),
    prog: str = "peaksim",
    about: str = DESCRIPTION,
) -> Shared:
    """The command these arguments describe, as an object of its dataclass."""
    name = arguments[0]
    if name in commands:
        module, kind, words = commands[name]
        if not module:
            return _parse(arguments[1:] or ["--help"], GROUPS[name], f"{prog} {name}", words)
        wanted = getattr(importlib.import_module(f"engine.cli.{module}"), kind)
        prog, rest = f"{prog} {name}", arguments[1:]
        # None: the words of the class.
        description: str | None = words
        # A command of several: read by its own parser, whose messages name it whole.
        for member in get_args(wanted):
            if rest and member.__metadata__[0].name == rest[0]:
                wanted, prog, description, rest = get_args(member)[0], f"{prog} {rest[0]}", None, rest[1:]
        command: Shared = tyro.cli(wanted, prog=prog, description=description, args=rest, config=CONFIG)
        return command
    # No command: this prints the overview or says what is wrong, and leaves.
    stand_ins = tuple(
        Annotated[make_dataclass(place.kind, ()), tyro.conf.subcommand(name, description=place.help)]
        for name, place in commands.items()
    )
    overview: Any = Union[stand_ins]  # noqa: UP007 (made from a tuple)
    tyro.cli(overview, prog=prog, description=about, args=arguments, config=CONFIG)
    raise AssertionError("only a name of a command is understood here, and there was none")


def _run(command: Shared) -> int:
    try:
        return command.run()
    except KeyboardInterrupt:
        sys.stderr.write("peaksim: interrupted\n")
        return INTERRUPTED
    except Exception as error:
        if command.debug:
            traceback.print_exc()
        else:
            sys.stderr.write(f"peaksim: {printable(_one_line(error))}\n")
        return _code(error)


def _code(error: Exception) -> int:
    # Looked up, not imported: as long as no picture was opened this would load torch for nothing.
    images = sys.modules.get("engine.images.errors")
    broken_picture = images is not None and isinstance(error, images.ImageError)
    wrong_call = isinstance(error, ValueError | TypeError) and not broken_picture
    return WRONG_CALL if wrong_call else FAILED


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if text and isinstance(error, ValueError | TypeError | OSError | ImportError | FloatingPointError):
        return text
    # What was not written for users is named with its kind.
    return f"{type(error).__name__}: {text} (--debug shows where)"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """A warning as one line, without the place in the source that Python would add."""
    sys.stderr.write(f"peaksim: warning: {printable(' '.join(str(message).split()))}\n")
