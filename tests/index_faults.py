"""Faults at every step in which an index is written: the process is killed there, or the system refuses the step."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# What changes files, as Python's audit hooks name it; flushing and writing in place are not among them.
EVENTS = frozenset({"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"})
FLUSHES = ("fsync", "fdatasync", "write")


class Steps:
    """Counts the steps in which files below a folder change; does something at one of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.log: list[tuple[str, str]] = []
        self.at: int | None = None
        self.action: Callable[[], None] = lambda: None

    def reached(self, event: str, path: str) -> None:
        self.log.append((event, path))
        if self.at is not None and len(self.log) - 1 == self.at:
            self.action()

    def heard(self, event: str, arguments: tuple) -> None:
        """An audit event."""
        if event == "open":
            path, mode, flags = arguments
            named = any(c in mode for c in "wax+") if isinstance(mode, str) else False
            if not (named or flags & (os.O_WRONLY | os.O_RDWR)) or not isinstance(path, str | os.PathLike):
                return
        elif event in EVENTS:
            path = arguments[0]
        else:
            return
        path = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if path.startswith(self.folder):
            self.reached(event, path)


_LISTENING: list[Steps] = []
_HOOKED: list[bool] = []


def _hook(event: str, arguments: tuple) -> None:
    for steps in _LISTENING:
        steps.heard(event, arguments)


@contextmanager
def watched(steps: Steps) -> Iterator[Steps]:
    """Tell `steps` of every change of a file while this lasts; flushing takes no time and does nothing else."""
    if not _HOOKED:
        # A hook stays for the life of the process.
        sys.addaudithook(_hook)
        _HOOKED.append(True)
    before = {name: getattr(os, name) for name in FLUSHES}

    def flush(name: str) -> Callable[..., object]:
        def call(handle: int, *rest: object) -> object:
            path = os.readlink(f"/proc/self/fd/{handle}")
            if path.startswith(steps.folder):
                steps.reached(name, path)
            return before[name](handle, *rest) if name == "write" else None

        return call

    for name in FLUSHES:
        setattr(os, name, flush(name))
    _LISTENING.append(steps)
    try:
        yield steps
    finally:
        _LISTENING.remove(steps)
        for name, function in before.items():
            setattr(os, name, function)


def die() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(number: int = errno.ENOSPC) -> Callable[[], None]:
    """An action that fails as the system does when a disk is full (or as `number` says)."""

    def action() -> None:
        raise OSError(number, os.strerror(number))

    return action


def in_child(work: Callable[[], None], *, timeout_s: float = 60.0) -> int:
    """Run `work` in a forked child; its exit status, minus the signal that ended it. Its errors go to stderr.

    A child that takes longer than `timeout_s` is killed, and TimeoutError raised.
    """
    with warnings.catch_warnings():
        # From Python 3.12 on forking a process with threads warns: here that is the point.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(int(timeout_s) + 1)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        raise TimeoutError(f"the child took longer than {timeout_s} s")
    return code
