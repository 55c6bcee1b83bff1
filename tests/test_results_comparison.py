"""The comparison: its runs in small, what is written of them, and the tables and verdicts made of the lines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.results import comparison, max_sim_head
from engine.results.comparison_runs import ARMS, BATCH, CATEGORIES, SEEDS, SPLITS, Cell, Comparison, cells, read_lines
from engine.results.figures import Figure, ResultsDiffer, read_figures
from engine.results.run import Run
from engine.training.head_data import ScenesQuads
from engine.training.negatives import NEGATIVES
from engine.training.presets import TRAINING


def test_cells_are_all_there_and_a_seed_is_whole_before_the_next():
    found = cells()
    assert len(set(found)) == len(found) == len(ARMS) * len(NEGATIVES) * len(SEEDS)
    assert [cell.seed for cell in found] == sorted(cell.seed for cell in found)
    assert {cell.arm for cell in found[: len(ARMS)]} == set(ARMS) and found[0].negatives == "quads"


def small(folder: Path) -> Comparison:
    return Comparison(
        Run(folder / "work"), folder / "f.jsonl", folder / "l.jsonl", quads=ScenesQuads(items=8), steps=(1, 2), items=3
    )


def test_cells_are_trained_measured_and_written_in_their_order(tmp_path):
    made = small(tmp_path)
    wanted = [Cell("linear", "captions", 1), Cell("tflocal", "quads", 0), Cell("finetune", "in_batch", 0)]
    for cell in wanted:
        lines = made.make(cell)
        assert [(line["split"], line["category"]) for line in lines] == [(s, c) for s in SPLITS for c in CATEGORIES]
        assert all(0 <= line["low"] <= line["value"] <= line["high"] <= 1 for line in lines)
        assert {(line["steps"], line["items_seen"], line["items"]) for line in lines} == {(3, 3 * BATCH, 3)}
    held = read_lines(tmp_path / "f.jsonl")
    assert [line["arm"] for line in held] == ["tflocal"] * 8 + ["finetune"] * 8 + ["linear"] * 8
    assert held[-1]["parameters"] == made.engine.spec.embed_dim**2 + 1
    assert [line["step"] for line in read_lines(tmp_path / "l.jsonl")] == [1, 1, 2] * 3
    # A trained cell is measured alike from its checkpoint.
    again = small(tmp_path).make(wanted[1])
    assert [line | {"seconds": 0} for line in again] == [line | {"seconds": 0} for line in held[:8]]
    assert len(read_lines(tmp_path / "f.jsonl")) == 24


def line(cell: Cell, split: str, category: str, value: float) -> dict[str, Any]:
    facts = {"parameters": 1000, "seconds": 60.0, "items": 200, "split": split, "category": category}
    return cell._asdict() | facts | {"value": value, "low": value - 0.05, "high": value + 0.05}


def lines_of(value: dict[tuple[str, str], float]) -> list[dict[str, Any]]:
    return [
        line(Cell(*key, seed), split, category, found + 0.01 * seed)
        for key, found in value.items()
        for seed in SEEDS
        for split in SPLITS
        for category in CATEGORIES
    ]


VALUES = {("tflocal", "quads"): 0.8, ("tfglobal", "quads"): 0.1, ("finetune", "quads"): 0.78, ("linear", "quads"): 0.05}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A repository with lines, and shipped heads that are as good as their seed 0."""
    lines = lines_of(VALUES)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "comparison.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))

    def shipped(run: Run) -> list[Figure]:
        return [Figure(f"tflocal held_out {name}", 25, 0.7, 0.6, 0.8) for name in CATEGORIES]

    monkeypatch.setattr(comparison, "_shipped", shipped)
    return Run(tmp_path / "work", root=tmp_path)


def test_tables_hold_means_ranges_and_verdicts(run):
    text = comparison.section(run)
    assert text.count("| `tflocal` | 2 × 2 pairs | 3 | 1,000 | 81.0 ± 5.0 (80–82) |") == 2
    assert "| `tflocal` above `tfglobal` | yes | yes | yes | yes |" in text
    assert "| `tflocal` above full fine-tuning | no | no | no | no |" in text
    assert "| `max_sim_head` above `tflocal` | not run |" in text
    assert "Not run: max_sim_head-quads-0" in text


def test_shipped_heads_must_meet_their_lines(run, monkeypatch):
    worse = [Figure("tflocal held_out color", 25, 0.5, 0.4, 0.7)]
    monkeypatch.setattr(comparison, "_shipped", lambda run: worse)
    with pytest.raises(ResultsDiffer, match=r"comparison\.jsonl: 1 of 1 .* tflocal held_out color: found 50\.0"):
        comparison.section(run)


def test_lines_that_are_not_there_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"comparison\.jsonl is missing or empty"):
        comparison.section(Run(root=tmp_path))


def test_figures_of_trainings_are_written_by_trainings(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"max_sim_head\.jsonl is missing; `make results-train` writes it"):
        max_sim_head.section(Run(root=tmp_path))


def test_a_head_that_did_not_learn_does_not_meet_the_shipped_one(tmp_path, monkeypatch):
    monkeypatch.setattr(max_sim_head, "SEEDS", (0,))
    monkeypatch.setattr(max_sim_head, "ITEMS", 12)
    monkeypatch.setattr(max_sim_head, "QUICK_ITEMS", 12)
    monkeypatch.setattr(max_sim_head, "ScenesQuads", lambda: ScenesQuads(items=8))
    short = replace(TRAINING["max_sim_head"], steps=1, warmup_steps=0)
    monkeypatch.setattr(max_sim_head, "TRAINING", {"max_sim_head": short})
    run = Run(tmp_path / "work", quick=True, root=tmp_path)
    max_sim_head.train(run)
    found = read_figures(tmp_path / "docs" / "results" / "max_sim_head.jsonl")
    assert [figure.name for figure in found[:2]] == ["seed 0 soft held_out color", "seed 0 hard held_out color"]
    assert len(found) == 10 and all(figure.items == 12 for figure in found)
    with pytest.raises(ResultsDiffer, match=r"max_sim_head\.jsonl: .* seed 0 hard held_out color: found"):
        max_sim_head.section(run)
