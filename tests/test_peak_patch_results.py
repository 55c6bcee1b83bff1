"""Ablation, sweep of layers and map: what is trained, what is recorded, and what the tables say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.benchmarks.negation_figures import NegationFigures
from engine.benchmarks.scenes_negation import NegationBenchmark, evaluate
from engine.diagnostics.changes import scene_changes
from engine.diagnostics.layers import diagnose_layers
from engine.encoders.scenes import save_scenes
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.engine import Engine, load
from engine.heads.peak_patch import PeakPatch, PeakPatchConfig
from engine.results import caption_map as maps
from engine.results.caption_map import KINDS, caption_map, map_section
from engine.results.peak_patch import ablation_section, layer_of, layers_section, sweep_section
from engine.results.peak_patch_arms import (
    COLUMNS,
    ENCODER,
    Arm,
    Budget,
    ItemSet,
    ablation_arms,
    losses,
    margin_over_seeds,
    over_seeds,
    packed,
    read_records,
    record_figures,
    run_arms,
    run_folder,
    sweep_arms,
    unpacked,
    write_records,
)
from engine.results.peak_plot import plot_map, plot_sweep
from engine.scorers.global_cosine import GlobalCosine
from engine.training.heads import HeadTrainConfig
from engine.training.peak_patch import SCENES_HEAD
from engine.training.scenes import VOCABULARY
from tests.command_line import Shell

ROOT = Path(__file__).resolve().parent.parent
TEXT_LAYERS = 3
SETS = (ItemSet(items=12), ItemSet(wording="held_out", items=12))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = ScenesModelConfig(width=32, heads=2, image_layers=1, text_layers=TEXT_LAYERS, stem_width=8, embed_dim=16)
    save_scenes(folder, ScenesModel(sizes), VOCABULARY)
    return f"scenes:{folder}"


@pytest.fixture(scope="module")
def engine(model: str) -> Engine:
    return load(model)


def budget(folder: Path) -> Budget:
    training = HeadTrainConfig(steps=2, batch_size=8, warmup_steps=1, log_every=1)
    return Budget(folder / "runs", folder / "features", rows=16, training=training, pretraining_steps=1)


def small(arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
    """Heads of the tiny model's width."""
    return tuple(replace(arm, head=replace(arm.head, heads=2)) for arm in arms)


