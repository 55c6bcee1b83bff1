"""Packed and quantised sides through the Triton launchers, where kernels are interpreted:
`TRITON_INTERPRET=1 python -m tests.max_sim_sides`. Run by `tests/test_max_sim_triton.py`."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.max_sim import Side, score_sides
from engine.kernels.max_sim_plan import plan_stationary
from engine.kernels.max_sim_stationary import launch_stationary
from engine.reference import max_sim as reference
from tests.tolerances import assert_close


def items(side: Side) -> list[tuple[Tensor, Tensor]]:
    """Tokens `(L, D)` and which are kept, of each item."""
    tokens, mask = side.tokens, side.mask
    if mask is None:
        mask = torch.ones(tokens.shape[:-1], dtype=torch.bool)
    if side.cu_seqlens is None:
        return list(zip(tokens, mask, strict=True))
    spans = list(itertools.pairwise(side.cu_seqlens.tolist()))
    return [(tokens[a:b], mask[a:b]) for a, b in spans]


def packed(lengths: list[int], dim: int, kept: float) -> Side:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    total = int(bounds[-1])
    mask = torch.rand(total) < kept if kept < 1 else None
    return Side(torch.randn(total, dim), mask, torch.rand(total), bounds, None, max(lengths))


def dense(n: int, length: int, dim: int, kept: float) -> Side:
    mask = torch.rand(n, length) < kept if kept < 1 else None
    return Side(torch.randn(n, length, dim), mask, torch.rand(n, length))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Results that show what was not written."""
    return torch.full(shape, math.nan if dtype.is_floating_point else -7, dtype=dtype)


def outputs_for(q: Side, d: Side, symmetric: bool) -> tuple[Tensor, ...]:
    grid = (q.number, d.number)
    of_q = (*grid, q.length) if q.cu_seqlens is None else (d.number, q.tokens.shape[0])
    of_d = (*grid, d.length) if d.cu_seqlens is None else (q.number, d.tokens.shape[0])
    back = of_d if symmetric else (0,)
    return (
        empty(*grid), empty(*(grid if symmetric else (0,))), empty(*of_q, dtype=torch.int32), empty(*of_q),
        empty(*back, dtype=torch.int32), empty(*back),
    )  # fmt: skip


def weights_of(side: Side, item: int) -> Tensor | None:
    if side.weights is None or side.cu_seqlens is None:
        return None if side.weights is None else side.weights[item]
    a, b = side.cu_seqlens[item : item + 2].tolist()
    return side.weights[a:b]


def per_token(x: Tensor, side: Side, own: int, other: int, transposed: bool) -> Tensor:
    """Results of one pair's tokens out of all."""
    if side.cu_seqlens is None:
        return x[other, own] if transposed else x[own, other]
    a, b = side.cu_seqlens[own : own + 2].tolist()
    return x[other, a:b]


def check(q: Side, d: Side, temperature: float | None, symmetric: bool) -> None:
    """Every pair of items against the reference on these two alone."""
    outputs = outputs_for(q, d, symmetric)
    score_sides(q, d, outputs, temperature, False, "ieee")
    for (i, (a, a_keep)), (j, (b, b_keep)) in itertools.product(enumerate(items(q)), enumerate(items(d))):
        weights = [None if w is None else w[None] for w in (weights_of(q, i), weights_of(d, j))]
        wanted = reference.max_sim(
            a[None], b[None], a_keep[None], b_keep[None], *weights, temperature=temperature, symmetric=symmetric,
            need_argmax=True, need_values=True,
        )  # fmt: skip
        got = [outputs[0][i, j], per_token(outputs[2], q, i, j, False), per_token(outputs[3], q, i, j, False)]
        expected = [wanted[0][0, 0], wanted[2][0, 0], wanted[3][0, 0]]
        if symmetric:
            got += [outputs[1][i, j], per_token(outputs[4], d, j, i, True), per_token(outputs[5], d, j, i, True)]
            expected += [wanted[1][0, 0], wanted[4][0, 0], wanted[5][0, 0]]
        for x, y in zip(got, expected, strict=True):
            if x.dtype == torch.int32:
                assert torch.equal(x, y), (i, j, x, y)
            else:
                assert_close(x, y, dtype=torch.float32, scale=20)


