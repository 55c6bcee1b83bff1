"""Numbers that no head can be built with, and no training made with, are refused by name before anything is done."""

from __future__ import annotations

import math

import pytest
import torch

from engine.choices import check_numbers
from engine.cli.main import main
from engine.datasets.captioned import CaptionedImages
from engine.encoders.scenes_model import ScenesModelConfig
from engine.heads.base import HeadConfig
from engine.heads.linear import LinearAlignmentConfig
from engine.heads.max_sim_head import MaxSimHeadConfig
from engine.heads.peak_patch import PeakPatchConfig
from engine.heads.tfglobal import TFGlobalConfig
from engine.heads.tflocal import TFLocalConfig
from engine.heads.window_head import WindowHeadConfig
from engine.scenes.negation_training import negation_examples
from engine.training.hard_negatives import with_negatives
from engine.training.head_data import ScenesQuads, epochs
from engine.training.heads import HeadTrainConfig
from engine.training.negation_data import photo_rows
from engine.training.peak_patch import JointObjective
from tests.head_cases import FACTS


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        (MaxSimHeadConfig, "width", 0, "must be at least 1, got 0"),
        (MaxSimHeadConfig, "width", -4, "must be at least 1, got -4"),
        (MaxSimHeadConfig, "dim", 0, "must be at least 1, got 0"),
        (MaxSimHeadConfig, "dim", "x", "must be an integer, got 'x'"),
        (MaxSimHeadConfig, "heads", 0, "must be at least 1, got 0"),
        (MaxSimHeadConfig, "reach", True, "must be an integer, got True"),
        (MaxSimHeadConfig, "image_width", -1, "must be at least 0, got -1"),
        (MaxSimHeadConfig, "text_layers", (0,), "must be at least 1, got 0"),
        (MaxSimHeadConfig, "grid", (0, 0), "must be at least 1, got 0"),
        (MaxSimHeadConfig, "grid", (6,), r"must be rows and columns, got \(6,\)"),
        (MaxSimHeadConfig, "temperature", math.inf, r"must be at most 1e\+30, got inf"),
        (TFLocalConfig, "mlp", -1, "must be at least 0, got -1"),
        (TFLocalConfig, "layers", 1.5, "must be an integer, got 1.5"),
        (TFLocalConfig, "grid", (6, 6, 6), r"must be rows and columns, got \(6, 6, 6\)"),
        (TFGlobalConfig, "mlp", -1, "must be at least 0, got -1"),
        (LinearAlignmentConfig, "embed_dim", -1, "must be at least 0, got -1"),
        (LinearAlignmentConfig, "embed_dim", "x", "must be an integer, got 'x'"),
        (WindowHeadConfig, "hidden", -1, "must be at least 0, got -1"),
        (WindowHeadConfig, "layers", (1, -2), "must be at least 1, got -2"),
        (WindowHeadConfig, "grid", (3,), r"must be rows and columns, got \(3,\)"),
        (PeakPatchConfig, "peak", "8", "must be an integer, got '8'"),
        (ScenesModelConfig, "context_length", 2, "must hold start, end and a word, at least 3, got 2"),
        (ScenesQuads, "items", 0, "must be at least 1, got 0"),
        (ScenesQuads, "seed", -1, r"must be from 0 to below 2\*\*63, got -1"),
        (ScenesQuads, "categories", (), "must name at least one, such as color, got none"),
        (HeadTrainConfig, "seed", -1, "must be at least 0, got -1"),
        (HeadTrainConfig, "seed", 99999999999999999999, "must be at most 8796093022208, got 99999999999999999999"),
        (HeadTrainConfig, "threads", 100_000, "must be at most 1024, got 100000"),
        (HeadTrainConfig, "learning_rate", 1e38, r"must be at most 1000, got 1e\+38"),
        (HeadTrainConfig, "weight_decay", 1e38, r"must be at most 1000, got 1e\+38"),
        (HeadTrainConfig, "clip_norm", 1e300, r"must be at most 1e\+30, got 1e\+300"),
        (JointObjective, "temperature", 0.0, "must be finite and above 0, got 0.0"),
        (JointObjective, "temperature", math.nan, "must be finite and above 0, got nan"),
        (JointObjective, "scale", math.nan, "must be finite and above 0, got nan"),
        (JointObjective, "penalty", math.nan, "must be finite, at least 0, got nan"),
        (JointObjective, "keep", math.nan, "must be finite, at least 0, got nan"),
    ],
)
def test_a_number_out_of_its_bounds_is_refused_by_name(kind, name, value, message):
    with pytest.raises(ValueError, match=f"{kind.__name__}: {name} {message}"):
        kind(**{name: value})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MaxSimHeadConfig(grid=(3, 3)), r"max_sim_head: grid must be tiny's \(2, 3\), got \(3, 3\)"),
        (MaxSimHeadConfig(image_width=5), "max_sim_head: image_width must be tiny's 16, got 5"),
        (MaxSimHeadConfig(text_width=7), "max_sim_head: text_width must be tiny's 16, got 7"),
        (MaxSimHeadConfig(reach=4), r"max_sim_head: reach must be at most the longer side of the grid \(2, 3\), got 4"),
        (TFLocalConfig(grid=(3, 2)), r"tflocal: grid must be tiny's \(2, 3\), got \(3, 2\)"),
        (TFLocalConfig(image_width=5), "tflocal: image_width must be tiny's 16, got 5"),
        (TFLocalConfig(reach=1000), r"tflocal: reach must be at most the longer side of the grid \(2, 3\), got 1000"),
        (TFGlobalConfig(embed_dim=9), "tfglobal: embed_dim must be tiny's 12, got 9"),
        (LinearAlignmentConfig(embed_dim=7), "linear: embed_dim must be tiny's 12, got 7"),
        (WindowHeadConfig(grid=(3, 3)), r"window_head: grid must be tiny's \(2, 3\), got \(3, 3\)"),
        (WindowHeadConfig(image_width=8), "window_head: image_width must be tiny's 16, got 8"),
        (WindowHeadConfig(embed_dim=7), "window_head: embed_dim must be tiny's 12, got 7"),
        (PeakPatchConfig(embed_dim=7), "peakpatch: embed_dim must be tiny's 12, got 7"),
    ],
)
def test_other_sizes_than_the_encoders_are_refused(config: HeadConfig, message: str):
    with pytest.raises(ValueError, match=message):
        config.fitted(FACTS)


