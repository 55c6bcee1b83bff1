"""From modules to graphs: traced, cut to what each use needs, their weights in one file that all of them share."""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.atomic_files import written_whole
from engine.encoders.onnx_graph import BATCH, Port, Signature

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 18
WEIGHTS_FILE = "weights.bin"
# Smaller ones stay inside the graph, where constant folding and shape inference see them.
_LEAST_BYTES = 1024
# Memory pages: whatever maps the file can map each weight alone.
_ALIGNMENT = 4096


@dataclass(frozen=True)
class Traced:
    """A graph in memory with its name, its inputs and outputs."""

    name: str
    model: ModelProto
    signature: Signature


def onnx_package(who: str) -> Any:
    """The module `onnx`. Raises ImportError that says how to get it."""
    try:
        import onnx
    except ImportError as error:
        raise ImportError(f"{who}: the package onnx is wanted ({error}); pip install 'peaksim[cpu]'") from error
    return onnx


def trace(
    name: str,
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
    axes: Mapping[str, Mapping[int, str]] | None = None,
) -> Traced:
    """The graph of a module, its first dimensions free.

    By torch's tracing exporter: it takes a tenth of the time of the one built on `torch.export`, and gives graphs that
    run as fast. What a trace might bake in by mistake shows when the exporter runs the graph at other batch sizes.

    Args:
        name: of the graph.
        module: its `forward` takes `inputs` in order and returns a tuple in the order of `outputs`.
        inputs: examples by name, each `(B, …)`.
        outputs: names.
        axes: names of the free dimensions of every input and output; None frees the first of each, as the batch.

    Raises:
        RuntimeError: torch knows no ONNX operator for something in the module.
    """
    onnx = onnx_package("export")
    free = axes or {port: {0: BATCH} for port in (*inputs, *outputs)}
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(), torch.no_grad(), _plain_attention():
        # That tracing is to go some day, and that it cannot follow Python: see above. Nothing else is silenced.
        for message in (r"You are using the legacy TorchScript-based ONNX export", r"The feature will be removed"):
            warnings.filterwarnings("ignore", message, category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", "Exporting aten::index operator", category=UserWarning)
        path = Path(place) / "graph.onnx"
        torch.onnx.export(
            module.eval(), tuple(inputs.values()), str(path), dynamo=False, opset_version=OPSET,
            input_names=list(inputs), output_names=list(outputs), dynamic_axes=free,
        )  # fmt: skip
        model = onnx.load(str(path))
    with torch.no_grad():
        examples = dict(zip(outputs, module(*inputs.values()), strict=True))
    # An input that nothing reads is no input of the graph.
    read = [port.name for port in model.graph.input]
    ports_in = {port: _port(inputs[port], free[port]) for port in read}
    ports_out = {port: _port(examples[port], free[port]) for port in outputs}
    return Traced(name, model, Signature(f"{name}.onnx", ports_in, ports_out))


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Without the one call that `nn.MultiheadAttention` makes of itself without gradients, which has no graph."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def part_of(traced: Traced, name: str, outputs: Sequence[str]) -> Traced:
    """The part of a graph that gives some of its outputs, as a graph of its own; weights are shared."""
    onnx = onnx_package("export")
    whole = traced.model
    wanted, kept = set(outputs), []
    for node in reversed(whole.graph.node):
        if wanted & set(node.output):
            kept.append(node)
            wanted |= set(node.input)
    model = onnx.ModelProto()
    model.CopyFrom(_without_graph(onnx, whole))
    graph = model.graph
    graph.name = name
    graph.node.extend(reversed(kept))
    graph.input.extend(port for port in whole.graph.input if port.name in wanted)
    graph.output.extend(port for port in whole.graph.output if port.name in outputs)
    graph.initializer.extend(weight for weight in whole.graph.initializer if weight.name in wanted)
    held = traced.signature
    inputs = {port: facts for port, facts in held.inputs.items() if port in wanted}
    chosen = {port: held.outputs[port] for port in outputs}
    return Traced(name, model, Signature(f"{name}.onnx", inputs, chosen))


def write_graphs(folder: Path, graphs: Iterable[Traced]) -> None:
    """Write graphs into a folder, and every distinct weight once into `weights.bin` beside them."""
    onnx = onnx_package("export")
    places: dict[bytes, tuple[int, int]] = {}
    with written_whole(folder / WEIGHTS_FILE) as unfinished, unfinished.open("wb") as file:
        for traced in graphs:
            for weight in traced.model.graph.initializer:
                _move_out(onnx, weight, file, places)
            data = traced.model.SerializeToString()
            with written_whole(folder / traced.signature.file) as path:
                path.write_bytes(data)


def _move_out(onnx: Any, weight: Any, file: Any, places: dict[bytes, tuple[int, int]]) -> None:
    """Put a weight's bytes into the file unless they are there, and say in the graph where they lie."""
    data = weight.raw_data if weight.HasField("raw_data") else onnx.numpy_helper.to_array(weight).tobytes()
    if len(data) < _LEAST_BYTES:
        return
    key = hashlib.sha256(data).digest()
    if key not in places:
        file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
        places[key] = file.tell(), len(data)
        file.write(data)
    start, length = places[key]
    for name in ("raw_data", "float_data", "int32_data", "int64_data"):
        weight.ClearField(name)
    weight.data_location = onnx.TensorProto.EXTERNAL
    del weight.external_data[:]
    for name, value in (("location", WEIGHTS_FILE), ("offset", start), ("length", length)):
        weight.external_data.add(key=name, value=str(value))


def _without_graph(onnx: Any, model: Any) -> Any:
    """Everything of a model but what is in its graph."""
    empty = onnx.ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
    empty.opset_import.extend(model.opset_import)
    empty.functions.extend(model.functions)
    return empty


def _port(example: Tensor, free: Mapping[int, str]) -> Port:
    sizes = (free.get(axis, size) for axis, size in enumerate(example.shape))
    return Port(str(example.dtype).removeprefix("torch."), tuple(sizes))
