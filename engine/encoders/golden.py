"""Golden inputs and outputs of an exported model: stored beside its graphs, run again wherever it is loaded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from engine.atomic_files import written_whole
from engine.encoders.onnx_graph import Graph

_IN, _OUT, _SOURCE = "/in/", "/out/", "/source/"


@dataclass(frozen=True)
class GoldenRow:
    """How far one output of a graph lies from what its source gave in float32.

    Attributes:
        graph, output: by name.
        max_abs: largest difference of two numbers.
        cosine: lowest cosine of two vectors (of the last axis; of the whole where it has one number).
        own_cosine: lowest cosine to what the export itself gave when it was written: of outputs that lie apart from
            their source's on purpose (int8); None for all others.
        provider: what ran the graph.
        latency_ms: of the graph's run on the golden inputs, the quickest of the runs made.
    """

    graph: str
    output: str
    max_abs: float
    cosine: float
    own_cosine: float | None
    provider: str
    latency_ms: float

    @property
    def checked(self) -> float:
        """The cosine that must not be too low: to its own output where one is stored, otherwise to its source's."""
        return self.cosine if self.own_cosine is None else self.own_cosine


def write_golden(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write golden tensors, named by `golden_input` and `golden_output` or otherwise."""
    with written_whole(path) as unfinished:
        save_file({name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}, unfinished)


def read_golden(who: str, path: Path) -> dict[str, Tensor]:
    """What `write_golden` wrote. Raises ValueError for a damaged file."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{who}: {path} is not a whole safetensors file ({error})") from error


def golden_input(graph: str, name: str) -> str:
    """Name of a golden tensor that goes into a graph.

    >>> golden_input("text_all", "ids")
    'text_all/in/ids'
    """
    return f"{graph}{_IN}{name}"


def golden_output(graph: str, name: str) -> str:
    """Name of a golden tensor that comes out of a graph."""
    return f"{graph}{_OUT}{name}"


def golden_source(graph: str, name: str) -> str:
    """Name of what the source gave in float32, where the output that must come again is the export's own."""
    return f"{graph}{_SOURCE}{name}"


def compare(name: str, graph: Graph, golden: Mapping[str, Tensor], provider: str, *, runs: int = 1) -> list[GoldenRow]:
    """Run a graph on its golden inputs and set every output beside the stored one.

    Raises ValueError, naming the output, where a golden tensor is not there or a number is not finite.
    """
    inputs = {port: _held(golden, graph, golden_input(name, port)) for port in graph.signature.inputs}
    graph.open()
    found, latency = {}, float("inf")
    for _ in range(runs):
        began = time.perf_counter()
        found = graph.run(inputs)
        latency = min(latency, time.perf_counter() - began)
    rows = []
    for output, value in found.items():
        wanted = _held(golden, graph, golden_output(name, output))
        if value.shape != wanted.shape or not bool(value.isfinite().all()):
            what = "numbers that are not finite" if value.shape == wanted.shape else f"shape {tuple(value.shape)}"
            raise ValueError(
                f"{graph.who}: output {output!r} of {graph.signature.file} must be finite and of shape "
                f"{tuple(wanted.shape)} on provider {provider!r}, got {what}"
            )
        source = golden.get(golden_source(name, output))
        own = None if source is None else lowest_cosine(value, wanted)
        exact = wanted if source is None else source
        apart = float((value.double() - exact.double()).abs().max())
        rows.append(GoldenRow(name, output, apart, lowest_cosine(value, exact), own, provider, 1e3 * latency))
    return rows


def refuse_far(who: str, rows: list[GoldenRow], least: float) -> None:
    """Raise ValueError naming the output that lies furthest from what was stored, below the cosine `least`."""
    # Written so that a cosine that is no number is refused, before any other.
    worst = min(rows, key=lambda row: (row.checked >= least, row.checked))
    if not worst.checked >= least:
        raise ValueError(
            f"{who}: output {worst.output!r} of {worst.graph} must have a cosine of at least {least} to the golden "
            f"vectors on provider {worst.provider!r}, got {worst.checked:.6f} (largest difference from the source "
            f"{worst.max_abs:.2e}); export the model again, in fp32 if this was fp16"
        )


def lowest_cosine(found: Tensor, wanted: Tensor) -> float:
    """The lowest cosine of vectors of the last axis; of everything as one vector where that has one number.

    Vectors that are equal count as 1, also where both are zero.

    >>> import torch
    >>> round(lowest_cosine(torch.tensor([[1.0, 1.0], [0.0, 2.0]]), torch.tensor([[1.0, 1.0], [2.0, 2.0]])), 4)
    0.7071
    """
    one = found.ndim < 2 or found.shape[-1] == 1
    a, b = (x.double().reshape(1, -1) if one else x.double().flatten(0, -2) for x in (found, wanted))
    cosine = functional.cosine_similarity(a, b, dim=-1, eps=1e-30)
    cosine[(a == b).all(dim=-1)] = 1.0
    return float(cosine.min())


def _held(golden: Mapping[str, Tensor], graph: Graph, name: str) -> Tensor:
    if name not in golden:
        raise ValueError(f"{graph.who}: the golden file lacks {name!r}; export the model again")
    return golden[name]
