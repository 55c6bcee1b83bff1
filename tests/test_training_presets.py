"""Settings of the papers, which options of one's own change, and the bar that shows how far a training is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from engine.cli.main import main
from engine.cli.peak_patch_training import TrainECN, TrainPeakPatch
from engine.cli.progress import Told
from engine.cli.training import TrainFinetune, TrainLinear, TrainMaxSimHead, TrainTFLocal
from engine.encoders.scenes import load_scenes
from engine.heads.base import shipped_head
from engine.heads.peak_patch import PeakPatchConfig
from engine.heads.registry import load_head
from engine.heads.tfglobal import TFGlobalConfig
from engine.heads.tflocal import TFLocalConfig
from engine.training.peak_patch import PAPER, SCENES, SCENES_TRAINING
from engine.training.presets import TRAINING, head_for


def test_scenes_are_the_default_and_the_papers_numbers_are_those_of_the_papers():
    assert TrainTFLocal().config == TRAINING["tflocal"]
    found = TrainTFLocal(preset="paper").config
    assert (found.epochs, found.learning_rate, found.weight_decay, found.warmup_steps) == (10, 1e-4, 0.1, 50)
    assert found.batch_weight == 0 and found.output == TRAINING["tflocal"].output
    found = TrainFinetune(preset="paper").config
    assert (found.batch_size, found.learning_rate, found.epsilon, found.weight_decay) == (400, 1e-6, 1e-6, 0.1)
    found = TrainLinear(preset="paper").config
    assert (found.batch_size, found.learning_rate, found.epochs, found.loss) == (1024, 1e-3, 10, "captions")


def test_sizes_of_the_shipped_heads_are_for_the_embedded_model_alone():
    spec = load_scenes().spec
    for name, kind in (("tflocal", TFLocalConfig), ("tfglobal", TFGlobalConfig)):
        shipped = load_head(shipped_head(name)).config
        assert kind().fitted(spec) != shipped == head_for(name, spec, kind()).fitted(spec)
        assert head_for(name, spec, kind(layers=1)) == kind(layers=1)
        assert head_for(name, replace(spec, family="clip"), kind()) == kind()


def test_options_of_ones_own_go_before_the_papers():
    given = replace(TRAINING["tflocal"], learning_rate=3e-4, seed=5)
    found = TrainTFLocal(preset="paper", training=given).config
    assert (found.learning_rate, found.seed, found.epochs) == (3e-4, 5, 10)
    with pytest.raises(ValueError, match=r"^--preset: paper must be of .*tflocal, got max_sim_head, which is our own"):
        _ = TrainMaxSimHead(preset="paper").config


def test_the_two_trainings_of_peak_patch_are_those_of_the_paper():
    head, objective, joint, first = TrainPeakPatch().settings()
    assert (objective, joint) == (SCENES, SCENES_TRAINING) and first is not None and first.steps == 150
    head, objective, joint, first = TrainPeakPatch(preset="paper").settings()
    assert objective == PAPER and head.dropout == PeakPatchConfig.dropout and first is not None
    assert (joint.epochs, joint.batch_size, joint.learning_rate, joint.part_rates) == (10, 1024, 1e-4, (("ecn.", 0.1),))
    assert (first.epochs, first.batch_size, first.learning_rate, first.weight_decay) == (20, 2048, 1e-3, 0.01)
    assert first.output != joint.output
    # A part alone has nothing to be slower than.
    assert TrainECN(preset="paper").settings()[2].part_rates == ()
    assert TrainPeakPatch(preset="paper", pretraining_steps=0).settings()[3] is None


def test_a_bar_shows_features_and_steps(tmp_path, monkeypatch, capsys):
    drawn: list[tuple[str, int, int]] = []

    @contextmanager
    def bar(what: str) -> Iterator[Told]:
        yield lambda *told: drawn.append(told)

    monkeypatch.setattr("engine.cli.training_data.bar", bar)
    sizes = ("--items", "4", "--categories", "color", "--batch-size", "2", "--steps", "4", "--log-every", "2")
    folders = ("--features", str(tmp_path / "features"), "--output", str(tmp_path / "run"))
    assert main(["train", "linear", "--loss", "quads", "--skip-figures", *sizes, *folders]) == 0
    said = capsys.readouterr().err
    assert ("features of images", 8, 8) in drawn and ("features of texts", 8, 8) in drawn
    assert [told for told in drawn if told[0] == "training"] == [("training", 2, 4), ("training", 4, 4)]
    # What a step gave stays on the screen above the bar.
    assert "step 4/4  loss " in said and "features of" not in said
