"""A progress bar of named steps on standard error, when there is a person to see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.cli.options import wants_bar


@contextmanager
def bar(what: str) -> Iterator[Callable[[str, int, int], None] | None]:
    """A function to call with (what, done, total), drawn on standard error when a person is there."""
    if not wants_bar():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(what, total=None)

        def advance(name: str, done: int, total: int) -> None:
            drawn.update(task, description=name, completed=done, total=total)

        yield advance
