"""Packed tokens for tests of max-sim: random cases, the op on each backend, plain loops over pairs of items."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from engine.ops.max_sim import MaxSimOutput
from engine.ops.max_sim_varlen import max_sim_varlen
from tests.max_sim_oracle import assert_matches, forced, oracle
from tests.tolerances import assert_close

Case = dict[str, Any]


def run(backend: str, **options: Any) -> MaxSimOutput:
    with forced(backend) as name:
        result = max_sim_varlen(backend=name, **options)
    return result if isinstance(result, MaxSimOutput) else MaxSimOutput(result)


def bounds_of(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def random_side(name: str, lengths: list[int] | tuple[int, int], dim: int, dtype: torch.dtype, beyond: int = 0) -> Case:
    """Packed tokens of items of these lengths, with `beyond` rows of no item; a tuple `(N, L)` makes a dense side."""
    packed = isinstance(lengths, list)
    shape = (sum(lengths) + beyond,) if packed else lengths
    tokens = torch.nn.functional.normalize(torch.randn(*shape, dim), dim=-1).to(dtype)
    case = {name: tokens, f"{name}_mask": torch.rand(shape) < 0.75, f"{name}_weights": torch.rand(shape)}
    if packed:
        case[f"{name}_cu_seqlens"] = bounds_of(lengths)
    return case


def random_case(q: Any, d: Any, dim: int, dtype: torch.dtype = torch.float32, beyond: int = 0) -> Case:
    return random_side("q", q, dim, dtype, beyond) | random_side("d", d, dim, dtype, beyond)


def items(case: Case, name: str) -> list[Case]:
    """One dense case `(1, L, ...)` per item of a side."""
    fields = [x for x in (name, f"{name}_mask", f"{name}_weights") if case.get(x) is not None]
    bounds = case.get(f"{name}_cu_seqlens")
    if bounds is None:
        return [{x: case[x][i : i + 1] for x in fields} for i in range(case[name].shape[0])]
    return [{x: case[x][a:b][None] for x in fields} for a, b in spans(bounds)]


def varlen_oracle(case: Case, temperature: float | None) -> MaxSimOutput:
    """Plain loops over pairs of items, laid out as the op lays them out."""
    left, right = items(case, "q"), items(case, "d")
    cells = [[oracle(**a, **b, temperature=temperature) for b in right] for a in left]
    grid = (len(left), len(right))

    def scores(field: str) -> Tensor:
        numbers = [getattr(x, field).item() for row in cells for x in row]
        return torch.tensor(numbers, dtype=torch.float64).reshape(grid)

    def of_queries(field: str, fill: int) -> Tensor:
        if "q_cu_seqlens" not in case:
            rows = [torch.cat([getattr(x, field) for x in row], 1) for row in cells]
            return torch.cat(rows) if rows else torch.zeros(*grid, case["q"].shape[1])
        to = torch.full((case["q"].shape[0], grid[1]), fill, dtype=torch.float64)
        for i, (begin, end) in enumerate(spans(case["q_cu_seqlens"])):
            for j in range(grid[1]):
                to[begin:end, j] = getattr(cells[i][j], field)[0, 0]
        return to

    def of_documents(field: str, fill: int) -> Tensor:
        if "d_cu_seqlens" not in case:
            rows = [torch.cat([getattr(x, field) for x in row], 1) for row in cells]
            return torch.cat(rows) if rows else torch.zeros(*grid, case["d"].shape[1])
        to = torch.full((grid[0], case["d"].shape[0]), fill, dtype=torch.float64)
        for j, (begin, end) in enumerate(spans(case["d_cu_seqlens"])):
            for i in range(grid[0]):
                to[i, begin:end] = getattr(cells[i][j], field)[0, 0]
        return to

    return MaxSimOutput(
        scores("scores"), scores("reverse_scores"),
        of_queries("argmax", -1).int(), of_queries("values", 0),
        of_documents("reverse_argmax", -1).int(), of_documents("reverse_values", 0),
    )  # fmt: skip


def spans(bounds: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(bounds.tolist()))


def check(backend: str, case: Case, temperature: float | None = None) -> MaxSimOutput:
    """Compare everything with the oracle; the call for scores alone must agree with the one for all."""
    got = run(backend, **case, temperature=temperature, symmetric=True, return_alignment=True)
    # Results are float32 whatever the inputs, whose rounding is no error of ours.
    number = torch.float64 if case["q"].dtype == torch.float64 else torch.float32
    assert_matches(got, varlen_oracle(case, temperature), number, scale=10)
    one_way = {name: value for name, value in case.items() if name != "d_weights"}
    plain = run(backend, **one_way, temperature=temperature).scores
    assert_close(plain, got.scores, dtype=number, scale=5, what="scores of the plain call")
    return got
