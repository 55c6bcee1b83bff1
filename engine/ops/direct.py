"""The way past torch's dispatcher, which takes most of the time of a small call.

A registered op gives gradients, graphs and transforms. A call on plain CPU tensors that wants none of them, and that
nothing watches, may run the CPU kernels at once: what it gives is the same bit by bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from engine.ops.checks import check_temperature, name_of
from engine.ops.native import INTERFACE

# How torch tells that modes, transforms (vmap, grad, functionalisation), tracing or a profiler are on; a torch that has
# lost one of these leaves all calls to the dispatcher.
_WATCHERS: dict[str, Callable[[], Any] | None] = {
    name: getattr(getattr(torch, "_C", None), name, None)
    for name in ("_len_torch_dispatch_stack", "_len_torch_function_stack", "_get_tracing_state")
}
_WATCHERS["peek_interpreter_stack"] = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
_WATCHERS["_profiler_enabled"] = getattr(torch.autograd, "_profiler_enabled", None)
_dispatch_modes, _function_modes, _tracing, _transforms, _profiled = _WATCHERS.values()
_KNOWN = all(_WATCHERS.values()) and hasattr(forward_ad, "_current_level")


# What the CPU kernels take, and their names of it.
_NAMES = {dtype: name_of(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def unwatched() -> bool:
    """Whether no compiler, mode, transform, tracer, forward differentiation or profiler is at work."""
    if torch.compiler.is_compiling() or not _KNOWN:
        return False
    assert _dispatch_modes and _function_modes and _tracing and _transforms and _profiled
    return not (
        _dispatch_modes()
        or _function_modes()
        or _transforms() is not None
        or _tracing() is not None
        or forward_ad._current_level >= 0
        or _profiled()
    )


def is_plain(x: Tensor) -> bool:
    """Whether `x` is a tensor of numbers in the CPU's memory, of no other class, that no gradient is wanted of."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and x.layout is torch.strided
        and not x.is_neg()
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def direct_scores(
    op: str,
    q: Tensor,
    d: Tensor,
    per_token: tuple[Tensor | None, Tensor | None, Tensor | None],
    temperature: float | None,
    pairs: bool,
) -> Tensor | None:
    """Scores of max-sim by the CPU kernels at once.

    Args:
        per_token: q_mask, d_mask, q_weights.

    Returns:
        None where that cannot be, or where an argument is wrong: the op's own checks then say what.
    """
    native = sys.modules.get("engine._C")
    if native is None or getattr(native, "INTERFACE", None) != INTERFACE or not unwatched():
        return None
    if not (is_plain(q) and is_plain(d)):
        return None
    name, q_shape, d_shape = _NAMES.get(q.dtype), q.shape, d.shape
    if name is None or d.dtype is not q.dtype or len(q_shape) != 3 or len(d_shape) != 3 or q_shape[2] != d_shape[2]:
        return None
    (n_q, l_q, dim), (n_d, l_d, _) = q_shape, d_shape
    if not (n_q and l_q and dim and n_d and l_d) or (pairs and n_q != n_d):
        return None
    (q_item, q_token, q_last), (d_item, d_token, d_last) = q.stride(), d.stride()
    if dim > 1 and not q_last == d_last == 1:
        return None
    others: list[int | None] = [0, 0, 0]
    for k, x in enumerate(per_token):
        if x is not None:
            others[k] = _address(x, d_shape if k == 1 else q_shape, torch.float32 if k == 2 else torch.bool)
    # A tensor may be without memory, such as torch makes of zeros.
    if None in others or not (q.data_ptr() and d.data_ptr()):
        return None
    if temperature is not None:
        check_temperature(op, temperature)
    scores = torch.empty((n_q,) if pairs else (n_q, n_d), dtype=torch.float32)
    native.max_sim_scores(
        name, q.data_ptr(), n_q, l_q, q_item, q_token, d.data_ptr(), n_d, l_d, d_item, d_token, dim, *others,
        temperature or 0.0, pairs, scores.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return scores


def _address(x: object, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
    """Where numbers per token begin in memory; None where they are not what the kernels take as they are."""
    if not (isinstance(x, Tensor) and is_plain(x)) or x.dtype is not dtype:
        return None
    return x.data_ptr() or None if x.shape == shape[:2] and x.is_contiguous() else None
