"""What runs a graph through ONNX Runtime: the CPU, CUDA or TensorRT, each with how to get it where it is missing."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from engine.choices import Provider, check_choice

PROVIDERS: dict[str, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
_REMEDIES = {
    "cuda": "pip uninstall onnxruntime, then pip install 'peaksim[gpu]' (onnxruntime-gpu)",
    "tensorrt": "pip uninstall onnxruntime, then pip install 'peaksim[gpu]' tensorrt",
}


def onnx_runtime(who: str) -> Any:
    """The module `onnxruntime`. Raises ImportError that says how to get it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            f"{who}: ONNX Runtime is wanted and is not installed ({error}); pip install 'peaksim[cpu]', or "
            "'peaksim[gpu]' for CUDA"
        ) from error
    return onnxruntime


def check_provider(who: str, provider: str) -> None:
    """See that this installation of ONNX Runtime has a provider.

    Raises ValueError for an unknown name, ImportError that says how to get one that is missing.
    """
    check_choice(who, "provider", provider, get_args(Provider))
    found = onnx_runtime(who).get_available_providers()
    if PROVIDERS[provider] not in found:
        raise ImportError(
            f"{who}: provider {provider!r} was wanted, but this ONNX Runtime has {', '.join(found)}; "
            f"{_REMEDIES.get(provider, 'reinstall onnxruntime')}"
        )


def open_session(
    who: str,
    path: Path,
    provider: str,
    *,
    device: int = 0,
    options: Mapping[str, str] | None = None,
    half: bool = False,
) -> Any:
    """A session of one graph on a provider and on no other.

    Args:
        who: the model, for errors.
        path: of the graph.
        provider: of `PROVIDERS`.
        device: number of the GPU.
        options: of the provider, beside the device.
        half: the graph computes in float16.

    Raises:
        ImportError: the provider is missing, or ONNX Runtime could not start it.
        ValueError: ONNX Runtime cannot read the graph.
    """
    runtime = onnx_runtime(who)
    check_provider(who, provider)
    settings = runtime.SessionOptions()
    # As many threads as torch has here: whoever set those meant this work too.
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.inter_op_num_threads = 1
    # Every batch size would leave a plan of its own behind.
    settings.enable_mem_pattern = False
    # Warnings of ONNX Runtime go to standard error by themselves; what matters is raised.
    settings.log_severity_level = 3
    chosen: list[Any] = [PROVIDERS[provider]]
    if provider != "cpu":
        chosen = [(PROVIDERS[provider], {"device_id": str(device), **(options or {})})]
    if provider == "tensorrt":
        # What TensorRT has no layer for; without it such a graph would end on the CPU.
        chosen.append((PROVIDERS["cuda"], {"device_id": str(device)}))
    try:
        # The layout of convolutions for CPUs knows float32 alone: on a float16 graph ONNX Runtime 1.32 crashes in it.
        without = ["NchwcTransformer"] if half else None
        session = runtime.InferenceSession(str(path), settings, providers=chosen, disabled_optimizers=without)
    except Exception as error:
        # Its errors are of classes of its own, which derive from RuntimeError or from nothing but Exception.
        raise ValueError(f"{who}: ONNX Runtime cannot open {path.name} ({_first_line(error)})") from error
    running = session.get_providers()
    if running[0] != PROVIDERS[provider]:
        raise ImportError(
            f"{who}: provider {provider!r} was wanted and could not be started, ONNX Runtime took {running[0]}; its "
            f"libraries are missing or of other versions: {_REMEDIES.get(provider, 'reinstall onnxruntime')}"
        )
    return session


def tensorrt_key(device: int) -> str:
    """What engines of TensorRT are built for: the GPU, and the versions of TensorRT and ONNX Runtime.

    Raises ImportError, saying how to get it, where TensorRT is not installed.
    """
    parts = torch.cuda.get_device_properties(device)
    versions = [f"tensorrt-{_tensorrt_version()}", f"onnxruntime-{onnx_runtime('export').__version__}"]
    words = [parts.name, f"sm{parts.major}{parts.minor}", *versions]
    return "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", word) for word in words)


def _tensorrt_version() -> str:
    for name in ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ImportError(f"tensorrt: TensorRT is wanted and is not installed; {_REMEDIES['tensorrt']}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
