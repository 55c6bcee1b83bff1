"""Cosine to class centroids over ragged sets of tokens. Contract: `engine.reference.centroid`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.ops.checks import FLOATS, check_bounds, check_tensor, choose_backend, name_of
from engine.ops.native import as_array, dense_rows, extension, forced_isa, on_device_of
from engine.reference import centroid as reference
from engine.reference.unit import SHORTEST, compute_dtype, unit_backward

OP = "centroid"


def _centroids(
    tokens: Tensor, cu_seqlens: Tensor, classes: Tensor, n_classes: int, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The op on checked arguments: unit centroids `(C, D)`, lengths of the means and numbers of tokens `(C,)`."""
    if cu_seqlens.device.type == "cpu":
        check_bounds(OP, "cu_seqlens", cu_seqlens, tokens.shape[0], from_zero=False)
    if backend == "reference":
        return reference.centroids(tokens, cu_seqlens, classes, n_classes)
    outputs = _empty(tokens, n_classes, torch.float32)
    if outputs[0].numel() == 0:
        empty, lengths, numbers = outputs
        return empty, lengths.zero_(), numbers.zero_()
    tokens, cu_seqlens, classes = dense_rows(tokens), cu_seqlens.contiguous(), classes.contiguous()
    if backend == "triton":
        from engine.kernels.centroid import centroids_forward

        with on_device_of(tokens):
            centroids_forward(tokens, cu_seqlens, classes, outputs)
        return outputs
    extension(OP).centroids(
        as_array(tokens), name_of(tokens.dtype), as_array(cu_seqlens), as_array(classes), *map(as_array, outputs),
        forced_isa(), torch.get_num_threads(),
    )  # fmt: skip
    return outputs


