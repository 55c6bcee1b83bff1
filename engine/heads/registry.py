"""The kinds of heads by name, and the reading of a stored one."""

from __future__ import annotations

from os import PathLike

from engine.heads.base import Head, check_belongs, read_head
from engine.heads.linear import LinearAlignment
from engine.heads.max_sim_head import MaxSimHead
from engine.heads.peak_patch import PeakPatch
from engine.heads.tfglobal import TFGlobal
from engine.heads.tflocal import TFLocal

HEADS: dict[str, type[Head]] = {kind.name: kind for kind in (MaxSimHead, TFLocal, TFGlobal, LinearAlignment, PeakPatch)}


def load_head(path: str | PathLike[str], *, fingerprint: str = "") -> Head:
    """The head that `Head.save` wrote, on the CPU and in evaluation mode.

    `fingerprint`: of the encoder it is wanted for; empty takes any.

    Raises FileNotFoundError, and ValueError for a file that is damaged, of an unknown kind, or of another encoder.
    """
    stored = read_head(path)
    if stored.head not in HEADS:
        raise ValueError(f"load_head: {path} must hold one of {', '.join(sorted(HEADS))}, got {stored.head!r}")
    head = stored.make(HEADS[stored.head], path)
    check_belongs(f"load_head: {path}: the features", head, fingerprint)
    return head
