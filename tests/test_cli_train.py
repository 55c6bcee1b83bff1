"""``peaksim train`` of heads from the command line: trains, goes on, says how the head is used, and scores with it."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engine.cli import window_head_training
from engine.cli.main import main
from engine.cli.peak_patch_training import TrainECN, TrainPeakPatch, TrainSCN
from engine.cli.training import OnQuads, TrainHead
from engine.cli.training_data import OnData
from engine.encoders.scenes import load_scenes
from engine.heads.ecn import ECNConfig
from engine.heads.linear import LinearAlignmentConfig
from engine.heads.max_sim_head import MaxSimHeadConfig
from engine.heads.peak_patch import PeakPatchConfig
from engine.heads.registry import load_head, load_window_head
from engine.heads.scn import SCNConfig
from engine.heads.tfglobal import TFGlobalConfig
from engine.heads.tflocal import TFLocalConfig
from engine.heads.window_head import WindowHeadConfig
from engine.training.heads import HeadTrainConfig
from engine.training.processes import Processes
from engine.training.scenes import ScenesTrainConfig
from engine.training.windows import WindowData, WindowObjective, WindowPictures, window_data
from tests import tiny_scenes

ASSETS = Path(__file__).parent.parent / "engine" / "assets" / "scenes"
SMALL = ("--items", "3", "--categories", "color", "size", "--steps", "2", "--batch-size", "2", "--skip-figures")


def train(kind: str, folder: Path, *more: str) -> int:
    return main(["train", kind, *SMALL, "--features", str(folder / "features"), "--output", str(folder / "run"), *more])


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("max_sim_head", ("--width", "16", "--dim", "8")),
        ("tflocal", ("--layers", "1", "--width", "16")),
        ("tfglobal", ("--layers", "1", "--width", "16")),
        ("linear", ()),
    ],
)
def test_train_writes_a_head_that_scores(tmp_path, capsys, kind, more):
    assert train(kind, tmp_path, *more) == 0
    done = capsys.readouterr()
    path = tmp_path / "run" / f"{kind}.safetensors"
    assert f"use it as --scorer {kind} --option head={path}" in " ".join(done.out.split())
    assert "peaksim: features of images: 12/12" in done.err and load_head(path).encoder == "scenes"
    # The second call finds features, checkpoint and log, and has nothing left to do.
    assert train(kind, tmp_path, *more, "--json") == 0
    done = capsys.readouterr()
    assert json.loads(done.out) == {"head": str(path), "scorer": kind} and "features of" not in done.err
    call = ["eval", "scenes", "--limit", "2", "--scorer", kind, "--option", f"head={path}", "--json"]
    assert main(call) == 0
    assert json.loads(capsys.readouterr().out)


def test_figures_of_held_out_pairs_are_logged(tmp_path, capsys):
    small = (*(word for word in SMALL if word != "--skip-figures"), "--figure-items", "3")
    folders = ("--features", str(tmp_path / "features"), "--output", str(tmp_path / "run"))
    assert main(["train", "linear", *small, *folders, "--seed", "1"]) == 0
    assert "step 2/2  loss " in capsys.readouterr().err
    last = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])
    assert {"group_color", "group_size"} <= set(last) and last["step"] == 2


def test_finetuning_writes_over_no_model(tmp_path, capsys):
    own = tmp_path / "own"
    own.mkdir()
    for name in ("model.json", "model.safetensors"):
        (own / name).write_bytes((ASSETS / name).read_bytes())
    assert main(["train", "finetune", *SMALL, "--model", f"scenes:{own}", "--output", str(own)]) == 2
    assert f"{own} holds model.safetensors and no checkpoint.pt" in " ".join(capsys.readouterr().err.split())
    assert (own / "model.safetensors").read_bytes() == (ASSETS / "model.safetensors").read_bytes()


def test_finetune_writes_a_model(tmp_path, capsys):
    small = (*(word for word in SMALL if word != "--skip-figures"), "--figure-items", "2", "--categories", "color")
    assert main(["train", "finetune", *small, "--output", str(tmp_path / "run"), "--json"]) == 0
    done = capsys.readouterr()
    assert json.loads(done.out) == {"model": f"scenes:{tmp_path / 'run'}"} and "group_color 0." in done.err
    assert load_scenes(tmp_path / "run").spec.fingerprint != load_scenes().spec.fingerprint


def test_window_head_makes_regions_for_sgi(tmp_path, capsys):
    small = ("--pictures", "4", "--windows", "2", "--steps", "2", "--batch-size", "2", "--layers", "4", "5")
    folders = ("--features", str(tmp_path / "features"), "--output", str(tmp_path / "run"))
    assert main(["train", "window_head", *small, *folders, "--figure-items", "2"]) == 0
    done = capsys.readouterr()
    path = tmp_path / "run" / "window_head.safetensors"
    assert f"--option crops=windows --option full_image=False --option head={path}" in " ".join(done.out.split())
    assert "peaksim: features of windows: 4/4" in done.err and "group_material " in done.err
    assert load_window_head(path).encoder == "scenes"
    # Of pictures of one's own, too.
    Image.new("RGB", (120, 80), "red").save(tmp_path / "a.png")
    Image.new("RGB", (64, 64), "blue").save(tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes(b"broken")
    folders = ("--features", str(tmp_path / "features"), "--output", str(tmp_path / "own"))
    assert main(["train", "window_head", "--images", str(tmp_path), *small[2:], *folders]) == 0
    done = capsys.readouterr()
    assert "peaksim: features of windows: 2/2" in done.err and "group" not in done.err
    assert f"left out {tmp_path / 'c.png'}: this is not an image" in done.err
    call = ["eval", "scenes", "--limit", "2", "--scorer", "sgi", "--option", "crops=windows", "--json"]
    assert main([*call, "--option", f"head={path}"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("call", "scorer"),
    [
        (("linear", "--items", "2", "--categories", "color"), "--scorer linear"),
        (("window_head", "--pictures", "2", "--windows", "2", "--wordings", "2"), "--scorer sgi --option"),
    ],
)
def test_a_head_of_another_model_is_used_with_it(tmp_path, capsys, call, scorer):
    model = tiny_scenes.write_folder(tmp_path / "model")
    folders = ("--features", str(tmp_path / "features"), "--output", str(tmp_path / "run"))
    short = ("--steps", "1", "--batch-size", "2", "--skip-figures")
    assert main(["train", *call, "--model", model, *short, *folders]) == 0
    assert f"use it as --model {model} {scorer} " in " ".join(capsys.readouterr().out.split())


def test_of_several_processes_the_main_one_makes_the_windows_and_each_has_its_place(tmp_path, monkeypatch):
    asked: list[str] = []

    class Noted(Processes):
        def place(self, device: str) -> str:
            asked.append(device)
            return "cpu"

        @contextmanager
        def main_first(self) -> Iterator[None]:
            asked.append("main first")
            yield
            asked.append("the others")

    def noted(*given: Any, **more: Any) -> WindowData:
        asked.append("windows")
        return window_data(*given, **more)

    monkeypatch.setattr(window_head_training, "processes", Noted)
    monkeypatch.setattr(window_head_training, "window_data", noted)
    small = ("--pictures", "2", "--windows", "2", "--steps", "1", "--batch-size", "2", "--layers", "5")
    folders = ("--features", str(tmp_path / "features"), "--output", str(tmp_path / "run"))
    assert main(["train", "window_head", *small, *folders, "--skip-figures", "--wordings", "2"]) == 0
    assert asked == ["auto", "main first", "windows", "the others"]


def test_a_generator_is_not_trained_by_several_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("engine.cli.generator_training.processes", lambda: Processes(1, 2))
    assert main(["train", "generator", "--output", str(tmp_path / "run")]) == 2
    assert "train generator: must run in one process, got 2; call it without" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


HEADS = ("max_sim_head", "tflocal", "tfglobal", "linear", "window_head", "peakpatch", "ecn", "scn")
KINDS = ("scenes", *HEADS, "finetune")


@pytest.mark.parametrize("kind", KINDS)
def test_help_shows_every_option(capsys, kind):
    assert main(["train", kind, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--json" in shown and "--learning-rate" in shown and "``" not in shown and "(default: None)" not in shown
    assert "noqa" not in shown


@pytest.mark.parametrize("call", [("train", "linear"), ("diagnose", "peak"), ("train",)])
def test_a_wrong_option_is_answered_with_the_whole_command(capsys, call):
    assert main([*call, "--no-such-option"]) == 2
    # In a frame, whose lines are as wide as the terminal.
    assert " ".join(("peaksim", *call, "--help")) in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "kind",
    [
        *(HeadTrainConfig, ScenesTrainConfig, MaxSimHeadConfig, TFLocalConfig, TFGlobalConfig, LinearAlignmentConfig),
        *(WindowHeadConfig, WindowPictures, WindowObjective),
        *(ECNConfig, SCNConfig, PeakPatchConfig, TrainHead, TrainPeakPatch, TrainECN, TrainSCN, OnQuads, OnData),
    ],
)
def test_every_option_has_words_on_one_line(kind):
    body = ast.parse(inspect.getsource(kind)).body[0].body
    for place, line in enumerate(body):
        if isinstance(line, ast.AnnAssign) and not ast.unparse(line.annotation).startswith("ClassVar"):
            words = body[place + 1]
            assert isinstance(words, ast.Expr) and isinstance(words.value.value, str), line.target.id
            # Help breaks its lines where the source does.
            assert "\n" not in words.value.value, line.target.id


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("linear", "--wordings", "held_out"), "train --data scenes --negatives auto: has no use for --wordings"),
        (("linear", "--negatives", "negation", "--categories", "size"), "negatives negation: has no use for --categ"),
        (("linear", "--negatives", "negation", "--described-share", ".5"), "has no use for --described-share"),
        (("linear", "--data", "coco:x.json", "--items", "3"), "train --data coco:x.json: has no use for --items"),
        (("linear", "--data", "coco:x.json", "--categories", "size"), "has no use for --categories"),
        (("finetune", "--data", "coco:x.json", "--described-share", ".5"), "has no use for --described-share"),
        (("finetune", "--data", "coco:x.json", "--wordings", "held_out"), "has no use for --wordings"),
        (("peakpatch", "--loss", "batch"), "train peakpatch: has no use for --loss"),
        (("ecn", "--batch-weight", "1"), "train peakpatch: has no use for --batch-weight"),
        (("window_head", "--loss", "batch"), "train window_head: has no use for --loss"),
        (("window_head", "--batch-weight", "1"), "train window_head: has no use for --batch-weight"),
        (("window_head", "--images", "x", "--wording", "1"), "window_head --images: has no use for --wording"),
        (("window_head", "--images", "x", "--wordings", "9"), "window_head --images: has no use for --wordings"),
        (("window_head", "--images", "x", "--pictures", "9"), "window_head --images: has no use for --pictures"),
        (("window_head", "--images", "x", "--figure-items", "9"), "has no use for --figure-items"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused_by_name(tmp_path, monkeypatch, capsys, call, message):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *call]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--rows", "9"), ("--wordings", "held_out")])
def test_peakpatch_refuses_what_scenes_alone_have(tmp_path, monkeypatch, capsys, option):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "scn", "--data", "coco:x.json", "--instances", "y.json", *option]) == 2
    assert f"train peakpatch --data coco:x.json: has no use for {option[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "items"),
    [
        (("linear", "--items", "3", "--categories", "color", "size"), 6),
        (("linear", "--negatives", "negation", "--items", "20", "--figure-items", "5"), 18),
        (("linear", "--negatives", "negation", "--items", "20", "--skip-figures"), 20),
        (("finetune", "--items", "3", "--categories", "color"), 3),
        (("window_head", "--pictures", "7"), 7),
        (("peakpatch", "--rows", "6"), 6),
        (("scn", "--rows", "6"), 6),
        (("generator", "--items", "6"), 6),
    ],
)
def test_a_batch_of_more_items_than_there_are_is_refused_before_anything_is_computed(
    tmp_path, monkeypatch, capsys, call, items
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.engine.load", None)
    assert main(["train", *call, "--batch-size", str(items + 1)]) == 2
    said = f"--batch-size: must be at most the {items} items that are trained on, got {items + 1}"
    assert said in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.npy"))


def test_the_batch_of_the_first_training_of_both_corrections_counts_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.engine.load", None)
    assert main(["train", "ecn", "--rows", "1500", "--preset", "paper", "--skip-figures"]) == 2
    assert "--batch-size: must be at most the 1500 items that are trained on, got 2048" in capsys.readouterr().err


def test_a_wrong_call_is_one_line(tmp_path, capsys):
    assert train("linear", tmp_path, "--loss", "x") == 2
    assert "loss" in capsys.readouterr().err
