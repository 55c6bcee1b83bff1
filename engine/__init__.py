"""Frozen vision-language encoders in, fine-grained image-text scores out.

Example
-------
>>> import engine
>>> peaksim = engine.load("scenes")
>>> peaksim.spec.embed_dim > 0
True
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from engine.engine import Engine, load, score
    from engine.features import ImageFeatures, Needs, RegionPlan, TextFeatures
    from engine.retrieval.index import Index
    from engine.scorers.base import Match, Scorer
    from engine.scorers.explanation import Explanation
    from engine.scorers.global_cosine import GlobalCosine
    from engine.scorers.max_sim import MaxSim
    from engine.scorers.sgi import SGI

__all__ = [
    "SGI",
    "Engine",
    "Explanation",
    "GlobalCosine",
    "ImageFeatures",
    "Index",
    "Match",
    "MaxSim",
    "Needs",
    "RegionPlan",
    "Scorer",
    "TextFeatures",
    "load",
    "score",
]

_HOME = {
    "SGI": "engine.scorers.sgi",
    "Engine": "engine.engine",
    "Explanation": "engine.scorers.explanation",
    "GlobalCosine": "engine.scorers.global_cosine",
    "ImageFeatures": "engine.features",
    "Index": "engine.retrieval.index",
    "Match": "engine.scorers.base",
    "MaxSim": "engine.scorers.max_sim",
    "Needs": "engine.features",
    "RegionPlan": "engine.features",
    "Scorer": "engine.scorers.base",
    "TextFeatures": "engine.features",
    "load": "engine.engine",
    "score": "engine.engine",
}


def __getattr__(name: str) -> object:
    # Names are fetched when they are first used: the command line shows its help without loading torch.
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    value = getattr(_importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
