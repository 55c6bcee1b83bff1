"""The kinds of heads by name, and the reading of a stored one."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

from engine.heads.base import Head, HeadType, check_belongs, read_head
from engine.heads.linear import LinearAlignment
from engine.heads.max_sim_head import MaxSimHead
from engine.heads.peak_patch import PeakPatch
from engine.heads.tfglobal import TFGlobal
from engine.heads.tflocal import TFLocal
from engine.heads.window_head import WindowHead

HEADS: dict[str, type[Head]] = {kind.name: kind for kind in (MaxSimHead, TFLocal, TFGlobal, LinearAlignment, PeakPatch)}


def load_head(path: str | PathLike[str], *, fingerprint: str = "") -> Head:
    """The scoring head that `Head.save` wrote, on the CPU and in evaluation mode.

    `fingerprint`: of the encoder it is wanted for; empty takes any.

    Raises FileNotFoundError, and ValueError for a file that is damaged, of an unknown kind, or of another encoder.
    """
    return _loaded(path, HEADS, fingerprint)


def load_window_head(path: str | PathLike[str], *, fingerprint: str = "") -> WindowHead:
    """The window head that was saved there; arguments and errors as for `load_head`."""
    return _loaded(path, {WindowHead.name: WindowHead}, fingerprint)


def _loaded(path: str | PathLike[str], kinds: Mapping[str, type[HeadType]], fingerprint: str) -> HeadType:
    stored = read_head(path)
    if stored.head not in kinds:
        raise ValueError(f"load_head: {path} must hold one of {', '.join(sorted(kinds))}, got {stored.head!r}")
    head = stored.make(kinds[stored.head], path)
    check_belongs(f"load_head: {path}: the features", head, fingerprint)
    return head
