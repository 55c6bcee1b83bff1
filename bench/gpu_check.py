"""The GPU kernels in eight minutes: `python -m bench.gpu_check`. First whether they are right, then how fast.

1. Every op against float64, forward and backward (`bench.gpu_cases`); a backward twice, bit by bit.
2. Ratios in one run, rounds of ours and the baselines taking turns: torch eager, and `flash-maxsim` and
   `late-interaction-kernels` where they are installed. A result is checked before it is timed. Shares are of the matrix
   rate and the memory bandwidth measured in the same run.

Everything goes to `bench/results/gpu_check.json`. It stops between cases when the budget is spent, and says what it
left out. `--dry-run` goes through all of it on a CPU at tiny sizes, the kernels by Triton's interpreter; its times
mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu_problems import Problem, problems, unit, with_gradients

RESULTS = Path(__file__).parent / "results" / "gpu_check.json"
ROUNDS = 9
PEERS = ("flash_maxsim", "late_interaction_kernels")


@dataclass
class Budget:
    """Seconds for everything; a case begins only if the longest so far would still fit."""

    seconds: float
    began: float = field(default_factory=time.monotonic)
    longest: float = 0.0

    @property
    def spent(self) -> float:
        return time.monotonic() - self.began

    def run(self, case: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether there was time, and what the case gave."""
        if self.spent + self.longest > self.seconds:
            return False, None
        began = time.monotonic()
        result = case()
        self.longest = max(self.longest, time.monotonic() - began)
        return True, result


@dataclass(frozen=True)
class Speed:
    """One comparison: our median time, each sibling's time and memory over ours, shares of what the chip can do."""

    name: str
    shape: str
    dtype: str
    ours_ms: float
    ratios: dict[str, float]
    share_of_matrix_rate: float | None
    share_of_bandwidth: float | None
    extra_memory_bytes: int | None
    memory_ratios: dict[str, float]
    failed: dict[str, str]


class Machine:
    """The device and its clock. On a CPU, for dry runs, times are wall-clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.matrix_rate = self.bandwidth = 0.0

    def time_ms(self, call: Callable[[], Any]) -> float:
        if not self.cuda:
            began = time.perf_counter()
            call()
            return (time.perf_counter() - began) * 1e3
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last)

    def measure(self) -> None:
        """Matrix rate (operations a second) and bandwidth (bytes read a second) of a large product and a large sum."""
        size, numbers = (8192, 2**31) if self.cuda else (128, 2**16)
        x = torch.randn(size, size, device=self.device, dtype=torch.bfloat16)
        buffer = torch.ones(numbers, device=self.device, dtype=torch.bfloat16)
        product = statistics.median(self.time_ms(lambda: x @ x) for _ in range(ROUNDS))
        total = statistics.median(self.time_ms(lambda: buffer.sum(dtype=torch.float32)) for _ in range(ROUNDS))
        self.matrix_rate = 2 * size**3 / product * 1e3
        self.bandwidth = 2 * numbers / total * 1e3

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """What a call takes beyond what is there, its results included."""
        if not self.cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del kept
        return peak


def measure(problem: Problem | None, machine: Machine, rounds: int) -> Speed | None:
    """Check siblings against ours, then time them in turns; None for an op that is not there."""
    if problem is None:
        return None
    wanted = _tensors(problem.ours())
    able: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    for name, call in problem.siblings.items():
        try:
            error = max(_distance(a, b) for a, b in zip(_tensors(call()), wanted, strict=True))
        except Exception as fault:  # a peer that cannot do this shape is a result, not the end of the run
            failed[name] = f"{type(fault).__name__}: {str(fault)[:200]}"
            continue
        if error > problem.tolerance:
            failed[name] = f"differs by {error:.2e}"
        else:
            able[name] = call
    times: dict[str, list[float]] = {name: [] for name in ("ours", *able)}
    for turn in range(rounds + 2):
        for name in times:
            taken = machine.time_ms(problem.ours if name == "ours" else able[name])
            if turn >= 2:  # the first two warm up
                times[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    ours = medians.pop("ours")
    taken_bytes = machine.peak_bytes(problem.ours)
    memory = {name: (machine.peak_bytes(able[name]) or 0) / taken_bytes for name in medians} if taken_bytes else {}
    return Speed(
        problem.name, problem.shape, str(problem.dtype).removeprefix("torch."), ours,
        {name: taken / ours for name, taken in medians.items()},
        problem.flops / ours * 1e3 / machine.matrix_rate if problem.flops else None,
        problem.read_bytes / ours * 1e3 / machine.bandwidth if problem.read_bytes else None,
        taken_bytes, memory, failed,
    )  # fmt: skip


def _tensors(result: Any) -> list[Tensor]:
    return [result.detach()] if isinstance(result, Tensor) else [x.detach() for x in result if x is not None]


def _distance(got: Tensor, wanted: Tensor) -> float:
    from bench.gpu_cases import distance

    return distance(got.reshape(wanted.shape), wanted)


def reproducible(machine: Machine, dry: bool) -> dict[str, bool]:
    """Whether two backwards agree bit by bit."""
    from engine.ops.max_sim import max_sim
    from engine.ops.max_sim_varlen import max_sim_varlen

    sizes = (3, 5, 7, 16) if dry else (64, 77, 196, 512)
    dtype = torch.float16 if dry else torch.bfloat16
    n, tokens, patches, dim = sizes
    q, d = unit(machine.device, dtype, n, tokens, dim), unit(machine.device, dtype, n, patches, dim)
    bounds = torch.arange(n + 1, device=machine.device).square() * patches // n  # short items and long ones
    found = {}
    for name, temperature in (("hard", None), ("soft", 0.07)):

        def score(a: Tensor, b: Tensor, t: float | None = temperature) -> Tensor:
            result = max_sim(a, b, temperature=t, symmetric=True, backend="triton")
            return result.scores + result.reverse_scores  # type: ignore[union-attr, operator]

        def packed(a: Tensor, b: Tensor, t: float | None = temperature) -> Tensor:
            result = max_sim_varlen(a, b, d_cu_seqlens=bounds, temperature=t, symmetric=True, backend="triton")
            return result.scores + result.reverse_scores  # type: ignore[union-attr, operator]

        for form, call, documents in ((name, score, d), (f"{name}, packed", packed, d.flatten(0, 1))):
            twice = [with_gradients(call, q, documents)() for _ in range(2)]
            found[form] = all(torch.equal(a, b) for a, b in zip(*twice, strict=True))
    return found


def versions() -> dict[str, str]:
    names = ("torch", "triton", "peaksim", *PEERS)
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything; what came of it."""
    dry = options.dry_run
    budget, machine = Budget(options.budget_s), Machine(torch.device("cpu" if dry else "cuda"))
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "dry": dry, "machine": platform.processor() if dry else torch.cuda.get_device_name(), "versions": versions(),
        "parity": [], "wrong": [], "speed": [], "left_out": [],
    }  # fmt: skip
    run_parity(machine, budget, report, options.verbose)
    fits, report["reproducible"] = budget.run(lambda: reproducible(machine, dry))
    if not fits:
        report["reproducible"] = {}
        report["left_out"].append("backwards twice")
    run_speed(machine, budget, report)
    report["seconds"] = budget.spent
    return report


