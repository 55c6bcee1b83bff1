"""Tables that people read and JSON that machines read, on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.cli.printable import printable, printable_json

# Wider than a terminal is better than numbers broken in two, which is what a pipe would get at 80 columns.
PIPE_WIDTH = 160


def console() -> Console:
    """The console of standard output."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Print a table; the first column is text, the others are right-aligned."""
    table = Table()
    for position, name in enumerate(header):
        table.add_column(Text(printable(name)), justify="left" if position == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    # A title of the table itself would be broken at the table's width.
    if title:
        show_line(title)
    console().print(table)


def show_text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Print a table of words: columns left-aligned, the first never broken, so that it can be copied."""
    table = Table()
    for position, name in enumerate(header):
        table.add_column(Text(printable(name)), overflow="fold", no_wrap=position == 0)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    # A title of the table itself would be broken at the table's width.
    if title:
        show_line(title)
    console().print(table)


def show_line(text: str) -> None:
    """Print one line as it is."""
    console().print(Text(printable(text)), soft_wrap=True)


def show_json(value: Any) -> None:
    """Print a value as JSON, one object, nothing else."""
    show_json_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, default=str))


def show_json_text(text: str) -> None:
    """Print JSON that has been written out already."""
    sys.stdout.write(printable_json(text.rstrip()) + "\n")


def show_markdown(text: str) -> None:
    """Print Markdown: as tables on a terminal, as it is into a file or a pipe."""
    if sys.stdout.isatty():
        # Imported here: only a terminal needs it.
        from rich.markdown import Markdown

        console().print(Markdown(printable(text)))
    else:
        sys.stdout.write(printable(text.rstrip()) + "\n")


def report(text: str) -> None:
    """One line on standard error."""
    sys.stderr.write(f"peaksim: {printable(text)}\n")
