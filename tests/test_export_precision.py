"""Exports in half precision and with weights of 8 bits; what the latter cost, and that it is not taken unasked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

import engine
from engine.cli import main
from engine.encoders.exported import ExportedEncoder, load_exported
from engine.encoders.golden import lowest_cosine
from engine.encoders.registry import load_encoder
from engine.export.checking import check_export
from engine.export.cost import CostRow, batch_milliseconds, stated_cost
from engine.export.folder import ExportSettings, export_model
from engine.export.precision import half_precision
from engine.features import Needs
from tests import tiny_open_clip, tiny_scenes

COST = {"benchmark": "b", "within_interval": True, "worst": {}, "rows": [], "milliseconds": {"source": 1, "export": 1}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("precision")


@pytest.fixture(scope="module")
def tiny(root: Path) -> str:
    return f"open_clip:{tiny_open_clip.write_folder(root / 'clip', 'clip-quickgelu')}"


@pytest.fixture(scope="module")
def scenes(root: Path) -> str:
    return tiny_scenes.write_folder(root / "scenes")


@pytest.mark.parametrize("kind", ["tiny", "scenes"])
def test_half_precision_is_near_and_half_the_size(kind, root, request):
    name = request.getfixturevalue(kind)
    source = load_encoder(name, device="cpu")
    folder = export_model(name, root / f"{kind}-fp16", ExportSettings(precision="fp16"))
    exported = load_exported(folder, device="cpu", dtype="float16")
    assert exported.manifest.least_cosine == 0.999 and min(exported.manifest.cosines.values()) > 0.9999
    assert exported.spec.fingerprint == source.spec.fingerprint, "the same weights, as half precision on a GPU has it"
    pixels = torch.stack([source.preprocess(Image.new("RGB", (50, 40), color)) for color in ("red", "blue")])
    for tap in (None, "projected"):
        a, b = source.encode_pixels(pixels, tap=tap), exported.encode_pixels(pixels, tap=tap)
        assert b.embedding.dtype == torch.float32 and 0.9999 < lowest_cosine(b.embedding, a.embedding) < 1
    import onnx

    graph = onnx.load(str(folder / "image_all.onnx"), load_external_data=False).graph
    kinds = {weight.data_type for weight in graph.initializer if weight.dims}
    assert onnx.TensorProto.FLOAT16 in kinds and onnx.TensorProto.FLOAT not in kinds
    assert {port.type.tensor_type.elem_type for port in (*graph.input, *graph.output)} == {onnx.TensorProto.FLOAT}


def test_half_precision_reads_the_same_weights(tiny, monkeypatch):
    source = load_encoder(tiny, device="cpu")
    other = half_precision(source)
    assert other.spec.fingerprint == source.spec.fingerprint
    object.__setattr__(source, "spec", engine.engine.replace(source.spec, fingerprint="other"))
    with pytest.raises(ValueError, match="reads the weights once more, and they must be other, got"):
        half_precision(source)


def test_int8_is_smaller_and_near_and_has_a_mark_of_its_own(tiny, root):
    source = load_encoder(tiny, device="cpu")
    folder = export_model(tiny, root / "int8", ExportSettings(precision="int8"))
    exported = engine.load(f"{folder}?precision=int8", device="cpu").encoder
    assert isinstance(exported, ExportedEncoder)
    assert exported.spec.fingerprint == f"{source.spec.fingerprint}-int8"
    pixels = torch.stack([source.preprocess(Image.new("RGB", (50, 40), color)) for color in ("red", "blue")])
    cosine = lowest_cosine(exported.encode_pixels(pixels).embedding, source.encode_pixels(pixels).embedding)
    assert 0.98 < cosine < 0.9999999
    assert all(0.9 < value < 1 for value in exported.manifest.cosines.values())
    rows = check_export(folder, device="cpu", runs=1)
    # What is checked is that its own outputs come again; what is shown is how far they lie from the source's.
    assert all(row.own_cosine is not None and row.own_cosine > 0.9999 and row.checked == row.own_cosine for row in rows)
    assert all(0.9 < row.cosine < 0.9999999 and row.max_abs > 1e-5 for row in rows)


def test_int8_of_unknown_or_high_cost_is_not_taken_unasked(tiny, root):
    folder = root / "int8"
    with pytest.raises(ValueError, match=r"what int8 costs here was not measured .* say '.*int8\?precision=int8'"):
        engine.load(str(folder))
    dear = {**COST, "within_interval": False, "worst": {"scorer": "max_sim", "export": 0.1}}
    folder = export_model(tiny, root / "dear", ExportSettings(precision="int8"), cost=lambda *_: dear)
    with pytest.raises(ValueError, match=r"int8 costs group score .* beyond its confidence interval \(.*max_sim"):
        engine.load(str(folder))
    assert engine.load(f"{folder}?precision=int8", device="cpu").spec.embed_dim == 24
    folder = export_model(tiny, root / "cheap", ExportSettings(precision="int8"), cost=lambda *_: COST)
    assert engine.load(str(folder), device="cpu").spec.embed_dim == 24
    with pytest.raises(ValueError, match="exported in int8, got dtype='float32'"):
        engine.load(str(folder), device="cpu", dtype="float32")


def test_features_of_int8_and_of_the_source_are_told_apart(tiny, root):
    source, other = engine.load(tiny, device="cpu"), engine.load(f"{root / 'int8'}?precision=int8", device="cpu")
    features = source.encode_images([Image.new("RGB", (40, 40), "red")], scorer=Needs())
    with pytest.raises(ValueError, match=r"features must come from the encoder .*-int8, got those of"):
        other.score(features, ["a photo"])


def test_the_cost_is_that_of_the_worst_row():
    rows = [CostRow("global", "color", 0.5, 0.4, 0.6, 0.45), CostRow("sgi", "size", 0.9, 0.85, 0.95, 0.8)]
    cost = stated_cost("b", rows, {"source": 2.0, "export": 1.0})
    assert cost["worst"]["scorer"] == "sgi" and not cost["within_interval"]
    assert stated_cost("b", rows[:1], {})["within_interval"]
    # Better than the source is no cost.
    assert CostRow("global", "color", 0.5, 0.4, 0.6, 0.7).within_interval
    with pytest.raises(ValueError, match="the cost needs at least one score, got none"):
        stated_cost("b", [], {})


def test_milliseconds_are_of_both(scenes):
    encoder = load_encoder(scenes, device="cpu")
    found = batch_milliseconds(encoder, encoder, batch=1, rounds=2)
    assert set(found) == {"source", "export"} and min(found.values()) > 0


def test_the_command_measures_what_int8_costs(scenes, tmp_path, capsys):
    words = ["export", scenes, str(tmp_path / "out"), "--precision", "int8", "--cost-items", "2"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "group score" in said.out and "sgi native color" in said.out and "times as fast" in said.out
    assert "group scores of the export on 2 items of each category" in said.err
    assert "own cosine" in said.out and "int8: every own cosine, to what the export gave" in said.out
    assert main(["export", "--check", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["least_cosine"] == 0.99 and all(row["own_cosine"] > row["cosine"] for row in found["outputs"])
    cost = found["cost"]
    assert cost["benchmark"] == "scenes, 2 items of each category"
    assert {row["scorer"] for row in cost["rows"]} == {"global", "max_sim", "sgi native"}
    assert cost["within_interval"] == all(row["export"] >= row["low"] for row in cost["rows"])


def test_golden_files_hold_every_input_and_output(root):
    with safe_open(root / "int8" / "golden.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert {"picture.0", "pixels.2", "image_all/in/pixels", "text_global/out/embedding", "text_all/in/ids"} <= names
