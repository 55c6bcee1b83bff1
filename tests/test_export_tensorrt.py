"""Engines of TensorRT: what they are built for, that none is built on a request; the script for GPUs, on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_export_check
from engine.cli import main
from engine.encoders import exported, onnx_providers, tensorrt_engines
from engine.encoders.export_manifest import Manifest, read_manifest
from engine.encoders.exported import TOWERS, ExportedEncoder, Placement
from engine.encoders.onnx_graph import Graph, Port, Signature
from engine.encoders.onnx_providers import open_session
from engine.export import warming
from engine.export.warming import warm_tensorrt
from engine.heads.base import shipped_head


@pytest.fixture
def folder(exported_scenes: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported_scenes, tmp_path / "copy"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, dict[str, str]]]:
    """A TensorRT that is the CPU: what was opened with which options, an engine's file each."""
    calls: list[tuple[str, str, dict[str, str]]] = []

    def open_on_cpu(
        who: str,
        path: Path,
        provider: str,
        *,
        device: int = 0,
        options: Mapping[str, str] | None = None,
        half: bool = False,
    ) -> Any:
        calls.append((path.name, provider, dict(options or {})))
        if options:
            Path(options["trt_engine_cache_path"], f"{options['trt_engine_cache_prefix']}.engine").touch()
        return open_session(who, path, "cpu", half=half)

    for module in (warming, exported):
        monkeypatch.setattr(module, "open_session", open_on_cpu)
    monkeypatch.setattr(warming, "check_provider", lambda who, provider: None)
    monkeypatch.setattr(warming, "place", lambda device, dtype: (torch.device("cpu"), torch.float32))
    monkeypatch.setattr(tensorrt_engines, "tensorrt_key", lambda device: "GPU_sm90_tensorrt-10.0_onnxruntime-1.0")
    return calls


def encoder_on(folder: Path, provider: str) -> ExportedEncoder:
    manifest = read_manifest("test", folder)
    return ExportedEncoder("test", folder, manifest, Placement(torch.device("cpu"), provider))


def test_engines_are_built_ahead_for_every_tower(folder, opened):
    told: list[str] = []
    place = warm_tensorrt(folder, told=told.append)
    assert place == folder / "tensorrt" / "GPU_sm90_tensorrt-10.0_onnxruntime-1.0"
    assert [name for name, _, _ in opened] == [f"{key}.onnx" for key in TOWERS] and len(told) == 4
    options = {name: options for name, _, options in opened}["text_global.onnx"]
    assert options["trt_profile_min_shapes"] == "ids:1x40,end:1"
    assert options["trt_profile_opt_shapes"] == "ids:16x40,end:16"
    assert options["trt_profile_max_shapes"] == "ids:64x40,end:64"
    # Strongly typed: none of the provider's own switches of precision.
    assert {options[f"trt_{name}_enable"] for name in ("fp16", "bf16", "int8")} == {"False"}
    assert options["trt_engine_cache_enable"] == "True" and options["trt_engine_cache_path"] == str(place)


def test_nothing_is_built_while_requests_wait(folder, opened):
    with pytest.raises(ValueError, match=r"holds no engine of TensorRT for 'image_global'.*--warm tensorrt"):
        encoder_on(folder, "tensorrt").verify()
    assert not opened
    warm_tensorrt(folder, told=lambda _: None)
    opened.clear()
    rows = encoder_on(folder, "tensorrt").verify()
    assert all(row.provider == "tensorrt" for row in rows)
    by_name = {name: provider for name, provider, _ in opened}
    assert all(by_name[f"{key}.onnx"] == "tensorrt" for key in TOWERS)
    # Heads are free in more than the batch.
    assert by_name["peakpatch_pairs.onnx"] == by_name["tflocal_text.onnx"] == "cuda"


