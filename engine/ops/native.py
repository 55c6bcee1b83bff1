"""The way to the kernels: whether `engine._C` is there, how tensors and options reach it, where Triton launches."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

# The name of an instruction set here limits the CPU kernels to it and to lesser ones; read at each call.
ISA_VARIABLE = "PEAKSIM_CPU_ISA"

# Raised, here and in csrc/bindings.cpp, with every change of what is called there.
INTERFACE = 1


def extension(op: str) -> ModuleType:
    """The extension module.

    Raises:
        RuntimeError: it was not built, was built from older sources, or cannot be loaded.
    """
    try:
        import engine._C as native
    except ImportError as error:
        raise RuntimeError(
            f"{op}: the C++ CPU kernels are missing ({error}). Install a C++17 compiler and reinstall peaksim, "
            "or pass backend='reference' for the slower torch form."
        ) from error
    if getattr(native, "INTERFACE", None) != INTERFACE:
        raise RuntimeError(
            f"{op}: the C++ CPU kernels were built from other sources than these. Build them again with `make setup` "
            "(`python setup.py build_ext --inplace`), or pass backend='reference' for the slower torch form."
        )
    return native


def instruction_sets() -> list[str]:
    """Instruction sets that the CPU kernels can use here, best first; empty where the kernels are missing."""
    try:
        return list(extension("instruction_sets").cpu_features())
    except RuntimeError:
        return []


def forced_isa() -> str:
    """What the environment limits the kernels to; empty for no limit. The kernels refuse unknown names."""
    return os.environ.get(ISA_VARIABLE, "")


def as_array(x: Tensor | None) -> np.ndarray | None:
    """The tensor's memory as a numpy array, bfloat16 as int16; None, and what has the shape (0,), as None."""
    if x is None or x.shape == (0,):
        return None
    x = x.detach()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def dense_arrays(*tensors: Tensor | None) -> tuple[np.ndarray | None, ...]:
    """Arrays of tensors whose every stride must be dense: copies where one is not."""
    return tuple(as_array(x if x is None else x.contiguous()) for x in tensors)


def dense_rows(x: Tensor) -> Tensor:
    """`x` itself if its last axis is dense, which is all that the kernels ask of strides; else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, which need not be the tensors': inside, it is that of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
