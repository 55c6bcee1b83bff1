"""The heads that come with the package belong to the embedded model and do what they were trained for."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import engine
from engine.benchmarks.scenes import ScenesBenchmark, evaluate
from engine.encoders.scenes import ScenesEncoder, load_scenes
from engine.engine import Engine
from engine.heads.base import shipped_head, shipped_heads
from engine.heads.registry import load_head, load_window_head
from engine.heads.scene_generator import load_generator
from engine.results.figures import read_figures
from engine.results.generator import Files
from engine.results.max_sim_head import ITEMS, SEEDS
from engine.scenes.items import controlled_items
from engine.scorers.max_sim_head import MaxSimHeadScorer
from engine.scorers.registry import get_scorer
from engine.scorers.sgi import SGI

ROOT = Path(__file__).resolve().parent.parent
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


def test_every_seed_of_the_max_sim_head_binds():
    held = {figure.name: figure for figure in read_figures(ROOT / "docs" / "results" / "max_sim_head.jsonl")}
    assert len(SEEDS) == 3
    for seed in SEEDS:
        for maximum in ("soft", "hard"):
            for category, least in GATES.items():
                figure = held[f"seed {seed} {maximum} held_out {category}"]
                assert figure.items == ITEMS == 400 and figure.value >= least, figure


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


@pytest.fixture(scope="module")
def stranger() -> Engine:
    """The embedded model with other weights: every layer a shipped head reads is there, and of its width."""
    shipped = load_scenes()
    model = deepcopy(shipped._model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        for weight in model.parameters():
            weight.add_(0.01 * torch.randn(weight.shape))
    return Engine(ScenesEncoder(model, shipped.tokenizer.words, name="scenes", device=torch.device("cpu")))


def refused(stranger: Engine, who: str) -> str:
    """The sentence that refuses a head, with both fingerprints."""
    own, other = load_scenes().spec.fingerprint, stranger.spec.fingerprint
    assert own != other
    return rf"{who} must come from the encoder the head was trained on, scenes \({own}\), got those of {other}; train"


# Of what draws the generator has a test of its own, and the judge sees pictures, whatever the encoder.
@pytest.mark.parametrize("name", [path.stem for path in shipped_heads() if not path.stem.startswith("scene_")])
def test_every_shipped_head_refuses_another_encoder(stranger, name):
    (item,) = controlled_items("size", 1, seed=3)
    pictures = [Image.fromarray(pixels) for pixels in item.images()]
    fingerprint, path, windows = stranger.spec.fingerprint, shipped_head(name), name == "window_head"
    load = load_window_head if windows else load_head
    with pytest.raises(ValueError, match=refused(stranger, rf"load_head: .*{name}\.safetensors: the features")):
        load(path, fingerprint=fingerprint)
    scorer = SGI(crops="windows", head="scenes") if windows else get_scorer(name)
    with pytest.raises(ValueError, match=refused(stranger, f"{scorer.name}: features")):
        stranger.score(pictures, item.captions, scorer=scorer)
    with pytest.raises(ValueError, match=refused(stranger, f"{scorer.name}: features")):
        stranger.explain(pictures[0], item.captions[0], scorer=scorer)
    # Features that were made without the scorer are refused by it too.
    with pytest.raises(ValueError, match=refused(stranger, f"{name}: the images")):
        stranger.encode_images(pictures, scorer=scorer.needs()) if windows else scorer.matrix(
            stranger.encode_images(pictures, scorer=scorer.needs()),
            stranger.encode_texts(item.captions, scorer=scorer.needs()),
        )
    if name == "max_sim_head":
        with pytest.raises(ValueError, match=refused(stranger, f"{name}: the texts")):
            scorer.late_queries(stranger.encode_texts(item.captions, scorer=scorer.needs()))
    # Layers and widths fit: nothing but the fingerprint tells that the encoder is another one.
    head = load(path)
    head.fingerprint = fingerprint
    fitting = replace(scorer, head=head)
    assert stranger.score(pictures, item.captions, scorer=fitting).shape == (2, 2)


def test_the_shipped_generator_refuses_another_encoder(stranger, tmp_path):
    own, other = load_scenes().spec.fingerprint, stranger.spec.fingerprint
    sentence = rf"scene_generator\S+ belongs to the encoder scenes \({own}\), wanted one for {other}; `peaksim train"
    with pytest.raises(ValueError, match=sentence):
        load_generator(shipped_head("scene_generator"), fingerprint=other)
    with pytest.raises(ValueError, match=refused(stranger, r"load_head: .*peakpatch\.safetensors: the features")):
        Files.of().load(other, torch.device("cpu"))
    head = load_head(shipped_head("peakpatch"))
    head.fingerprint = other
    with pytest.raises(ValueError, match=sentence):
        Files.of(head=head.save(tmp_path / "head.safetensors")).load(other, torch.device("cpu"))
