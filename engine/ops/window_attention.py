"""Window attention: queries that each see one box of a patch grid. Contract: `engine.reference.window_attention`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from engine.ops.checks import FLOATS, check_tensor, choose_backend, name_of
from engine.ops.native import as_array, dense_rows, extension, forced_isa, on_device_of
from engine.reference import window_attention as reference

OP = "window_attention"


def _window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    windows: Tensor,
    rows: int,
    columns: int,
    scale: float,
    backend: str,
) -> Tensor:
    """The op on checked arguments."""
    if backend == "reference":
        return reference.window_attention(q, k, v, own_k, own_v, windows, rows=rows, columns=columns, scale=scale)
    out = q.new_empty(q.shape)
    if out.numel() == 0:
        return out
    if backend == "triton":
        from engine.kernels.window_attention import window_attention_forward

        with on_device_of(q):
            window_attention_forward(q, k, v, own_k, own_v, windows, out, rows=rows, columns=columns, scale=scale)
        return out
    extension(OP).window_attention(
        *(as_array(x if x is None else dense_rows(x)) for x in (q, k, v, own_k, own_v)),
        windows.contiguous().numpy(), name_of(q.dtype), rows, columns, scale, as_array(out),
        forced_isa(), torch.get_num_threads(),
    )  # fmt: skip
    return out


window_attention_op = torch.library.custom_op("peaksim::window_attention", _window_attention, mutates_args=())


@window_attention_op.register_fake
def _window_attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    windows: Tensor,
    rows: int,
    columns: int,
    scale: float,
    backend: str,
) -> Tensor:
    return q.new_empty(q.shape)


def _window_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    windows: Tensor,
    rows: int,
    columns: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, own_k and own_v; the last two of shape (0,) where there are none."""
    if backend == "reference":
        return reference.window_attention_backward(
            grad, q, k, v, own_k, own_v, windows, rows=rows, columns=columns, scale=scale
        )
    if backend == "triton":
        from engine.kernels.window_attention import window_attention_backward

        with on_device_of(q):
            return window_attention_backward(
                grad, q, k, v, own_k, own_v, windows, rows=rows, columns=columns, scale=scale
            )
    grads = _empty_gradients(q, k, own_k, torch.float32)
    extension(OP).window_attention_backward(
        *(as_array(x if x is None else dense_rows(x)) for x in (grad, q, k, v, own_k, own_v)),
        windows.contiguous().numpy(), name_of(q.dtype), rows, columns, scale, *map(as_array, grads),
        forced_isa(), torch.get_num_threads(),
    )  # fmt: skip
    return tuple(x.to(q.dtype) for x in grads)  # type: ignore[return-value]