def test_the_encoders_own_sizes_may_be_said():
    said = MaxSimHeadConfig(grid=(2, 3), image_width=16, text_width=16)
    assert said.fitted(FACTS) == MaxSimHeadConfig().fitted(FACTS)
    assert TFGlobalConfig(embed_dim=12).fitted(FACTS) == TFGlobalConfig().fitted(FACTS)
    assert TFLocalConfig(reach=3).fitted(FACTS).reach == 3


def test_the_highest_seed_can_be_trained_with():
    seed = HeadTrainConfig(seed=1 << 43).seed
    assert next(epochs(4, 2, seed)).shape == (2,)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1_000_003 + 10**9)


def test_seeds_of_data_are_refused_below_zero():
    none = CaptionedImages("coco", ())
    for who, make in (
        ("negation_examples", lambda: negation_examples(1, seed=-1)),
        ("with_negatives", lambda: with_negatives(none, "none", seed=-1)),
        ("photo_rows", lambda: photo_rows((), seed=-1)),
    ):
        with pytest.raises(ValueError, match=rf"{who}: seed must be from 0 to below 2\*\*63, got -1"):
            make()


def test_a_bound_above_holds_for_what_is_no_number():
    class Settings:
        rate = math.nan

    with pytest.raises(ValueError, match="Settings: rate must be at most 2, got nan"):
        check_numbers(Settings(), at_most={"rate": 2})


@pytest.mark.parametrize("kind", ["ablation", "peak"])
@pytest.mark.parametrize(
    ("option", "value", "least"),
    [("items", 0, 2), ("items", -1, 2), ("items", 1, 2), ("rows", 1, 64), ("seeds", 0, 1), ("steps", 0, 1)],
)
def test_diagnoses_of_nothing_are_refused_before_a_model_is_loaded(
    tmp_path, monkeypatch, capsys, kind, option, value, least
):
    def stop(*_: object, **__: object) -> None:
        raise AssertionError("nothing should have been loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.engine.load_encoder", stop)
    assert main(["diagnose", kind, f"--{option}", str(value)]) == 2
    assert capsys.readouterr().err == f"peaksim: --{option} must be at least {least}, got {value}\n"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("max_sim_head", "--grid", "3", "3"), "max_sim_head: grid must be scenes's (6, 6), got (3, 3)"),
        (("tflocal", "--reach", "1000"), "tflocal: reach must be at most the longer side of the grid (6, 6), got 1000"),
        (("linear", "--data-seed", "-1"), "ScenesQuads: seed must be from 0 to below 2**63, got -1"),
        (("linear", "--categories"), "ScenesQuads: categories must name at least one, such as color, got none"),
        (("peakpatch", "--temperature", "nan"), "JointObjective: temperature must be finite and above 0, got nan"),
        (("peakpatch", "--bound", "inf"), "bound must be finite and above 0, got inf"),
        (("scenes", "--context-length", "1"), "context_length must hold start, end and a word, at least 3, got 1"),
    ],
)
def test_the_command_line_says_it_before_features_are_made(tmp_path, monkeypatch, capsys, call, message):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *call]) == 2
    # Messages of the parser stand in a box that breaks lines.
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in told and not any(path.is_file() for path in tmp_path.rglob("*"))
