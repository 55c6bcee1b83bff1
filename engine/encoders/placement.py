"""Where a model runs and in which floating-point type."""

from __future__ import annotations

from typing import Any

import torch

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def place(device: torch.device | str, dtype: torch.dtype | str) -> tuple[torch.device, torch.dtype]:
    """The device and dtype meant by `"auto"` or by name.

    Args:
        device: `"auto"` (CUDA where there is one, else the CPU), `"cpu"`, `"cuda"`, `"cuda:1"`, … or such a
            `torch.device`; other kinds of device where this torch has them.
        dtype: `"auto"` (float16 on CUDA, else float32), `"float32"`, `"float16"`, `"bfloat16"` or such a
            `torch.dtype`. Embeddings come out as float32 in every case.

    Raises:
        ValueError: another dtype, and for a device that torch does not know or that is not there.

    >>> place("cpu", "auto")
    (device(type='cpu'), torch.float32)
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = _device(device)
    if dtype == "auto":
        return chosen, torch.float16 if chosen.type == "cuda" else torch.float32
    named = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if named not in _DTYPES.values():
        raise ValueError(f"load: dtype must be 'auto', 'float32', 'float16' or 'bfloat16', got {dtype!r}")
    assert named is not None
    return chosen, named


def _device(wanted: torch.device | str) -> torch.device:
    """The device of this name, known to be there."""
    try:
        chosen = torch.device(wanted)
    except (RuntimeError, TypeError):
        # Torch would list some twenty kinds, most of which no build of it has.
        known = "'auto', 'cpu', 'cuda' or 'cuda:<number>' (or another device of torch)"
        raise ValueError(f"load: device must be {known}, got {wanted!r}") from None
    if chosen.type == "cpu":
        return chosen
    backend: Any = torch.backends.mps if chosen.type == "mps" else getattr(torch, chosen.type, None)
    if not hasattr(backend, "is_available") or not backend.is_available():
        sees = f"no {chosen.type.upper()} device"
    elif chosen.index and chosen.index >= (count := getattr(backend, "device_count", lambda: 1)()):
        sees = f"{count} of this kind"
    else:
        return chosen
    raise ValueError(f"load: device {str(wanted)!r} was wanted, but torch sees {sees} here; use 'cpu'")
