"""The command line, run in this process: what is printed, exit codes, and what it says when it goes wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from engine.benchmarks import demo
from engine.benchmarks.demo import DemoConfig, DemoResult
from engine.cli.demonstration import in_words
from engine.cli.main import COMMANDS
from engine.cli.options import image_files, scorer_named, scorer_with
from engine.encoders.registry import families
from engine.engine import Engine
from engine.scenes.items import CATEGORIES
from engine.scorers.max_sim import MaxSim
from engine.scorers.sgi import SGI
from tests.command_line import Shell, fake_shell
from tests.fake_encoder import FakeEncoder, picture


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return fake_shell(monkeypatch, capsys)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    picture("red", "blue").save(folder / "a.png")
    picture("green").save(folder / "more" / "b.PNG")
    (folder / "notes.txt").write_text("no picture")
    return folder


MODEL = ("--model", "fake", "--segmenter", "rules")
TEXTS = ("--text", "a red box and a blue box", "--text", "green grass")


def test_scores_are_those_of_the_engine(shell: Shell, photos: Path):
    found = shell.json("score", photos, *TEXTS, *MODEL, "--scorer", "sgi", "--option", "crops=native")
    assert found["images"] == [str(photos / "a.png"), str(photos / "more" / "b.PNG")]
    assert found["texts"] == [TEXTS[1], TEXTS[3]]
    assert found["scorer"] == repr(SGI(crops="native")) and found["failures"] == []
    engine = Engine(FakeEncoder(), segmenter="rules")
    expected = engine.score(found["images"], found["texts"], scorer=SGI(crops="native")).tolist()
    assert [pytest.approx(row, abs=1e-5) for row in expected] == found["scores"]


def test_the_table_of_scores_names_images_and_texts(shell: Shell, photos: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(photos)
    long = "a red box to the left of a blue box"
    assert shell("score", ".", "--text", long, "--text", "blue", *MODEL) == 0
    assert "a.png" in shell.out and "b.PNG" in shell.out and f"text 0: {long}" in shell.out
    assert shell("score", photos, "--text", "[red]", "--text", "blue", *MODEL) == 0
    assert "[red]" in shell.out and "text 0" not in shell.out
    assert shell("score", photos / "a.png", *TEXTS, *MODEL) == 0
    assert "caption" in shell.out and "green grass" in shell.out
    value = Engine(FakeEncoder()).score(photos / "a.png", "green grass").item()
    assert f"{value:.4f}" in shell.out and shell.err == ""


def test_captions_may_come_from_a_file(shell: Shell, photos: Path, tmp_path: Path):
    file = tmp_path / "captions.txt"
    file.write_text("red\n\n blue \n", encoding="utf-8")
    found = shell.json("score", photos, "--text", "green", "--text-file", file, *MODEL)
    assert found["texts"] == ["green", "red", "blue"]


def test_pairs_and_outputs(shell: Shell, photos: Path):
    files = image_files((str(photos),))
    found = shell.json("score", *files, *TEXTS, *MODEL, "--pairs", "--output", "logit")
    expected = Engine(FakeEncoder()).score(files, found["texts"], pairs=True, output="logit").tolist()
    assert found["scores"] == pytest.approx(expected, abs=1e-5)
    assert shell("score", *files, *TEXTS, *MODEL, "--pairs") == 0
    assert "green grass" in shell.out
    assert shell("score", files[0], *TEXTS, *MODEL, "--pairs") == 2
    assert shell.err == "peaksim: --pairs needs as many captions as pictures, got 2 and 1\n"


def test_broken_pictures_are_named_at_the_end_and_in_the_exit_code(shell: Shell, photos: Path):
    (photos / "broken.jpg").write_bytes(b"no picture")
    assert shell("score", photos, *TEXTS, *MODEL, "--json") == 1
    found = json.loads(shell.out)
    assert len(found["images"]) == 2 and found["failures"][0]["id"] == str(photos / "broken.jpg")
    assert "broken.jpg: " in shell.err and shell.err.endswith("peaksim: 1 picture could not be read\n")
    assert shell("classify", photos, "--label", "red", "--label", "blue", "--model", "fake") == 1
    assert shell("score", photos / "broken.jpg", *TEXTS, *MODEL) == 1
    assert "broken.jpg" in shell.err and shell.out == ""
    files = [photos / "broken.jpg", photos / "a.png"]
    assert shell("score", *files, *TEXTS, *MODEL, "--pairs", "--json") == 1
    assert json.loads(shell.out)["texts"] == ["green grass"]


def test_explain_shows_words_and_saves_the_picture(shell: Shell, photos: Path, tmp_path: Path):
    target = tmp_path / "found.png"
    call = ("explain", photos / "a.png", "--text", "a red box and a blue box", *MODEL)
    assert shell(*call, "--draw", target) == 0
    assert "a red box" in shell.out and "sgi score" in shell.out and f"saved {target}" in shell.out
    with Image.open(target) as drawn:
        assert drawn.width >= 480
    found = shell.json(*call, "--scorer", "max_sim")
    assert [match["text"] for match in found["matches"]] == ["a", "red", "box", "and", "a", "blue", "box"]
    assert found["drawn"] is None and found["scorer"] == repr(MaxSim())


def test_classify_names_the_best_labels(shell: Shell, photos: Path):
    labels = ("--label", "red", "--label", "green", "--label", "blue")
    found = shell.json("classify", photos, *labels, "--top", "2", "--template", "{}", "--model", "fake")
    assert [entry["labels"][0]["label"] for entry in found["images"]][1] == "green"
    assert all(len(entry["labels"]) == 2 for entry in found["images"])
    assert shell("classify", photos, *labels, "--model", "fake") == 0
    assert "green" in shell.out and "%" in shell.out
    assert shell("classify", photos, *labels, "--top", "0", "--model", "fake") == 2
    assert shell.err == "peaksim: --top must be at least 1, got 0\n"


def test_labels_that_are_too_long_are_named_as_they_were_given(shell: Shell, photos: Path):
    stem = " ".join(f"w{number}" for number in range(12))
    long = [f"{stem} {word}" for word in ("end", "stop")]
    labels = [word for label in ("red", *long) for word in ("--label", label)]
    assert shell("classify", photos, *labels, "--model", "fake") == 0
    first, second = (repr(label[:39] + "…") for label in long)
    assert shell.err == (
        "peaksim: warning: classify: longer than the model's context and cut: "
        f"label 1 ({first}), 2 ({second}); sentences of theirs are equal after the cut: labels [1, 2]\n"
    )


def test_models_lists_the_families(shell: Shell):
    assert shell("models") == 0
    assert all(family.example in shell.out for family in families())
    lines = shell.out.splitlines()
    clip = next(line for line in lines if "open_clip:ViT-B-32/openai" in line)
    assert "projected" in clip and "77" in clip and "lower case" in clip and "hidden (not" in shell.out
    assert "A folder that `peaksim export` wrote is a --model too" in shell.out
    assert shell("models", "--json") == 0
    found = json.loads(shell.out)
    assert [entry["example"] for entry in found] == [family.example for family in families()]


def test_models_states_the_facts_of_one_model(shell: Shell):
    assert shell("models", "fake") == 0
    facts = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in shell.out.splitlines() if "│" in line}
    assert facts["taps"] == "hidden (not aligned), projected" and facts["context length"] == "12"
    found = shell.json("models", "fake")
    assert found["taps"] == {"hidden": False, "projected": True} and found["fingerprint"] == "fake-1"
    assert shell("models", "other") == 2 and "load: name must be 'fake', got 'other'" in shell.err


def test_doctor_says_what_is_there(shell: Shell):
    assert shell("doctor") == 0
    assert "backend" in shell.out and "torch" in shell.out and "segmenter: " in shell.out
    assert {"backends", "packages", "missing"} <= shell.json("doctor").keys()


def test_demo_scores_and_draws(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def run(config: DemoConfig, *, progress: object) -> DemoResult:
        asked.append(config)
        fake = Engine(FakeEncoder(context_length=40), segmenter="rules")
        return demo.run(config, engine=fake, progress=None)

    monkeypatch.setattr("engine.cli.demonstration.run", run)
    target = tmp_path / "demo"
    assert shell("demo", "--model", "fake", "--items", "1", "--output", target) == 0
    assert asked == [DemoConfig(output=target, items=1, model="fake")]
    assert all(name in shell.out for name in ("color", "sgi native", "index.html", "peaksim explain"))
    assert (target / "index.html").exists()


def test_a_piped_demo_says_what_it_does_and_how_long_it_takes(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake = Engine(FakeEncoder(context_length=40), segmenter="rules")
    monkeypatch.setattr(
        "engine.cli.demonstration.run", lambda config, *, progress: demo.run(config, engine=fake, progress=progress)
    )
    assert shell("demo", "--items", "2", "--output", tmp_path / "demo") == 0
    lines = shell.err.splitlines()
    assert lines[0] == "peaksim: demo: 5 categories of 2 items and 2 choices with negations, scored and drawn"
    assert lines[1].startswith("peaksim: color: global, max_sim, sgi rescaled (")
    assert lines[1].endswith(" of 40 pictures)") and lines[-1].startswith("peaksim: negation: global, ")
    assert len(lines) == 1 + 2 * 5 + 1
    assert in_words(DemoConfig()).endswith("; about a minute on two cores")
    assert "minute" not in in_words(DemoConfig(model="hf:other"))


def test_a_piped_evaluation_names_its_steps(shell: Shell):
    assert shell("eval", "scenes", "--limit", "1", "--scorer", "global", *MODEL) == 0
    assert [line.split(" (")[0] for line in shell.err.splitlines() if "(" in line and "warning" not in line] == [
        f"peaksim: {category}: global" for category in CATEGORIES
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(shell: Shell, command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert shell(command, "--help") == 0
    assert "``" not in shell.out and "(default: )" not in shell.out and "(default: None)" not in shell.out
    # Where there are no words the default stands alone, behind the option or on the line below it.
    bare = [line for line in shell.out.splitlines() if re.search(r"^\W*(--\S+ .*?  +)?\((default|opt|repeat)", line)]
    assert not bare, bare


TINY = (
    *("--steps", "1", "--batch-size", "2", "--width", "8", "--heads", "1", "--stem-width", "8"),
    *("--image-layers", "1", "--text-layers", "1", "--skip-figures"),
)


def test_train_writes_a_model(shell: Shell, tmp_path: Path):
    found = shell.json("train", "scenes", *TINY, "--output", tmp_path / "run")
    assert found == {"model": f"scenes:{tmp_path / 'run'}"}
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert "step 1/1" in shell.err
    assert shell("train", "scenes", *TINY, "--output", tmp_path / "run") == 0
    assert f"--model scenes:{tmp_path / 'run'}" in shell.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score", "--text", "red"], "give at least one picture, or a folder of pictures"),
        (["score", "{photos}"], "give at least one caption: --text '...' or --text-file FILE"),
        (["score", "{photos}", "--text", "red", "--model", "clip"], "load: name must be 'fake', got 'clip'"),
        (
            ["score", "{photos}", "--text", "red", "--scorer", "x"],
            "scorer: must be one of 'global', ",
        ),
        (["score", "{empty}", "--text", "red"], "the folder must hold pictures (.bmp, "),
        (["score", "{photos}", "--text", "red", "--option", "crops"], "--option: must be NAME=VALUE"),
        (
            ["score", "{photos}", "--text", "red", "--batch-size", "0"],
            "--batch-size must be at least 1, got 0",
        ),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    shell: Shell, photos: Path, tmp_path: Path, arguments: list[str], message: str
):
    (tmp_path / "empty").mkdir()
    places = {"photos": photos, "empty": tmp_path / "empty"}
    filled = [argument.format_map(places) if argument.startswith("{") else argument for argument in arguments]
    if "--model" not in filled:
        filled += ["--model", "fake"]
    assert shell(*filled) == 2
    assert shell.out == "" and shell.err.startswith("peaksim: ") and shell.err.count("\n") == 1
    assert message in shell.err


def test_what_cannot_be_done_is_exit_code_1(shell: Shell, photos: Path):
    assert shell("compare", photos / "absent.json") == 1
    assert "absent.json" in shell.err and "Traceback" not in shell.err
    assert shell("score", photos / "absent.png", "--text", "red", *MODEL) == 1
    assert "absent.png" in shell.err


def test_debug_shows_the_traceback(shell: Shell):
    assert shell("score", "--text", "red", "--debug") == 2
    assert "Traceback" in shell.err and "give at least one picture" in shell.err


def test_what_nobody_expected_is_named_by_its_kind(shell: Shell, monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise RuntimeError("no\nmemory")

    monkeypatch.setattr("engine.doctor.examine", fail)
    assert shell("doctor") == 1
    assert shell.err == "peaksim: RuntimeError: no memory (--debug shows where)\n"

    def diverge() -> None:
        raise FloatingPointError("the gradient is not finite")

    monkeypatch.setattr("engine.doctor.examine", diverge)
    assert shell("doctor") == 1
    assert shell.err == "peaksim: the gradient is not finite\n"

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.doctor.examine", interrupt)
    assert shell("doctor") == 130
    assert shell.err == "peaksim: interrupted\n"


def test_warnings_are_one_line_too(shell: Shell, photos: Path):
    long = " ".join(map(str, range(40)))
    assert shell("score", photos, "--text", long, *MODEL) == 0
    assert shell.err.startswith("peaksim: warning: encode_texts: longer than the model's context")
    assert shell.err.count("\n") == 1


def test_options_are_read_as_their_types():
    options = ("crops=native", "exclusive=true", "full_image=False", "fill=1,2,3", "backend=none")
    assert scorer_with("sgi", options) == SGI(
        crops="native", exclusive=True, full_image=False, fill=(1, 2, 3), backend=None
    )
    assert scorer_with("max_sim", ("temperature=0.1", "tap=value")) == MaxSim(temperature=0.1, tap="value")
    assert scorer_with("max_sim", ("temperature=None",)) == MaxSim()
    assert scorer_with("sgi", ("template=a photo of {}, close",)).template == "a photo of {}, close"
    for options, message in (
        (("size=3",), r"an option of 'sgi' \(grid, crops, .*\), got 'size=3'"),
        (("exclusive=yes",), "exclusive must be true or false, got 'yes'"),
        (("crops=big",), "crops must be one of 'rescaled', 'native', 'windows', got 'big'"),
    ):
        with pytest.raises(ValueError, match=message):
            scorer_with("sgi", options)
    for given in (("crops=native", "crops=rescaled"), ("crops=native", "grid=scenes", "crops=native")):
        with pytest.raises(ValueError, match="--option: crops must be given once, got crops=native and "):
            scorer_with("sgi", given)
    with pytest.raises(ValueError, match="crops must be given once"):
        scorer_named("sgi?crops=native&crops=rescaled")
    with pytest.raises(ValueError, match="temperature must be a number, got 'warm'"):
        scorer_with("max_sim", ("temperature=warm",))
    with pytest.raises(ValueError, match=r"an option of 'global' \(it has none\), got 'a=b'"):
        scorer_with("global", ("a=b",))


def test_a_file_is_taken_whatever_its_name_is(photos: Path):
    assert image_files((str(photos / "notes.txt"),)) == [photos / "notes.txt"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(shell: Shell, command: str):
    assert shell(command, "--help") == 0
    # Commands of several kinds show their options one level below.
    shown = "--json" in shell.out or "subcommands" in shell.out
    assert f"usage: peaksim {command}" in shell.out and shown


def test_help_is_there_at_once_and_without_torch():
    code = (
        "import sys; from engine.cli import main; code = main(['--help']); "
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    # Processor time of finished children: a busy machine must not fail this.
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 3
    assert done.stdout.split()[-3:] == ["0", "False", "False"]
    assert all(name in done.stdout for name in COMMANDS)


def test_without_a_command_there_is_the_overview_and_an_unknown_one_is_refused(shell: Shell):
    assert shell() == 0
    assert all(name in shell.out for name in COMMANDS)
    assert shell("scor") == 2
    assert "scor" in shell.err
    assert shell("score", "--textt", "x") == 2
    assert "--textt" in shell.err


def test_the_module_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "engine.cli", "score"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("peaksim: give at least one")
