"""Where a model runs and in which floating-point type."""

from __future__ import annotations

import torch

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def place(device: torch.device | str, dtype: torch.dtype | str) -> tuple[torch.device, torch.dtype]:
    """The device and dtype meant by ``"auto"`` or by name.

    Arguments
    ---------
    device: ``"auto"`` (CUDA where there is one, else the CPU) or anything ``torch.device`` takes.
    dtype: ``"auto"`` (float16 on CUDA, else float32), ``"float32"``, ``"float16"``, ``"bfloat16"`` or such a
        ``torch.dtype``. Embeddings come out as float32 in every case.

    Raises ValueError for another dtype, or a CUDA device where there is none.

    >>> place("cpu", "auto")
    (device(type='cpu'), torch.float32)
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"load: device {str(device)!r} was wanted, but torch sees no CUDA device here; use 'cpu'")
    if dtype == "auto":
        return chosen, torch.float16 if chosen.type == "cuda" else torch.float32
    named = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if named not in _DTYPES.values():
        raise ValueError(f"load: dtype must be 'auto', 'float32', 'float16' or 'bfloat16', got {dtype!r}")
    assert named is not None
    return chosen, named