def check_codes(q: Side, d: Side) -> None:
    """int8 codes: exact products, documents' scales before the maximum, queries' after it."""
    q_codes, d_codes = (torch.randint(-127, 128, side.tokens.shape, dtype=torch.int8) for side in (q, d))
    q_scales, d_scales = (torch.rand(side.tokens.shape[:-1]) for side in (q, d))
    d_scales.view(-1)[1] = math.nan
    left = Side(q_codes, q.mask, q.weights, q.cu_seqlens, q_scales, q.longest)
    right = Side(d_codes, d.mask, None, d.cu_seqlens, d_scales, d.longest)
    outputs = outputs_for(left, right, False)
    score_sides(left, right, outputs, None, False, "ieee")
    rows = [items(Side(scales[..., None], None, None, side.cu_seqlens, None, 1))
            for scales, side in ((q_scales, left), (d_scales, right))]  # fmt: skip
    for (i, (a, a_keep)), (j, (b, b_keep)) in itertools.product(enumerate(items(left)), enumerate(items(right))):
        products = (a.double() @ b.double().T).float() * rows[1][j][0].squeeze(-1)[None]
        best, place = reference.pool(products, b_keep[None], None)
        place = place.masked_fill(~a_keep, -1)
        value = (rows[0][i][0].squeeze(-1) * best).masked_fill(place < 0, 0)
        assert torch.equal(per_token(outputs[2], left, i, j, False), place.int())
        assert torch.equal(per_token(outputs[3], left, i, j, False).nan_to_num(9), value.nan_to_num(9))
        weight = weights_of(q, i)
        total = (value if weight is None else weight * value).masked_fill(place < 0, 0).sum()
        assert_close(outputs[0][i, j], total, dtype=torch.float32, scale=20)


def check_batch(d: Side, temperature: float | None, full: bool) -> None:
    """Many queries with documents staying on the chip, in launches of some queries and programs of some documents."""
    n, length, dim = 40, 13, d.tokens.shape[-1]
    q = Side(torch.randn(n, length, dim).half(), *((torch.rand(n, length) < 0.8, torch.rand(n, length)) * full))
    q.tokens[7, 2, 1] = math.nan
    options = {"soft": temperature is not None, "argmax": full and temperature is None}
    plan = plan_stationary(q, d, **options, single=False, aligned=True, wgmma=True, processors=1)
    assert plan is not None and n * length >= 4 * plan.block_r and d.length > plan.block_t
    grid, places = (n, d.number), (n, d.number, length)
    nothing = torch.empty(0)
    argmax = empty(*places, dtype=torch.int32) if options["argmax"] else nothing.int()
    values = empty(*places) if full else nothing
    scores = empty(*grid)
    outputs = (scores, nothing, argmax, values, nothing.int(), nothing)
    launch_stationary(replace(plan, queries=17, programs=(d.number + 1) // 2), q, d, outputs, temperature)
    for j, (b, keep) in enumerate(items(d)):
        wanted = reference.max_sim(
            q.tokens.float(), b[None].float(), q.mask, keep[None], q.weights, None, temperature=temperature,
            symmetric=False, need_argmax=True, need_values=True,
        )  # fmt: skip
        assert_close(scores[:, j], wanted[0][:, 0], dtype=torch.float32, scale=20)
        if full:
            assert_close(values[:, j], wanted[3][:, 0], dtype=torch.float32, scale=20)
        if options["argmax"]:
            assert torch.equal(argmax[:, j], wanted[2][:, 0])


def check_batches() -> None:
    # Few: the interpreter takes a maximum that keeps NaN number by number.
    plain = Side(torch.randn(2, 130, 72).half())
    plain.tokens[0, 129, 5] = math.nan
    plain.tokens[1, 7, 0] = math.inf
    check_batch(plain, None, False)
    for temperature in (None, 0.3):
        some = packed([3, 0, 140, 1, 65], 24, 0.7)
        some = replace(some, tokens=some.tokens.half(), weights=None)
        some.tokens[90] = some.tokens[10]  # a tie: the first one wins
        assert some.mask is not None
        some.mask[:3] = False
        some.tokens[1, 3] = math.nan  # not kept
        check_batch(some, temperature, True)
    many = dense(3, 150, 64, 0.9)
    check_batch(replace(many, tokens=many.tokens.half(), weights=None), None, True)
    check_batch(Side(torch.randn(2, 130, 128).half()), 0.3, False)


def main() -> None:
    torch.manual_seed(3)
    documents = packed([3, 0, 70, 1], 24, 0.8)
    queries = packed([5, 1, 0, 17], 24, 1.0)
    for temperature, symmetric in itertools.product((None, 0.3), (False, True)):
        check(dense(3, 5, 24, 0.8), documents, temperature, symmetric)
        check(queries, dense(2, 9, 24, 1.0), temperature, symmetric)
        check(queries, documents, temperature, symmetric)
    # Queries longer than a tile: the reverse direction by itself, packed and dense.
    check(packed([140, 3], 16, 0.9), packed([4, 66], 16, 1.0), None, True)
    check(packed([140, 3], 16, 0.9), dense(2, 5, 16, 0.8), None, True)
    check_codes(dense(3, 5, 40, 0.8), documents_of(40))
    check_codes(queries_of(40), dense(2, 9, 40, 1.0))
    check_codes(dense(40, 13, 144, 0.8), packed([130, 0, 2], 144, 0.8))
    check_batches()
    print("all agree")


def documents_of(dim: int) -> Side:
    return packed([3, 0, 70, 1], dim, 0.8)


def queries_of(dim: int) -> Side:
    return packed([5, 1, 0, 17], dim, 1.0)


if __name__ == "__main__":
    main()
