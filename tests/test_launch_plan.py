"""The launch planner of max-sim: tiles that hardware and compiler can hold; full ones for the usual shapes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is a Linux package")

from engine.kernels.max_sim_plan import (
    Plan,
    Side,
    StationaryPlan,
    plan_max_sim,
    plan_max_sim_backward,
    plan_stationary,
)

BF16 = torch.bfloat16
TOKENS = [0, 1, 7, 15, 16, 17, 31, 32, 33, 48, 50, 63, 64, 65, 77, 79, 80, 81, 96, 112, 127, 128, 129, 200, 500]
PATCHES = [0, 1, 49, 50, 64, 65, 128, 129, 196, 257, 576, 1024]
DIMS = [0, 1, 16, 33, 64, 100, 128, 384, 512, 640, 768, 1024, 1152]
NAMES = ("soft", "argmax", "symmetric")
SWITCHES = [dict(zip(NAMES, on, strict=True)) for on in itertools.product((False, True), repeat=3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8], ids=str)
def test_every_plan_can_be_launched(dtype: torch.dtype) -> None:
    for n_q, l_q, l_d, dim in itertools.product((1, 2, 32, 1000), TOKENS, PATCHES[::3], DIMS[::3]):
        for switches in SWITCHES:
            plan = plan_max_sim(n_q, l_q, l_d, dim, dtype, **switches)
            sizes = (plan.block_m, plan.block_n, plan.block_k, *([plan.block_e] if plan.block_e else []))
            assert all(size >= 16 and size & (size - 1) == 0 for size in sizes)  # tl.dot takes no others
            assert plan.block_m % 64 == 0 and plan.block_e < plan.block_n
            assert plan.block_k * dtype.itemsize >= 32  # one step of a tensor core
            # Shared memory of sm_80, and of sm_90 all the more.
            assert plan.num_stages * (plan.block_m + plan.columns) * plan.block_k * dtype.itemsize <= 163 * 1024
            # The sums and the state of a tile in registers, with room for addresses.
            numbers = 2 + switches["soft"] + switches["argmax"]
            assert plan.block_m * plan.columns * numbers / (32 * plan.num_warps) <= 160
            assert plan.num_warps in (4, 8) and 1 <= plan.num_stages <= 4


def test_groups_fit_in_a_tile() -> None:
    for n_q, l_q, switches in itertools.product((1, 2, 3, 32, 1000), TOKENS, SWITCHES):
        plan = plan_max_sim(n_q, l_q, 196, 512, BF16, **switches)
        assert 1 <= plan.group <= max(n_q, 1)
        assert plan.group == 1 or plan.group * l_q <= plan.columns
        if switches["symmetric"]:
            assert plan.group == 1 or not plan.reverse
        if plan.reverse:
            assert switches["symmetric"] and l_q <= plan.columns


@pytest.mark.parametrize("l_q, block_n, block_e", [
    (1, 16, 0), (16, 16, 0), (17, 32, 0), (32, 32, 0), (48, 32, 16), (64, 64, 0), (77, 64, 16), (80, 64, 16),
    (81, 64, 32), (96, 64, 32), (112, 128, 0), (128, 128, 0), (129, 64, 16),
])  # fmt: skip
def test_columns_for_one_query(l_q: int, block_n: int, block_e: int) -> None:
    """77 tokens take 80 columns, not 128; 129 take two blocks."""
    plan = plan_max_sim(1, l_q, 196, 512, BF16)
    assert (plan.block_n, plan.block_e, plan.group) == (block_n, block_e, 1)


@pytest.mark.parametrize("l_q", [16, 32, 50, 64, 77])
def test_many_queries_fill_a_tile(l_q: int) -> None:
    plan = plan_max_sim(32, l_q, 196, 512, BF16)
    alone = plan_max_sim(1, l_q, 196, 512, BF16)
    assert plan.group * l_q >= 0.74 * plan.columns
    assert plan.block_m * plan.columns >= alone.block_m * alone.columns


def test_rows_follow_the_documents() -> None:
    assert plan_max_sim(1, 32, 50, 512, BF16).block_m == 64  # 50 patches in 64 rows, not 128
    assert plan_max_sim(1, 32, 196, 512, BF16).block_m == 128
    assert plan_max_sim(1, 32, 1024, 512, BF16).block_m == 128


@pytest.mark.parametrize("dim", DIMS[1:])
@pytest.mark.parametrize("dtype, elements", [(torch.bfloat16, 64), (torch.float32, 32), (torch.int8, 128)], ids=str)
def test_rows_are_read_by_128_bytes(dim: int, dtype: torch.dtype, elements: int) -> None:
    """D is never padded to a power of two: beyond one block, at most the last one is in part empty."""
    plan = plan_max_sim(1, 32, 196, dim, dtype)
    assert plan.block_k <= elements
    if dim >= elements:
        assert plan.block_k == elements and math.ceil(dim / plan.block_k) * plan.block_k - dim < elements
    else:
        assert plan.block_k < 2 * max(dim, 32)


def test_full_precision_has_no_tensor_cores() -> None:
    exact, narrow = (plan_max_sim(32, 77, 196, 512, torch.float32, exact=exact) for exact in (True, False))
    assert exact.block_m * exact.columns < narrow.block_m * narrow.columns
    assert exact.max_registers == 255 and narrow.max_registers is None


def test_long_symmetric_queries_go_one_direction_at_a_time() -> None:
    long = plan_max_sim(4, 300, 196, 512, BF16, symmetric=True)
    assert not long.reverse and isinstance(long, Plan)
    assert plan_max_sim(4, 77, 196, 512, BF16, symmetric=True).reverse


def test_warps_before_wgmma_have_rows_of_their_own() -> None:
    for n_q, l_q, l_d in itertools.product((1, 32), TOKENS, PATCHES):
        for switches in SWITCHES:
            plan = plan_max_sim(n_q, l_q, l_d, 512, BF16, wgmma=False, **switches)
            assert plan.num_warps == plan.block_m // 16 and plan.max_registers == 255
            numbers = 2 + 2 * switches["soft"] + switches["argmax"] + 2 * plan.reverse
            assert plan.block_m * plan.columns * numbers / (32 * plan.num_warps) <= 80


def test_rows_that_are_not_aligned_are_read_in_shorter_blocks() -> None:
    aligned, other = (plan_max_sim(4, 32, 196, 500, BF16, aligned=aligned) for aligned in (True, False))
    assert (aligned.block_k, other.block_k) == (64, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_backward_can_be_launched(dtype: torch.dtype) -> None:
    for length, dim in itertools.product(TOKENS, DIMS):
        for soft, scatter, aligned in itertools.product((False, True), repeat=3):
            plan = plan_max_sim_backward(length, dim, dtype, soft=soft, scatter=soft or scatter, aligned=aligned)
            for size in (plan.block_r, plan.block_f, plan.block_k, plan.block_d):
                assert size >= 16 and size & (size - 1) == 0
            assert plan.block_d <= 128 and plan.num_warps in (4, 8)
            # Tensor cores of sm_90 take rows by 64; products by hand do without.
            assert dtype == torch.float32 or not (soft or scatter) or plan.block_r % 64 == 0
            assert plan.block_r * plan.block_d / (32 * plan.num_warps) <= 64


def stationary(
    n_q: int, l_q: int, n_d: int, l_d: int, dim: int, dtype: torch.dtype = BF16, *, soft: bool = False,
    argmax: bool = False, single: bool = False, aligned: bool = True, wgmma: bool = True,
) -> StationaryPlan | None:  # fmt: skip
    q, d = (Side(torch.empty(n, length, dim, dtype=dtype, device="meta")) for n, length in ((n_q, l_q), (n_d, l_d)))
    return plan_stationary(
        q, d, soft=soft, argmax=argmax, single=single, aligned=aligned, wgmma=wgmma, processors=132
    )  # fmt: skip


def test_documents_stay_on_the_chip_for_batches() -> None:
    """Four tiles of query tokens, rows of up to 256 bytes, and documents for every processor."""
    assert stationary(32, 32, 10_000, 1024, 128) is not None
    assert stationary(1, 512, 10_000, 1024, 128) is not None
    for fewer in ((15, 32, 10_000), (1, 32, 10_000), (32, 32, 131), (0, 32, 10_000), (32, 0, 10_000)):
        assert stationary(*fewer, 1024, 128) is None
    assert [stationary(32, 32, 10_000, 196, dim) is not None for dim in (0, 64, 96, 100, 136, 512)] == [
        False, True, True, False, False, False,
    ]  # fmt: skip
    assert stationary(32, 32, 10_000, 196, 256, torch.int8) is not None
    assert stationary(32, 32, 10_000, 196, 64, torch.float32) is None
    for one in ({"single": True}, {"aligned": False}, {"soft": True, "argmax": True}):
        assert stationary(32, 32, 10_000, 196, 128, **one) is None  # type: ignore[arg-type]
    for one in ({"soft": True}, {"argmax": True}, {"wgmma": False}):
        assert stationary(32, 32, 10_000, 196, 128, **one) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_every_stationary_plan_can_be_launched(dtype: torch.dtype) -> None:
    for l_q, l_d, dim, wgmma in itertools.product((1, 7, 32, 77, 9000), PATCHES, (16, 48, 64, 96, 128), (False, True)):
        plan = stationary(600, l_q, 200, l_d, dim, dtype, wgmma=wgmma)
        assert plan is not None
        for size in (plan.block_r, plan.block_t, plan.block_k, plan.block_q, plan.block_u):
            assert size & (size - 1) == 0 and size >= (1 if size == plan.block_u else 8)
        assert dim <= plan.block_k < 2 * max(dim, 32) and plan.block_q * plan.block_u == 1024
        stages = plan.num_stages if wgmma else plan.num_stages - 1  # one is in flight
        held = (stages * plan.block_r + plan.block_t) * plan.block_k * dtype.itemsize
        assert 2 * held <= (227 if wgmma else 163) * 1024  # two blocks share a processor
        assert plan.queries >= 1 and plan.queries * l_q <= max(8192, l_q)
        # Whole tiles of documents, as few empty columns as 64 and 128 leave.
        assert math.ceil(l_d / plan.block_t) * plan.block_t == math.ceil(l_d / 64) * 64 or wgmma is False
