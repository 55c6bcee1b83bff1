"""The section on regions from one pass: trained, measured and timed at a small size, and checked against itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.engine import load
from engine.heads.base import shipped_head
from engine.results import onepass
from engine.results.figures import Figure, ResultsDiffer, read_figures, write_figures
from engine.results.run import Run
from engine.scorers.sgi import SGI
from engine.training.windows import WindowPictures

ROOT = Path(__file__).resolve().parent.parent


def test_the_speed_is_of_each_row_and_says_its_threads():
    rows = {"sgi native": SGI(crops="native", grid="none"), "windows": SGI(crops="windows", grid="none")}
    found = onepass.speeds(load("scenes"), rows, pictures=2, rounds=1)
    assert set(found) == {"threads", *rows} and all(found[name] > 0 for name in rows)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """A repository of its own in which the section before was made, of two seeds and three items."""
    monkeypatch.setattr(onepass, "CATEGORIES", ("color",))
    for name, value in {"ITEMS": 3, "QUICK_ITEMS": 2, "SEEDS": (0, 1), "TIMED": 2, "ROUNDS": 1}.items():
        monkeypatch.setattr(onepass, name, value)
    run = Run(tmp_path / "work", root=tmp_path)
    before = [
        Figure(f"{name} {split} {category}", 3, 0.5, 0.25, 0.75)
        for name in ("global", *onepass.RE_ENCODED)
        for split in ("held_out", "in_domain")
        for category in onepass.CATEGORIES
    ]
    write_figures(run.figures / "scorers.jsonl", before)
    return run


def test_the_section_is_trained_written_and_met(small: Run):
    onepass.train(small, steps=2, pictures=WindowPictures(pictures=32, windows=2))
    seeds = read_figures(small.figures / "onepass-seeds.jsonl")
    assert [figure.name for figure in seeds] == [
        f"windows, trained head, seed {seed} held_out {category}" for seed in (0, 1) for category in onepass.CATEGORIES
    ]
    # Trained again they are the same; where they were others that is told.
    onepass.train(small, steps=2, pictures=WindowPictures(pictures=32, windows=2))
    write_figures(small.figures / "onepass-seeds.jsonl", [replace(figure, low=2.0, high=2.0) for figure in seeds])
    with pytest.raises(ResultsDiffer, match=r"onepass-seeds\.jsonl: 2 of 2 .* seed 1 held_out color: found"):
        onepass.train(small, steps=2, pictures=WindowPictures(pictures=32, windows=2))
    assert read_figures(small.figures / "onepass-seeds.jsonl") == seeds
    # Those of the shipped head in place of the two steps: the section wants the first seed to be the shipped one.
    shipped = [Figure(f.name, f.items, 0.5, 0.0, 1.0) for f in seeds]
    write_figures(small.figures / "onepass-seeds.jsonl", shipped)
    text = onepass.section(small)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [
        "regions",
        "crops re-encoded, rescaled",
        "crops re-encoded, native scale",
        "windows, untrained",
        "windows, untrained, whole image left out",
        "windows, trained head",
        "windows, trained head, whole image too",
        "windows, trained head, seed 0",
        "windows, trained head, seed 1",
    ]
    assert rows[1].startswith("| crops re-encoded, rescaled | 50.0 ± 25.0 |") and rows[2].endswith(" 1.0 |")
    assert "over 3 items" in text and rows[-1].endswith("|  |  |")
    assert len(read_figures(small.figures / "onepass.jsonl")) == 6 * len(onepass.CATEGORIES)
    speeds = onepass.read_speeds(small.figures / "onepass-speed.jsonl")
    assert set(speeds) == {*onepass.RE_ENCODED, *onepass.UNTRAINED, onepass.SHIPPED, onepass.WITH_WHOLE}
    times = speeds[onepass.SHIPPED] / speeds["sgi native"]
    assert rows[5].endswith(f" | {speeds[onepass.SHIPPED]:.0f} | {times:.1f} |")
    quick = Run(small.folder, quick=True, root=small.root)
    assert onepass.section(quick)
    wrong = [Figure(f.name, f.items, 0.9, 0.9, 0.9) for f in read_figures(small.figures / "onepass.jsonl")]
    write_figures(small.figures / "onepass.jsonl", wrong)
    with pytest.raises(ResultsDiffer, match=r"onepass\.jsonl: \d+ of 4 figures are not reproduced"):
        onepass.section(quick)


def test_a_first_seed_that_is_not_the_shipped_head_is_told(small: Run):
    names = [f"windows, trained head, seed 0 held_out {category}" for category in onepass.CATEGORIES]
    write_figures(small.figures / "onepass-seeds.jsonl", [Figure(name, 3, 2.0, 2.0, 2.0) for name in names])
    with pytest.raises(ResultsDiffer, match=r"seed 0 held_out color: found 200\.0 %"):
        onepass.section(small)


def test_seeds_that_are_not_there_are_written_by_the_training(small: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(onepass, "_measured", lambda *_: [])
    with pytest.raises(FileNotFoundError, match=r"onepass-seeds\.jsonl is missing; `make results-train` writes it"):
        onepass.section(small)


def test_a_seed_is_trained_with_the_settings_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    preset = replace(onepass.TRAINING["window_head"], clip_norm=0.5)
    monkeypatch.setattr(onepass, "TRAINING", {"window_head": preset})
    run = Run(tmp_path)
    wanted = replace(preset, output=tmp_path / "onepass" / "2", seed=2, evaluate_every=0)
    assert onepass.training(run, 2, None) == wanted
    assert onepass.training(run, 2, 3) == replace(wanted, steps=3, warmup_steps=3)


def test_committed_figures_are_of_the_shipped_head():
    held = {figure.name: figure for figure in read_figures(ROOT / "docs" / "results" / "onepass.jsonl")}
    least = {"color": 0.9, "size": 0.8, "material": 0.8}
    assert all(held[f"windows, trained head held_out {category}"].value >= value for category, value in least.items())
    speeds = onepass.read_speeds(ROOT / "docs" / "results" / "onepass-speed.jsonl")
    assert speeds["windows, trained head"] >= 10 * speeds["sgi native"]
    lines = (ROOT / "docs" / "results" / "onepass.jsonl").read_text().splitlines()
    assert len(lines) == 24 and all(json.loads(line)["items"] == 400 for line in lines)
    assert shipped_head("window_head").stat().st_size < 3_000_000
