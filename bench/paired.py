"""Ours and its baselines in turn: results checked first, medians of interleaved rounds, share of the machine's roofs.

Used through the fixture `paired` of `conftest.py`, whose terminal summary is the table of ratios. On one thread times
are the process's own, which other processes do not lengthen; with more they are the clock's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

ROUNDS = 7
ROUND_S = 0.02
READ_BYTES = 256 << 20
MATRIX = 2048

# dtype of the inputs -> (rtol, atol) of a result against float64 on the same inputs.
TOLERANCES = {
    torch.float32: (1e-5, 1e-4), torch.int8: (1e-5, 1e-4), torch.float16: (1e-2, 5e-2), torch.bfloat16: (1e-2, 5e-2),
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What a case cannot do without: multiplications and additions, bytes read from memory."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Row:
    """One line of the table; `ratios` of each baseline's time to ours, `share` of the roof that binds."""

    op: str
    case: str
    dtype: str
    threads: int
    ours_ms: float
    ratios: dict[str, float]
    share: float | None = None
    roof: str | None = None


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def seconds(call: Callable[[], Any], calls: int = 1) -> float:
    """Seconds a call takes, of `calls` in a row."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(calls):
        call()
    return (clock() - start) / calls


def median_of(call: Callable[[], Any]) -> float:
    call()
    return statistics.median(seconds(call) for _ in range(ROUNDS))


# Measured once a session, by the number of threads.
_read_rates: dict[int, float] = {}
_matrix_rates: dict[tuple[torch.dtype, int], float] = {}


def read_rate(threads: int) -> float:
    """Bytes per second that `threads` threads read: the sum over a buffer much larger than the caches."""
    assert threads == torch.get_num_threads(), "the rate is that of torch's threads"
    if threads not in _read_rates:
        buffer = torch.ones(READ_BYTES // 4)
        _read_rates[threads] = READ_BYTES / median_of(buffer.sum)
    return _read_rates[threads]


def matrix_rate(dtype: torch.dtype, threads: int) -> float:
    """Multiplications and additions per second of a large product through torch."""
    assert threads == torch.get_num_threads(), "the rate is that of torch's threads"
    if (dtype, threads) not in _matrix_rates:
        x = (32 * torch.randn(MATRIX, MATRIX, generator=torch.Generator().manual_seed(7))).to(dtype)
        product = torch._int_mm if dtype == torch.int8 else torch.mm
        _matrix_rates[dtype, threads] = 2 * MATRIX**3 / median_of(lambda: product(x, x))
    return _matrix_rates[dtype, threads]


def binding_roof(work: Work, dtype: torch.dtype, ours_s: float) -> tuple[float, str]:
    """The share of the slower of both roofs that `ours_s` reaches, and which roof it is."""
    threads = torch.get_num_threads()
    least = {"matrix": work.flops / matrix_rate(dtype, threads), "read": work.bytes / read_rate(threads)}
    roof = max(least, key=lambda name: least[name])
    return least[roof] / ours_s, roof


def assert_results_close(result: Any, expected: Any, rtol: float, atol: float) -> None:
    """Each tensor of a result against float64."""
    pairs = [(result, expected)] if isinstance(expected, Tensor) else zip(result, expected, strict=True)
    for actual, wanted in pairs:
        torch.testing.assert_close(actual.double(), wanted.double(), rtol=rtol, atol=atol)


@dataclass
class Paired:
    """What the fixture gives: call it once in a test. Rows of all tests gather in `rows`."""

    benchmark: BenchmarkFixture
    rows: list[Row] = field(default_factory=list)

    def __call__(
        self,
        op: str,
        case: str,
        ours: Callable[[], Any],
        baselines: Mapping[str, Callable[[], Any]],
        *,
        expected: Any,
        dtype: torch.dtype = torch.float32,
        work: Work | None = None,
        loose: Mapping[str, tuple[float, float]] | None = None,
    ) -> Row:
        """Check every implementation against float64, then time ours and the baselines in turn.

        Args:
            op, case: what the row is called.
            ours, baselines: without arguments; each returns its result.
            expected: the result in float64, a tensor or a tuple of them, or a function that checks a result and raises.
            dtype: of the inputs; row of `TOLERANCES`.
            work: least work of the case, for the share of the machine's roofs.
            loose: relative and absolute tolerance of baselines that compute something less exact.
        """
        everyone = {"ours": ours, **baselines}
        for name, call in everyone.items():
            rtol, atol = (loose or {}).get(name, TOLERANCES[dtype])
            expected(call()) if callable(expected) else assert_results_close(call(), expected, rtol, atol)
        calls = {name: max(1, int(ROUND_S / seconds(call, 2))) for name, call in everyone.items()}
        times: dict[str, list[float]] = {name: [] for name in everyone}

        def take(name: str) -> None:
            times[name].append(seconds(everyone[name], calls[name]))

        def take_baselines() -> None:
            for name in baselines:
                take(name)

        # The set-up of a round runs before it and outside its time: A B A B.
        self.benchmark.pedantic(take, ("ours",), setup=take_baselines, rounds=ROUNDS)
        medians = {name: statistics.median(some) for name, some in times.items()}
        row = self._row(op, case, dtype, medians, work)
        self.benchmark.group = f"{op}, {case}, {row.dtype}"
        self.benchmark.extra_info.update(ratios=row.ratios, share=row.share, roof=row.roof, calls=calls["ours"])
        self.rows.append(row)
        return row

    @staticmethod
    def _row(op: str, case: str, dtype: torch.dtype, medians: dict[str, float], work: Work | None) -> Row:
        ours = medians["ours"]
        ratios = {name: other / ours for name, other in medians.items() if name != "ours"}
        share, roof = (None, None) if work is None else binding_roof(work, dtype, ours)
        return Row(op, case, name_of(dtype), torch.get_num_threads(), 1e3 * ours, ratios, share, roof)


def table(rows: list[Row]) -> list[str]:
    """The rows as aligned lines of text, a heading above; empty without rows."""
    if not rows:
        return []
    lines = [["op", "case", "dtype", "threads", "ours ms", "times as fast as", "share of roof"]]
    for row in rows:
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row.ratios.items())
        share = "" if row.share is None else f"{100 * row.share:.0f} % {row.roof}"
        lines.append([row.op, row.case, row.dtype, str(row.threads), f"{row.ours_ms:.3f}", ratios, share])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def roofs() -> list[str]:
    """What was measured of the machine in this run, as lines of text."""
    lines = [f"read on {threads} threads: {rate / 1e9:.1f} GB/s" for threads, rate in _read_rates.items()]
    for (dtype, threads), rate in _matrix_rates.items():
        lines.append(f"{name_of(dtype)} matrix product on {threads} threads: {rate / 1e9:.0f} GFLOP/s")
    return lines