def test_engines_of_another_export_are_not_taken(folder, opened):
    place = warm_tensorrt(folder, told=lambda _: None)
    facts = json.loads((place / "built.json").read_text())
    (place / "built.json").write_text(json.dumps({**facts, "manifest": "other"}))
    with pytest.raises(ValueError, match="holds no engine of TensorRT"):
        encoder_on(folder, "tensorrt").verify()


def test_larger_batches_are_run_in_parts(folder, opened):
    warm_tensorrt(folder, told=lambda _: None)
    encoder, plain = encoder_on(folder, "tensorrt"), encoder_on(folder, "cpu")
    assert encoder.graphs["image_global"].max_batch == 64 and encoder.graphs["peakpatch_text"].max_batch == 0
    pixels = torch.rand(150, 3, 96, 96)
    found, wanted = encoder.encode_pixels(pixels), plain.encode_pixels(pixels)
    torch.testing.assert_close(found.embedding, wanted.embedding, rtol=0, atol=1e-6)


def test_a_graph_of_no_rows_gives_no_rows():
    signature = Signature("g.onnx", {"x": Port("float32", ("batch", 3))}, {"y": Port("float32", ("batch", 5))})
    graph = Graph("test", signature, lambda: pytest.fail("nothing is to be run"))
    assert graph.run({"x": torch.zeros(0, 3)})["y"].shape == (0, 5)


def test_warming_says_what_is_missing(folder, capsys):
    assert main(["export", "--warm", "tensorrt", str(folder)]) == 1
    assert "provider 'tensorrt' was wanted" in capsys.readouterr().err
    with pytest.raises(ImportError, match="TensorRT is wanted and is not installed; pip"):
        onnx_providers._tensorrt_version()


def test_int8_is_for_cpus(folder, monkeypatch):
    from tests.test_export import rewrite

    rewrite(folder, precision="int8", cost={"within_interval": True})
    with pytest.raises(ValueError, match="int8 is for CPUs, TensorRT was wanted"):
        warm_tensorrt(folder, told=lambda _: None)
    monkeypatch.setattr(exported, "check_provider", lambda who, provider: None)
    with pytest.raises(ValueError, match="int8 is for CPUs, got provider 'cuda'; export fp16 for GPUs"):
        exported.load_exported(folder, device="cpu", provider="cuda")


def test_a_provider_that_does_not_start_is_an_error(exported_scenes, monkeypatch):
    monkeypatch.setattr(onnx_providers, "check_provider", lambda who, provider: None)
    with (
        pytest.warns(UserWarning, match="CUDAExecutionProvider"),
        pytest.raises(ImportError, match="provider 'cuda' was wanted and could not be started, ONNX Runtime took CPU"),
    ):
        open_session("test", exported_scenes / "image_global.onnx", "cuda")
    with pytest.raises(ValueError, match=r"test: ONNX Runtime cannot open peakpatch\.safetensors"):
        open_session("test", shipped_head("peakpatch"), "cpu")


def test_the_gpu_script_runs_dry(tmp_path, capsys):
    assert gpu_export_check.main(["--dry-run", "--out", str(tmp_path / "r.json"), "--precisions", "fp32"]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    (row,) = report["rows"]
    assert row["wrong"] == [] and row["provider"] == "cpu" and set(row["milliseconds"]) == {"1", "8", "64"}
    assert row["cosines"]["patches"] > 0.9999 and len(row["golden"]) > 8
    assert "1 combinations, 0 wrong" in capsys.readouterr().out


def test_the_gpu_script_says_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_export_check, "load_exported", lambda *_, **__: (_ for _ in ()).throw(ValueError("far")))
    row = gpu_export_check.examine(None, tmp_path, "cpu", "cpu")  # type: ignore[arg-type]
    assert row == {"wrong": ["ValueError: far"]}


def test_manifests_state_the_largest_batch(exported_scenes):
    manifest = read_manifest("test", exported_scenes)
    assert isinstance(manifest, Manifest) and manifest.max_batch == 64
