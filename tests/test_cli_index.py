"""``peaksim index``: every command, on a folder of pictures with a small model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from engine.cli.progress import counted
from tests.command_line import Shell, fake_shell
from tests.fake_encoder import picture
from tests.test_index_sources import png, shard

COLOURS = ("red", "green", "blue", "grey")


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return fake_shell(monkeypatch, capsys)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    root.mkdir()
    for colour in COLOURS:
        picture(colour).save(root / f"{colour}.png")
    return root


@pytest.fixture
def made(tmp_path: Path, shell: Shell, photos: Path) -> Path:
    place = tmp_path / "index"
    assert shell("index", "create", place, "--model", "fake", "--vectors", "patches") == 0, shell.err
    assert shell("index", "add", place, photos) == 0, shell.err
    return place


def test_the_overview_and_the_help_name_every_command(shell):
    assert shell("index") == 0
    for name in ("create", "add", "search", "delete", "stats", "verify", "compact"):
        assert name in shell.out
    assert shell("index", "add", "--help") == 0 and "WebDataset" in shell.out
    assert shell("index", "fly") == 2
    assert shell("--help") == 0 and "index" in shell.out


def test_pictures_are_added_once_and_found(shell, made, photos):
    facts = shell.json("index", "add", made, photos)
    assert (facts["added"], facts["skipped"], facts["images"]) == (0, 4, 4)
    facts = shell.json("index", "search", made, "--text", "blue", "--text", "red", "--k", "2")
    assert facts["scorer"].startswith("MaxSim(")
    blue, red = facts["queries"]
    assert blue["hits"][0]["id"] == f"{photos}/blue.png" and len(blue["hits"]) == 2
    assert red["hits"][0]["id"] == f"{photos}/red.png" and red["hits"][0]["margin"] > 0
    assert "alignment" not in red["hits"][0]
    assert shell("index", "search", made, "--text", "green", "--explain") == 0
    assert "green.png" in shell.out and "margin" in shell.out and "box x0 y0 x1 y1" in shell.out
    facts = shell.json("index", "search", made, "--image", photos / "grey.png", "--scorer", "global", "--k", "1")
    assert facts["queries"][0]["hits"][0]["id"] == f"{photos}/grey.png"


def test_broken_pictures_are_named_and_the_exit_code_tells(shell, made, photos, tmp_path):
    (photos / "broken.png").write_bytes(b"nothing")
    cut = tmp_path / "cut.tar"
    cut.write_bytes(b"no tar" * 200)
    good = shard(tmp_path / "good.tar", {"1.png": png("red"), "1.json": b'{"year": 2021}', "2.png": b"broken"})
    assert shell("index", "add", made, photos, cut, good, "--column", "year") == 1
    assert "broken.png: this is not an image" in shell.err and "cut.tar" in shell.err and "good/2" in shell.err
    assert "3 images could not be read" in shell.err
    code = shell("index", "add", made, photos, "--json")
    assert code == 1 and [failure["path"] for failure in json.loads(shell.out)["failures"]] == [f"{photos}/broken.png"]
    facts = shell.json("index", "search", made, "--text", "red", "--where", "year = 2021")
    assert [hit["id"] for hit in facts["queries"][0]["hits"]] == ["good/1"]


def test_deleting_by_id_file_and_condition(shell, made, photos, tmp_path):
    (tmp_path / "ids.txt").write_text(f"{photos}/red.png\n")
    facts = shell.json("index", "delete", made, f"{photos}/blue.png", "--ids-file", tmp_path / "ids.txt")
    assert (facts["deleted"], facts["images"]) == (2, 2)
    assert shell("index", "delete", made, f"{photos}/blue.png") == 2 and "is not there; nothing" in shell.err
    assert shell("index", "delete", made) == 2 and "give at least one id" in shell.err
    assert shell.json("index", "delete", made, "--where", "id like '%grey%'")["deleted"] == 1
    assert shell.json("index", "delete", made, "--where", "false")["deleted"] == 0
    assert shell("index", "compact", made) == 0 and "1 images in 1 segments" in shell.out
    assert shell.json("index", "stats", made)["images"] == 1


def test_stats_and_verify(shell, made):
    assert shell("index", "stats", made) == 0 and "KiB" in shell.out and "patches: 64" in shell.out
    assert shell("index", "verify", made) == 0 and "all as it was written" in shell.out
    (codes,) = made.rglob("patches.codes")
    codes.write_bytes(b"\0" * codes.stat().st_size)
    code = shell("index", "verify", made, "--json")
    assert code == 1 and "patches.codes" in json.loads(shell.out)["faults"][0]
    (made / "manifest.json").write_text("{}")
    assert shell("index", "verify", made) == 1 and "manifest.json is damaged" in shell.out
    assert shell("index", "verify", made / "no") == 1 and "holds no index" in shell.err


def test_a_page_holds_the_pictures_and_nothing_of_theirs_acts_on_it(shell, made, photos, tmp_path):
    bad = photos / "<script>alert(1)</script>&'.png"
    bad.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (400, 100), (0, 0, 255)).save(bad)
    assert shell("index", "add", made, photos) == 0
    (photos / "red.png").unlink()
    page = tmp_path / "found.html"
    assert shell("index", "search", made, "--text", "blue <b>red</b>", "--html", page) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("data:image/jpeg;base64,") == 4 and "the picture is not where the index says" in text
    assert "<script" not in text and "<b>" not in text and "&lt;b&gt;red&lt;/b&gt;" in text
    assert "http" not in re.sub(r"http-equiv", "", text) and "src='data:" in text
    assert re.search(r"class='box' style='left: [\d.]+%; top: [\d.]+%; width: 25\.00%; height: 25\.00%", text)
    assert shell("index", "search", made, "--text", "x", "--html", tmp_path / "found.txt") == 2
    assert "--html must end in .html" in shell.err


def test_wrong_calls_say_what_was_wanted(shell, made, photos, tmp_path):
    fake = ("--model", "fake")
    for arguments, code, message in (
        (("search", made), 2, "give at least one caption"),
        (("search", made, "--text", "a", "--image", photos / "red.png"), 2, "with pictures or with captions, got both"),
        (("search", made, "--text", "a", "--candidates", "few"), 2, "--candidates must be a number from 1"),
        (("search", made, "--text", "a", "--where", "select"), 2, "where: must be one SQL condition"),
        (("search", made, "--text", "a", "--option", "reduction=sum"), 2, "--option: needs --scorer"),
        (("search", tmp_path / "no", "--text", "a"), 1, "holds no index"),
        (("add", made), 2, "give at least one source"),
        (("add", made, tmp_path / "no.png"), 1, "no.png is not there"),
        (("create", made, *fake, "--vectors", "none"), 1, "holds an index already"),
        (("create", tmp_path / "x", *fake, "--vectors", "none", "--vectors", "head"), 2, "must stand alone"),
        (("create", tmp_path / "x", *fake, "--ann", "fast"), 2, "FAISS factory string, got 'fast'"),
    ):
        assert shell("index", *arguments) == code, (arguments, shell.err)
        assert message in shell.err


def test_an_index_of_embeddings_alone_and_of_a_scorers_vectors(shell, tmp_path, photos):
    assert shell("index", "create", tmp_path / "a", "--model", "fake", "--vectors", "none") == 0
    assert shell("index", "add", tmp_path / "a", photos) == 0
    facts = shell.json("index", "search", tmp_path / "a", "--text", "blue", "--k", "1")
    assert facts["scorer"] == "GlobalCosine()" and facts["queries"][0]["hits"][0]["id"].endswith("blue.png")
    assert shell("index", "create", tmp_path / "b", "--model", "fake", "--vectors", "sgi?crops=native&grid=none") == 0
    assert shell("index", "add", tmp_path / "b", photos) == 0
    facts = shell.json(
        "index", "search", tmp_path / "b", "--text", "a blue thing", "--segmenter", "rules", "--candidates", "2"
    )
    assert "native" in facts["scorer"] and facts["queries"][0]["hits"][0]["stage_one_rank"] is not None


def test_compacting_and_verifying_say_how_far_they_are(shell, made, monkeypatch):
    monkeypatch.setattr("engine.cli.progress.LINE_EVERY_S", 0.0)
    assert shell("index", "verify", made) == 0 and "peaksim: MiB: 1 of 1, " in shell.err
    assert shell("index", "delete", made, "--where", "path like '%red.png'") == 0
    assert shell("index", "compact", made) == 0 and "peaksim: images: 3 of 3, " in shell.err


def test_long_work_says_how_far_it_is_where_nobody_watches(monkeypatch, capsys):
    monkeypatch.setattr("engine.cli.progress.LINE_EVERY_S", 0.0)
    with counted("images", 10) as advance:
        advance(5, 0)
        advance(10, 2)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("peaksim: images: 5 of 10, ") and "left" in first and second.endswith(", 2 failed")
