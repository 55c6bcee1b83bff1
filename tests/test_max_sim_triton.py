"""The Triton kernel of max-sim: the contract under the interpreter, the launch planner, offline compilation."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels import max_sim
from engine.kernels.max_sim import Plan, plan_max_sim
from tests.max_sim_oracle import DTYPES

REPEATED = [f"tests/test_max_sim{part}.py" for part in ("", "_laws", "_gradients")]


def test_the_contract_holds_under_the_interpreter() -> None:
    """The same tests, in a process where kernels run interpreted on CPU tensors (decided at their import)."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", *REPEATED],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and int(found.group(1)) > 50, done.stdout[-2000:]


def test_the_planner_keeps_within_what_triton_can_launch() -> None:
    sizes = itertools.product((0, 1, 16, 17, 77, 500), (0, 1, 65, 1024), (1, 100, 1152))
    for (l_q, l_d, dim), dtype, soft, extra in itertools.product(sizes, DTYPES, (False, True), (False, True)):
        plan = plan_max_sim(l_q, l_d, dim, dtype, soft=soft, extra=extra)
        for size in (plan.block_m, plan.block_n, plan.block_k):
            assert size >= 16 and size & (size - 1) == 0
        assert plan.block_m % 64 == 0  # tensor cores of sm_90 take rows by 64
        assert plan.block_n >= min(l_q, 128)
        stages = plan.num_stages * (plan.block_m + plan.block_n) * plan.block_k * dtype.itemsize
        assert stages <= 160 * 1024  # shared memory of sm_80
        assert plan.num_warps in (4, 8)


def test_the_planner_suits_the_shapes_of_encoders() -> None:
    plan = plan_max_sim(32, 196, 512, torch.bfloat16, soft=False, extra=False)
    assert (plan.block_m, plan.block_n, plan.block_k) == (128, 32, 64)
    assert plan_max_sim(77, 50, 512, torch.bfloat16, soft=False, extra=False).block_n == 128
    assert plan_max_sim(32, 196, 512, torch.float32, soft=False, extra=False).block_k == 32
    assert plan_max_sim(32, 196, 512, torch.bfloat16, soft=True, extra=False).block_m == 64


def compiled(arch: int, element: str, options: dict[str, bool], plan: Plan) -> Any:
    """The kernel compiled for an architecture without a GPU, as the launcher would have it for D % 16 = 0."""
    kernel = max_sim._max_sim_fwd_kernel
    constants: dict[str, Any] = {
        **dict.fromkeys(("PAIRS", "SOFT", "REVERSE", "HAS_Q_WEIGHTS", "HAS_D_WEIGHTS"), False),
        **dict.fromkeys(("HAS_Q_MASK", "HAS_D_MASK", "WRITE_ARGMAX", "WRITE_VALUES"), False),
        **options, "PRECISION": "ieee",
        "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k,
    }  # fmt: skip
    types = {"q_ptr": f"*{element}", "d_ptr": f"*{element}", "temperature": "fp32"}
    types |= {name: "*u8" for name in ("q_mask_ptr", "d_mask_ptr")}
    types |= {name: "*i32" for name in ("argmax_ptr", "reverse_argmax_ptr")}
    aligned = ("q_ptr", "d_ptr", "stride_qi", "stride_qu", "stride_dj", "stride_dt", "dim")
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        other = "*fp32" if name.endswith("_ptr") else "i64" if name.startswith("stride") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, other)
        if name in aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    launch = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)


@pytest.mark.parametrize("arch, instruction", [(80, "mma.sync"), (90, "wgmma.mma_async")])
def test_compiles_without_a_gpu(arch: int, instruction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    switches = "SOFT REVERSE HAS_Q_MASK HAS_D_MASK HAS_Q_WEIGHTS HAS_D_WEIGHTS WRITE_ARGMAX WRITE_VALUES"
    everything = dict.fromkeys(switches.split(), True)
    for options in ({}, everything):
        plan = plan_max_sim(32, 196, 512, torch.bfloat16, soft=bool(options), extra=bool(options))
        result = compiled(arch, "bf16", options, plan)
        ptx = result.asm["ptx"]
        assert instruction in ptx and "cp.async" in ptx
        assert "ld.local" not in ptx and "st.local" not in ptx
        assert re.search(r"(mul\.wide|mad\.wide|mul\.lo|mad\.lo)\.s64|mul\.wide", ptx)  # 64-bit row offsets
        assert result.metadata.shared <= 160 * 1024
        assert result.asm["cubin"]
