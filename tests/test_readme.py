"""The README is run: its Python, its commands (on small stand-ins of the pictures it names), its links and length."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from engine.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [part.strip() for line in lines for part in line.split(";") if part.strip().startswith("peaksim ")]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "photos").mkdir()
    for name, color in (("dog.jpg", "black"), ("cat.jpg", "white")):
        Image.new("RGB", (120, 90), color).save(tmp_path / "photos" / name)
    # What `make demo` leaves behind.
    (tmp_path / "demo" / "pictures").mkdir(parents=True)
    Image.new("RGB", (96, 96), "gray").save(tmp_path / "demo" / "pictures" / "color-found-picture-a.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:scenes. the embedded model knows:UserWarning")
def test_python_blocks_run_one_after_the_other(folder):
    code = "\n".join(blocks("python"))
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert tuple(names["scores"].shape) == (1, 2)
    assert tuple(names["labels"].shape) == (1, 2)
    assert tuple(names["alignment"].argmax.shape) == (2, 5, 7)


def test_there_are_commands():
    assert len(commands()) >= 6


@pytest.mark.filterwarnings("ignore:scenes. the embedded model knows:UserWarning")
@pytest.mark.parametrize("command", commands())
def test_commands_run(command, folder, capsys):
    # Hub weights are out of reach of tests, and 400 items take minutes.
    words = shlex.split(re.sub(r"--model \S+", "--model scenes", command), comments=True)[1:]
    if words[:2] == ["eval", "scenes"]:
        words += ["--limit", "2"]
    if words[0] == "index" and words[1] != "create":
        words = [word for word in words if "*" not in word]
        assert main(["index", "create", "photos.index"]) == 0
        if words[1] != "add":
            assert main(["index", "add", "photos.index", "photos/"]) == 0
        capsys.readouterr()
    code = main(words)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert said.out.strip()


def test_pairs_keep_their_captions_when_a_picture_comes_twice(folder, capsys):
    words = ["score", "photos/dog.jpg", "photos/cat.jpg", "photos/dog.jpg", "--pairs", "--json"]
    captions = ["a red ring", "a blue star", "a circle"]
    assert main([*words, *(part for caption in captions for part in ("--text", caption))]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == captions


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).is_file(), target


def test_it_is_short():
    assert len(README.splitlines()) <= 250


@pytest.mark.parametrize("page", [*sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("*.md")), "docs"])
def test_no_placeholder_is_left(page):
    paths = (ROOT / "docs").glob("*.md") if page == "docs" else [ROOT / page]
    for path in paths:
        assert not re.search(r"\b[A-Z]+_(TABLES?|FACTS|ROWS)\b", path.read_text(encoding="utf-8")), path.name


def test_the_command_of_the_model_card_trains(folder, capsys):
    card = (ROOT / "docs" / "scenes_model.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^peaksim train scenes .*$", card, flags=re.MULTILINE)
    words = shlex.split(command, comments=True)[1:]
    small = ["--steps", "1", "--batch-size", "2", "--skip-figures", "--warmup-steps", "0"]
    assert main([*words, *small]) == 0, capsys.readouterr().err
    assert (folder / "runs" / "scenes-0" / "model.safetensors").is_file()