def _empty_gradients(q: Tensor, k: Tensor, own_k: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
    own = (0,) if own_k is None else q.shape
    return tuple(q.new_empty(shape, dtype=dtype) for shape in (q.shape, k.shape, k.shape, own, own))


window_attention_backward_op = torch.library.custom_op(
    "peaksim::window_attention_backward", _window_attention_backward, mutates_args=()
)


@window_attention_backward_op.register_fake
def _window_attention_backward_fake(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    windows: Tensor,
    rows: int,
    columns: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(q, k, own_k, q.dtype)  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    tensors, ctx.options = inputs[:6], inputs[6:]
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, own_k, own_v, windows = ctx.saved_tensors
    grads = window_attention_backward_op(grad, q, k, v, own_k, own_v, windows, *ctx.options)
    of_own = grads[3:] if own_k is not None else (None, None)
    return (*grads[:3], *of_own, None, *(None,) * len(ctx.options))


torch.library.register_autograd("peaksim::window_attention", _backward, setup_context=_setup_context)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Tensor,
    *,
    grid: tuple[int, int],
    own_k: Tensor | None = None,
    own_v: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention of one query per window over the patches inside that window and the window's own key.

        out[b, w, h] = Σ_p softmax_p(scale · ⟨q[b, w, h], k[b, p, h]⟩) · v[b, p, h]     over what window w sees

    The edges (empty windows, NaN, what lies outside the grid) are set down in `engine.reference.window_attention`.

    Args:
        q: queries `(B, W, H, hd)`, float32, float16, bfloat16 or float64.
        k, v: keys and values of the patches `(B, P, H, hd)`, row by row of the grid, of the same dtype and device.
            Any strides will do, also those of an expanded axis; a last axis that is not dense costs a copy.
        windows: int32 `(W, 4)` for all images or `(B, W, 4)` for each its own: half-open boxes x0, y0, x1, y1 in
            cells of the grid (x counts columns). On CUDA they are there too.
        grid: rows and columns of the grid, rows · columns = P.
        own_k, own_v: `(B, W, H, hd)`, a key and a value that each window sees besides; both or neither.
        scale: factor of the scores; by default hd^-0.5.
        backend: "cpp" (CPU), "triton" (CUDA) or "reference" (plain torch, any device); by default, or with
            "auto", by the tensors' device. float64 always goes to the reference.

    Returns:
        `(B, W, H, hd)` in the dtype of q, with gradients for q, k, v, own_k and own_v, the same bit by bit from run
        to run.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or range.
        RuntimeError: the backend is missing; the message says how to get it.

    Follows the window queries of one-pass structure-guided inference; attention as in Vaswani et al. (2017).

    >>> v = torch.arange(6.0).reshape(1, 6, 1, 1)
    >>> k, q = torch.zeros(1, 6, 1, 1), torch.zeros(1, 2, 1, 1)
    >>> windows = torch.tensor([[0, 0, 3, 2], [1, 1, 3, 2]], dtype=torch.int32)
    >>> window_attention(q, k, v, windows, grid=(2, 3)).flatten()
    tensor([2.5000, 4.5000])
    """
    rows, columns = _check_grid(grid)
    _check_heads(q, k, v, own_k, own_v, rows * columns)
    _check_windows(windows, q)
    chosen = choose_backend(OP, backend, q)
    factor = q.shape[-1] ** -0.5 if scale is None and q.shape[-1] else _check_scale(scale)
    return window_attention_op(q, k, v, own_k, own_v, windows, rows, columns, factor, chosen)


def _check_grid(grid: object) -> tuple[int, int]:
    is_pair = isinstance(grid, tuple | list) and len(grid) == 2
    if not is_pair or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in grid):  # type: ignore[attr-defined]
        raise ValueError(f"{OP}: grid must be (rows, columns), two whole numbers of at least 0, got {grid!r}")
    rows, columns = int(grid[0]), int(grid[1])  # type: ignore[index]
    if rows * columns >= 2**31 - 1:
        raise ValueError(f"{OP}: grid must have fewer than 2^31 - 1 cells, got {rows} x {columns}")
    return rows, columns


def _check_heads(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor | None, own_v: Tensor | None, cells: int) -> None:
    """Tensors `(B, W or P, H, hd)` of one floating dtype, on one device."""
    check_tensor(OP, "q", q)
    if q.ndim != 4:
        raise ValueError(f"{OP}: q must have the shape (B, W, H, hd), got {tuple(q.shape)}")
    if q.dtype not in FLOATS:
        raise TypeError(f"{OP}: q must be one of {', '.join(map(name_of, FLOATS))}, got {name_of(q.dtype)}")
    if (own_k is None) != (own_v is None):
        given, lacking = ("own_v", "own_k") if own_k is None else ("own_k", "own_v")
        raise ValueError(f"{OP}: own_k and own_v go together, got {given} without {lacking}")
    of_cells = (q.shape[0], cells, *q.shape[2:])
    wanted = [("k", k, "(B, rows * columns, H, hd)", of_cells), ("v", v, "(B, rows * columns, H, hd)", of_cells)]
    if own_k is not None:
        wanted += [(n, x, "(B, W, H, hd)", tuple(q.shape)) for n, x in (("own_k", own_k), ("own_v", own_v))]  # type: ignore[misc]
    for name, x, axes, shape in wanted:
        check_tensor(OP, name, x)
        if tuple(x.shape) != shape:
            raise ValueError(f"{OP}: {name} must have the shape {axes} = {shape}, got {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{OP}: {name} must have q's dtype {name_of(q.dtype)}, got {name_of(x.dtype)}")
        if x.device != q.device:
            raise ValueError(f"{OP}: {name} must be on {q.device} as q is, got {x.device}")


def _check_windows(windows: object, q: Tensor) -> None:
    check_tensor(OP, "windows", windows)
    assert isinstance(windows, Tensor)
    if windows.dtype != torch.int32:
        raise TypeError(f"{OP}: windows must be int32, got {name_of(windows.dtype)}")
    shared, single = (q.shape[1], 4), (q.shape[0], q.shape[1], 4)
    if tuple(windows.shape) not in (shared, single):
        raise ValueError(
            f"{OP}: windows must have the shape (W, 4) = {shared} or (B, W, 4) = {single}, got {tuple(windows.shape)}"
        )
    if windows.device != q.device:
        raise ValueError(f"{OP}: windows must be on {q.device} as q is, got {windows.device}")


def _check_scale(scale: object) -> float:
    if scale is None:
        return 1.0  # heads of no width: nothing is scaled
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"{OP}: scale must be a number or None, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"{OP}: scale must be finite, got {scale}")
    return float(scale)