def run_parity(machine: Machine, budget: Budget, report: dict[str, Any], verbose: bool) -> None:
    """Every op against float64, in at most half of the time."""
    from bench.gpu_cases import cases, check

    for case in cases(small=report["dry"]):
        name = f"{case.name} {case.dtype}"
        if budget.spent > budget.seconds / 2:
            report["left_out"].append(name)
            continue
        _, parity = budget.run(lambda case=case: _guarded(lambda: check(case, "triton", machine.device)))
        row = parity if isinstance(parity, str) else asdict(parity) | {"right": parity.right}
        report["parity"].append(row)
        wrong = isinstance(parity, str) or not parity.right
        if wrong:
            report["wrong"].append({"case": name, "found": row})
        if wrong or verbose:
            print(f"{'WRONG' if wrong else 'right'}  {name}: {row}", flush=True)


def run_speed(machine: Machine, budget: Budget, report: dict[str, Any]) -> None:
    """Ours against the others."""
    budget.run(machine.measure)
    report["matrix_rate"], report["bandwidth"] = machine.matrix_rate, machine.bandwidth
    rounds = 1 if report["dry"] else ROUNDS
    for place, build in enumerate(problems(machine.device, report["dry"])):
        fits, speed = budget.run(lambda build=build: _guarded(lambda: measure(build(), machine, rounds)))
        if not fits:
            report["left_out"].append(f"comparison {place}")
        elif isinstance(speed, str):
            report["wrong"].append({"case": f"comparison {place}", "found": speed})
            print(f"WRONG  comparison {place}: {speed}", flush=True)
        elif speed is not None:
            report["speed"].append(asdict(speed))
            ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in speed.ratios.items())
            memory = ", ".join(f"{name} {ratio:.2f}" for name, ratio in speed.memory_ratios.items())
            print(f"{speed.name} {speed.shape}: {speed.ours_ms:.3f} ms; of ours: {ratios}; "
                  f"of our memory: {memory or 'not measured'} {speed.failed or ''}", flush=True)  # fmt: skip
        if machine.cuda:
            torch.cuda.empty_cache()


def _guarded(call: Callable[[], Any]) -> Any:
    """A result, or in words why there is none: one case that fails does not end the run."""
    try:
        return call()
    except Exception as fault:
        return f"{type(fault).__name__}: {str(fault)[:1000]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget-s", type=float, default=420.0, help="seconds after which no new case begins")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, through Triton's interpreter")
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    options = parser.parse_args(arguments)
    if options.dry_run:
        # Before any kernel is imported: it decides then whether it is compiled.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        parser.error("no GPU here; --dry-run goes through everything on the CPU")
    report = run(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    right = not report["wrong"] and all(report["reproducible"].values())
    print(f"{len(report['parity'])} cases, {len(report['wrong'])} wrong, reproducible {report['reproducible']}, "
          f"{len(report['left_out'])} left out, {report['seconds']:.0f} s: {options.out}")  # fmt: skip
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
