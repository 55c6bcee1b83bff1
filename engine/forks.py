"""Going on in a forked child, in which the thread pools of torch and FAISS hang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

# The process that imported the engine. A child that was spawned imports it anew, one that was forked does not.
_HOME = os.getpid()


class OwnLock:
    """A reentrant lock that a forked child has anew: a thread of the parent's may have held it and is not there."""

    def __init__(self) -> None:
        self._lock, self._process = RLock(), os.getpid()

    def __enter__(self) -> None:
        if self._process != os.getpid():
            self._lock, self._process = RLock(), os.getpid()
        self._lock.acquire()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._lock.release()


def is_forked() -> bool:
    """Whether this process was forked from one that had imported the engine."""
    return os.getpid() != _HOME


@contextmanager
def one_thread_after_fork() -> Iterator[None]:
    """In a forked child: torch works with the calling thread alone while this lasts.

    The threads of the parent's pools do not exist in the child, and whoever hands them work waits for ever.
    """
    if not is_forked():
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
