"""Engines of TensorRT in an exported folder: built ahead of time, kept by device and version, never on a request.

An engine is built for the types that the graph states ("strongly typed": ONNX Runtime asks for that network as long as
none of its own precision switches is on) and for batches from 1 to the manifest's `max_batch`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from engine.atomic_files import write_text
from engine.encoders.export_manifest import Manifest
from engine.encoders.onnx_providers import tensorrt_key
from engine.encoders.settings import read_object

ENGINES_FOLDER = "tensorrt"
_BUILT = "built.json"


def engines_folder(folder: Path, device: int) -> Path:
    """Where the engines for this GPU and these versions lie. Raises ImportError where TensorRT is missing."""
    return folder / ENGINES_FOLDER / tensorrt_key(device)


def tensorrt_options(who: str, folder: Path, manifest: Manifest, key: str, *, device: int) -> dict[str, str]:
    """Options of the provider for one graph whose engine has been built.

    Raises ValueError, saying how to build them, where there are no engines of this very export for this GPU.
    """
    place = engines_folder(folder, device)
    path = place / _BUILT
    facts = read_object(who, path) if path.is_file() else {}
    if facts.get("manifest") != manifest.mark or key not in facts.get("graphs", ()):
        raise ValueError(
            f"{who}: {place} holds no engine of TensorRT for {key!r}, and none is built while requests wait; run "
            f"`peaksim export --warm tensorrt --check {folder}`"
        )
    return build_options(manifest, key, place)


def build_options(manifest: Manifest, key: str, place: Path) -> dict[str, str]:
    """Options of the provider that build an engine into `place`, or read it from there."""
    ports = manifest.graphs[key].inputs
    shapes = {}
    for name, batch in (("min", 1), ("opt", max(1, manifest.max_batch // 4)), ("max", manifest.max_batch)):
        sizes = (
            (port, (batch if isinstance(size, str) else size for size in facts.shape)) for port, facts in ports.items()
        )
        shapes[f"trt_profile_{name}_shapes"] = ",".join(f"{port}:{'x'.join(map(str, each))}" for port, each in sizes)
    return {
        **shapes,
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": str(place),
        "trt_engine_cache_prefix": key,
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": str(place),
        # Precision is the graph's own, operation by operation.
        "trt_fp16_enable": "False",
        "trt_bf16_enable": "False",
        "trt_int8_enable": "False",
    }


def mark_built(manifest: Manifest, place: Path, graphs: Sequence[str]) -> None:
    """State that `place` holds an engine of this export for each of `graphs`."""
    write_text(place / _BUILT, json.dumps({"manifest": manifest.mark, "graphs": sorted(graphs)}, indent=1))
