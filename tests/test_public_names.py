"""What `import engine` offers is a promise: a name comes or goes only together with this list."""

from __future__ import annotations

import types

import engine

NAMES = [
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


def test_the_names_are_these_and_few():
    assert sorted(engine.__all__) == sorted(NAMES)
    assert len(engine.__all__) <= 15


def test_every_name_is_there_and_says_what_it_is():
    for name in engine.__all__:
        value = getattr(engine, name)
        assert name.startswith("__") or (value.__doc__ or "").strip(), name


def test_nothing_else_is_public():
    stray = {
        name
        for name, value in vars(engine).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name not in engine.__all__
    }
    # `from __future__ import annotations` leaves its name behind.
    assert stray <= {"annotations"}
    modules = {
        n for n, v in vars(engine).items() if isinstance(v, types.ModuleType) and not n.startswith("_")
    }
    assert {name for name in modules if not getattr(engine, name).__name__.startswith("engine.")} == set()
