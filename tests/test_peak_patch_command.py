"""`peaksim train peakpatch`, and the figures in its log."""

from __future__ import annotations

import json

import pytest
import torch

from engine.benchmarks.negation_figures import NegationFigures
from engine.benchmarks.scenes_negation import NegationBenchmark, evaluate
from engine.cli.peak_patch_training import TrainPeakPatch
from engine.encoders.scenes import save_scenes
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.engine import Engine, load
from engine.heads.peak_patch import PeakPatch
from engine.heads.registry import load_head
from engine.scorers.peak_patch import PeakPatchScorer
from engine.training.scenes import VOCABULARY
from tests.captioned_files import write_coco
from tests.command_line import Shell


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = ScenesModelConfig(width=32, heads=2, image_layers=1, text_layers=3, stem_width=8, embed_dim=16)
    save_scenes(folder, ScenesModel(sizes), VOCABULARY)
    return f"scenes:{folder}"


@pytest.fixture(scope="module")
def engine(model: str) -> Engine:
    return load(model)


def test_figures_are_those_of_the_benchmark(engine):
    head = PeakPatch.build(engine.spec, seed=2).eval()
    head.take_readout(engine.encoder.text_readout())
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    found = NegationFigures(engine, items=24, seed=3)(head)
    benchmark = NegationBenchmark(items=24, scenes=24, seed=3)
    wanted = evaluate(engine, {"peakpatch": PeakPatchScorer(head)}, benchmark).result("peakpatch")
    assert found["choice"] == pytest.approx(wanted.accuracy().value)
    for kind in ("positive", "negative", "hybrid"):
        assert found[f"choice_{kind}"] == pytest.approx(wanted.accuracy(kind).value)
    assert found["r@5"] == pytest.approx(wanted.recall(5).value)
    assert found["r-neg@5"] == pytest.approx(wanted.recall(5, negated=True).value)


def test_figures_follow_the_layers_of_the_head(engine):
    figures = NegationFigures(engine, items=6)
    for parts in ("both", "ecn"):
        head = PeakPatch.build(engine.spec, PeakPatch.config_type(parts=parts)).eval()
        head.take_readout(engine.encoder.text_readout())
        assert 0 <= figures(head)["choice"] <= 1


def test_the_command_trains_a_head_that_scores(model, tmp_path, capsys):
    shell = Shell(capsys)
    options = (
        *("train", "peakpatch", "--model", model, "--rows", "16", "--features", tmp_path / "features"),
        *("--output", tmp_path / "run", "--steps", "3", "--batch-size", "8", "--pretraining-steps", "2"),
        *("--log-every", "1", "--figure-items", "6", "--parts", "ecn"),
    )
    told = shell.json(*options)
    head = load_head(told["head"])
    assert told["scorer"] == "peakpatch" and isinstance(head, PeakPatch) and head.scn is None
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 3 and 0 <= log[-1]["choice_negative"] <= 1
    assert (tmp_path / "run" / "pretraining" / "log.jsonl").exists()
    # What is done already is not done again.
    assert shell(*options) == 0
    assert f"use it as --model {model} --scorer peakpatch --option head={told['head']}" in shell.out
    assert "features of" not in shell.err


def test_rows_are_those_of_the_options(tmp_path, capsys):
    rows = TrainPeakPatch(rows=2, wordings=("held_out",)).read_rows()
    assert len(rows) == 2 and rows != TrainPeakPatch(rows=2).read_rows()
    captions, images, instances = write_coco(tmp_path)
    own = TrainPeakPatch(data=f"coco:{captions}", images=images, instances=instances).read_rows()
    assert len(own) == 12 and own[0].image == images / "000000000000.png"
    assert "12 rows" in capsys.readouterr().err
    with pytest.raises(ValueError, match="peakpatch needs to know what is absent from each picture"):
        TrainPeakPatch(data=f"coco:{captions}", images=images).read_rows()


def test_what_is_left_out_of_the_rows_is_said(tmp_path, capsys):
    captions, images, instances = write_coco(tmp_path, captions=4)
    seen = json.loads(instances.read_text(encoding="utf-8"))
    seen["annotations"].pop()
    instances.write_text(json.dumps(seen), encoding="utf-8")
    TrainPeakPatch(data=f"coco:{captions}", images=images, instances=instances).read_rows()
    said = capsys.readouterr().err
    assert "6 items" in said and "left out captions after the first 3 of a picture: 5 of them" in said
    assert f"left out {images / '000000000005.png'}: two categories must be in it, got 1" in said and "15 rows" in said


@pytest.mark.parametrize("kind", ["peakpatch", "ecn", "scn"])
def test_the_help_says_what_the_figures_are_of(capsys, kind):
    shell = Shell(capsys)
    assert shell("train", kind, "--help") == 0
    words = " ".join(shell.out.replace("│", " ").split())
    assert "rendered scenes that no training shows, also where your own pictures are trained on" in words


@pytest.mark.parametrize("part", ["ecn", "scn"])
def test_each_part_has_its_command_and_broken_pictures_are_left_out(model, tmp_path, capsys, part):
    captions, images, instances = write_coco(tmp_path)
    (images / "000000000001.png").write_bytes(b"broken")
    told = Shell(capsys).json(
        *("train", part, "--model", model, "--data", f"coco:{captions}", "--images", images, "--instances", instances),
        *("--features", tmp_path / "features", "--output", tmp_path / "run", "--steps", "2", "--batch-size", "10"),
        *("--pretraining-steps", "1", "--skip-figures", "--log-every", "1"),
    )
    head = load_head(told["head"])
    assert isinstance(head, PeakPatch) and head.config.parts == part and told["scorer"] == "peakpatch"
    # Six pictures of two captions, one of them broken: a batch of ten is all there is.
    assert (tmp_path / "run" / "pretraining").exists() == (part == "ecn")
