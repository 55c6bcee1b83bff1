"""Compiles every Triton kernel in every planned configuration, without a GPU: `python -m bench.offline_compile`.

For sm_80 and sm_90 it prints a line per kernel and configuration: registers, bytes of local memory (spills), shared
memory, instructions of the tensor cores. It fails, naming the case, on

* local memory: registers that spilled;
* more shared memory than a block may have;
* products of 16-bit or 8-bit numbers that are not `wgmma` on sm_90;
* row offsets of 32 bits: a product of two run-time values in 32 bits that an address is made of. Collections pass
  2^31 elements, where such a product wraps around.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.offline_launches import CASES, Launch, all_launches

# Most shared memory of one block, bytes.
SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024}
# Kernels that are nothing without tensor cores, whose narrow forms must have them.
PRODUCTS = ("_max_sim_fwd_kernel", "_max_sim_bwd_soft_kernel")
NARROW = ("bf16", "fp16", "i8")


@dataclass(frozen=True)
class Measured:
    """What one compilation gave; `failures` in words."""

    launch: Launch
    arch: int
    registers: int
    local_bytes: int
    shared_bytes: int
    wgmma: int
    mma: int
    failures: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.launch.kernel} {self.launch.dtype} sm_{self.arch} [{self.launch.configuration}]"


def measure(launch: Launch, arch: int) -> Measured:
    """Compile one launch and look at the result."""
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    source = ASTSource(
        kernel, dict(launch.signature), constexprs=dict(launch.constants),
        attrs={(place,): [["tt.divisibility", 16]] for place in launch.aligned},
    )  # fmt: skip
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(launch.options))
    except Exception as error:  # whatever the compiler raises is a failure of this case, not of the run
        root = error
        while root.__cause__ is not None:  # of nested functions, the innermost
            root = root.__cause__  # type: ignore[assignment]
        reason = f"does not compile: {type(root).__name__}: {str(root)[-300:]}"
        return Measured(launch, arch, 0, 0, 0, 0, 0, (reason,))
    registers, local = resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    found = Measured(
        launch, arch, registers, local, compiled.metadata.shared,
        len(re.findall(r"\bwgmma\.mma_async", ptx)), len(re.findall(r"\bmma\.sync", ptx)), (),
    )  # fmt: skip
    failures = tuple(complaints(found, compiled.asm["ttir"], ptx))
    return Measured(*(getattr(found, name) for name in list(found.__dataclass_fields__)[:-1]), failures)


def complaints(found: Measured, ttir: str, ptx: str) -> Iterator[str]:
    """What is wrong with a compiled kernel."""
    if found.local_bytes or re.search(r"\b(ld|st)\.local", ptx):
        yield f"{found.local_bytes} bytes of local memory: registers spill"
    limit = SHARED_LIMIT_BYTES[found.arch]
    if found.shared_bytes > limit:
        yield f"{found.shared_bytes} bytes of shared memory, the limit is {limit}"
    narrow = multiplies_narrow(ttir) or (found.launch.kernel in PRODUCTS and found.launch.dtype in NARROW)
    if found.arch >= 90 and narrow and (not found.wgmma or found.mma):
        yield f"products of narrow numbers without wgmma ({found.wgmma} wgmma, {found.mma} mma.sync)"
    for line in narrow_offsets(ttir):
        yield f"an address made of a product in 32 bits: {line}"


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory per thread, as the binary says."""
    tool = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", said)
    assert numbers, said
    return int(numbers[1]), int(numbers[2]) + int(numbers[3])


def multiplies_narrow(ttir: str) -> bool:
    """Whether a product of matrices (tt.dot) takes bf16, fp16 or int8."""
    return any(re.search(r"tensor<\d+x\d+x(bf16|f16|i8)>", line) for line in ttir.splitlines() if "tt.dot" in line)


