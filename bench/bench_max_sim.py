"""Max-sim against torch and NumKong: `pytest bench/bench_max_sim.py [--threads 2]` prints the table of ratios."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bench.paired import Paired, Work
from engine.ops.max_sim import max_sim

try:
    import numkong
except ImportError:
    numkong = None

Call = Callable[[], Tensor]


class Case(NamedTuple):
    """Documents, patches of each, tokens of a query, dimensions, queries."""

    n: int
    patches: int
    tokens: int
    dim: int
    queries: int = 1

    def __str__(self) -> str:
        queries = "" if self.queries == 1 else f" x {self.queries} queries"
        return f"N {self.n} P {self.patches} T {self.tokens} D {self.dim}{queries}"

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        make = torch.Generator().manual_seed(7)

        def unit(*shape: int) -> Tensor:
            return torch.nn.functional.normalize(torch.randn(shape, generator=make), dim=-1).to(dtype)

        return unit(self.queries, self.tokens, self.dim), unit(self.n, self.patches, self.dim)

    def work(self, dtype: torch.dtype) -> Work:
        rows = float(self.n * self.patches)
        return Work(2 * rows * self.queries * self.tokens * self.dim, rows * self.dim * dtype.itemsize)


ONE_QUERY = [
    Case(2048, 64, 32, 128), Case(1024, 50, 77, 512), Case(512, 196, 77, 512), Case(4096, 50, 32, 512),
    Case(256, 576, 64, 1024),
]  # fmt: skip
SHORT_QUERY = [Case(4096, 50, tokens, 512) for tokens in (1, 4, 8, 16, 20)]
BATCH = [Case(1024, 50, 77, 512, 8), Case(4096, 50, 16, 512, 8), Case(2048, 64, 32, 128, 8)]
SEGMENTS = [Case(64, 35, 4, 512, 200), Case(64, 196, 32, 512, 32)]
SWEEP = [
    Case(n, patches, tokens, dim)
    for n, patches in ((64, 7), (300, 49), (40, 257), (2000, 1))
    for tokens in (1, 7, 33)
    for dim in (64, 768)
]
DTYPES = [torch.bfloat16, torch.float32]
per_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def torch_products(q: Tensor, d: Tensor) -> Tensor:
    """What one writes in torch: one large product, a maximum, a sum; needs all similarities at once."""
    sims = q.flatten(0, 1) @ d.flatten(0, 1).T
    return sims.view(*q.shape[:2], *d.shape[:2]).amax(-1).float().sum(1)


def numkong_calls(q: Tensor, d: Tensor) -> Call:
    """One call a document, as its interface has it; both sides packed beforehand. It gives Σ (1 − cosine).

    Its winners are found in a coarser type, so that on random vectors its scores are several per cent too low.
    """

    def packed(x: Tensor) -> object:
        return numkong.maxsim_pack(numkong.from_dlpack(x), dtype="bf16" if x.dtype == torch.bfloat16 else "f32")

    query, documents = packed(q[0]), [packed(x) for x in d]

    def run() -> Tensor:
        distances = torch.tensor([[numkong.maxsim_packed(query, x) for x in documents]])
        return q.shape[1] - distances

    return run


def reference(q: Tensor, d: Tensor) -> Tensor:
    return max_sim(q.double(), d.double(), backend="reference")


@per_dtype
@pytest.mark.parametrize("case", [*ONE_QUERY, *SHORT_QUERY], ids=str)
def bench_one_query(paired: Paired, case: Case, dtype: torch.dtype, threads: int) -> None:
    """One query over a collection."""
    q, d = case.inputs(dtype)
    baselines: dict[str, Call] = {"torch": lambda: torch_products(q, d)}
    # Its calls run on one thread.
    if numkong is not None and threads == 1:
        baselines["NumKong"] = numkong_calls(q, d)
    ours = lambda: max_sim(q, d)  # noqa: E731
    work, wanted = case.work(dtype), reference(q, d)
    paired(
        "max_sim", str(case), ours, baselines, expected=wanted, dtype=dtype, work=work, loose={"NumKong": (0.2, 0.05)}
    )  # fmt: skip


def bench_numkong_is_here() -> None:
    """Says so where the table lacks a peer."""
    if numkong is None:
        pytest.skip("NumKong is not installed: pip install 'peaksim[dev]'")


@per_dtype
@pytest.mark.parametrize("case", BATCH, ids=str)
def bench_batch(paired: Paired, case: Case, dtype: torch.dtype) -> None:
    """Eight queries at once read each document once."""
    q, d = case.inputs(dtype)

    def single_calls() -> Tensor:
        return torch.cat([max_sim(one[None], d) for one in q])

    baselines = {"torch": lambda: torch_products(q, d), "single calls": single_calls}
    ours = lambda: max_sim(q, d)  # noqa: E731
    paired("max_sim", str(case), ours, baselines, expected=reference(q, d), dtype=dtype, work=case.work(dtype))


@per_dtype
@pytest.mark.parametrize("case", [*SEGMENTS, *SWEEP], ids=str)
def bench_sweep(paired: Paired, case: Case, dtype: torch.dtype) -> None:
    """Short segments over crops, a batch, and small collections of odd shapes."""
    q, d = case.inputs(dtype)
    baselines = {"torch": lambda: torch_products(q, d)}
    ours = lambda: max_sim(q, d)  # noqa: E731
    paired("max_sim", str(case), ours, baselines, expected=reference(q, d), dtype=dtype, work=case.work(dtype))


@per_dtype
@pytest.mark.parametrize("case", [Case(4096, 50, 8, 512)], ids=str)
def bench_mapped_file(paired: Paired, case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    """A file in the page cache, scored where it is mapped, against the same numbers in memory."""
    q, d = case.inputs(dtype)
    path = tmp_path / "documents.bin"
    d.view(torch.uint8).numpy().tofile(path)
    mapped = torch.from_file(str(path), shared=True, size=d.numel(), dtype=dtype).view(d.shape)
    baselines = {"torch": lambda: torch_products(q, mapped), "ours in memory": lambda: max_sim(q, d)}
    ours = lambda: max_sim(q, mapped)  # noqa: E731
    work, wanted = case.work(dtype), reference(q, d)
    paired("max_sim", f"{case}, mapped", ours, baselines, expected=wanted, dtype=dtype, work=work)
