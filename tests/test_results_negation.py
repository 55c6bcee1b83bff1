"""The sections on PeakPatch and on the generator: written, met by a quick run, and trained; on tiny models."""

from __future__ import annotations

import re
import sys
from copy import deepcopy
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import pytest
import torch

from engine.encoders.scenes import ScenesEncoder
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.engine import Engine
from engine.heads.peak_patch import PeakPatch, PeakPatchConfig
from engine.heads.scene_generator import SceneGenerator, SceneGeneratorConfig
from engine.heads.scene_judge import SceneJudge, SceneJudgeConfig
from engine.results import generator, peak_patch
from engine.results.figures import ResultsDiffer, read_figures, write_figures
from engine.results.peak_patch_arms import Arm, Budget, ItemSet, read_records, write_records
from engine.results.run import Run
from engine.training.heads import HeadTrainConfig
from engine.training.scene_generator import SmallScenes
from engine.training.scenes import VOCABULARY

SETS = (ItemSet(items=24), ItemSet(wording="held_out", items=12))
ARMS = {
    "ablation": (
        Arm("ECN and SCN", PeakPatchConfig(heads=2)),
        Arm("no pool", PeakPatchConfig(heads=2, use_pool=False)),
    ),
    "sweep": (Arm("layer 1", PeakPatchConfig(heads=2, peak=1)), Arm("layer 2", PeakPatchConfig(heads=2, peak=2))),
}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A tiny model in place of the embedded one."""
    torch.manual_seed(0)
    sizes = ScenesModelConfig(width=32, heads=2, image_layers=1, text_layers=2, stem_width=8, embed_dim=16)
    made = Engine(ScenesEncoder(ScenesModel(sizes), VOCABULARY, name="tiny", device=torch.device("cpu")))
    for module in (peak_patch, generator):
        monkeypatch.setattr(module, "load", lambda name, device: made)
    return made


@pytest.fixture
def shipped(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tiny heads in place of the shipped ones."""
    torch.manual_seed(1)
    head = PeakPatch.build(engine.spec, PeakPatchConfig(heads=2))
    head.take_readout(engine.encoder.text_readout())
    sizes = SceneGeneratorConfig(16, side=32, patch=8, width=32, depth=1, heads=2, context=2)
    painter = SceneGenerator(sizes, encoder=engine.spec.name, fingerprint=engine.spec.fingerprint)
    folder = tmp_path / "shipped"
    for part in (head, painter, SceneJudge(SceneJudgeConfig((4, 4, 4)))):
        part.save(folder / f"{part.name}.safetensors")
    for module in (peak_patch, generator):
        monkeypatch.setattr(module, "shipped_head", lambda name: folder / f"{name}.safetensors")
    return folder


def small_budget(output: Path, features: Path) -> Budget:
    training = HeadTrainConfig(steps=1, batch_size=8, warmup_steps=0)
    return Budget(output, features, rows=16, training=training, pretraining_steps=1)


def doubt(path: Path) -> None:
    """Make the first committed figure one that nothing can meet."""
    first, *others = read_figures(path)
    write_figures(path, [replace(first, value=-1.0, low=-1.0, high=-1.0), *others])


