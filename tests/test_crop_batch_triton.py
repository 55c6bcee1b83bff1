"""The Triton kernel of crop_batch: the contract under the interpreter, the launch planner, offline compilation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is a Linux package")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from engine.kernels import crop_batch as kernels
from engine.reference.crop_batch import placements

POINTERS = {
    "pixels_ptr": "*u8", "boxes_ptr": "*i64", "first_ptr": "*i32", "count_ptr": "*i32", "total_ptr": "*i32",
    "weights_ptr": "*i32", "fill_ptr": "*u8",
}  # fmt: skip


def test_the_contract_holds_under_the_interpreter() -> None:
    """The same tests, in a process where kernels run interpreted on CPU tensors (decided at their import)."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning",
         "tests/test_crop_batch.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and int(found.group(1)) > 30, done.stdout[-2000:]


@pytest.mark.parametrize("size", [(1, 1), (16, 64), (17, 65), (224, 224), (5, 300), (1000, 3)])
def test_every_output_has_a_tile(size: tuple[int, int]) -> None:
    plan = kernels.plan_crop_batch(*size)
    for a, b in (size, size[::-1]):
        assert -(-a // plan.block_a) * -(-b // plan.block_b) <= plan.tiles
    assert plan.block_a & (plan.block_a - 1) == 0 and plan.block_b & (plan.block_b - 1) == 0
    assert plan.num_warps in (1, 4)


def test_what_a_box_tells_the_kernel() -> None:
    boxes = torch.tensor([[0, 1, 2, 4, 8], [1, -2, 3, 5, 4], [1, 50, 0, 53, 2]])
    placed = placements(torch.tensor([[9, 7], [4, 6]]), boxes, "rescaled", (4, 5))
    offsets, strides = torch.tensor([0, 2**40, 2**40]), torch.tensor([21, 18, 18])
    axes = torch.tensor([[0, 4], [9, 13], [0, 4]])
    first, second, third = kernels.box_fields(placed, offsets, strides, axes, (4, 5)).tolist()
    # Height 6 becomes 4 and width 3 grows: columns first, so that the vertical axis is a.
    assert first == [2 * 21 + 3, 21, 3, 0, 6, 0, 3, 4, 5, 5, 1, 0, 4]
    # Rows first: a is horizontal; two columns lie outside the image.
    assert second == [2**40 + 3 * 18, 3, 18, 2, 7, 0, 1, 5, 4, 1, 5, 13, 9]
    # Nothing of the third lies on its image.
    assert third[6] <= third[5]


def test_images_share_a_buffer() -> None:
    images = [torch.arange(12, dtype=torch.uint8).reshape(2, 2, 3), torch.arange(9, dtype=torch.uint8).reshape(1, 3, 3)]
    pixels, offsets, strides = kernels.pack(images)
    assert pixels.tolist() == [*range(12), *range(9)]
    assert offsets.tolist() == [0, 12] and strides.tolist() == [6, 9]
    view = torch.zeros(4, 9, 3, dtype=torch.uint8)[:, 2:5]
    pixels, offsets, strides = kernels.pack([view])
    assert pixels.data_ptr() == view.data_ptr() and strides.tolist() == [27]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_it_compiles_without_a_gpu(
    capability: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    plan = kernels.plan_crop_batch(224, 224)
    constants = {"BLOCK_A": plan.block_a, "BLOCK_B": plan.block_b, "N_FIELDS": kernels.FIELDS}
    kernel = kernels._crop_batch_fwd_kernel
    signature = {}
    for name in kernel.arg_names:
        number = "fp32" if name.startswith(("scale", "shift")) else "i32"
        signature[name] = "constexpr" if name in constants else POINTERS.get(name, number)
    signature["out_ptr"] = "*" + dtype
    compiled = compile(
        ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32),
        options={"num_warps": plan.num_warps},
    )  # fmt: skip
    ptx = compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 0
    assert ".local" not in ptx
    # A box's place in the result and in the pixels: 64-bit products.
    assert re.search(r"mul\.lo\.s64|mad\.lo\.s64|mul\.wide", ptx)
