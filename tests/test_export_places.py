"""Where the folder of an exported model lies: written into, loaded from, and what happens to it afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import engine
from engine.cli import main
from engine.encoders.export_manifest import MANIFEST_FILE, read_manifest
from engine.encoders.registry import load_encoder
from engine.export.folder import export_model
from engine.export.layers import shipped_needs
from engine.export.unfinished import unfinished_folder
from engine.heads.base import shipped_head
from engine.heads.registry import load_head
from engine.retrieval.index import Index

TEXTS = ["a large red ring", "a small blue square"]


def pictures() -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (2, 60, 90, 3), dtype=np.uint8))


def test_a_folder_that_is_there_is_filled(exported_scenes, tmp_path, monkeypatch):
    """A link, the working directory and `~` stand for the folders they name."""
    from engine.export import folder as module

    def written(work, spec):
        shutil.copytree(exported_scenes, work.folder, dirs_exist_ok=True)
        return read_manifest("test", work.folder)

    # What is written is not the question here, and takes its time.
    monkeypatch.setattr(module, "_written", written)
    monkeypatch.setattr(module, "_compared", lambda work, found: {})
    source = load_encoder("scenes", device="cpu")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    for out, target in (("../link", "real"), (".", "here"), ("~/fresh", "fresh")):
        assert export_model(source, out) == tmp_path / target
        assert (tmp_path / target / MANIFEST_FILE).is_file()
    assert Path(MANIFEST_FILE).is_file(), "the working directory is still the one we are in"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "here", "link", "real"]


def test_a_folder_without_a_manifest_of_ours_is_named(exported_copy):
    message = r"copy must hold the manifest\.json that `peaksim export` writes, got a folder where it is missing or dam"
    for spoil in (lambda path: path.write_text("[]"), Path.unlink):
        spoil(exported_copy / MANIFEST_FILE)
        for name in (str(exported_copy), f"{exported_copy}?provider=cpu"):
            with pytest.raises(ValueError, match=message):
                engine.load(name)
    with pytest.raises(ValueError, match=r"name must be 'scenes', .* got '/nowhere\?provider=cpu'"):
        engine.load("/nowhere?provider=cpu")


def test_a_relative_folder_serves_from_anywhere(exported_copy, tmp_path, monkeypatch, exported_scenes):
    monkeypatch.chdir(exported_copy.parent)
    loaded = engine.load("copy", device="cpu", segmenter="rules")
    monkeypatch.chdir("/")
    assert loaded.spec.name == "copy"
    absolute = engine.load(str(exported_scenes), device="cpu", segmenter="rules")
    for scorer in ("max_sim", "max_sim_head"):
        given = pictures(), TEXTS
        assert torch.equal(loaded.score(*given, scorer=scorer), absolute.score(*given, scorer=scorer))


def test_a_folder_that_changed_since_it_was_loaded_is_not_read_on(exported_copy):
    loaded = engine.load(str(exported_copy), device="cpu", segmenter="rules")
    content = (exported_copy / "weights.bin").read_bytes()
    (exported_copy / "weights.bin").write_bytes(content[:-4] + b"1234")
    message = r"weights\.bin must stay as it was when the model was loaded, got one that was changed, moved or removed"
    for scorer in ("max_sim", "peakpatch"):
        with pytest.raises(ValueError, match=message):
            loaded.score(pictures(), TEXTS, scorer=scorer)
    shutil.rmtree(exported_copy)
    with pytest.raises(ValueError, match="must stay as it was when the model was loaded"):
        loaded.score(pictures(), TEXTS, scorer="max_sim")


def test_a_folder_called_as_a_model_is_shown_by_its_path(exported_copy, tmp_path, monkeypatch, capsys):
    exported_copy.rename(tmp_path / "scenes")
    monkeypatch.chdir(tmp_path)
    assert main(["export", "--check", "scenes"]) == 0
    assert f"use it as --model {tmp_path / 'scenes'}\n" in capsys.readouterr().out


def test_layers_of_shipped_heads_are_there_unasked():
    spec = load_encoder("scenes", device="cpu").spec
    heads = ("max_sim_head", "peakpatch")
    wanted = [load_head(shipped_head(name)).needs() for name in heads]
    assert [needs for needs in shipped_needs(spec) if needs in wanted] == wanted
    assert shipped_needs(replace(spec, fingerprint="another")) == []
    assert shipped_needs(replace(spec, family="clip")) == []


def killed_export(out: Path) -> subprocess.Popen[str]:
    """A process that exports and says so once its folder is there, then waits to be killed."""
    code = (
        "import sys, time; from engine.export import folder\n"
        "def written(*_):\n    print('writing', flush=True); time.sleep(600)\n"
        "folder._written = written; folder.export_model('scenes', sys.argv[1])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    return process


@pytest.mark.skipif(os.name == "nt", reason="Windows has no flock to tell a dead export by")
def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path):
    process = killed_export(tmp_path / "out")
    try:
        (held,) = tmp_path.iterdir()
        assert held.name.startswith(".out-") and held.name.endswith(".unfinished-export")
        # Others' folders, and one that is being written in, stay.
        (tmp_path / ".out-mine").mkdir()
        with unfinished_folder(tmp_path / "out") as place:
            assert {path.name for path in tmp_path.iterdir()} == {held.name, place.name, ".out-mine"}
        assert {path.name for path in tmp_path.iterdir()} == {held.name, ".out-mine"}
    finally:
        process.kill()
        process.communicate()
    # The export appears whole or not at all.
    assert held.is_dir() and not (tmp_path / "out").exists()
    with unfinished_folder(tmp_path / "out") as place:
        assert {path.name for path in tmp_path.iterdir()} == {place.name, ".out-mine"}
    assert [path.name for path in tmp_path.iterdir()] == [".out-mine"]


def test_an_index_keeps_windows_of_an_export_and_is_read_with_its_source(exported_scenes, tmp_path):
    exported = engine.load(str(exported_scenes), device="cpu", segmenter="rules")
    source = engine.load("scenes", device="cpu", segmenter="rules")
    scorer = engine.SGI(crops="windows")
    index = Index.create(tmp_path / "index", model=exported)
    index.add(pictures(), ids=["a", "b"])
    (ours,) = index.search(TEXTS[0], 2, scorer=scorer)
    (theirs,) = Index.open(tmp_path / "index", model=source).search(TEXTS[0], 2, scorer=scorer)
    assert [hit.id for hit in ours] == [hit.id for hit in theirs]
    assert [hit.score for hit in ours] == pytest.approx([hit.score for hit in theirs], abs=1e-5)