@pytest.fixture(scope="module")
def records(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("arms")
    return run_arms(engine, small(ablation_arms(engine.spec)), budget(folder), seeds=2, sets=SETS)


def test_arms_differ_in_what_their_names_say(engine):
    arms = {arm.name: arm for arm in ablation_arms(engine.spec)}
    whole = arms["ECN and SCN"]
    changed = {
        "ECN alone": {"parts": "ecn"},
        "SCN alone": {"parts": "scn"},
        "SCN alone, questions only": {"parts": "scn"},
        "no anchor": {"use_anchor": False},
        "no pool": {"use_pool": False},
    }
    assert set(arms) == {"ECN and SCN", *changed}
    for name, fields in changed.items():
        assert arms[name].head == replace(whole.head, **fields)
        assert (arms[name].objective == whole.objective) == (name != "SCN alone, questions only")
    for layer, arm in enumerate(sweep_arms(8), 1):
        head = arm.head
        assert (layer_of(arm.name), head.peak, head.low, head.layers) == (layer, layer, layer, (layer,))
    shipped = ablation_arms(replace(engine.spec, text_layers=8))[0].head
    assert (shipped.peak, shipped.anchor, shipped.low) == (SCENES_HEAD.peak, SCENES_HEAD.anchor, SCENES_HEAD.low)
    assert layer_of(ENCODER) == 0 and layer_of("layer cake") == 0


def test_a_record_of_every_run_and_of_the_encoder(records, engine):
    arms = [arm.name for arm in ablation_arms(engine.spec)]
    told = [(entry["arm"], entry["seed"]) for entry in records]
    assert told == [(ENCODER, None), *((arm, seed) for arm in arms for seed in (0, 1))]
    assert all(entry["fingerprint"] == engine.spec.fingerprint for entry in records)
    for entry in records[1:]:
        assert set(entry["sets"]) == {"held_out/benchmark", "held_out/held_out"} and entry["parameters"] > 0
        assert entry["loss"]["joint"][-1][0] == 2
        assert ("pretraining" in entry["loss"]) == ("SCN alone" not in entry["arm"])
        for values in entry["sets"].values():
            assert values["choice"]["items"] == 12 and set(COLUMNS) < set(values)
    json.dumps(records, allow_nan=False)


def test_the_encoder_alone_is_what_the_benchmark_says(records, engine):
    for items in SETS:
        benchmark = NegationBenchmark(items=12, scenes=12, seed=items.seed, wording=items.wording)
        wanted = evaluate(engine, {"global": GlobalCosine()}, benchmark).result("global")
        found = records[0]["sets"][items.name]
        assert found["choice"]["share"] == pytest.approx(wanted.accuracy().value)
        assert found["choice_hybrid"]["share"] == pytest.approx(wanted.accuracy("hybrid").value)
        assert found["r-neg@5"]["share"] == pytest.approx(wanted.recall(5, negated=True).value)
        assert found["margin"] == pytest.approx(wanted.choice.margin["median"])
        for name, value in wanted.choice.baselines.items():
            assert name == "chance" or found["blind"][name]["choice"]["share"] == pytest.approx(value)
        for cell in (cell for columns in found["blind"].values() for cell in columns.values()):
            assert 0 <= cell["low"] <= cell["share"] <= cell["high"] <= 1 and cell["items"] <= 12


def test_what_is_trained_is_not_trained_again(engine, tmp_path):
    (arm, *_) = small(ablation_arms(engine.spec))
    first = run_arms(engine, [arm], budget(tmp_path), seeds=1, sets=SETS[:1])
    path = run_folder(budget(tmp_path), arm, 0) / "peakpatch.safetensors"
    written = path.read_bytes()
    lines: list[str] = []
    assert run_arms(engine, [arm], budget(tmp_path), seeds=1, sets=SETS[:1], told=lines.append) == first
    assert path.read_bytes() == written and lines == []
    # Another set of items is another record.
    other = run_arms(engine, [arm], budget(tmp_path), seeds=1, sets=SETS[1:])
    assert list(other[0]["sets"]) == list(other[1]["sets"]) == [SETS[1].name]
    longer = replace(budget(tmp_path), training=replace(budget(tmp_path).training, steps=3))
    with pytest.raises(ValueError, match="was written with other settings"):
        run_arms(engine, [arm], longer, seeds=1)
    with pytest.raises(ValueError, match="seeds must be at least 1, got 0"):
        run_arms(engine, [arm], budget(tmp_path), seeds=0)


def test_a_head_reads_the_stored_layers_it_needs_and_no_other(engine, tmp_path):
    from engine.results.peak_patch_arms import shared_data

    data = shared_data(engine, budget(tmp_path))
    assert set(data.texts[[0]].hidden) == {1, 2, 3}
    some = data.texts.with_layers((2,))
    assert set(some[[0]].hidden) == {2} and len(some) == len(data.texts)
    torch.testing.assert_close(some[[3]].hidden[2], data.texts[[3]].hidden[2])


def test_outcomes_are_packed_without_loss(engine):
    outcomes = NegationFigures(engine, items=11).outcomes(GlobalCosine())
    held = packed(outcomes)
    for name, values in outcomes.columns().items():
        assert np.array_equal(unpacked(held[name]), values)
    one, other = dict(held["choice"]), {"share": 1.0, "items": 11, "right": "ffe0"}
    interval, low, high = over_seeds([one, other])
    assert interval.value == pytest.approx((one["share"] + 1) / 2) and (low, high) == (one["share"], 1.0)
    assert interval.low <= interval.value <= interval.high


def test_margins_of_every_item_are_kept(engine):
    outcomes = NegationFigures(engine, items=11).outcomes(GlobalCosine())
    held = packed(outcomes)
    kept = np.frombuffer(bytes.fromhex(held["margins"]), "<f2")
    assert kept == pytest.approx(outcomes.margins, abs=1e-3)
    # By hand, of two seeds: items are drawn alike for both.
    other = {"margin": 0.5, "margins": np.full(11, 0.5, "<f2").tobytes().hex()}
    found = margin_over_seeds([held, other])
    assert found.value == pytest.approx((np.median(outcomes.margins) + 0.5) / 2)
    rng = np.random.default_rng(0)
    medians = [np.median(kept.astype(float)[rows]) / 2 + 0.25 for rows in rng.integers(11, size=(1000, 11))]
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(medians, [0.025, 0.975])), abs=1e-3)
    assert found.low < found.value < found.high
    # A record of before they were kept has a median and no interval.
    old = margin_over_seeds([held, {"margin": 0.5}])
    assert old.value == found.value and np.isnan(old.low) and np.isnan(old.high)


def test_figures_of_records_are_their_shares(records):
    found = {figure.name: figure for figure in record_figures(records)}
    assert len(found) == len(records) * len(SETS) * (len(COLUMNS) + 1)
    margin = found["no pool, seed 1: held_out/benchmark margin"]
    assert margin.value == pytest.approx(records[-1]["sets"]["held_out/benchmark"]["margin"]) and margin.items == 12
    values = records[1]["sets"]["held_out/held_out"]["choice_hybrid"]
    figure = found["ECN and SCN, seed 0: held_out/held_out choice_hybrid"]
    assert (figure.value, figure.items) == (pytest.approx(values["share"]), values["items"])
    assert figure.low <= figure.value <= figure.high


