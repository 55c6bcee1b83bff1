"""Checks of arguments that the ops share. Each message says who asks, what was wanted and what came."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from numbers import Real
from typing import get_args

import torch
from torch import Tensor

from engine.choices import Backend
from engine.ops.native import extension

BACKENDS: tuple[str, ...] = get_args(Backend)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensor(op: str, name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{op}: {name} must be a dense tensor, got a {'nested' if x.is_nested else 'sparse'} one")


def check_tokens(op: str, q: object, d: object, *, q_packed: bool = False, d_packed: bool = False) -> None:
    """Two tensors `(Nq, Lq, D)` and `(Nd, Ld, D)`, packed `(total, D)`, of one floating dtype, on one device."""
    shapes = "(q_total, D)" if q_packed else "(Nq, Lq, D)", "(d_total, D)" if d_packed else "(Nd, Ld, D)"
    for name, x, shape in (("q", q, shapes[0]), ("d", d, shapes[1])):
        check_tensor(op, name, x)
        assert isinstance(x, Tensor)
        if x.ndim != shape.count(",") + 1:
            raise ValueError(f"{op}: {name} must have the shape {shape}, got {tuple(x.shape)}")
        if x.dtype not in FLOATS:
            wanted = ", ".join(map(name_of, FLOATS))
            raise TypeError(f"{op}: {name} must be one of {wanted}, got {name_of(x.dtype)}")
    assert isinstance(q, Tensor) and isinstance(d, Tensor)
    if q.dtype != d.dtype:
        raise TypeError(f"{op}: q and d must have one dtype, got {name_of(q.dtype)} and {name_of(d.dtype)}")
    if q.device != d.device:
        raise ValueError(f"{op}: q and d must be on one device, got {q.device} and {d.device}")
    if q.shape[-1] != d.shape[-1]:
        raise ValueError(f"{op}: q and d must have one last dimension D, got {q.shape[-1]} and {d.shape[-1]}")


def check_per_token(op: str, name: str, x: object, tokens: Tensor, axes: str, *, mask: bool) -> None:
    """None, or a mask or weights `(N, L)` for `tokens (N, L, D)`, `(total,)` for packed ones, on their device."""
    if x is None:
        return
    check_tensor(op, name, x)
    assert isinstance(x, Tensor)
    wanted = tuple(tokens.shape[:-1])
    right = x.dtype == torch.bool if mask else x.dtype.is_floating_point
    if not right or tuple(x.shape) != wanted:
        kind, got = "bool" if mask else "floating", f"{name_of(x.dtype)} {tuple(x.shape)}"
        error = ValueError if right else TypeError
        raise error(f"{op}: {name} must be {kind} of shape {axes} = {wanted}, got {got}")
    if x.device != tokens.device:
        raise ValueError(f"{op}: {name} must be on {tokens.device} as its tokens are, got {x.device}")


def check_cu_seqlens(op: str, name: str, x: object, axes: str, tokens: Tensor) -> None:
    """None, or boundaries of packed tokens, on their device. Values are checked by `check_bounds`."""
    if x is None:
        return
    check_tensor(op, name, x)
    assert isinstance(x, Tensor)
    if x.dtype not in (torch.int32, torch.int64) or x.ndim != 1 or x.shape[0] == 0:
        got = f"{name_of(x.dtype)} {tuple(x.shape)}"
        raise ValueError(f"{op}: {name} must be int32 or int64 of shape {axes}, got {got}")
    if x.device != tokens.device:
        raise ValueError(f"{op}: {name} must be on {tokens.device} as its tokens are, got {x.device}")


def check_bounds(op: str, name: str, cu_seqlens: Tensor | None, total: int, *, from_zero: bool = True) -> None:
    """Boundaries ascend from 0 (or after) to no more than `total` rows. On CUDA reading them waits for the device."""
    if cu_seqlens is None:
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] < 0 or (from_zero and bounds[0] > 0):
        raise ValueError(f"{op}: {name} must start at 0{'' if from_zero else ' or after'}, got {bounds[0]}")
    for i, (begin, end) in enumerate(pairwise(bounds)):
        if begin > end:
            raise ValueError(f"{op}: {name} must not decrease, got {begin} and then {end} at {i + 1}")
    if bounds[-1] > total:
        raise ValueError(f"{op}: {name} must end at {total}, the number of rows, or before, got {bounds[-1]}")


def check_temperature(op: str, temperature: object) -> None:
    """None, or a number that float32 arithmetic can divide by."""
    if temperature is None:
        return
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"{op}: temperature must be a number or None, got {type(temperature).__name__}")
    if not (math.isfinite(temperature) and 1e-30 <= temperature <= 1e30):
        raise ValueError(f"{op}: temperature must be between 1e-30 and 1e30, got {temperature}")


def check_number(op: str, name: str, x: object) -> float:
    """A number, finite or not; bool is none."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{op}: {name} must be a number, got {type(x).__name__}")
    return float(x)


def check_flag(op: str, name: str, x: object) -> None:
    if not isinstance(x, bool):
        raise TypeError(f"{op}: {name} must be True or False, got {x!r}")


def check_symmetric(op: str, symmetric: object, d_weights: object) -> None:
    """A flag, and True where there are weights of the reverse direction."""
    check_flag(op, "symmetric", symmetric)
    if d_weights is not None and not symmetric:
        raise ValueError(f"{op}: d_weights weigh the reverse direction and need symmetric=True, got False")


def check_precision(op: str, precision: object, dtype: torch.dtype, backend: str) -> None:
    """Nothing but "ieee", or "tf32" where that changes something."""
    if precision not in ("ieee", "tf32"):
        raise ValueError(f"{op}: precision must be 'ieee' or 'tf32', got {precision!r}")
    if precision == "tf32" and dtype != torch.float32:
        raise ValueError(f"{op}: precision='tf32' is for float32 inputs, got {name_of(dtype)}")
    if precision == "tf32" and backend == "cpp":
        raise ValueError(f"{op}: precision='tf32' is for CUDA tensors or backend='reference', got backend 'cpp'")


def choose_backend(op: str, backend: object, x: Tensor) -> str:
    """The backend for tensors like `x`: "cpp", "triton" or "reference"; None and "auto" choose by device and dtype.

    Raises:
        ValueError: the backend is unknown, or cannot work on such tensors.
        RuntimeError: the backend is not there; the message says how to get it.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"{op}: backend must be one of {', '.join(BACKENDS)} or None, got {backend!r}")
    device = x.device.type
    if backend in (None, "auto"):
        if x.dtype == torch.float64 or device == "meta":
            return "reference"
        if device not in ("cpu", "cuda"):
            raise ValueError(f"{op}: no kernels for device {device!r}; pass backend='reference'")
        backend = "cpp" if device == "cpu" else "triton"
    if backend != "reference" and x.dtype == torch.float64:
        raise ValueError(f"{op}: backend {backend!r} does not take float64; pass backend='reference'")
    if backend == "cpp":
        if device != "cpu":
            raise ValueError(f"{op}: backend 'cpp' takes CPU tensors, got {device}")
        extension(op)
    if backend == "triton":
        check_triton(op, device)
    return str(backend)


def check_triton(op: str, device: str) -> None:
    """Triton is installed, and tensors of this device can be given to it."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device != "cuda" and not interpreted:
        raise ValueError(f"{op}: backend 'triton' takes CUDA tensors, got {device}")
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"{op}: Triton is missing ({error}). Install it with `pip install triton`, "
            "or pass backend='reference' for the slower torch form."
        ) from error
