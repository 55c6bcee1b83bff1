"""Max-sim of int8 codes against our bfloat16: `pytest bench/bench_max_sim_int8.py [--threads 2]` prints the ratios.

Times are those of scoring; documents are quantised beforehand, as an index stores them. The check is against the
vectors that the codes stand for.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.paired import Paired, Work
from engine.ops.max_sim import max_sim
from engine.ops.max_sim_int8 import max_sim_int8
from engine.ops.max_sim_topk import max_sim_topk
from engine.ops.quantize import dequantize, quantize

# documents, patches of each, tokens of a query, D, queries
SHAPES = [
    (2048, 64, 32, 128, 1), (1024, 50, 77, 512, 1), (512, 196, 77, 512, 1), (4096, 50, 32, 512, 1),
    (256, 576, 64, 1024, 1), (4096, 50, 8, 512, 1), (1024, 50, 32, 512, 8),
]  # fmt: skip


def unit(*shape: int) -> Tensor:
    make = torch.Generator().manual_seed(sum(shape))
    return torch.nn.functional.normalize(torch.randn(shape, generator=make), dim=-1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_codes(paired: Paired, shape: tuple[int, ...]) -> None:
    """Scores of a collection."""
    n, patches, tokens, dim, queries = shape
    q, d = unit(queries, tokens, dim), unit(n, patches, dim)
    codes = quantize(q), quantize(d)
    wanted = max_sim(*(dequantize(x).double() for x in codes), backend="reference")
    rows = float(n * patches)
    paired(
        "max_sim_int8", f"N {n} P {patches} T {tokens} D {dim} x {queries}", lambda: max_sim_int8(*codes),
        {"our bfloat16": bfloat16_scores(q, d)}, expected=wanted, dtype=torch.int8,
        work=Work(2 * rows * queries * tokens * dim, rows * dim), loose={"our bfloat16": (0.05, 5e-2)},
    )  # fmt: skip


def bfloat16_scores(q: Tensor, d: Tensor) -> Callable[[], Tensor]:
    q, d = q.bfloat16(), d.bfloat16()
    return lambda: max_sim(q, d)


@pytest.mark.parametrize("quantised", [False, True])
def bench_topk(paired: Paired, quantised: bool) -> None:
    """Ten best of a collection against all scores and torch's topk."""
    q, d = unit(8, 16, 256), unit(4096, 20, 256)
    sides = (quantize(q), quantize(d)) if quantised else (q, d)
    score = max_sim_int8 if quantised else max_sim

    def all_scores() -> Tensor:
        return score(*sides).topk(10).values

    wanted = all_scores().double()
    name = "int8" if quantised else "float32"
    baselines = {"all scores, then topk": all_scores}
    paired("max_sim_topk", f"N 4096 P 20 T 16 D 256 x 8, {name}", lambda: max_sim_topk(*sides, 10).scores, baselines,
           expected=wanted)  # fmt: skip
