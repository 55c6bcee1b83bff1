"""The PeakPatch head that comes with the package does what it was trained for, on items training never showed."""

from __future__ import annotations

import pytest
from PIL import Image

import engine
from engine.benchmarks.scenes_negation import NegationBenchmark, evaluate
from engine.encoders.scenes import load_scenes
from engine.heads.base import shipped_head
from engine.heads.registry import load_head
from engine.scenes.negation import negation_items
from engine.scorers.global_cosine import GlobalCosine
from engine.scorers.peak_patch import PeakPatchScorer


def test_it_belongs_to_the_embedded_model():
    head = load_head(shipped_head("peakpatch"), fingerprint=load_scenes().spec.fingerprint)
    assert head.name == "peakpatch" and head.encoder == "scenes"
    assert shipped_head("peakpatch").stat().st_size < 2_000_000


def test_it_lifts_negation_and_keeps_the_rest():
    benchmark = NegationBenchmark(items=90, scenes=60, seed=11)
    scorers = {"global": GlobalCosine(), "peakpatch": PeakPatchScorer()}
    report = evaluate(engine.load("scenes"), scorers, benchmark)
    plain, head = report.result("global"), report.result("peakpatch")
    assert plain.accuracy("negative").value <= 0.1 and head.accuracy("negative").value >= 0.5
    assert head.accuracy("hybrid").value >= plain.accuracy("hybrid").value + 0.1
    assert head.accuracy("positive").value >= plain.accuracy("positive").value - 0.1
    assert head.accuracy().value >= plain.accuracy().value + 0.2
    assert head.recall(5).value >= plain.recall(5).value - 0.04


def test_the_one_liner_scores_and_explains():
    (item,) = negation_items(1, seed=3)
    picture = Image.fromarray(item.image())
    scores = engine.score([picture], item.captions, scorer="peakpatch")
    assert scores.shape == (1, 4) and int(scores[0].argmax()) == item.correct
    shown = engine.load("scenes").explain(picture, item.captions[0], scorer="peakpatch")
    assert shown.total == pytest.approx(float(scores[0, 0]), abs=1e-5)
    assert sum(match.score for match in shown.matches) == pytest.approx(shown.total, abs=1e-5)