class Flow:
    """Which values of a kernel in Triton's intermediate form are made of which; names may recur in sibling regions.

    Numbers stand for values. What was loaded from memory, and what was compared, does not depend on its operands.
    """

    STOPS = ("tt.load", "arith.cmpi", "arith.cmpf", "tt.atomic_rmw", "tt.atomic_cas")

    def __init__(self, ttir: str) -> None:
        self.sources: list[list[int]] = []
        self.constant: list[bool] = []
        self.products: dict[int, str] = {}
        self.offsets: list[int] = []
        self._named: dict[str, int] = {}
        # For each open region, what its yields go to: one list of values per operand.
        self._regions: list[list[list[int]]] = []
        for line in ttir.splitlines():
            if not line.lstrip().startswith("#"):
                self._read(re.sub(r"\s+loc\(.*\)\s*$", "", re.sub(r'loc\("[^"]*"\(#loc\d*\)\)', "", line)).strip())

    def _new(self, name: str, sources: list[int], constant: bool = False) -> int:
        self.sources.append(sources)
        self.constant.append(constant)
        self._named[name] = len(self.sources) - 1
        return self._named[name]

    def _values(self, text: str) -> list[int]:
        return [self._named[name] for name in re.findall(r"%[\w$.]+(?:#\d+)?", text)]

    def _read(self, line: str) -> None:
        if line.startswith("}"):
            if not line.startswith("} else"):
                self._regions.pop()
            return
        if line.startswith(("tt.func", "^")):  # arguments of the kernel, or of a block
            for name in re.findall(r"(%[\w$.]+): ", line):
                self._new(name, [])
        result = re.match(r"(%[\w$.]+)(?::(\d+))? = ", line)
        body = line[result.end() :] if result else line
        op = re.match(r'"?([\w.]+)"?', body)
        if body.startswith("scf.yield"):
            for value, receivers in zip(self._values(body), self._regions[-1], strict=False):
                for receiver in receivers:
                    self.sources[receiver].append(value)
        elif line.endswith("{") and (result or body.startswith("scf.")):
            names = [] if result is None else [result[1]]
            if result and result[2]:
                names = [f"{result[1]}#{k}" for k in range(int(result[2]))]
            self._open(names, body)
        elif line.endswith("{"):
            self._regions.append([])
        elif result and op:
            self._simple(result[1], int(result[2] or 1), op[1], body)

    def _open(self, names: list[str], body: str) -> None:
        """A loop, a branch or another op with a region."""
        results = [self._new(name, []) for name in names]
        receivers = [[result] for result in results]
        if body.startswith("scf.for"):
            carried = re.search(r"iter_args\((.*?)\) ->", body)
            for k, (inner, start) in enumerate(re.findall(r"(%[\w$.]+) = (%[\w$.#]+)", carried[1] if carried else "")):
                begin = self._values(start)
                self.sources[results[k]] += begin
                receivers[k].append(self._new(inner, list(begin)))
            # The counter is made of its start and its step; where the loop ends tells nothing of addresses.
            counter = re.match(r"scf\.for (?:unsigned )?(%[\w$.]+) = (\S+) to \S+ step (\S+)", body)
            if counter:
                self._new(counter[1], self._values(f"{counter[2]} {counter[3]}"))
        elif not body.startswith("scf.if"):
            for result in results:  # a reduction or the like: made of its operands
                self.sources[result] += self._values(body)
        self._regions.append(receivers)

    def _simple(self, name: str, count: int, op: str, body: str) -> None:
        operands = self._values(body.split(" : ")[0])
        constant = op == "arith.constant" or (
            op in ("tt.splat", "tt.broadcast", "tt.expand_dims", "arith.extsi", "arith.trunci")
            and all(self.constant[x] for x in operands)
        )
        sources = [] if op in self.STOPS else operands
        for k in range(count):
            value = self._new(f"{name}#{k}" if count > 1 else name, sources, constant)
            narrow = op == "arith.muli" and re.search(r"(?:\bi32|xi32>)$", body)
            if narrow and not any(self.constant[x] for x in operands):
                self.products[value] = f"{name} = {body}"
        if op == "tt.addptr":
            self.offsets.append(operands[1])


def narrow_offsets(ttir: str) -> list[str]:
    """32-bit products of two run-time values that reach an address, as lines of Triton's intermediate form."""
    flow = Flow(ttir)
    seen: set[int] = set()
    open_values = list(flow.offsets)
    while open_values:
        value = open_values.pop()
        if value not in seen:
            seen.add(value)
            open_values += flow.sources[value]
    return [line for value, line in flow.products.items() if value in seen]


def table(rows: list[Measured]) -> str:
    heads = ("kernel", "dtype", "arch", "registers", "local B", "shared B", "wgmma", "mma", "configuration")
    cells = [
        (m.launch.kernel.strip("_").removesuffix("_kernel"), m.launch.dtype, f"sm_{m.arch}", m.registers, m.local_bytes,
         m.shared_bytes, m.wgmma, m.mma, m.launch.configuration + (" FAILED" if m.failures else ""))
        for m in rows
    ]  # fmt: skip
    widths = [max(len(str(row[k])) for row in [heads, *cells]) for k in range(len(heads) - 1)]
    lines = []
    for row in [heads, *cells]:
        words = [str(x).ljust(w) for x, w in zip(row[:3], widths, strict=False)]
        numbers = [str(x).rjust(w) for x, w in zip(row[3:-1], widths[3:], strict=True)]
        lines.append("  ".join([*words, *numbers, str(row[-1])]))
    return "\n".join(lines)


def measure_all(tasks: list[tuple[Launch, int]], workers: int) -> list[Measured]:
    """Every launch for its architecture, in order."""
    if workers <= 1:
        return [measure(*task) for task in tasks]
    # Not forked: torch has threads by now.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(measure, *zip(*tasks, strict=True), chunksize=1))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ops", nargs="*", choices=[*CASES], default=[*CASES], help="default: all")
    parser.add_argument("--arch", nargs="*", type=int, choices=[*SHARED_LIMIT_BYTES], default=[*SHARED_LIMIT_BYTES])
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    ops = tuple(options.ops)
    rows = measure_all([(launch, arch) for arch in options.arch for launch in all_launches(ops, arch)], options.workers)
    print(table(rows))
    failed = [row for row in rows if row.failures]
    for row in failed:
        for failure in row.failures:
            print(f"FAILED {row.name}: {failure}", file=sys.stderr)
    print(f"{len(rows)} compilations, {len(failed)} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
