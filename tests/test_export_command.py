"""`peaksim export`, and the page on it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

from PIL import Image

from engine.cli import main
from engine.scenes.items import controlled_items


def save_picture(path: Path) -> None:
    Image.fromarray(controlled_items("color", 1, seed=3)[0].images()[0]).save(path)


def test_the_command_checks_a_folder_and_scores_with_it(exported_scenes, tmp_path, capsys):
    assert main(["export", "--check", str(exported_scenes), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["outputs"]
    assert {row["output"] for row in rows} >= {"embedding", "patches.projected", "tokens", "hidden.8"}
    assert all(row["cosine"] > 0.9999 and row["provider"] == "cpu" and row["latency_ms"] > 0 for row in rows)
    assert main(["export", "--check", str(exported_scenes)]) == 0
    said = capsys.readouterr().out
    assert "max abs difference" in said and "image_all patches.projected" in said and " ms" in said
    save_picture(tmp_path / "a.png")
    words = ["score", str(tmp_path / "a.png"), "--text", "a red ring", "--model", str(exported_scenes), "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(exported_scenes)


def test_the_command_says_what_is_wrong(exported_copy, tmp_path, capsys):
    assert main(["export", "scenes"]) == 2
    assert "peaksim export MODEL OUT" in capsys.readouterr().err
    (exported_copy / "image_all.onnx").unlink()
    assert main(["export", "--check", str(exported_copy)]) == 1
    assert "image_all.onnx is missing" in capsys.readouterr().err
    assert main(["export", "--check", str(tmp_path / "nowhere")]) == 1
    assert "`peaksim export` writes it" in capsys.readouterr().err
    assert main(["export", "--check", str(exported_copy), "--max-batch", "7"]) == 2
    assert "--max-batch is for a folder to be written (peaksim export MODEL OUT), got it for" in capsys.readouterr().err


def test_the_page_on_exports_runs(exported_scenes, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).resolve().parent.parent / "docs" / "export.md").read_text(encoding="utf-8")
    shutil.copytree(exported_scenes, tmp_path / "exported" / "scenes")
    (tmp_path / "photos").mkdir()
    save_picture(tmp_path / "photos" / "a.png")
    monkeypatch.chdir(tmp_path)
    (commands,) = re.findall(r"^```bash\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line)[1:] for line in commands.splitlines()]
    assert lines[0][:3] == ["export", "scenes", "exported/scenes"], "what the fixture did"
    for words in lines[1:]:
        assert main(words) == 0, capsys.readouterr().err
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    capsys.readouterr()
    exec(compile(code, "export.md", "exec"), {})
    assert capsys.readouterr().out == "True\n"
    assert not re.search(r"\b[A-Z0-9]+_TABLE\b", page)
