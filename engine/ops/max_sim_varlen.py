"""Max-sim on packed tokens, without padding. Contract: `engine.reference.max_sim_varlen`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.ops.checks import (
    check_bounds,
    check_cu_seqlens,
    check_flag,
    check_per_token,
    check_precision,
    check_symmetric,
    check_temperature,
    check_tokens,
    choose_backend,
    name_of,
)
from engine.ops.max_sim import MaxSimOutput, arriving, asked_for, backward_on_cpu
from engine.ops.native import as_array, dense_rows, extension, forced_isa, on_device_of
from engine.reference import max_sim_varlen as reference
from engine.reference.max_sim import Incoming, Outputs
from engine.reference.max_sim_varlen import Items
from engine.reference.unit import compute_dtype

OP = "max_sim_varlen"


def _max_sim_varlen(
    q: Tensor,
    d: Tensor,
    q_cu_seqlens: Tensor | None,
    d_cu_seqlens: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    d_weights: Tensor | None,
    temperature: float | None,
    symmetric: bool,
    need_argmax: bool,
    need_values: bool,
    precision: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op on checked arguments: returns what `engine.reference.max_sim_varlen.max_sim_varlen` does."""
    for name, bounds, tokens in (("q_cu_seqlens", q_cu_seqlens, q), ("d_cu_seqlens", d_cu_seqlens, d)):
        check_bounds(OP, name, bounds, tokens.shape[0])
    queries, documents = Items(q, q_cu_seqlens, q_mask, q_weights), Items(d, d_cu_seqlens, d_mask, d_weights)
    options: dict[str, Any] = {"symmetric": symmetric, "need_argmax": need_argmax, "need_values": need_values}
    if backend == "reference":
        return reference.max_sim_varlen(queries, documents, temperature=temperature, precision=precision, **options)
    outputs = reference.empty_outputs(queries, documents, **options)
    fill_tail(outputs[2:4], q_cu_seqlens)
    fill_tail(outputs[4:6], d_cu_seqlens)
    if outputs[0].numel() == 0:
        return outputs
    if backend == "triton":
        launch(queries, documents, outputs, temperature=temperature, precision=precision)
    else:
        extension(OP).max_sim(
            as_array(dense_rows(q)), as_array(dense_rows(d)), name_of(q.dtype),
            *map(offsets_of, (q_cu_seqlens, d_cu_seqlens)),
            *(as_array(x if x is None else x.contiguous()) for x in (q_mask, d_mask, q_weights, d_weights)),
            temperature or 0.0, False, *map(as_array, outputs), forced_isa(), torch.get_num_threads(),
        )  # fmt: skip
    return outputs


def launch(
    q: Items,
    d: Items,
    outputs: tuple[Tensor, ...],
    *,
    temperature: float | None = None,
    precision: str = "ieee",
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    pairs: bool = False,
) -> None:
    """Fill `outputs` by the Triton kernels; with scales, tokens are int8 codes. Pairs are dense."""
    from engine.kernels.max_sim import score_sides

    sides = [_side(items, its) for items, its in zip((q, d), scales, strict=True)]
    with on_device_of(q.tokens):
        score_sides(sides[0], sides[1], outputs, temperature, pairs, precision)


def _side(items: Items, scales: Tensor | None = None) -> Any:
    """The queries or the documents as the Triton launchers take them."""
    from engine.kernels.max_sim_plan import Side

    bounds, longest = items.cu_seqlens, 0
    if bounds is not None:
        bounds = bounds.to(torch.int64).contiguous()
        longest = int(bounds.diff().max()) if items.number else 0
    scales = None if scales is None else scales.contiguous()
    return Side(dense_rows(items.tokens), items.mask, items.weights, bounds, scales, longest)


