"""The comparison: its runs in small, what is written of them, and the tables and verdicts made of the lines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.results import comparison, comparison_runs, max_sim_head
from engine.results.comparison_runs import ARMS, BATCH, CATEGORIES, SEEDS, SPLITS, Cell, Comparison, cells, read_lines
from engine.results.figures import Figure, ResultsDiffer, read_figures, renew_figures, write_figures
from engine.results.run import Run
from engine.training.head_data import ScenesQuads
from engine.training.negatives import NEGATIVES
from engine.training.presets import TRAINING

ROOT = Path(__file__).resolve().parent.parent


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


def untrained(run: Run) -> list[Figure]:
    """As much as a run measures."""
    names = comparison.QUICK_UNTRAINED if run.quick else comparison.UNTRAINED
    splits = SPLITS[1:] if run.quick else SPLITS
    return [Figure(f"{n} {s} {c}", 200, 0.02, 0.01, 0.05) for n in names for s in splits for c in CATEGORIES]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A repository with lines, and shipped heads that are as good as their seed 0."""
    lines = lines_of(VALUES)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "comparison.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))

    def shipped(run: Run) -> list[Figure]:
        return [Figure(f"tflocal held_out {name}", 25, 0.7, 0.6, 0.8) for name in CATEGORIES]

    monkeypatch.setattr(comparison, "_shipped", shipped)
    monkeypatch.setattr(comparison, "_untrained", untrained)
    return Run(tmp_path / "work", root=tmp_path)


def test_tables_hold_means_ranges_and_verdicts(run):
    text = comparison.section(run)
    assert text.count("| `tflocal` | 2 × 2 pairs | 3 | 1,000 | 81.0 ± 5.0 (80–82) |") == 2
    assert "| `tflocal` above `tfglobal` | yes | yes | yes | yes |" in text
    assert "| `tflocal` above full fine-tuning | no | no | no | no |" in text
    assert "| `max_sim_head` above `tflocal` | not run |" in text
    assert "Not run: max_sim_head-quads-0" in text


def test_scorers_that_are_not_trained_stand_first(run, monkeypatch):
    text = comparison.section(run)
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    wanted = "| `sgi native` | – | – | – | " + " | ".join(["2.0 ± 2.0"] * len(CATEGORIES)) + " |"
    assert [row.split(" ")[1] for row in rows[:2]] == ["`global`", "`max_sim`"] and rows[3] == wanted
    assert text.count(wanted) == 2
    held = read_figures(run.figures / "comparison-untrained.jsonl")
    assert len(held) == len(comparison.UNTRAINED) * len(SPLITS) * len(CATEGORIES)
    # A quick run measures some, and shows what is committed.
    quick = replace(run, quick=True)
    assert comparison.section(quick) == text
    monkeypatch.setattr(comparison, "_untrained", lambda run: [Figure("max_sim held_out size", 25, 0.4, 0.3, 0.5)])
    with pytest.raises(ResultsDiffer, match=r"comparison-untrained\.jsonl: 1 of 1 .*max_sim held_out size: found 40"):
        comparison.section(quick)


def test_scorers_that_are_not_trained_are_measured_on_the_items_of_the_heads(tmp_path, monkeypatch):
    rows = {name: comparison.UNTRAINED[name] for name in ("global", "max_sim")}
    monkeypatch.setattr(comparison, "UNTRAINED", rows)
    monkeypatch.setattr(comparison, "ITEMS", 5)
    run = Run(tmp_path)
    found = {figure.name: figure for figure in comparison._untrained(run)}
    assert len(found) == len(rows) * len(SPLITS) * len(CATEGORIES) and {f.items for f in found.values()} == {5}
    made = Comparison(run, tmp_path / "f.jsonl", tmp_path / "l.jsonl", items=5)
    for split in SPLITS:
        for name, scorer in rows.items():
            measure = made._figures_of(made.engine, lambda _, scorer=scorer: scorer, split)
            for category, outcome in measure.outcomes(None).items():
                assert found[f"{name} {split} {category}"].value == pytest.approx(outcome.mean())
    # Kept for a run that is made again.
    monkeypatch.setattr(comparison.scenes, "evaluate", None)
    assert {figure.name: figure for figure in comparison._untrained(run)} == found


def test_committed_scorers_that_are_not_trained_are_of_the_items_of_the_heads():
    held = read_figures(ROOT / "docs" / "results" / "comparison-untrained.jsonl")
    wanted = {f"{name} {split} {c}" for name in comparison.UNTRAINED for split in SPLITS for c in CATEGORIES}
    assert {figure.name for figure in held} == wanted and {figure.items for figure in held} == {comparison.ITEMS}


def test_a_seed_that_was_trained_to_something_else_is_told(run, monkeypatch):
    path = run.figures / "comparison.jsonl"
    before = read_lines(path)
    other = Cell("tfglobal", "quads", 2)
    made: list[Cell] = []

    class Made(Comparison):
        """One that trains nothing: lines are those of before, but for one seed."""

        def make(self, cell: Cell) -> list[dict[str, Any]]:
            made.append(cell)
            if stop and cell == Cell("linear", "quads", 2):
                raise KeyboardInterrupt
            own = [dict(each) for each in before if Cell(each["arm"], each["negatives"], each["seed"]) == cell]
            if cell == other:
                own = [each | {"value": 0.9, "low": 0.85, "high": 0.95} for each in own]
            comparison_runs._put(self.figures, cell, own)
            return own

    monkeypatch.setattr(comparison, "Comparison", Made)
    # A run that is stopped after the line was replaced loses no difference.
    stop = True
    with pytest.raises(KeyboardInterrupt):
        comparison.train(run)
    stop = False
    with pytest.raises(ResultsDiffer, match=r"8 of 96 .* tfglobal-quads-2 in_domain color: found 90\.0 "):
        comparison.train(run)
    assert made[-len(cells()) :] == cells()
    written = {(each["arm"], each["seed"], each["split"], each["category"]): each for each in read_lines(path)}
    assert written["tfglobal", 2, "held_out", "size"]["value"] == 0.9 and len(written) == len(before)
    # Those are now what is to be met.
    comparison.train(run)
    assert not (run.folder / "comparison" / "before.jsonl").exists()


def test_figures_of_a_training_are_written_and_held_against_those_before(tmp_path):
    path = tmp_path / "figures.jsonl"
    first = [Figure("seed 0", 100, 0.5, 0.4, 0.6), Figure("seed 1", 100, 0.5, 0.4, 0.6)]
    renew_figures(path, first)
    near = [first[0], Figure("seed 1", 100, 0.65, 0.58, 0.7), Figure("seed 2", 100, 0.9, 0.8, 1.0)]
    renew_figures(path, near)
    far = [first[0], Figure("seed 1", 100, 0.1, 0.0, 0.2)]
    with pytest.raises(ResultsDiffer, match=r"figures\.jsonl: 1 of 2 .* seed 1: found 10\.0 .* committed 65\.0"):
        renew_figures(path, far)
    assert read_figures(path) == far


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
    # Nor does it meet what is committed when it is trained again.
    better = [Figure(figure.name, 12, 1.0, 1.0, 1.0) for figure in found]
    write_figures(run.figures / "max_sim_head.jsonl", better)
    with pytest.raises(ResultsDiffer, match=r"max_sim_head\.jsonl: .* seed 0 soft held_out color: found"):
        max_sim_head.train(run)
    assert read_figures(run.figures / "max_sim_head.jsonl") == found
