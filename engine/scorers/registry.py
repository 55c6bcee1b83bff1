"""The scorers by name."""

from __future__ import annotations

from dataclasses import replace

from engine.heads.base import Head
from engine.scorers.base import Scorer
from engine.scorers.global_cosine import GlobalCosine
from engine.scorers.learned import HeadScorer
from engine.scorers.linear import LinearScorer
from engine.scorers.max_sim import MaxSim
from engine.scorers.max_sim_head import MaxSimHeadScorer
from engine.scorers.peak_patch import PeakPatchScorer
from engine.scorers.sgi import SGI
from engine.scorers.tfglobal import TFGlobalScorer
from engine.scorers.tflocal import TFLocalScorer

KINDS: tuple[type[Scorer], ...] = (
    GlobalCosine,
    MaxSim,
    SGI,
    MaxSimHeadScorer,
    TFLocalScorer,
    TFGlobalScorer,
    LinearScorer,
    PeakPatchScorer,
)
SCORERS: dict[str, type[Scorer]] = {kind.name: kind for kind in KINDS}


def get_scorer(scorer: str | Scorer) -> Scorer:
    """The scorer of this name with its default options; a `Scorer` object is given back as it is.

    Raises:
        ValueError: an unknown name.
        TypeError: anything else.

    Example:
        >>> get_scorer("max_sim").reduction
        'mean'
    """
    if isinstance(scorer, Scorer):
        return scorer
    if not isinstance(scorer, str):
        raise TypeError(f"scorer: must be a name or a Scorer object, got {type(scorer).__name__}")
    if scorer not in SCORERS:
        raise ValueError(f"scorer: must be one of {', '.join(map(repr, sorted(SCORERS)))}, got {scorer!r}")
    return SCORERS[scorer]()


def with_head(head: Head) -> HeadScorer:
    """The scorer of a head, with its default options. Raises ValueError for a head that no scorer is named after."""
    plain = get_scorer(head.name)
    assert isinstance(plain, HeadScorer)
    return replace(plain, head=head)