def fill_tail(per_token: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> None:
    """Rows that belong to no item: argmax −1, value 0."""
    if cu_seqlens is None:
        return
    for x, fill in zip(per_token, (-1, 0), strict=True):
        if x.ndim == 2:
            x[:, int(cu_seqlens[-1]) :] = fill


def offsets_of(cu_seqlens: Tensor | None) -> Any:
    """Boundaries as the kernels take them."""
    return None if cu_seqlens is None else as_array(cu_seqlens.to(torch.int64).contiguous())


max_sim_varlen_op = torch.library.custom_op("peaksim::max_sim_varlen", _max_sim_varlen, mutates_args=())


@max_sim_varlen_op.register_fake
def _max_sim_varlen_fake(
    q: Tensor,
    d: Tensor,
    q_cu_seqlens: Tensor | None,
    d_cu_seqlens: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    d_weights: Tensor | None,
    temperature: float | None,
    symmetric: bool,
    need_argmax: bool,
    need_values: bool,
    precision: str,
    backend: str,
) -> Outputs:
    queries, documents = Items(q, q_cu_seqlens, None, None), Items(d, d_cu_seqlens, None, None)
    return reference.empty_outputs(
        queries, documents, symmetric=symmetric, need_argmax=need_argmax, need_values=need_values
    )


def _max_sim_varlen_backward(
    grad_scores: Tensor | None,
    grad_values: Tensor | None,
    argmax: Tensor | None,
    grad_reverse_scores: Tensor | None,
    grad_reverse_values: Tensor | None,
    reverse_argmax: Tensor | None,
    q: Tensor,
    d: Tensor,
    q_cu_seqlens: Tensor | None,
    d_cu_seqlens: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    d_weights: Tensor | None,
    temperature: float | None,
    precision: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and d; a direction whose gradient of scores is None takes no part.

    In tiles and in a fixed order on every backend.
    """
    ahead, back = (grad_scores, grad_values, argmax), (grad_reverse_scores, grad_reverse_values, reverse_argmax)
    if backend == "cpp":
        bounds, per_token = (offsets_of(q_cu_seqlens), offsets_of(d_cu_seqlens)), (q_mask, d_mask, q_weights, d_weights)
        return backward_on_cpu(OP, q, d, bounds, per_token, ahead, back, temperature, False)
    queries, documents = Items(q, q_cu_seqlens, q_mask, q_weights), Items(d, d_cu_seqlens, d_mask, d_weights)
    if backend == "triton":
        from engine.kernels.max_sim_backward import max_sim_backward

        sides = _side(queries), _side(documents)
        with on_device_of(q):
            return max_sim_backward(*sides, (ahead, back), temperature=temperature, pairs=False, precision=precision)
    forward, reverse = (None if x[0] is None else Incoming(x[0], x[1], x[2]) for x in (ahead, back))
    return reference.max_sim_varlen_backward(
        queries, documents, forward, reverse, temperature=temperature, precision=precision
    )


max_sim_varlen_backward_op = torch.library.custom_op(
    "peaksim::max_sim_varlen_backward", _max_sim_varlen_backward, mutates_args=()
)


@max_sim_varlen_backward_op.register_fake
def _max_sim_varlen_backward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, d = args[6], args[7]
    return q.new_empty(q.shape), d.new_empty(d.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Outputs) -> None:
    tensors, ctx.options = inputs[:8], inputs[8:]
    _, _, argmax, values, reverse_argmax, reverse_values = output
    ctx.save_for_backward(*tensors, argmax, values, reverse_argmax, reverse_values)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, argmax, values, reverse_argmax, reverse_values = ctx.saved_tensors
    temperature, symmetric, need_argmax, need_values, precision, backend = ctx.options
    needs_tokens, needs_weights = any(ctx.needs_input_grad[:2]), any(ctx.needs_input_grad[6:8])
    if (needs_tokens and temperature is None and not need_argmax) or (needs_weights and not need_values):
        # The op was called directly without what its backward needs: recompute it.
        _, _, argmax, values, reverse_argmax, reverse_values = max_sim_varlen_op(
            *tensors, temperature, symmetric, True, True, precision, backend
        )
    scores, reverse_scores, _, of_values, _, of_reverse_values = grads
    grad_q = grad_d = grad_q_weights = grad_d_weights = None
    grid = (_number(tensors[0], tensors[2]), _number(tensors[1], tensors[3]))
    if needs_tokens:
        ahead = arriving(scores, of_values, argmax, grid)
        back = arriving(reverse_scores, of_reverse_values, reverse_argmax, grid) if symmetric else (None,) * 3
        if ahead[0] is not None or back[0] is not None:
            grad_q, grad_d = max_sim_varlen_backward_op(*ahead, *back, *tensors, temperature, precision, backend)
    if ctx.needs_input_grad[6] and scores is not None:
        grad_q_weights = _of_weights(scores, values, tensors[2], "ij,iju->iu")
    if ctx.needs_input_grad[7] and symmetric and reverse_scores is not None:
        turned = reverse_scores if tensors[3] is None else reverse_scores.T
        grad_d_weights = _of_weights(turned, reverse_values, tensors[3], "ij,ijt->jt")
    return grad_q, grad_d, None, None, None, None, grad_q_weights, grad_d_weights, *(None,) * len(ctx.options)


def _number(tokens: Tensor, cu_seqlens: Tensor | None) -> int:
    return tokens.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _of_weights(scores: Tensor, values: Tensor, cu_seqlens: Tensor | None, dense: str) -> Tensor:
    """Gradient of one side's weights; `scores (own, others)` and `values (others, total)` if that side is packed."""
    if cu_seqlens is None:
        return torch.einsum(dense, scores, values)
    total = values.shape[1]
    if scores.shape[0] == 0:
        return values.new_zeros(total)
    rows = torch.arange(total, device=values.device)
    item = torch.searchsorted(cu_seqlens.to(torch.int64).contiguous(), rows, right=True) - 1
    grad = (scores[item.clamp(max=scores.shape[0] - 1)] * values.T).sum(1)
    return grad.masked_fill(item >= scores.shape[0], 0)


torch.library.register_autograd("peaksim::max_sim_varlen", _backward, setup_context=_setup_context)


def max_sim_varlen(
    q: Tensor,
    d: Tensor,
    *,
    q_cu_seqlens: Tensor | None = None,
    d_cu_seqlens: Tensor | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    q_weights: Tensor | None = None,
    d_weights: Tensor | None = None,
    temperature: float | None = None,
    symmetric: bool = False,
    return_alignment: bool = False,
    precision: str = "ieee",
    backend: str | None = None,
) -> Tensor | MaxSimOutput:
    """`max_sim` of items of any lengths, whose tokens are packed one after the other: nothing is padded.

        scores[i, j] = Σ_u q_weights[i, u] · max_t ⟨q[i, u], d[j, t]⟩        over kept u of query i, t of document j

    Args:
        q: queries `(q_total, D)` with `q_cu_seqlens`, or dense `(Nq, Lq, D)` without.
        d: documents `(d_total, D)` with `d_cu_seqlens`, or dense `(Nd, Ld, D)` without. At least one side is packed.
        q_cu_seqlens, d_cu_seqlens: int32 or int64 `(N + 1,)`: item i is the rows from `cu_seqlens[i]` to
            `cu_seqlens[i + 1]`. They ascend from 0 to the number of rows or fewer; rows beyond belong to no item.
        q_mask, d_mask, q_weights, d_weights: `(total,)` for packed sides, `(N, L)` for dense ones. All else: `max_sim`.

    Returns:
        scores `(Nq, Nd)`, or a `MaxSimOutput` with `symmetric` or `return_alignment`, in which argmax and values are
        `(q_total, Nd)` for packed queries and `(Nq, Nd, Lq)` for dense ones, reverse_argmax and reverse_values
        `(Nq, d_total)` for packed documents and `(Nq, Nd, Ld)` for dense ones. A winner's place counts from its
        item's first token. Gradients as in `max_sim`.

    Raises:
        TypeError, ValueError, RuntimeError: as `max_sim`; ValueError also for boundaries out of order or range.

    >>> q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> d = torch.tensor([[0.5, 0.0], [0.25, 2.0], [3.0, 1.0]])
    >>> out = max_sim_varlen(q, d, d_cu_seqlens=torch.tensor([0, 2, 2, 3]), return_alignment=True)
    >>> out.scores.tolist(), out.argmax.tolist()
    ([[2.5, 0.0, 4.0]], [[[0, 1], [-1, -1], [0, 0]]])
    """
    _check_arguments(q, d, q_cu_seqlens, d_cu_seqlens, q_mask, d_mask, q_weights, d_weights)
    _check_options(d_weights, symmetric, return_alignment, temperature)
    chosen = choose_backend(OP, backend, q)
    check_precision(OP, precision, q.dtype, chosen)

    weights = [None if w is None else w.to(compute_dtype(q.dtype)) for w in (q_weights, d_weights)]
    of_tokens, of_weights = (
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in group) for group in ((q, d), weights)
    )
    need_argmax = return_alignment or (of_tokens and temperature is None)
    outputs = max_sim_varlen_op(
        q, d, q_cu_seqlens, d_cu_seqlens, q_mask, d_mask, *weights, None if temperature is None else float(temperature),
        symmetric, need_argmax, return_alignment or of_weights, precision, chosen,
    )  # fmt: skip
    if q_cu_seqlens is not None and return_alignment:
        scores, reverse_scores, argmax, values, *reverse = outputs
        outputs = (scores, reverse_scores, argmax.T, values.T, *reverse)
    return asked_for(outputs, symmetric, return_alignment)


def _check_arguments(
    q: Tensor,
    d: Tensor,
    q_cu_seqlens: object,
    d_cu_seqlens: object,
    q_mask: object,
    d_mask: object,
    q_weights: object,
    d_weights: object,
) -> None:
    """Types, shapes and devices of all tensors."""
    if q_cu_seqlens is None and d_cu_seqlens is None:
        raise ValueError(f"{OP}: q_cu_seqlens or d_cu_seqlens must be given, got neither; max_sim takes dense tokens")
    q_axes = "(Nq, Lq)" if q_cu_seqlens is None else "(q_total,)"
    d_axes = "(Nd, Ld)" if d_cu_seqlens is None else "(d_total,)"
    check_tokens(OP, q, d, q_packed=q_cu_seqlens is not None, d_packed=d_cu_seqlens is not None)
    check_cu_seqlens(OP, "q_cu_seqlens", q_cu_seqlens, "(Nq + 1,)", q)
    check_cu_seqlens(OP, "d_cu_seqlens", d_cu_seqlens, "(Nd + 1,)", d)
    check_per_token(OP, "q_mask", q_mask, q, q_axes, mask=True)
    check_per_token(OP, "d_mask", d_mask, d, d_axes, mask=True)
    check_per_token(OP, "q_weights", q_weights, q, q_axes, mask=False)
    check_per_token(OP, "d_weights", d_weights, d, d_axes, mask=False)


def _check_options(d_weights: object, symmetric: object, return_alignment: object, temperature: object) -> None:
    check_symmetric(OP, symmetric, d_weights)
    check_flag(OP, "return_alignment", return_alignment)
    check_temperature(OP, temperature)
