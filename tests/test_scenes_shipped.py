"""The shipped weights show what the README says: the cosine loses who wears what, crops and segments keep it."""

from __future__ import annotations

import pytest

from engine.benchmarks.scenes import STANDARD_SCORERS, ScenesBenchmark, ScenesReport, evaluate
from engine.engine import load

# The first of the 400 items a category of the published table: a few seconds, and room for a few items either way.
ITEMS = 20


@pytest.fixture(scope="module")
def report() -> ScenesReport:
    benchmark = ScenesBenchmark(items=ITEMS, categories=("color", "size", "material"))
    scorers = {name: STANDARD_SCORERS[name] for name in ("global", "sgi rescaled", "sgi native")}
    return evaluate(load("scenes", device="cpu"), scorers, benchmark)


@pytest.mark.parametrize("category", ["color", "size", "material"])
def test_the_cosine_does_not_know_who_wears_what(report: ScenesReport, category: str):
    assert report.result("global", category).group.value <= 0.05


@pytest.mark.parametrize(
    ("scorer", "category"),
    [
        ("sgi rescaled", "color"),
        ("sgi rescaled", "material"),
        ("sgi native", "color"),
        ("sgi native", "size"),
        ("sgi native", "material"),
    ],
)
def test_crops_and_segments_do(report: ScenesReport, scorer: str, category: str):
    assert report.result(scorer, category).group.value >= 0.85


def test_rescaled_crops_lose_the_size(report: ScenesReport):
    assert report.result("sgi rescaled", "size").group.value <= 0.2
