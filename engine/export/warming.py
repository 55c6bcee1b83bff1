"""`peaksim export --warm tensorrt`: engines of TensorRT built ahead of time, so that no request waits for one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path

from engine.encoders.export_manifest import GOLDEN_FILE, read_manifest
from engine.encoders.exported import TOWERS
from engine.encoders.golden import golden_input, read_golden
from engine.encoders.onnx_graph import Graph
from engine.encoders.onnx_providers import check_provider, open_session
from engine.encoders.placement import place
from engine.encoders.tensorrt_engines import build_options, engines_folder, mark_built


def warm_tensorrt(folder: str | PathLike[str], *, device: str = "auto", told: Callable[[str], None]) -> Path:
    """Build an engine for each tower graph of an exported folder; the folder inside it that holds them.

    An engine fits the GPU and the versions it was built with, and batches of 1 to the manifest's `max_batch`; larger
    ones are run in parts. Building takes minutes; `told` is called before each.

    Raises:
        ImportError: TensorRT or its provider is missing; it says how to get it.
        ValueError: a folder of int8, or a graph that TensorRT cannot take.
        FileNotFoundError: naming a file that is missing.
    """
    source, name = Path(folder), str(folder)
    manifest = read_manifest(name, source)
    if manifest.precision == "int8":
        raise ValueError(f"{name}: int8 is for CPUs, TensorRT was wanted; export fp16 for GPUs")
    check_provider(name, "tensorrt")
    chosen = place("cuda" if device == "auto" else device, "float32")[0]
    number = chosen.index or 0
    target = engines_folder(source, number)
    target.mkdir(parents=True, exist_ok=True)
    golden = read_golden(name, source / GOLDEN_FILE)
    keys = [key for key in TOWERS if key in manifest.graphs]
    for step, key in enumerate(keys, start=1):
        told(f"building the engine of {key} ({step} of {len(keys)}) into {target}")
        signature = manifest.graphs[key]
        opener = partial(
            open_session, name, source / signature.file, "tensorrt", device=number,
            options=build_options(manifest, key, target), half=manifest.precision == "fp16",
        )  # fmt: skip
        given = {port: golden[golden_input(key, port)].to(chosen) for port in signature.inputs}
        graph = Graph(name, signature, opener)
        # Some parts are built when they are first run.
        for rows in (1, manifest.max_batch):
            graph.run({port: value[:1].expand(rows, *value.shape[1:]) for port, value in given.items()})
    mark_built(manifest, target, keys)
    return target
