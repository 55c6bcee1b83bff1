"""What the command line prints and writes: awkward file names and texts, and output paths checked before the work."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from pathlib import Path

import pytest

from engine.cli.outputs import check_file, check_folder
from engine.cli.printable import printable, printable_json
from engine.engine import Engine
from tests.command_line import Shell, fake_shell, write_data
from tests.fake_encoder import picture

MODEL = ("--model", "fake", "--segmenter", "rules")
RAW = os.fsdecode(b"na\xefve.png")


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return fake_shell(monkeypatch, capsys)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    picture("red", "blue").save(folder / "a.png")
    try:
        picture("green").save(folder / RAW)
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    return folder


def test_a_name_that_is_no_utf8_does_not_stop_the_folder(shell: Shell, photos: Path):
    assert shell("score", photos, "--text", "red", *MODEL) == 0, shell.err
    assert "a.png" in shell.out and r"na\xefve.png" in shell.out
    assert shell("classify", photos, "--label", "red", "--label", "green", "--model", "fake") == 0, shell.err
    assert r"na\xefve.png" in shell.out
    assert shell("explain", photos / RAW, "--text", "a green box", *MODEL) == 0, shell.err
    assert r"na\xefve.png" in shell.out


def test_json_keeps_a_name_that_is_no_utf8(shell: Shell, photos: Path):
    found = shell.json("score", photos, "--text", "red", *MODEL)
    assert found["images"] == [str(photos / "a.png"), str(photos / RAW)]
    assert r"na\udcefve.png" in shell.out and shell.out.encode("utf-8")
    (photos / os.fsdecode(b"\xff.jpg")).write_bytes(b"no picture")
    assert shell("classify", photos, "--label", "red", "--model", "fake", "--json") == 1
    assert json.loads(shell.out)["failures"][0]["path"] == str(photos / os.fsdecode(b"\xff.jpg"))
    assert r"\xff.jpg: " in shell.err


def test_what_acts_on_a_terminal_and_what_its_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch):
    assert printable("a\x1b[31m\tb\n\x85") == "a\\x1b[31m\tb\n\\x85"
    assert printable("caf\u00e9 \ud800") == "caf\u00e9 \\ud800"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert printable("caf\u00e9 \u2013") == "caf\\xe9 \\u2013"
    assert json.loads(printable_json('["caf\u00e9"]')) == ["caf\u00e9"] and printable_json('["caf\u00e9"]').isascii()


def test_a_file_of_captions_may_begin_with_a_byte_order_mark(shell: Shell, photos: Path, tmp_path: Path):
    file = tmp_path / "captions.txt"
    file.write_bytes(codecs.BOM_UTF8 + b"red\r\n\n blue\x0cgreen \n")
    assert shell.json("score", photos / "a.png", "--text-file", file, *MODEL)["texts"] == ["red", "blue\x0cgreen"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"red\nb\xe9ton\n", "line 2 must be UTF-8, got byte 0xe9 at column 2"),
        ("red".encode("utf-16"), "line 1 must be UTF-8, got byte 0xff at column 1"),
        (b"", "must hold captions, one a line, got none"),
        (codecs.BOM_UTF8 + b"\n \n", "must hold captions, one a line, got none"),
    ],
)
def test_a_file_of_captions_is_refused_by_name_and_line(shell: Shell, tmp_path: Path, content: bytes, message: str):
    file = tmp_path / "captions.txt"
    file.write_bytes(content)
    assert shell("score", "a.png", "--text", "red", "--text-file", file, *MODEL) == 2
    assert shell.err.startswith(f"peaksim: --text-file: {file} ") and message in shell.err


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("score", "a.png", "--text", "r\udce9d", *MODEL), "--text"),
        (("explain", "a.png", "--text", "r\udce9d", *MODEL), "--text"),
        (("classify", "a.png", "--label", "r\udce9d", "--model", "fake"), "--label"),
        (("classify", "a.png", "--label", "red", "--template", "\udce9 {}", "--model", "fake"), "--template"),
    ],
)
def test_words_that_are_no_text_are_refused(shell: Shell, arguments: tuple[str, ...], option: str):
    assert shell(*arguments) == 2
    assert shell.err.startswith(f"peaksim: {option} must be text in UTF-8, got bytes that are not: '")


def stop(*_: object, **__: object) -> None:
    raise AssertionError("something was computed before the output path was looked at")


@pytest.mark.parametrize(
    "call",
    [
        ("eval", "scenes", "--limit", "2", "--scorer", "global", *MODEL, "--out"),
        ("eval", "scenes_negation", "--limit", "2", "--scorer", "global", *MODEL, "--out"),
        ("eval", "winoground", "--data", "data", *MODEL, "--out"),
        ("eval", "winoground", "--data", "data", *MODEL, "--resume"),
        ("compare", "--models", "fake", "--benchmarks", "winoground", "--data", "data", "--out"),
        ("explain", "photos/a.png", "--text", "red", *MODEL, "--draw"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_first(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: tuple[str, ...]
):
    write_data(tmp_path / "data")
    (tmp_path / "photos").mkdir()
    picture("red").save(tmp_path / "photos" / "a.png")
    monkeypatch.chdir(tmp_path)
    for name in ("score", "encode_images", "encode_texts", "explain"):
        monkeypatch.setattr(Engine, name, stop)
    (tmp_path / "folder.png").mkdir()
    assert shell(*call, "folder.png") == 2
    assert f"{call[-1]} must be a file to write, got the folder folder.png" in shell.err
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    assert shell(*call, "file/out.png") == 1
    assert f"{call[-1]}: file/out.png cannot be written (" in shell.err
    assert (tmp_path / "file").read_text(encoding="utf-8") == "kept"


PLAIN_HEADS = ("max_sim_head", "tflocal", "tfglobal", "linear")
FEATURE_HEADS = (*PLAIN_HEADS, "window_head", "peakpatch", "ecn", "scn")


@pytest.mark.parametrize(
    "call",
    [
        *(("train", kind, "--output") for kind in (*FEATURE_HEADS, "finetune")),
        *(("train", kind, "--output", "run", "--features") for kind in FEATURE_HEADS),
    ],
)
def test_a_training_refuses_its_folders_first(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: tuple[str, ...]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.engine.load_encoder", stop)
    monkeypatch.setattr("engine.training.finetune_models.load_encoder", stop)
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    assert shell(*call, "file") == 2
    assert f"{call[-1]} must be a folder, got the file file" in shell.err
    assert shell(*call, "file/deep") == 1
    assert f"{call[-1]}: file/deep cannot be written (" in shell.err


@pytest.mark.parametrize("kind", [*FEATURE_HEADS, "finetune"])
def test_figures_of_nothing_are_refused_by_name(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.engine.load_encoder", stop)
    monkeypatch.setattr("engine.training.finetune_models.load_encoder", stop)
    assert shell("train", kind, "--figure-items", "0") == 2
    assert "--figure-items must be at least 1, got 0; --skip-figures leaves the figures out" in shell.err


@pytest.mark.parametrize(
    ("call", "suffix"), [(("layers", "--plot"), ".png, .pdf, .svg"), (("generator", "--sheet"), ".png")]
)
def test_a_diagnosis_refuses_its_picture_first(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: tuple[str, str], suffix: str
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.engine.load_encoder", stop)
    (tmp_path / "folder.png").mkdir()
    assert shell("diagnose", *call, "folder.png") == 2
    assert f"{call[-1]} must be a file to write, got the folder folder.png" in shell.err
    assert shell("diagnose", *call, "a.txt") == 2
    assert f"{call[-1]} must end in {suffix}, got a.txt" in shell.err
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    assert shell("diagnose", *call, "file/a.png") == 1
    assert f"{call[-1]}: file/a.png cannot be written (" in shell.err


def test_what_is_read_is_not_written_over(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = write_data(tmp_path / "data")
    image, result = tmp_path / "a.png", tmp_path / "result.json"
    picture("red").save(image)
    assert shell("eval", "winoground", "--data", data, *MODEL, "--out", result) == 0, shell.err
    link, scores = tmp_path / "link.png", tmp_path / "scores.jsonl"
    link.symlink_to(image)
    os.link(result, tmp_path / "hard.json")
    choices = data / "negbench" / "COCO_val_mcq_llama3.1_rephrased.csv"
    texts = ("eval", "negbench_mcq", "--annotations", choices, "--baseline", "random")
    assert shell(*texts, "--resume", scores) == 0, shell.err
    before = {path: path.read_bytes() for path in (image, result, choices, scores)}
    for name in ("score", "encode_images", "encode_texts", "explain"):
        monkeypatch.setattr(Engine, name, stop)
    monkeypatch.chdir(tmp_path)
    for call, message in (
        (("explain", image, "--text", "red", *MODEL, "--draw", "./a.png"), "--draw must be another file than the pict"),
        (("explain", image, "--text", "red", *MODEL, "--draw", link), "--draw must be another file than the picture"),
        (("explain", link, "--text", "red", *MODEL, "--draw", image), "--draw must be another file than the picture"),
        (("compare", result, "--out", "result.json"), "compare: --out must be another file than a result to read, got"),
        (("compare", result, "--out", "hard.json"), "compare: --out must be another file than a result to read, got"),
        (("compare", result, "--out", "t.json", "--out", "x/../t.json"), "--out must be another file than compare: --"),
        ((*texts, "--out", choices), "--out must be another file than --annotations"),
        ((*texts, "--resume", choices), "--resume must be another file than --annotations"),
        ((*texts, "--resume", scores, "--out", scores), "--out must be another file than --resume"),
        ((*texts, "--resume", "both", "--out", "both"), "--out must be another file than --resume, got both for both"),
        ((*texts, "--resume", "new", "--merge", scores, "--out", scores), "--out must be another file than --merge"),
    ):
        assert shell(*call) == 2, call
        assert message in shell.err
        assert {path: path.read_bytes() for path in before} == before
    assert shell(*texts, "--resume", scores, "--merge", scores, "--out", os.devnull) == 0, shell.err


def test_missing_folders_of_outputs_are_made(shell: Shell, tmp_path: Path):
    picture("red").save(tmp_path / "a.png")
    target = tmp_path / "deep" / "er" / "found.png"
    assert shell("explain", tmp_path / "a.png", "--text", "a red box", *MODEL, "--draw", target) == 0, shell.err
    assert target.exists()
    assert shell("explain", tmp_path / "a.png", "--text", "a red box", *MODEL, "--draw", tmp_path / "x.pdf") == 2
    assert "--draw must end in .png, .jpg, .jpeg, got" in shell.err and "x.pdf" in shell.err


def test_what_is_there_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "a.json"
    file.write_text("old", encoding="utf-8")
    check_file("--out", file)
    check_file("--out", tmp_path / "new.json")
    check_folder("--output", tmp_path / "new")
    assert file.read_text(encoding="utf-8") == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "new"]
    with pytest.raises(ValueError, match=r"--output must be a folder, got the file .*a\.json"):
        check_folder("--output", file)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match=r"--out: .*a\.json is there and must not be written to"):
        check_file("--out", file)


def test_a_file_that_is_there_needs_a_folder_that_takes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "a.json"
    file.write_text("old", encoding="utf-8")
    monkeypatch.setattr("engine.cli.outputs.tempfile.TemporaryFile", full)
    with pytest.raises(OSError, match=r"--out: .*a\.json cannot be written \(No space left on device\)"):
        check_file("--out", file)
    # What is no file is written to as it is.
    check_file("--out", Path(os.devnull))


@pytest.mark.parametrize("limit", ["-1", "0"])
@pytest.mark.parametrize(
    "call", [("eval", "scenes"), ("eval", "scenes_negation"), ("eval", "winoground"), ("compare", "--models", "fake")]
)
def test_a_limit_that_leaves_nothing_is_named(shell: Shell, call: tuple[str, ...], limit: str):
    assert shell(*call, "--limit", limit) == 2
    assert shell.err == f"peaksim: --limit must be at least 1, got {limit}\n"
