"""The heads that come with the package belong to the embedded model and do what they were trained for."""

from __future__ import annotations

import pytest
from PIL import Image

import engine
from engine.benchmarks.scenes import ScenesBenchmark, evaluate
from engine.encoders.scenes import load_scenes
from engine.heads.base import shipped_head
from engine.heads.registry import load_head, load_window_head
from engine.scenes.items import controlled_items
from engine.scorers.max_sim_head import MaxSimHeadScorer
from engine.scorers.registry import get_scorer
from engine.scorers.sgi import SGI

SHIPPED = ("linear", "max_sim_head", "tfglobal", "tflocal")
# Least group score on held-out pairs, whichever maximum is served.
GATES = {"color": 0.7, "size": 0.7, "material": 0.6}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_heads_belong_to_the_embedded_model(name):
    head = load_head(shipped_head(name), fingerprint=load_scenes().spec.fingerprint)
    assert head.name == name and head.encoder == "scenes"
    assert shipped_head(name).stat().st_size < 4_000_000


def test_the_max_sim_head_binds_on_pairs_training_never_showed():
    scorers = {maximum: MaxSimHeadScorer(maximum=maximum) for maximum in ("soft", "hard")}
    benchmark = ScenesBenchmark(items=60, categories=tuple(GATES))
    report = evaluate(engine.load("scenes"), scorers, benchmark)
    found = {(r.scorer, r.category): r.group.value for r in report.results}
    assert all(found[maximum, category] >= least for maximum in scorers for category, least in GATES.items()), found


def test_the_window_head_binds_from_one_pass_on_pairs_training_never_showed():
    load_window_head(shipped_head("window_head"), fingerprint=load_scenes().spec.fingerprint)
    benchmark = ScenesBenchmark(items=60, categories=tuple(GATES))
    scorer = SGI(crops="windows", head="scenes", full_image=False)
    report = evaluate(engine.load("scenes"), {"sgi": scorer}, benchmark)
    found = {r.category: r.group.value for r in report.results}
    assert all(found[category] >= least for category, least in GATES.items()), found


def test_the_one_liner_scores_and_explains():
    (item,) = controlled_items("color", 1, seed=3)
    pictures = [Image.fromarray(pixels) for pixels in item.images()]
    scores = engine.score(pictures, item.captions, scorer="max_sim_head")
    assert scores.shape == (2, 2)
    assert scores[0, 0] > scores[0, 1] and scores[1, 1] > scores[1, 0]
    shown = engine.load("scenes").explain(pictures[0], item.captions[0], scorer="max_sim_head")
    assert shown.total == pytest.approx(float(scores[0, 0]), abs=1e-5)
    assert sum(match.weight for match in shown.matches) == pytest.approx(1.0)


def test_tflocal_tells_sizes_apart_where_embeddings_alone_do_not():
    scorers = {name: get_scorer(name) for name in ("tflocal", "tfglobal", "linear")}
    report = evaluate(engine.load("scenes"), scorers, ScenesBenchmark(items=60, categories=("size",)))
    found = {r.scorer: r.group.value for r in report.results}
    assert found["tflocal"] > 0.2 and max(found["tfglobal"], found["linear"]) < 0.1, found


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_head_scores_by_its_name(name):
    (item,) = controlled_items("size", 1, seed=3)
    pictures = [Image.fromarray(pixels) for pixels in item.images()]
    scores = engine.score(pictures, item.captions, scorer=name)
    assert scores.shape == (2, 2) and scores.std() > 0