def test_peak_patch_is_trained_written_and_met(engine, shipped, tmp_path, monkeypatch):
    monkeypatch.setattr(peak_patch, "SETS", SETS)
    monkeypatch.setattr(peak_patch, "SEEDS", 2)
    monkeypatch.setattr(peak_patch, "Budget", small_budget)
    monkeypatch.setattr(peak_patch, "arms_of", lambda engine: ARMS)
    monkeypatch.setattr(peak_patch, "QUICK_ITEMS", 12)
    monkeypatch.setattr(peak_patch, "PAIRS", 6)
    monkeypatch.setattr(peak_patch, "FAMILIES", 10)
    told: list[str] = []
    run = Run(tmp_path / "work", root=tmp_path, progress=lambda what, done, total: told.append(what))
    with pytest.raises(FileNotFoundError, match=r"peakpatch-ablation\.jsonl is missing; `peaksim results --train`"):
        peak_patch.section(run)
    peak_patch.train(run)
    assert any(line.startswith("sweep: layer 2, seed 1: step 1/1") for line in told)
    assert len(read_records(tmp_path / "docs" / "heads" / "peakpatch-sweep.jsonl")) == 5
    # Every run of every seed is held against the record before it.
    sweep = tmp_path / "docs" / "heads" / "peakpatch-sweep.jsonl"
    trained = read_records(sweep)
    wrong = {"share": 1.0, "items": 24, "right": "ffffff"} if trained[-1]["sets"]["held_out/benchmark"]["choice"][
        "share"] < 0.5 else {"share": 0.0, "items": 24, "right": "000000"}  # fmt: skip
    doubted = deepcopy(trained)
    doubted[-1]["sets"]["held_out/benchmark"]["choice"] = wrong
    write_records(sweep, doubted)
    with pytest.raises(
        ResultsDiffer, match=r"peakpatch-sweep\.jsonl: 1 of 70 .* layer 2, seed 1: held_out/benchmark choice: found"
    ):
        peak_patch.train(run)
    assert read_records(sweep) == trained
    peak_patch.train(run)
    text = peak_patch.section(run)
    for words in (
        "| `peakpatch` | ",
        "| no pool | ",
        "| layer 2 | ",
        "| blind: longest text | ",
        "(docs/peak_layers.png)",
        "(docs/scenes_layers.png)",
        "(docs/caption_map.png)",
        "| negation | ",
        "| there is Y – there is no Y | ",
        "wordings that no training",
    ):
        assert words in text
    for name in ("peak_layers", "scenes_layers", "caption_map"):
        assert (tmp_path / "docs" / f"{name}.png").exists()
    held = {figure.name: figure for figure in read_figures(run.figures / "peak_patch.jsonl")}
    margin = held["peakpatch held_out/benchmark margin"]
    cell = f"{margin.value:+.3f} ± {(margin.high - margin.low) / 2:.3f}"
    assert margin.low <= margin.value <= margin.high and margin.items == 24
    assert re.search(rf"\| `peakpatch` \| .* \| {re.escape(cell)} \|", text)
    assert held["blind: longest text held_out/held_out choice"].items == 12
    assert "blind: longest text held_out/held_out r@5" not in held
    quick = replace(run, quick=True)
    for name in ("plot_layers", "plot_map", "caption_map", "diagnose_layers"):
        monkeypatch.setattr(peak_patch, name, None)
    assert peak_patch.section(quick) == ""
    doubt(run.figures / "peak_patch.jsonl")
    with pytest.raises(ResultsDiffer, match=r"global held_out/benchmark choice: found .* over 12 items"):
        peak_patch.section(quick)


def test_what_the_plot_needs_is_asked_for_before_anything_is_measured(engine, tmp_path, monkeypatch):
    def stop(*given: object) -> None:
        raise AssertionError("something was measured before matplotlib was asked for")

    monkeypatch.setattr(peak_patch, "_measured", stop)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="needs matplotlib, which is missing"):
        peak_patch.section(Run(tmp_path / "work", root=tmp_path))


def test_the_generator_is_written_met_and_trained(engine, shipped, tmp_path, monkeypatch):
    for name, value in (("PROMPTS", 7), ("NOISES", 1), ("QUICK_PROMPTS", 2), ("JUDGED", 20)):
        monkeypatch.setattr(generator, name, value)
    monkeypatch.setattr(SceneGenerator, "sample", partialmethod(SceneGenerator.sample, steps=1, guidance=1.0))
    run = Run(tmp_path / "work", root=tmp_path)
    text = generator.section(run)
    assert "| there is no Y, as the benchmark denies | corrected | " in text and "over 7 prompts" in text
    assert "one seed of the generator, of the judge and of the head" in text
    figures = read_figures(run.figures / "generator.jsonl")
    assert len(figures) == 12 * 2 * 2 and figures[0].name == "X, vanilla: X's color" and figures[0].items == 7
    quick = replace(run, quick=True)
    assert generator.section(quick) == ""
    doubt(run.figures / "generator-quick.jsonl")
    with pytest.raises(ResultsDiffer, match="X, vanilla: X's color: found"):
        generator.section(quick)
    # What was trained in the work folder takes the place of what is shipped.
    one = {"steps": 1, "batch_size": 4}
    monkeypatch.setattr(generator, "SCENES", SmallScenes(8))
    for name in ("GENERATOR_TRAINING", "JUDGE_TRAINING"):
        monkeypatch.setattr(generator, name, replace(getattr(generator, name), **one))
    generator.train(run)
    for part in (SceneGenerator, SceneJudge):
        assert (run.folder / "generator" / part.name / f"{part.name}.safetensors").exists()
    loaded: list[Path] = []
    load_judge = generator.load_judge
    monkeypatch.setattr(generator, "load_judge", lambda path: loaded.append(path) or load_judge(path))
    committed = run.figures / "generator.jsonl"
    write_figures(committed, [replace(figure, low=0.0, high=1.0) for figure in read_figures(committed)])
    assert "over 7 prompts" in generator.section(run)
    assert loaded[-1].is_relative_to(run.folder) and loaded[0].is_relative_to(shipped)
    found = read_figures(committed)
    doubt(committed)
    with pytest.raises(ResultsDiffer, match=r"generator\.jsonl: 1 of 48 .* X, vanilla: X's color: found"):
        generator.section(run)
    assert read_figures(committed) == found
