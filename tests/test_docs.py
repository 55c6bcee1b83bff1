"""The pages on models and benchmarks are run: commands (on a small data folder and model), Python, links."""

from __future__ import annotations

import glob
import json
import re
import shlex
from pathlib import Path

import pytest

from engine.encoders.registry import families
from tests.command_line import Shell, write_data
from tests.fake_encoder import FakeEncoder

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("models.md", "benchmarks.md")


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """A shell in a folder with the data that the pages name; every model is the fake one."""
    write_data(tmp_path / "data")
    (tmp_path / "new_tag_assignments.json").write_text(json.dumps({"0": [], "1": ["Non Minimal"]}), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "engine.engine.load_encoder",
        lambda name, *, device, dtype: FakeEncoder(
            name=name, context_length=40, taps={"projected": True, "value": True, "hidden": False}
        ),
    )
    return Shell(capsys)


@pytest.mark.parametrize("page", PAGES)
def test_commands_run_one_after_the_other(page: str, shell: Shell):
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("peaksim ")]
    assert len(commands) >= 2
    for words in commands:
        if any(word.startswith("sgi") for word in words):
            words += ["--segmenter", "rules"]
        if words[:2] == ["compare", "--models"]:
            words += ["--limit", "2"]
        given = [path for word in words for path in (sorted(glob.glob(word)) if "*" in word else [word])]
        assert shell(*given) == 0, f"{words}: {shell.err}"
        assert shell.out.strip()


def test_python_runs(shell: Shell, capsys: pytest.CaptureFixture[str]):
    code = blocks("models.md", "python")
    assert code
    for block in code:
        exec(compile(block, "models.md", "exec"), {})
    assert "projected" in capsys.readouterr().out


def test_the_example_of_shards_runs():
    (block,) = blocks("scale.md", "python")
    names: dict[str, object] = {}
    exec(compile(block, "scale.md", "exec"), names)
    best = names["best"]
    assert isinstance(best, list) and best[0].id == "blue" and best[0].score >= best[1].score


@pytest.mark.parametrize("page", (*PAGES, "scale.md", "index_format.md"))
def test_links_lead_somewhere(page: str):
    for target in re.findall(r"\]\(([^)#]+)\)", read(page)):
        assert target.startswith("https://arxiv.org/") or (ROOT / "docs" / target).is_file(), target


def test_every_benchmark_and_every_family_is_on_its_page():
    from engine.benchmarks.official import OFFICIAL

    page = read("benchmarks.md")
    assert all(f"| `{name}` | `{place.annotations}" in page for name, place in OFFICIAL.items())
    assert {family.family for family in families()} == {"scenes", "clip", "siglip", "siglip2", "pe"}
    page = read("models.md")
    assert all(f"| {name} |" in page for name in ("CLIP", "SigLIP", "SigLIP 2", "PE-Core"))
    assert all(f"| `{tap}` |" in page for family in families() for tap in family.taps)
