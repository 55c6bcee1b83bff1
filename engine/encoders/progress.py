"""A progress bar for long work, or the caller's own function in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.encoders.base import Progress


@contextmanager
def reporting(progress: bool | Progress, what: str) -> Iterator[Progress | None]:
    """A function to call with (done, total): a bar on standard error for True, None for False, or the given
    one.

    Raises TypeError for what is none of the three.

    Example:
        >>> with reporting(False, "images") as report:
        ...     report is None
        True
    """
    if progress is False:
        yield None
        return
    if progress is not True:
        if not callable(progress):
            raise TypeError(f"progress: must be True, False or a function of (done, total), got {progress!r}")
        yield progress
        return
    # Imported here: only the bar needs it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