def _empty(tokens: Tensor, n_classes: int, number: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (n_classes, tokens.shape[1]), (n_classes,), (n_classes,)
    return tuple(tokens.new_empty(shape, dtype=number) for shape in shapes)  # type: ignore[return-value]


centroids_op = torch.library.custom_op("peaksim::centroids", _centroids, mutates_args=())


@centroids_op.register_fake
def _centroids_fake(
    tokens: Tensor, cu_seqlens: Tensor, classes: Tensor, n_classes: int, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(tokens, n_classes, compute_dtype(tokens.dtype))


def _centroids_backward(
    grad: Tensor,
    direction: Tensor,
    length: Tensor,
    count: Tensor,
    tokens: Tensor,
    cu_seqlens: Tensor,
    classes: Tensor,
    backend: str,
) -> Tensor:
    """Gradient of tokens, given that of the unit centroids."""
    if backend == "reference" or tokens.numel() == 0:
        return reference.centroids_backward(grad, direction, length, count, tokens, cu_seqlens, classes)
    # One row per class: the kernels' work is to hand it to every token.
    rows = unit_backward(direction, length[:, None], grad) / count.clamp(min=1)[:, None]
    rows, cu_seqlens, classes = rows.contiguous(), cu_seqlens.contiguous(), classes.contiguous()
    if backend == "triton":
        from engine.kernels.centroid import centroids_spread

        to_tokens = tokens.new_empty(tokens.shape)
        with on_device_of(tokens):
            centroids_spread(rows, cu_seqlens, classes, to_tokens)
        return to_tokens
    to_tokens = tokens.new_empty(tokens.shape, dtype=torch.float32)
    extension(OP).centroids_spread(
        as_array(rows), as_array(cu_seqlens), as_array(classes), as_array(to_tokens),
        forced_isa(), torch.get_num_threads(),
    )  # fmt: skip
    return to_tokens.to(tokens.dtype)


centroids_backward_op = torch.library.custom_op("peaksim::centroids_backward", _centroids_backward, mutates_args=())


@centroids_backward_op.register_fake
def _centroids_backward_fake(*args: Any) -> Tensor:
    tokens = args[4]
    return tokens.new_empty(tokens.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    tokens, cu_seqlens, classes, _, ctx.backend = inputs
    ctx.save_for_backward(*output, tokens, cu_seqlens, classes)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return centroids_backward_op(grad, *ctx.saved_tensors, ctx.backend), None, None, None, None


centroids_op.register_autograd(_backward, setup_context=_setup_context)


def _unit(x: Tensor) -> Tensor:
    """Rows of `x` at length 1 or 0, without the NaN that autograd makes of 0 / 0."""
    x = x.to(compute_dtype(x.dtype))
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    none = length < SHORTEST
    return torch.where(none, 0, x / torch.where(none, 1, length))


def centroid(
    queries: Tensor,
    tokens: Tensor,
    cu_seqlens: Tensor,
    *,
    classes: Tensor | None = None,
    n_classes: int | None = None,
    q_cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Cosine of queries to the centroids of classes of ragged token sets.

        cosines[i, c] = cos(queries[i], mean of all tokens of all sets of class c)

    Args:
        queries: vectors `(Nq, D)`; with `q_cu_seqlens` packed tokens `(q_total, D)`, of which each set is its mean.
        tokens: packed tokens `(total, D)`, float32, float16, bfloat16 or float64, as the queries.
        cu_seqlens: int64 `(n_sets + 1,)`: set s holds the tokens from `cu_seqlens[s]` to `cu_seqlens[s + 1]`, ascending
            from 0 or more to `total` or less. On a CPU this is checked; on a GPU what lies outside is not read.
        classes: int64 `(n_sets,)`: the class of each set, in [0, n_classes), any other value for none; by default each
            set is a class.
        n_classes: number of classes C; needed with `classes`, otherwise the number of sets.
        q_cu_seqlens: int64 `(Nq + 1,)`, likewise for the queries.
        backend: "cpp" (CPU), "triton" (CUDA) or "reference" (plain torch, any device); by default, or with
            "auto", by the tensors' device. float64 always goes to the reference.

    Returns:
        `(Nq, C)` float32, or float64 for float64 inputs, with gradients for queries and tokens, the same bit by bit
        from run to run. Classes and queries without tokens have cosine 0 and pass no gradient. The product of queries
        and centroids is the library's.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or range.
        RuntimeError: the backend is missing; the message says how to get it.

    >>> tokens = torch.tensor([[1.0, 0], [3, 0], [0, 1], [2, 2]])
    >>> cu_seqlens, classes = torch.tensor([0, 2, 3, 4]), torch.tensor([0, 1, 1])
    >>> centroid(torch.tensor([[1.0, 0]]), tokens, cu_seqlens, classes=classes, n_classes=2)
    tensor([[1.0000, 0.5547]])
    """
    _check(queries, tokens, cu_seqlens, classes, n_classes, q_cu_seqlens)
    chosen = choose_backend(OP, backend, tokens)
    n_sets = cu_seqlens.shape[0] - 1
    if classes is None:
        classes = torch.arange(n_sets, device=tokens.device)
    directions, *_ = centroids_op(tokens, cu_seqlens, classes, n_sets if n_classes is None else n_classes, chosen)
    if q_cu_seqlens is None:
        return _unit(queries) @ directions.T
    n_queries = q_cu_seqlens.shape[0] - 1
    own = torch.arange(n_queries, device=queries.device)
    return centroids_op(queries, q_cu_seqlens, own, n_queries, chosen)[0] @ directions.T


def _check(
    queries: Tensor,
    tokens: Tensor,
    cu_seqlens: Tensor,
    classes: Tensor | None,
    n_classes: int | None,
    q_cu_seqlens: Tensor | None,
) -> None:
    for name, x, shape in (("queries", queries, "(Nq, D)"), ("tokens", tokens, "(total, D)")):
        check_tensor(OP, name, x)
        if x.ndim != 2:
            raise ValueError(f"{OP}: {name} must have the shape {shape}, got {tuple(x.shape)}")
        if x.dtype not in FLOATS:
            raise TypeError(f"{OP}: {name} must be one of {', '.join(map(name_of, FLOATS))}, got {name_of(x.dtype)}")
    if queries.dtype != tokens.dtype or queries.device != tokens.device:
        wanted, got = (f"{name_of(x.dtype)} on {x.device}" for x in (tokens, queries))
        raise TypeError(f"{OP}: queries must be {wanted} as tokens are, got {got}")
    if queries.shape[1] != tokens.shape[1]:
        raise ValueError(
            f"{OP}: queries and tokens must have one last dimension D, got {queries.shape[1]} and {tokens.shape[1]}"
        )
    _check_int64("cu_seqlens", cu_seqlens, "(n_sets + 1,)", None, tokens)
    if q_cu_seqlens is not None:
        _check_int64("q_cu_seqlens", q_cu_seqlens, "(Nq + 1,)", None, tokens)
    if classes is not None:
        _check_int64("classes", classes, "(n_sets,)", cu_seqlens.shape[0] - 1, tokens)
    if (classes is None) != (n_classes is None):
        given = "n_classes" if classes is None else "classes"
        raise ValueError(f"{OP}: classes and n_classes must be given together, got {given} alone")
    if n_classes is not None and (isinstance(n_classes, bool) or not isinstance(n_classes, int) or n_classes < 0):
        raise ValueError(f"{OP}: n_classes must be a number of classes, got {n_classes!r}")


def _check_int64(name: str, x: Tensor, axes: str, size: int | None, tokens: Tensor) -> None:
    """int64 of one axis of `size`, or of at least 1, on the device of the tokens."""
    check_tensor(OP, name, x)
    fits = x.ndim == 1 and (x.shape[0] == size or (size is None and x.shape[0] > 0))
    if x.dtype != torch.int64 or not fits:
        wanted = f"{axes} = {(size,)}" if size is not None else axes
        raise ValueError(f"{OP}: {name} must be int64 of shape {wanted}, got {name_of(x.dtype)} {tuple(x.shape)}")
    if x.device != tokens.device:
        raise ValueError(f"{OP}: {name} must be on {tokens.device} as tokens are, got {x.device}")