def test_many_heads_share_features(engine, monkeypatch):
    figures = NegationFigures(engine, items=4, layers=(1, 2, 3))
    figures.outcomes(GlobalCosine())
    monkeypatch.setattr(engine, "encode_texts", None)
    for layer in (1, 3):
        head = PeakPatch.build(engine.spec, PeakPatchConfig(peak=layer, anchor=2, low=2, heads=2)).eval()
        head.take_readout(engine.encoder.text_readout())
        assert 0 <= figures(head)["choice"] <= 1


@pytest.mark.parametrize("steps", [1, 8, 9, 17, 30])
def test_the_last_loss_stands_once(tmp_path, steps):
    lines = [{"settings": {}}, *({"step": step, "loss": 1 / step} for step in range(1, steps + 1))]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [step for step, _ in losses(tmp_path)["joint"]]
    assert found == sorted(set(found)) and found[0] == 1 and found[-1] == steps and len(found) <= 17


def test_committed_losses_stand_once():
    for name in ("ablation", "sweep"):
        for entry in read_records(ROOT / "docs" / "heads" / f"peakpatch-{name}.jsonl"):
            for curve in entry.get("loss", {}).values():
                assert [step for step, _ in curve] == sorted({step for step, _ in curve})


def test_records_come_back(records, tmp_path):
    write_records(tmp_path / "deep" / "records.jsonl", records)
    assert read_records(tmp_path / "deep" / "records.jsonl") == records
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl is missing"):
        read_records(tmp_path / "gone.jsonl")


def test_the_ablation_table_shows_every_arm_and_the_blind(records, engine):
    text = ablation_section(records)
    for arm in (ENCODER, *(arm.name for arm in ablation_arms(engine.spec))):
        assert text.count(f"| {arm} | ") == len(SETS)
    mine = [entry["sets"]["held_out/benchmark"] for entry in records if entry["arm"] == "no pool"]
    share = np.mean([values["choice"]["share"] for values in mine])
    row = next(line for line in text.splitlines() if line.startswith("| no pool | "))
    assert row.startswith(f"| no pool | {100 * share:.1f} ± ")
    assert text.count("| blind: no negation word | ") == len(SETS) and "Mean of 2 seeds" in text
    number = r"[+-]?\d+\.\d+ ± \d+\.\d+"
    assert re.search(rf"^\| no pool \| .* \| {number} \|$", text, re.MULTILINE)
    # A blind row has no retrieval and no margin, and every other cell its interval.
    assert len(re.findall(rf"^\| blind: [a-z ]+ \|( {number} \|){{4}} – \| – \| – \|$", text, re.MULTILINE)) == 6


def test_the_sweep_stands_beside_the_contrast_of_layers(engine, tmp_path):
    arms = small(sweep_arms(TEXT_LAYERS))
    found = run_arms(engine, arms, budget(tmp_path), seeds=1, sets=SETS[:1])
    report = diagnose_layers(engine, scene_changes(6))
    text = sweep_section(report, found)
    for layer in (1, 2, 3):
        own = report.curve("negation").values[layer - 1]
        assert f"| layer {layer} | {own.value:.3f} ± {(own.high - own.low) / 2:.3f} | " in text
    assert "| read | negation | existence | denial | all | " in text and " | R@5 | R-Neg@5 | margin |" in text
    assert "| encoder alone | – | – | – | " in text and "| blind: longest text | – | – | – | " in text
    assert all(line.count("|") == 12 for line in text.splitlines() if line.startswith("| "))
    shares = [entry["sets"][SETS[0].name]["choice"]["share"] for entry in found[1:]]
    if np.ptp(shares):
        wanted = np.corrcoef(report.curve("negation").means, shares)[0, 1]
        assert f"with all right choices: negation {wanted:+.2f}, " in text
    picture = Image.open(plot_sweep(report, found, tmp_path / "sweep.png"))
    assert picture.width > picture.height and len(np.unique(np.asarray(picture.convert("L")))) > 20


def test_every_curve_of_the_layers_has_its_row(engine):
    report = diagnose_layers(engine, scene_changes(6))
    text = layers_section(report)
    assert "| text layer | 1 | 2 | 3 | pairs |" in text and "(docs/scenes_layers.png)" in text
    for curve in report.curves:
        (row,) = [line for line in text.splitlines() if line.removesuffix(" |").startswith(f"| {curve.name}")
                  and line.split(" | ")[0].removeprefix("| ").removesuffix(" (control)") == curve.name]  # fmt: skip
        first = curve.values[0]
        assert f" | {first.value:.3f} ± {(first.high - first.low) / 2:.3f} | " in row
        assert row.endswith(f" | {curve.count} |") and (" (control) | " in row) == (curve.role == "control")
    assert "roposed peak layer" in text


