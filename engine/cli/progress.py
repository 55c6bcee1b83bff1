"""Progress of named steps on standard error: a bar for a person, a line for each step for a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.cli.options import wants_bar
from engine.cli.tables import report

# Told (what is done, how many, of how many).
Told = Callable[[str, int, int], None]


@contextmanager
def bar(what: str) -> Iterator[Told | None]:
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


@contextmanager
def steps(what: str) -> Iterator[Told]:
    """As ``bar``, and where no person sees it a line of plain text whenever a step begins."""
    with bar(what) as drawn:
        yield _Lines(what) if drawn is None else drawn


class _Lines:
    """Reports a step when it is first heard of."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._step = ""

    def __call__(self, name: str, done: int, total: int) -> None:
        if name != self._step:
            self._step = name
            report(f"{name} ({done} of {total} {self._what})")
