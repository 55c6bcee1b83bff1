"""The Triton kernels of window attention: the contract under the interpreter, the planner, offline compilation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is a Linux package")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, compile

from engine.kernels import window_attention as kernels

# What the interpreter repeats; views, dtypes and laws take the same path through the kernels as these.
REPEATED = {
    "tests/test_window_attention.py": "empty or single_cell or influence or sees or infinite or far_apart "
    "or each_image or scale or (sizes and 33 and not float16) or (strides and float32)",
    "tests/test_window_attention_gradients.py": "(test_gradients and float32) or exactly_zero or stays_off "
    "or reproducible",
}
KERNELS = {
    "forward": kernels._window_attention_fwd_kernel,
    "backward of windows": kernels._window_attention_bwd_windows_kernel,
    "backward of cells": kernels._window_attention_bwd_cells_kernel,
}
FLOATS = ("grad_q_ptr", "grad_k_ptr", "grad_v_ptr", "grad_own_k_ptr", "grad_own_v_ptr", "lse_ptr", "mean_ptr")


@pytest.mark.parametrize("file", REPEATED)
def test_the_contract_holds_under_the_interpreter(file: str) -> None:
    """The same tests, in a process where kernels run interpreted on CPU tensors (decided at their import)."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", file,
         "-k", REPEATED[file] + " and not cpp and not reference"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and int(found.group(1)) >= 8, done.stdout[-2000:]


@pytest.mark.parametrize("cells", [0, 1, 3, 36, 49, 196, 256, 10_000])
@pytest.mark.parametrize("dim", [1, 16, 33, 64, 72, 96, 128, 256, 1000])
def test_the_plan_covers_a_head_and_fits_registers(cells: int, dim: int) -> None:
    plan = kernels.plan_window_attention(cells, dim)
    assert plan.block_d >= dim
    assert plan.block_d & (plan.block_d - 1) == 0 and plan.block_c & (plan.block_c - 1) == 0
    assert plan.block_c * plan.block_d <= max(2048, 4 * plan.block_d)
    assert plan.num_warps in (2, 4)


def test_launches_stay_within_the_grid() -> None:
    most = kernels.MAX_PROGRAMS
    assert kernels._launches(0) == []
    assert kernels._launches(5) == [(0, 5)]
    assert kernels._launches(2 * most + 1) == [(0, most), (most, most), (2 * most, 1)]


def signature_of(kernel: Any, constants: dict[str, Any], dtype: str) -> dict[str, str]:
    types = {"windows_ptr": "*i32", "scale": "fp32", "first": "i64", **{name: "*fp32" for name in FLOATS}}
    found = {}
    for name in kernel.arg_names:
        number = "i64" if name.startswith("stride") else "i32"
        usual = "*" + dtype if name.endswith("_ptr") else number
        found[name] = "constexpr" if name in constants else types.get(name, usual)
    return found


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype, dim", [("fp32", 96), ("fp16", 72), ("bf16", 64)])
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_without_a_gpu(
    name: str, dtype: str, dim: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No spills; rows are found by 64-bit products."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    plan = kernels.plan_window_attention(196, dim)
    kernel = KERNELS[name]
    constants = {"OWN": True, "SHARED": True, "BLOCK_C": plan.block_c, "BLOCK_D": plan.block_d}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    compiled = compile(
        ASTSource(kernel, signature_of(kernel, constants, dtype), constants), target=GPUTarget("cuda", capability, 32),
        options={"num_warps": plan.num_warps},
    )  # fmt: skip
    ptx = compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 0 and ".local" not in ptx
    assert re.search(r"mul\.lo\.s64|mad\.lo\.s64", ptx)
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    report = subprocess.run(
        [get_ptxas(capability).path, "-v", f"--gpu-name={re.search(r'target (sm_[0-9a-z]+)', ptx)[1]}",  # type: ignore[index]
         str(source), "-o", str(tmp_path / "kernel.cubin")],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
