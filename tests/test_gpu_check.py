"""The GPU script: it runs to its end on a CPU, says what is wrong, and keeps within its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is a Linux package")

from bench.gpu_cases import OUTLIER, Case, check, distance
from bench.gpu_check import Budget, Machine, main, measure
from bench.gpu_problems import Problem

CPU = torch.device("cpu")


def dry_run(tmp_path: Path, *arguments: str) -> tuple[int, dict, str]:
    """Exit status, report and output of a dry run, in a process of its own: kernels are interpreted there."""
    out = tmp_path / "report.json"
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "bench.gpu_check", "--dry-run", "--out", str(out)]
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert out.exists(), done.stderr[-3000:]
    return done.returncode, json.loads(out.read_text()), done.stdout


def test_a_dry_run_goes_through_everything(tmp_path: Path) -> None:
    status, report, output = dry_run(tmp_path)
    assert status == 0 and report["wrong"] == [] and report["left_out"] == [], output
    assert report["dry"] and {"python", "torch", "triton"} <= set(report["versions"])
    forms = ("hard", "hard, packed", "soft", "soft, packed")
    assert report["reproducible"] == dict.fromkeys(forms, True)
    names = {row["name"].split()[0] for row in report["parity"]}
    assert names >= {"max_sim", "max_sim_pairs", "window_attention", "peak_patch_features", "peak_patch_correct",
                     "peak_patch_pairs", "centroid", "crop_batch", "max_sim_contrastive", "max_sim_varlen",
                     "max_sim_topk", "max_sim_int8"}  # fmt: skip
    assert all(row["forward"] <= 1 for row in report["parity"])
    assert {row["name"] for row in report["speed"]} >= {
        "one query", "training, hard", "training, soft", "training, packed, hard",
        "contrastive loss, hard", "contrastive loss, soft",
    }  # fmt: skip
    assert all(row["ours_ms"] > 0 and row["ratios"]["torch"] > 0 for row in report["speed"] if "torch" in row["ratios"])


def test_nothing_begins_when_the_time_is_spent(tmp_path: Path) -> None:
    status, report, _ = dry_run(tmp_path, "--budget-s", "0")
    assert status == 0 and report["parity"] == [] and report["speed"] == [] and report["reproducible"] == {}
    assert len(report["left_out"]) > 15


def test_a_case_begins_only_if_the_longest_would_fit() -> None:
    budget = Budget(1000.0)
    assert budget.run(lambda: time.sleep(0.02)) == (True, None) and budget.longest >= 0.02
    budget.longest = 2000.0
    assert budget.run(lambda: pytest.fail("it began")) == (False, None)


def test_a_gpu_is_needed_otherwise(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([])
    assert "no GPU here; --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["value", "gradient", "one element", "nan", None])
def test_faults_are_found(fault: str | None) -> None:
    x = torch.randn(50, 40)

    def call(backend: str, x: Tensor) -> Tensor:
        y = 3 * x
        if backend == "reference" or fault is None:
            return y
        if fault == "value":
            return y * 1.0001
        if fault == "gradient":
            return y.detach() + (x - x.detach()) * 3.001
        spot = torch.zeros_like(y)
        spot[7, 3] = torch.nan if fault == "nan" else 0.01
        return y + spot

    found = check(Case("case", torch.float32, call, (x,), (0,)), "faulty", CPU)
    assert found.right == (fault is None)


def test_distance() -> None:
    wanted = torch.ones(1000)
    assert distance(wanted, wanted) == 0 and distance(wanted * 1.01, wanted) == pytest.approx(0.01)
    # One element that stands out counts by itself.
    single = wanted.clone()
    single[0] = 9
    assert distance(single, wanted) == pytest.approx(max(8 / 1000**0.5, 8 / OUTLIER))
    assert distance(wanted[:9], wanted) == float("inf")


def test_siblings_that_differ_are_not_timed() -> None:
    x = torch.ones(4)

    def broken() -> Tensor:
        raise RuntimeError("out of luck")

    siblings = {"right": lambda: x.clone(), "wrong": lambda: 2 * x, "broken": broken}
    speed = measure(Problem("name", "shape", torch.float32, lambda: x, siblings), Machine(CPU), 1)
    assert speed is not None and list(speed.ratios) == ["right"]
    assert speed.failed["wrong"].startswith("differs by 1.0") and "out of luck" in speed.failed["broken"]
    assert measure(None, Machine(CPU), 1) is None
