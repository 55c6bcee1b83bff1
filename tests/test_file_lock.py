"""A file lock has one holder, and nobody waits where there are no locks."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from engine.file_lock import locked, try_lock


def test_a_lock_has_one_holder(tmp_path: Path):
    with locked(tmp_path / "lock"), (tmp_path / "lock").open("rb+") as other:
        assert not try_lock(other.fileno())
    with (tmp_path / "lock").open("rb+") as other:
        assert try_lock(other.fileno())


@pytest.mark.skipif(os.name == "nt", reason="locks by another call")
def test_where_there_are_no_locks_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with locked(tmp_path / "lock"), (tmp_path / "lock").open("rb+") as other, pytest.raises(OSError, match="No locks"):
        try_lock(other.fileno())
