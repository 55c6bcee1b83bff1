"""Max-sim as plain Python loops in float64, and the ways to run it, for the tests of max-sim.

The loops share no code with the reference: they are what the reference itself is checked against.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops.max_sim import MaxSimOutput, max_sim, max_sim_pairs
from engine.ops.native import ISA_VARIABLE, instruction_sets
from tests.tolerances import assert_close

# A run under Triton's interpreter (see test_max_sim_triton.py) repeats the same tests with that backend alone.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["triton"] if INTERPRETED else ["reference", *(f"cpp:{isa}" for isa in instruction_sets())]
# The interpreter's bfloat16 products are wrong; compiled kernels are another matter.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
NAN, INF = math.nan, math.inf


@contextmanager
def forced(backend: str) -> Iterator[str]:
    """The `backend` argument for an entry of BACKENDS, with the instruction set it names forced meanwhile."""
    name, _, isa = backend.partition(":")
    with pytest.MonkeyPatch.context() as patch:
        if isa:
            patch.setenv(ISA_VARIABLE, isa)
        yield name


def run(backend: str, q: Tensor, d: Tensor, *, pairs: bool = False, **options: Any) -> MaxSimOutput:
    """max_sim or max_sim_pairs on an entry of BACKENDS, always as a MaxSimOutput."""
    with forced(backend) as name:
        result = (max_sim_pairs if pairs else max_sim)(q, d, backend=name, **options)
    return result if isinstance(result, MaxSimOutput) else MaxSimOutput(result)


def dot(x: list[float], y: list[float]) -> float:
    return sum((a * b for a, b in zip(x, y, strict=True)), 0.0)


def pooled(sims: list[tuple[int, float]], temperature: float | None) -> tuple[float, int]:
    """Value and place of the maximum of (place, similarity); (0, -1) of none."""
    if not sims:
        return 0.0, -1
    place, best = sims[0]
    for t, s in sims[1:]:
        if not math.isnan(best) and (math.isnan(s) or s > best):
            place, best = t, s
    if temperature is None or math.isnan(best) or math.isinf(best):
        return best, place
    return best + temperature * math.log(sum(math.exp((s - best) / temperature) for _, s in sims)), place


def one_direction(
    q: list, d: list, q_kept: list[int], d_kept: list[int], weights: list[float], temperature: float | None
) -> tuple[float, list[int], list[float]]:
    """Score, argmax and values of one query against one document."""
    argmax, values, score = [-1] * len(q), [0.0] * len(q), 0.0
    for u in q_kept:
        values[u], argmax[u] = pooled([(t, dot(q[u], d[t])) for t in d_kept], temperature)
        if d_kept:
            score += weights[u] * values[u]
    return score, argmax, values


def oracle(
    q: Tensor,
    d: Tensor,
    *,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    q_weights: Tensor | None = None,
    d_weights: Tensor | None = None,
    temperature: float | None = None,
    pairs: bool = False,
) -> MaxSimOutput:
    """Everything that max_sim can return, in float64."""

    def lists(x: Tensor | None, like: Tensor, fill: Any) -> list:
        return torch.full(like.shape[:2], fill).tolist() if x is None else x.tolist()

    q_rows, d_rows = q.double().tolist(), d.double().tolist()
    q_keep, d_keep = lists(q_mask, q, True), lists(d_mask, d, True)
    q_w, d_w = lists(q_weights, q, 1.0), lists(d_weights, d, 1.0)
    cells = []
    for i in range(len(q_rows)):
        for j in [i] if pairs else range(len(d_rows)):
            kept_u = [u for u, keep in enumerate(q_keep[i]) if keep]
            kept_t = [t for t, keep in enumerate(d_keep[j]) if keep]
            ahead = one_direction(q_rows[i], d_rows[j], kept_u, kept_t, q_w[i], temperature)
            back = one_direction(d_rows[j], q_rows[i], kept_t, kept_u, d_w[j], temperature)
            cells.append((*ahead, *back))
    grid = (len(q_rows),) if pairs else (len(q_rows), len(d_rows))
    shapes = [grid, (*grid, q.shape[1]), (*grid, q.shape[1]), grid, (*grid, d.shape[1]), (*grid, d.shape[1])]
    columns = []
    for k, shape in enumerate(shapes):
        dtype = torch.int32 if k in (1, 4) else torch.float64
        columns.append(torch.tensor([cell[k] for cell in cells], dtype=dtype).reshape(shape))
    score, argmax, values, reverse_score, reverse_argmax, reverse_values = columns
    return MaxSimOutput(score, reverse_score, argmax, values, reverse_argmax, reverse_values)


def assert_matches(got: MaxSimOutput, wanted: MaxSimOutput, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Every field that `got` has agrees with the oracle; places exactly."""
    for name, actual, expected in zip(MaxSimOutput._fields, got, wanted, strict=True):
        if actual is None:
            continue
        if actual.dtype == torch.int32:
            assert_close(actual, expected, what=name)
        else:
            assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), name
            assert_close(actual, expected, dtype=dtype, scale=scale, what=name)


def check(backend: str, q: Tensor, d: Tensor, *, scale: float = 1.0, **options: Any) -> MaxSimOutput:
    """Run with the alignment and in symmetric form, compare with the oracle, return the result.

    The plain call must give the very same scores as the one that also returns the alignment.
    """
    got = run(backend, q, d, symmetric=True, return_alignment=True, **options)
    assert_matches(got, oracle(q, d, **options), q.dtype, scale)
    one_way = {name: value for name, value in options.items() if name != "d_weights"}
    plain = run(backend, q, d, **one_way)
    assert_close(plain.scores, got.scores, dtype=torch.float32, scale=scale, what="scores of the plain call")
    aligned = run(backend, q, d, return_alignment=True, **one_way)
    assert_close(aligned.argmax, got.argmax, what="argmax of the one-sided call")
    return got
