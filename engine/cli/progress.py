"""Progress of named steps on standard error: a bar for a person, a line for each step for a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from engine.cli.options import wants_bar
from engine.cli.tables import report

# Told (what is done, how many, of how many).
Told = Callable[[str, int, int], None]
# Told (how many are done, how many of them failed).
Counted = Callable[[int, int], None]
# Told (how many are done, of how many).
Counting = Callable[[int, int], None]
# Where no person watches, a line every so often.
LINE_EVERY_S = 30.0


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


@contextmanager
def counted(what: str, total: int | None) -> Iterator[Counted]:
    """A function to call with (done, failed), for long work: rate, time left and failures, as a bar or as lines.

    `total` is None where it is not known.
    """
    begun = time.monotonic()
    if not wants_bar():
        yield _CountedLines(what, total, begun)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(what, total=total, words="")

        def advance(done: int, failed: int) -> None:
            words = in_words(done, total, failed, time.monotonic() - begun)
            drawn.update(task, completed=done, words=words)

        yield advance


@contextmanager
def counting(what: str) -> Iterator[Counting]:
    """As ``counted``, for long work that says itself how much there is: a function to call with (done, total)."""
    with ExitStack() as stack:
        advance: Counted | None = None

        def told(done: int, total: int) -> None:
            nonlocal advance
            if advance is None:
                advance = stack.enter_context(counted(what, total))
            advance(done, 0)

        yield told


def in_words(done: int, total: int | None, failed: int, seconds: float) -> str:
    """How far long work is.

    >>> in_words(300, 1200, 2, 60.0)
    '300 of 1200, 5.0/s, 3:00 left, 2 failed'
    """
    rate = done / seconds if seconds > 0 else 0.0
    parts = [f"{done}" if total is None else f"{done} of {total}", f"{rate:.1f}/s"]
    if total is not None and rate > 0:
        left = round(max(0, total - done) / rate)
        parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left" if left >= 3600 else
                     f"{left // 60}:{left % 60:02} left")  # fmt: skip
    return ", ".join([*parts, *([f"{failed} failed"] if failed else [])])


class _CountedLines:
    """Reports how far long work is, a line every `LINE_EVERY_S`."""

    def __init__(self, what: str, total: int | None, begun: float) -> None:
        self._what, self._total, self._begun, self._said = what, total, begun, begun

    def __call__(self, done: int, failed: int) -> None:
        now = time.monotonic()
        if now - self._said >= LINE_EVERY_S:
            self._said = now
            report(f"{self._what}: {in_words(done, self._total, failed, now - self._begun)}")
