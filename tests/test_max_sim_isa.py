"""Every instruction set of max-sim's CPU kernels against float64: shapes around their blocks, masks, strides, types."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine.ops.max_sim import MaxSimOutput, max_sim
from engine.ops.native import ISA_VARIABLE, extension, instruction_sets
from tests.max_sim_oracle import INF, INTERPRETED, NAN
from tests.tolerances import assert_close

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the Triton interpreter runs no CPU kernel")

# "amx_emulated" runs the tile code in plain C++ on any processor; "amx_bf16" is among the others where there is one.
ISAS = [*instruction_sets(), "amx_emulated"]
WITH_BFLOAT16 = [isa for isa in ISAS if "amx" in isa or "bf16" in isa]
CASES = [(isa, dtype) for isa in ISAS for dtype in (torch.float32, torch.bfloat16, torch.float16)]
CASES = [(isa, dtype) for isa, dtype in CASES if dtype == torch.bfloat16 or isa not in WITH_BFLOAT16]
per_case = pytest.mark.parametrize("isa, dtype", CASES, ids=lambda x: str(x).removeprefix("torch."))


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MaxSimOutput]]:
    """max_sim with an instruction set forced and the alignment returned."""

    def run(isa: str, *tokens: Tensor, **options: object) -> MaxSimOutput:
        monkeypatch.setenv(ISA_VARIABLE, isa)
        result = max_sim(*tokens, backend="cpp", return_alignment=True, **options)
        monkeypatch.delenv(ISA_VARIABLE)
        assert isinstance(result, MaxSimOutput)
        return result

    yield run


def unit(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(shape, dtype=torch.float64), dim=-1).to(dtype)


def expected(q: Tensor, d: Tensor, d_mask: Tensor | None = None) -> Tensor:
    """Values (Nq, Nd, Lq) in float64: 0 where a document has no token."""
    sims = torch.einsum("iuk,jtk->ijut", q.double(), d.double())
    keep = torch.ones(d.shape[:2], dtype=torch.bool) if d_mask is None else d_mask
    best = sims.masked_fill(~keep[None, :, None], -INF).amax(-1)
    return best.masked_fill(~keep.any(1)[None, :, None], 0)


def check(got: MaxSimOutput, q: Tensor, d: Tensor, d_mask: Tensor | None = None) -> None:
    """Scores, values and places; a place may be another only where its similarity is as great."""
    wanted = expected(q, d, d_mask)
    assert_close(got.values, wanted, dtype=torch.float32, what="values")
    assert_close(got.scores, wanted.sum(-1), dtype=torch.float32, scale=10, what="scores")
    sims = torch.einsum("iuk,jtk->ijut", q.double(), d.double())
    found = sims.gather(-1, got.argmax.long().clamp(min=0)[..., None])[..., 0]
    empty = torch.zeros(d.shape[0], dtype=torch.bool) if d_mask is None else ~d_mask.any(1)
    assert_close(found.masked_fill(empty[None, :, None], 0), wanted, dtype=torch.float32, what="found")
    assert ((got.argmax == -1) == empty[None, :, None]).all()
    if d_mask is not None:
        kept = d_mask[torch.arange(d.shape[0])[None, :, None], got.argmax.long().clamp(min=0)]
        assert (kept | (got.argmax < 0)).all()


@per_case
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 9, 12, 13, 16, 17, 20, 31, 33, 48, 49, 64, 65, 77, 81])
def test_numbers_of_tokens(forced: Callable, isa: str, dtype: torch.dtype, length: int) -> None:
    """Few tokens take several lanes each, many full vectors, the rest of them narrower ones."""
    q, d = unit(1, length, 40, dtype=dtype), unit(5, 7, 40, dtype=dtype)
    check(forced(isa, q, d), q, d)


@per_case
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129, 200])
def test_dimensions(forced: Callable, isa: str, dtype: torch.dtype, dim: int) -> None:
    """What follows a row in memory must not reach it: NaN lies there."""
    for length in (1, 4, 21):
        around = torch.full((3, 9, dim + 3), NAN, dtype=dtype)
        d = around[..., :dim].copy_(unit(3, 9, dim))
        q = torch.full((2, length, dim + 1), NAN, dtype=dtype)[..., 1:].copy_(unit(2, length, dim))
        check(forced(isa, q, d), q, d)


@per_case
@pytest.mark.parametrize("length, n", [(1, 1), (1, 30), (2, 9), (3, 40), (11, 3), (12, 5), (13, 7), (50, 23), (600, 3)])
def test_documents_in_one_row_block_and_across(
    forced: Callable, isa: str, dtype: torch.dtype, length: int, n: int
) -> None:
    """Blocks of rows run on across documents; a document may be longer than a table of rows."""
    for tokens in (3, 16, 40):
        q, d = unit(1, tokens, 24, dtype=dtype), unit(n, length, 24, dtype=dtype)
        check(forced(isa, q, d), q, d)


@per_case
def test_masked_documents(forced: Callable, isa: str, dtype: torch.dtype) -> None:
    q, d = unit(2, 19, 33, dtype=dtype), unit(40, 17, 33, dtype=dtype)
    d_mask = torch.rand(40, 17) < 0.3
    d_mask[3] = False
    d[~d_mask] = NAN
    clean = d.nan_to_num()
    check(forced(isa, q, d, d_mask=d_mask), q, clean, d_mask)


@per_case
@pytest.mark.parametrize("way", ["token-major", "backwards", "wide", "expanded", "lengths"])
def test_strided_documents(forced: Callable, isa: str, dtype: torch.dtype, way: str) -> None:
    """Rows that are evenly spaced, unevenly at documents' borders, and all one and the same."""
    q, d = unit(1, 18, 64, dtype=dtype), unit(12, 21, 64, dtype=dtype)
    views = {
        "token-major": lambda: d.transpose(0, 1).contiguous().transpose(0, 1),
        "backwards": lambda: torch.full((13, 21, 64), NAN, dtype=dtype)[1:].copy_(d),
        "wide": lambda: torch.full((12, 24, 80), NAN, dtype=dtype)[:, 1:22, 5:69].copy_(d),
        "expanded": lambda: d[:1, :1].expand(12, 21, 64),
        "lengths": lambda: torch.full((12, 40, 64), NAN, dtype=dtype)[:, :21].copy_(d),
    }
    view = views[way]()
    check(forced(isa, q, view), q, view)


