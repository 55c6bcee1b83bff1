"""The offline compilation finds what it says it finds: bad kernels fail, good ones pass, every kernel is met."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is a Linux package")

import triton
import triton.language as tl

from bench import offline_compile
from bench.offline_compile import Measured, measure, narrow_offsets
from bench.offline_launches import CASES, Launch, all_launches, describe, recorded

KERNELS = Path(__file__).parent.parent / "kernels"
ROWS = torch.empty(64, 64, dtype=torch.float32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@triton.jit
def _copy_kernel(x_ptr, y_ptr, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + row * stride + at, tl.load(x_ptr + row * stride + at))


@triton.jit
def _narrow_kernel(x_ptr, y_ptr, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + tl.program_id(0) * stride + at, tl.load(x_ptr + at))


@triton.jit
def _late_kernel(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):
    """The product is made in 32 bits, goes through a loop and a branch, and is widened afterwards."""
    at = tl.arange(0, BLOCK)
    offset = tl.program_id(0) * stride
    for k in range(0, n):
        if k % 3 == 1:
            offset += stride
    tl.store(y_ptr + offset.to(tl.int64)[None] + at, tl.load(x_ptr + at))


@triton.jit
def _data_kernel(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):
    """A 32-bit product that is stored, or says how far a loop goes, is none of an address."""
    at = tl.arange(0, BLOCK)
    total = tl.program_id(0) * stride
    for k in range(0, n * stride):
        total += tl.load(x_ptr + k)
    tl.store(y_ptr + at, total + at)


@triton.jit
def _spilling_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i[:, None] * BLOCK + i[None, :])
    y = tl.load(y_ptr + i[:, None] * BLOCK + i[None, :])
    tl.debug_barrier()
    tl.store(y_ptr + i[:, None] * BLOCK + i[None, :], tl.exp(x) * tl.sum(y) + y * tl.sum(x * y))


@triton.jit
def _product_kernel(x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(x_ptr + m[:, None] * K + k[None, :])
    y = tl.load(x_ptr + n[None, :] * K + k[:, None])
    tl.store(y_ptr + m[:, None] * N + n[None, :], tl.dot(x, y))


def launch(kernel: Any, *arguments: Any, num_warps: int = 4, **constants: Any) -> Launch:
    return describe(kernel, arguments, {"num_warps": num_warps, "grid": (1,), **constants})


def failures(found: Measured) -> str:
    return " | ".join(found.failures)


@pytest.mark.parametrize("arch", [80, 90])
def test_a_good_kernel_passes(arch: int) -> None:
    found = measure(launch(_copy_kernel, ROWS, ROWS, 64, BLOCK=64), arch)
    assert found.failures == () and found.registers > 0 and found.local_bytes == 0 and found.wgmma == found.mma == 0


def test_products_use_the_tensor_cores() -> None:
    narrow = torch.empty(64, 64, dtype=torch.bfloat16)
    good = launch(_product_kernel, narrow, ROWS, M=64, N=16, K=64)
    assert good.dtype == "bf16" and measure(good, 90).wgmma > 0 and measure(good, 90).failures == ()
    assert measure(good, 80).mma > 0 and measure(good, 80).failures == ()
    # Sixteen rows are too few for wgmma.
    found = measure(launch(_product_kernel, narrow, ROWS, M=16, N=64, K=64), 90)
    assert found.wgmma == 0 and "without wgmma" in failures(found)


def test_a_product_that_is_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_compile, "PRODUCTS", ("_copy_kernel",))
    narrow = torch.empty(64, dtype=torch.bfloat16)
    assert "without wgmma" in failures(measure(launch(_copy_kernel, narrow, narrow, 64, BLOCK=64), 90))


def test_spills_are_found() -> None:
    found = measure(launch(_spilling_kernel, ROWS, ROWS, BLOCK=128, num_warps=1), 90)
    assert found.local_bytes > 0 and "registers spill" in failures(found)


def test_too_much_shared_memory_is_found() -> None:
    narrow = torch.empty(64, 64, dtype=torch.bfloat16)
    large = launch(_product_kernel, narrow, ROWS, M=128, N=128, K=512, num_warps=8)
    found = measure(large, 90)
    assert found.shared_bytes > 227 * 1024 and "bytes of shared memory" in failures(found)


@pytest.mark.parametrize("kernel, sizes", [(_narrow_kernel, (48,)), (_late_kernel, (5, 48))])
def test_row_offsets_of_32_bits_are_found(kernel: Any, sizes: tuple[int, ...]) -> None:
    found = measure(launch(kernel, ROWS, ROWS, *sizes, BLOCK=64), 80)
    assert "a product in 32 bits" in failures(found)
    assert found.registers > 0  # all else about it is well
    assert len(found.failures) == 1


def test_products_that_reach_no_address_are_none_of_ours() -> None:
    counts = torch.empty(64, dtype=torch.int32)
    assert measure(launch(_data_kernel, counts, counts, 3, 5, BLOCK=64), 80).failures == ()


def test_names_recur_in_sibling_regions() -> None:
    """What a name meant in an earlier region has no part in a later one."""
    ttir = """
    tt.func public @f(%p: !tt.ptr<f32> loc("p"(#loc)), %a: i32, %b: i32) attributes {noinline = false} {
      %c0 = arith.constant 0 : i32 loc(#loc1)
      scf.for %k = %c0 to %a step %c0  : i32 {
        %x = arith.muli %a, %b : i32 loc(#loc2)
        %y = arith.addi %x, %c0 : i32 loc(#loc2)
      } loc(#loc2)
      scf.for %k = %c0 to %a step %c0  : i32 {
        %x = arith.addi %a, %b : i32 loc(#loc3)
        %q = tt.addptr %p, %x : !tt.ptr<f32>, i32 loc(#loc3)
      } loc(#loc3)
      tt.return loc(#loc)
    } loc(#loc)
    """
    assert narrow_offsets(ttir) == []
    assert len(narrow_offsets(ttir.replace("arith.addi %a, %b", "arith.muli %a, %b"))) == 1


def test_what_does_not_compile_is_a_failure() -> None:
    broken = dataclasses.replace(launch(_copy_kernel, ROWS, ROWS, 64, BLOCK=64), constants=(("BLOCK", 63),))
    assert "does not compile" in failures(measure(broken, 80))


def test_the_run_fails_and_names_the_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def cases(*kernels: Any) -> Callable[[], None]:
        return lambda: [kernel[(1,)](ROWS, ROWS, 48, BLOCK=64) for kernel in kernels] and None

    monkeypatch.setitem(CASES, "max_sim", cases(_copy_kernel, _narrow_kernel, _copy_kernel))
    assert offline_compile.main(["--ops", "max_sim", "--arch", "80", "--workers", "1"]) == 1
    out, err = capsys.readouterr()
    assert "2 compilations, 1 failed" in out and "registers" in out
    assert err.startswith("FAILED _narrow_kernel fp32 sm_80 [block=64") and err.count("FAILED") == 1
    monkeypatch.setitem(CASES, "max_sim", cases(_copy_kernel))
    assert offline_compile.main(["--ops", "max_sim", "--arch", "80", "--workers", "1"]) == 0


def test_the_recorder_leaves_triton_as_it_was() -> None:
    before = triton.runtime.jit.JITFunction.run
    with recorded() as launches:
        _copy_kernel[(3,)](ROWS, ROWS, 1, BLOCK=64, num_warps=2)
    assert triton.runtime.jit.JITFunction.run is before
    (found,) = launches
    assert found.kernel == "_copy_kernel" and found.options == (("num_warps", 2),)
    assert found.constants == (("stride", 1), ("BLOCK", 64)) and found.aligned == (0, 1)


def test_every_kernel_is_met() -> None:
    """Each kernel of the package is among the launches, in the dtypes that its op has."""
    defined = set()
    for file in KERNELS.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                defined.add(node.name)
    launches = all_launches(tuple(CASES), 90)
    assert {found.kernel for found in launches} == defined
    assert {found.dtype for found in launches if found.kernel == "_max_sim_fwd_kernel"} >= {"bf16", "fp16", "fp32"}