def test_the_map_holds_every_caption_twice(engine, tmp_path, monkeypatch):
    torch.manual_seed(1)
    head = PeakPatch.build(engine.spec, PeakPatchConfig(heads=2)).eval()
    head.take_readout(engine.encoder.text_readout())
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
    found = caption_map(engine, head, families=10)
    assert found.kinds == KINDS * 10 and found.before.shape == found.after.shape == (50, 2)
    assert np.isfinite(found.before).all() and found.texts[1].startswith(found.texts[0])
    plain = engine.encode_texts(list(found.texts)).embedding.view(10, 5, -1)
    wanted = float((plain[:, 0] * plain[:, 2]).sum(-1).mean())
    assert found.cosines["X – X and no Y, before"].value == pytest.approx(wanted, abs=1e-5)
    assert found.cosines["X – X and no Y, after"].value != pytest.approx(wanted, abs=1e-3)
    json.dumps(found.to_dict(), allow_nan=False)
    sides = [found.cosines[f"X – X and no Y, {side}"] for side in ("before", "after")]
    cells = " | ".join(f"{side.value:.3f} ± {(side.high - side.low) / 2:.3f}" for side in sides)
    assert f"| X – X and no Y | {cells} |" in map_section(found) and "10 scenes X" in map_section(found)
    assert plot_map(found, tmp_path / "map.png").stat().st_size > 5000
    kept = (tmp_path / "map.png").read_bytes()

    def full(figure: object, path: Path, **options: object) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(OSError, match="no space left"):
        plot_map(found, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes() == kept


def test_the_map_refuses_what_it_cannot_draw(engine, monkeypatch):
    head = PeakPatch.build(engine.spec, PeakPatchConfig(heads=2)).eval()
    head.take_readout(engine.encoder.text_readout())
    with pytest.raises(ValueError, match="families must be at least 10, got 3"):
        caption_map(engine, head, families=3)
    alone = PeakPatch.build(engine.spec, PeakPatchConfig(heads=2, parts="scn"))
    with pytest.raises(ValueError, match="must have an embedding correction, got one of parts 'scn'"):
        caption_map(engine, alone)
    head.fingerprint = "another"
    with pytest.raises(ValueError, match=r"must belong to .*, got one of .* \(another\)"):
        caption_map(engine, head, families=10)
    monkeypatch.setitem(__import__("sys").modules, "sklearn.manifold", None)
    with pytest.raises(ImportError, match=r"needs scikit-learn, which is missing; pip install 'peaksim\[plots\]'"):
        maps.require_scikit_learn()


@pytest.mark.parametrize("kind", ["ablation", "map", "generator"])
def test_what_runs_in_passes_of_its_own_takes_no_batch_size(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    shell = Shell(capsys)
    assert shell("diagnose", kind, "--batch-size", "8") == 2 and "--batch-size" in shell.err
    assert shell("diagnose", "peak", "--batch-size", "0") == 2
    assert shell.err == "peaksim: --batch-size must be at least 1, got 0\n"


def test_the_commands(model, tmp_path, capsys):
    shell = Shell(capsys)
    options = (
        *("--model", model, "--seeds", "1", "--rows", "64", "--steps", "1", "--items", "6"),
        *("--output", tmp_path / "runs", "--features", tmp_path / "features"),
    )
    assert shell("diagnose", "peak", *options, "--plot", tmp_path / "p.png", "--records", tmp_path / "r.jsonl") == 0
    assert "| layer 3 | " in shell.out and (tmp_path / "p.png").exists()
    assert len(read_records(tmp_path / "r.jsonl")) == 4
    told = shell.json("diagnose", "peak", *options)
    assert [run["arm"] for run in told["runs"]] == [ENCODER, "layer 1", "layer 2", "layer 3"]
    assert shell("diagnose", "peak", *options, "--plot", tmp_path / "p.txt") == 2 and "must end in" in shell.err
    assert shell("diagnose", "map", "--families", "10", "--plot", tmp_path / "map.png") == 0
    assert (tmp_path / "map.png").exists() and "there is no Y, after" in shell.out
    told = shell.json("diagnose", "map", "--families", "10", "--plot", tmp_path / "map.svg")
    assert len(told["captions"]) == 50
    assert shell("diagnose", "map", "--model", model, "--plot", tmp_path / "map.png") == 2 and "encoder" in shell.err