@per_case
def test_special_values_anywhere_in_a_block(forced: Callable, isa: str, dtype: torch.dtype) -> None:
    """The first NaN of a document wins, infinities count, neither reaches the document beside it."""
    q = torch.ones(1, 18, 1, dtype=dtype)
    rows = torch.arange(60, dtype=torch.float32).reshape(12, 5, 1)
    rows[1, 3:] = NAN
    rows[2, 0] = NAN
    rows[4] = -INF
    rows[6, 1:3] = INF
    rows[7, 2] = -INF
    got = forced(isa, q, rows.to(dtype))
    assert got.argmax[0, :, 0].tolist() == [4, 3, 0, 4, 0, 4, 1, 4, 4, 4, 4, 4]
    value = rows.to(dtype).double()[..., 0].amax(1)
    assert_close(got.values, value[None, :, None].expand(1, 12, 18), dtype=torch.float32)


@per_case
def test_ties_take_the_lowest_index(forced: Callable, isa: str, dtype: torch.dtype) -> None:
    for length in (1, 5, 33):
        q = torch.ones(1, length, 4, dtype=dtype)
        d = torch.ones(6, 30, 4, dtype=dtype)
        d[:, :7] = -1
        d[2, 3] = 1
        places = torch.tensor([7, 7, 3, 7, 7, 7], dtype=torch.int32)
        assert torch.equal(forced(isa, q, d).argmax, places[None, :, None].expand(1, 6, length))


@per_case
def test_many_queries_and_threads(forced: Callable, isa: str, dtype: torch.dtype) -> None:
    """Several blocks of packed queries, and the same bits whatever the number of threads."""
    q, d = unit(70, 11, 96, dtype=dtype), unit(31, 10, 96, dtype=dtype)
    one = forced(isa, q, d)
    check(one, q, d)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        three = forced(isa, q, d)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one.scores, three.scores) and torch.equal(one.argmax, three.argmax)


@per_case
def test_soft_and_symmetric(forced: Callable, isa: str, dtype: torch.dtype) -> None:
    for length in (1, 6, 37):
        q, d = unit(2, length, 50, dtype=dtype), unit(3, 35, 50, dtype=dtype)
        got = forced(isa, q, d, temperature=0.1, symmetric=True)
        sims = torch.einsum("iuk,jtk->ijut", q.double(), d.double())
        soft = [0.1 * (sims / 0.1).logsumexp(axis).sum(-1) for axis in (-1, -2)]
        assert_close(got.scores, soft[0], dtype=torch.float32, scale=10)
        assert_close(got.reverse_scores, soft[1], dtype=torch.float32, scale=10)


def test_emulation_is_never_chosen() -> None:
    assert "amx_emulated" not in extension("max_sim").cpu_features()


def test_emulated_tiles_take_subnormals_for_zero(forced: Callable) -> None:
    """As the instruction does, which tells that the emulation ran; others may keep what is below 2^-126."""
    q = torch.ones(1, 1, 4, dtype=torch.bfloat16)
    d = torch.full((1, 1, 4), 2.0**-130, dtype=torch.bfloat16)
    assert forced("amx_emulated", q, d).values.item() == 0
    assert forced("generic", q, d).values.item() == 4 * 2.0**-130
    # float32 has no tiles: whatever comes next does it.
    assert forced("amx_emulated", q.float(), d.float()).values.item() == 4 * 2.0**-130


def test_tiles_of_the_processor_agree_with_their_emulation(forced: Callable) -> None:
    """Where there are tiles, they and the emulation within tolerance; everywhere the path that is chosen."""
    q, d = unit(2, 37, 77, dtype=torch.bfloat16), unit(9, 50, 77, dtype=torch.bfloat16)
    wanted = forced("amx_emulated", q, d)
    if "amx_bf16" in instruction_sets():
        assert_close(forced("amx_bf16", q, d).values, wanted.values, dtype=torch.float32)
    assert_close(forced("", q, d).values, wanted.values, dtype=torch.float32)
