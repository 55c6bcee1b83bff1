"""What every benchmark has: the fixture `paired`, the option `--threads`, the table of ratios at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.paired import Paired, Row, roofs, table

ROWS = pytest.StashKey[list[Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--images", type=int, default=20_000, help="images of the index in benchmarks (default 20000)")
    parser.addoption("--threads", type=int, default=1, help="threads of ours and of torch in benchmarks (default 1)")
    parser.addoption("--large", action="store_true", help="encoders: also a model of the size of ViT-B/32")
    parser.addoption("--exports", type=Path, help="encoders: folder that keeps what was exported")
    parser.addoption("--compiled", action="store_true", help="encoders: also torch.compile as a baseline")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []
    # One table is enough: the absolute times are in --benchmark-json, or here with -v.
    config.option.benchmark_quiet = True


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """`--threads` for the time of a benchmark."""
    before, wanted = torch.get_num_threads(), request.config.getoption("--threads")
    torch.set_num_threads(wanted)
    yield wanted
    torch.set_num_threads(before)


@pytest.fixture
def paired(benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> Paired:
    return Paired(benchmark, request.config.stash[ROWS])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if rows:
        terminalreporter.section("ours against baselines, medians of interleaved rounds")
        for line in [*table(rows), "", *roofs()]:
            terminalreporter.write_line(line)
