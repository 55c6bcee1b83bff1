"""Triton kernels of PeakPatch and centroids: contracts under the interpreter, planners, offline compilation."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels import centroid, peak_patch, peak_patch_backward, peak_patch_correct

REPEATED = [f"tests/test_{name}.py" for name in ("peak_patch", "peak_patch_correct", "centroid")]


def test_the_contracts_hold_under_the_interpreter() -> None:
    """The same tests, in a process where kernels run interpreted on CPU tensors (decided at their import)."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", *REPEATED],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and int(found.group(1)) > 60, done.stdout[-2000:]


def test_planners_keep_within_what_triton_can_launch() -> None:
    for heads, length, width in itertools.product((1, 8, 12, 17, 32), (0, 1, 16, 77, 500), (1, 100, 512, 1152)):
        plan = peak_patch.plan_peak_patch(heads, length, width)
        for size in (plan.block_h, plan.block_t, plan.block_w):
            assert size >= 16 and size & (size - 1) == 0
        assert plan.block_h >= heads
        # Sums of scores and of pooled vectors stay in registers.
        assert plan.block_h * max(plan.block_t, plan.block_w) <= 4096 * max(1, plan.block_h // 32)
    for dim in (0, 1, 33, 512, 4096):
        rows = peak_patch_correct.plan_rows(dim)
        assert rows.block_d >= dim and rows.block_d & (rows.block_d - 1) == 0 and 1 <= rows.num_warps <= 8
        assert rows.block_d // (32 * rows.num_warps) <= 16  # elements of a row per thread
        plan = centroid.plan_centroid(dim)
        assert plan.block_t * plan.block_d <= 4096 and plan.block_d & (plan.block_d - 1) == 0


def compiled(kernel: Any, arch: int, element: str, constants: dict[str, Any], launch: dict[str, int]) -> Any:
    """A kernel compiled for an architecture without a GPU; `element` is the type of what comes from an encoder."""
    encoded = ("peak_ptr", "anchor_ptr", "f_ptr", "delta_ptr", "image_ptr", "text_ptr", "low_ptr", "tokens_ptr")
    integers = ("end_ptr", "cu_seqlens_ptr", "order_ptr", "cu_classes_ptr", "classes_ptr")
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            kind = "i64" if name in integers else element if name in encoded else "fp32"
            signature[name] = "*u8" if name == "mask_ptr" else f"*{kind}"
        else:
            signature[name] = "fp32" if name == "eps" else "i64" if name.startswith("stride") else "i32"
    source = ASTSource(kernel, signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)


def kernels() -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """Each kernel with constants and launch for captions of 77 tokens, width 512, everything switched on."""
    plan = peak_patch.plan_peak_patch(8, 77, 512)
    blocks = {"BLOCK_H": plan.block_h, "BLOCK_T": plan.block_t, "BLOCK_W": plan.block_w, "NORM": True}
    launch = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    rows, sets = peak_patch_correct.plan_rows(512), centroid.plan_centroid(1024)
    row, of_rows = {"BLOCK_D": rows.block_d}, {"num_warps": rows.num_warps}
    block, of_sets = {"BLOCK_T": sets.block_t, "BLOCK_D": sets.block_d}, {"num_warps": sets.num_warps}
    backward = peak_patch_backward
    return [
        (peak_patch._peak_patch_fwd_kernel, {**blocks, "FACTORS": True}, launch),
        (backward._peak_patch_bwd_scores_kernel, {**blocks, "FACTORS": True, "OF_ATTENTION": True}, launch),
        (backward._peak_patch_bwd_keys_kernel, {**blocks, "CAPTIONS": backward.CHUNK}, launch),
        (backward._peak_patch_bwd_tokens_kernel, {**blocks, "FACTORS": True}, launch),
        (peak_patch_correct._correct_fwd_kernel, row, of_rows),
        (peak_patch_correct._correct_bwd_kernel, row, of_rows),
        (peak_patch_correct._pairs_fwd_kernel, row, of_rows),
        (peak_patch_correct._pairs_bwd_kernel, row, of_rows),
        (centroid._set_sums_kernel, block, of_sets),
        (centroid._class_kernel, {"BLOCK_D": sets.block_d}, of_sets),
        (centroid._spread_kernel, block, of_sets),
    ]


@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_without_a_gpu(arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel, constants, launch in kernels():
        result = compiled(kernel, arch, "bf16", constants, launch)
        ptx = result.asm["ptx"]
        assert "ld.local" not in ptx and "st.local" not in ptx, kernel
        assert re.search(r"(mul|mad)\.(wide|lo)\.[su](32|64)", ptx), kernel  # offsets
        assert result.metadata.shared <= 100 * 1024, kernel
        assert result.asm["cubin"]
