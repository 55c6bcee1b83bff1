"""Max-sim: how well each query's tokens are found among each document's. Contract: `engine.reference.max_sim`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.ops.checks import (
    check_flag,
    check_per_token,
    check_precision,
    check_symmetric,
    check_temperature,
    check_tokens,
    choose_backend,
    name_of,
)
from engine.ops.direct import direct_scores
from engine.ops.native import as_array, dense_arrays, dense_rows, extension, forced_isa, on_device_of
from engine.reference import max_sim as reference
from engine.reference.max_sim import Incoming, Outputs
from engine.reference.unit import compute_dtype


class MaxSimOutput(NamedTuple):
    """What max-sim can return; fields that were not asked for are None.

    For pairs, drop the axis `Nd`. A token's value is its hard or soft maximum, before the weight.
    """

    scores: Tensor
    """(Nq, Nd) float32, or float64 for float64 inputs."""
    reverse_scores: Tensor | None = None
    """(Nq, Nd): documents' tokens looking for queries'. With `symmetric`."""
    argmax: Tensor | None = None
    """(Nq, Nd, Lq) int32: the document token each query token found, −1 for none. With `return_alignment`."""
    values: Tensor | None = None
    """(Nq, Nd, Lq): how similar it is, 0 for none; scores = Σ_u q_weights · values. With `return_alignment`."""
    reverse_argmax: Tensor | None = None
    """(Nq, Nd, Ld) int32: the query token each document token found. With both."""
    reverse_values: Tensor | None = None
    """(Nq, Nd, Ld): how similar it is. With both."""


def _max_sim(
    q: Tensor,
    d: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    d_weights: Tensor | None,
    temperature: float | None,
    symmetric: bool,
    pairs: bool,
    need_argmax: bool,
    need_values: bool,
    precision: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op on checked arguments: returns what `engine.reference.max_sim.max_sim` does."""
    options: dict[str, Any] = {
        "symmetric": symmetric, "pairs": pairs, "need_argmax": need_argmax, "need_values": need_values,
    }  # fmt: skip
    per_token = (q_mask, d_mask, q_weights, d_weights)
    if backend == "reference":
        return reference.max_sim(q, d, *per_token, temperature=temperature, precision=precision, **options)
    outputs = reference.empty_outputs(q, d, **options)
    if outputs[0].numel() == 0:
        return outputs
    q, d = dense_rows(q), dense_rows(d)
    if backend == "triton":
        from engine.kernels.max_sim import max_sim_forward

        with on_device_of(q):
            max_sim_forward(q, d, *per_token, outputs, temperature=temperature, pairs=pairs, precision=precision)
        return outputs
    extension("max_sim").max_sim(
        as_array(q), as_array(d), name_of(q.dtype), None, None, *dense_arrays(*per_token),
        temperature or 0.0, pairs, *map(as_array, outputs), forced_isa(), torch.get_num_threads(),
    )  # fmt: skip
    return outputs


max_sim_op = torch.library.custom_op("peaksim::max_sim", _max_sim, mutates_args=())


@max_sim_op.register_fake
def _max_sim_fake(
    q: Tensor,
    d: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    d_weights: Tensor | None,
    temperature: float | None,
    symmetric: bool,
    pairs: bool,
    need_argmax: bool,
    need_values: bool,
    precision: str,
    backend: str,
) -> Outputs:
    return reference.empty_outputs(
        q, d, symmetric=symmetric, pairs=pairs, need_argmax=need_argmax, need_values=need_values
    )


def _max_sim_backward(
    grad_scores: Tensor | None,
    grad_values: Tensor | None,
    argmax: Tensor | None,
    grad_reverse_scores: Tensor | None,
    grad_reverse_values: Tensor | None,
    reverse_argmax: Tensor | None,
    q: Tensor,
    d: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    d_weights: Tensor | None,
    temperature: float | None,
    pairs: bool,
    precision: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and d; a direction whose gradient of scores is None takes no part.

    In tiles and in a fixed order on every backend.
    """
    ahead, back = (grad_scores, grad_values, argmax), (grad_reverse_scores, grad_reverse_values, reverse_argmax)
    if backend == "cpp":
        per_token = (q_mask, d_mask, q_weights, d_weights)
        return backward_on_cpu("max_sim", q, d, (None, None), per_token, ahead, back, temperature, pairs)
    if backend == "triton":
        from engine.kernels.max_sim_backward import max_sim_backward
        from engine.kernels.max_sim_plan import Side

        sides = Side(dense_rows(q), q_mask, q_weights), Side(dense_rows(d), d_mask, d_weights)
        with on_device_of(q):
            return max_sim_backward(*sides, (ahead, back), temperature=temperature, pairs=pairs, precision=precision)
    forward, reverse = (None if x[0] is None else Incoming(x[0], x[1], x[2]) for x in (ahead, back))
    return reference.max_sim_backward(
        q, d, q_mask, d_mask, q_weights, d_weights, forward, reverse,
        temperature=temperature, pairs=pairs, precision=precision,
    )  # fmt: skip


Arriving = tuple[Tensor | None, Tensor | None, Tensor | None]  # gradients of scores and of values, argmax


def backward_on_cpu(
    op: str,
    q: Tensor,
    d: Tensor,
    bounds: tuple[Any, Any],
    per_token: tuple[Tensor | None, ...],
    ahead: Arriving,
    back: Arriving,
    temperature: float | None,
    pairs: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and d by the C++ kernels; `bounds` as they take them, None for a dense side."""
    grads = q.new_empty(q.shape, dtype=torch.float32), d.new_empty(d.shape, dtype=torch.float32)
    for grad, ends in zip(grads, bounds, strict=True):
        if ends is not None:
            grad[int(ends[-1]) :] = 0
    tokens = (as_array(dense_rows(q)), as_array(dense_rows(d)), name_of(q.dtype), *bounds)
    last = (*map(as_array, grads), forced_isa(), torch.get_num_threads())
    if temperature is None:
        extension(op).max_sim_backward(
            *tokens, *dense_arrays(*per_token[2:]), pairs, *dense_arrays(*ahead, *back), *last
        )  # fmt: skip
    else:
        extension(op).max_sim_soft_backward(
            *tokens, *dense_arrays(*per_token), temperature, pairs, *dense_arrays(*ahead[:2], *back[:2]), *last
        )  # fmt: skip
    return grads[0].to(q.dtype), grads[1].to(d.dtype)


max_sim_backward_op = torch.library.custom_op("peaksim::max_sim_backward", _max_sim_backward, mutates_args=())


@max_sim_backward_op.register_fake
def _max_sim_backward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, d = args[6], args[7]
    return q.new_empty(q.shape), d.new_empty(d.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Outputs) -> None:
    tensors, ctx.options = inputs[:6], inputs[6:]
    _, _, argmax, values, reverse_argmax, reverse_values = output
    ctx.save_for_backward(*tensors, argmax, values, reverse_argmax, reverse_values)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, argmax, values, reverse_argmax, reverse_values = ctx.saved_tensors
    temperature, symmetric, pairs, need_argmax, need_values, precision, backend = ctx.options
    needs_tokens, needs_weights = any(ctx.needs_input_grad[:2]), any(ctx.needs_input_grad[4:6])
    if (needs_tokens and temperature is None and not need_argmax) or (needs_weights and not need_values):
        # The op was called directly without what its backward needs: recompute it.
        wanted = (temperature, symmetric, pairs, True, True, precision, backend)
        _, _, argmax, values, reverse_argmax, reverse_values = max_sim_op(*tensors, *wanted)
    scores, reverse_scores, _, of_values, _, of_reverse_values = grads
    grad_q = grad_d = grad_q_weights = grad_d_weights = None
    if needs_tokens:
        grid = tensors[0].shape[0], 1 if pairs else tensors[1].shape[0]
        ahead = arriving(scores, of_values, argmax, grid)
        back = arriving(reverse_scores, of_reverse_values, reverse_argmax, grid) if symmetric else (None,) * 3
        if ahead[0] is not None or back[0] is not None:
            rest = (temperature, pairs, precision, backend)
            grad_q, grad_d = max_sim_backward_op(*ahead, *back, *tensors, *rest)
    if ctx.needs_input_grad[4] and scores is not None:
        grad_q_weights = torch.einsum("ij,iju->iu", scores, values)
    if ctx.needs_input_grad[5] and symmetric and reverse_scores is not None:
        of_pairs = "ij,ijt->it" if pairs else "ij,ijt->jt"
        grad_d_weights = torch.einsum(of_pairs, reverse_scores, reverse_values)
    return grad_q, grad_d, None, None, grad_q_weights, grad_d_weights, *(None,) * len(ctx.options)


def arriving(scores: Tensor | None, values: Tensor | None, argmax: Tensor, grid: tuple[int, int]) -> Arriving:
    """One direction's part of the backward op's arguments; all None if no gradient comes."""
    if scores is None and values is None:
        return None, None, None
    if scores is None:
        assert values is not None
        scores = values.new_zeros(grid)
    return scores, values, argmax if argmax.ndim > 1 else None


torch.library.register_autograd("peaksim::max_sim", _backward, setup_context=_setup_context)


def max_sim(
    q: Tensor,
    d: Tensor,
    *,
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
    """How well each query's tokens are found among each document's tokens.

        scores[i, j] = Σ_u q_weights[i, u] · max_t ⟨q[i, u], d[j, t]⟩        over kept u and t

    The edges (empty sets, NaN, infinities, ties, weights) are set down in `engine.reference.max_sim`.

    Args:
        q: queries `(Nq, Lq, D)`, float32, float16, bfloat16 or float64; rows are not normalised here.
        d: documents `(Nd, Ld, D)`, of the same dtype, on the same device. Any strides will do; a last axis
            that is not dense costs a copy.
        q_mask, d_mask: bool `(Nq, Lq)` and `(Nd, Ld)`, True = keep; by default all are kept.
        q_weights: `(Nq, Lq)` floating, what each query token counts; by default 1.
        d_weights: `(Nd, Ld)` likewise for the reverse direction; needs `symmetric`.
        temperature: τ of the soft maximum τ · log Σ exp(s / τ); by default the hard maximum. Gradients on CUDA need
            0.001 or more.
        symmetric: also give `reverse_scores[i, j] = Σ_t d_weights[j, t] · max_u ⟨q[i, u], d[j, t]⟩`.
        return_alignment: also give each token's winner and value.
        precision: "tf32" lets float32 products be rounded to TF32 on CUDA and in the reference; default "ieee".
        backend: "cpp" (CPU), "triton" (CUDA) or "reference" (plain torch, any device); by default, or with
            "auto", by the tensors' device. float64 always goes to the reference.

    Returns:
        scores `(Nq, Nd)`, float32 (float64 for float64 inputs), or a `MaxSimOutput` with `symmetric` or
        `return_alignment`. Scores and values have gradients for q, d and the weights, the same bit by bit
        from run to run.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or range.
        RuntimeError: the backend is missing; the message says how to get it.

    >>> q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> d = torch.tensor([[[0.5, 0.0], [0.25, 2.0]], [[3.0, 1.0], [0.0, 0.0]]])
    >>> max_sim(q, d)
    tensor([[2.5000, 4.0000]])
    >>> max_sim(q, d, return_alignment=True).argmax.tolist()
    [[[0, 1], [0, 0]]]
    """
    return _call(
        "max_sim", q, d, (q_mask, d_mask, q_weights, d_weights), temperature, symmetric, False,
        return_alignment, precision, backend,
    )  # fmt: skip


def max_sim_pairs(
    q: Tensor,
    d: Tensor,
    *,
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
    """`max_sim` of query i and document i alone.

        scores[i] = Σ_u q_weights[i, u] · max_t ⟨q[i, u], d[i, t]⟩

    Args:
        q, d: `(N, Lq, D)` and `(N, Ld, D)`. All else as in `max_sim`.

    Returns:
        scores `(N,)`, or a `MaxSimOutput` whose fields lack the axis Nd.

    Raises:
        TypeError, ValueError, RuntimeError: as `max_sim`; ValueError also if q and d differ in number.

    >>> max_sim_pairs(torch.ones(3, 2, 4), torch.ones(3, 5, 4))
    tensor([8., 8., 8.])
    """
    return _call(
        "max_sim_pairs", q, d, (q_mask, d_mask, q_weights, d_weights), temperature, symmetric, True,
        return_alignment, precision, backend,
    )  # fmt: skip


def _call(
    op: str,
    q: Tensor,
    d: Tensor,
    per_token: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    temperature: float | None,
    symmetric: bool,
    pairs: bool,
    return_alignment: bool,
    precision: str,
    backend: str | None,
) -> Tensor | MaxSimOutput:
    """Check the arguments once, run the op, give back what was asked for."""
    q_mask, d_mask, q_weights, d_weights = per_token
    plain = symmetric is False and return_alignment is False and d_weights is None and precision == "ieee"
    if plain and (backend is None or backend == "auto" or backend == "cpp"):
        scores = direct_scores(op, q, d, (q_mask, d_mask, q_weights), temperature, pairs)
        if scores is not None:
            return scores
    check_tokens(op, q, d)
    check_per_token(op, "q_mask", q_mask, q, "(N, Lq)" if pairs else "(Nq, Lq)", mask=True)
    check_per_token(op, "d_mask", d_mask, d, "(N, Ld)" if pairs else "(Nd, Ld)", mask=True)
    check_per_token(op, "q_weights", q_weights, q, "(N, Lq)" if pairs else "(Nq, Lq)", mask=False)
    check_per_token(op, "d_weights", d_weights, d, "(N, Ld)" if pairs else "(Nd, Ld)", mask=False)
    if pairs and q.shape[0] != d.shape[0]:
        raise ValueError(f"{op}: q and d must be equal in number, got {q.shape[0]} and {d.shape[0]}")
    check_symmetric(op, symmetric, d_weights)
    check_flag(op, "return_alignment", return_alignment)
    check_temperature(op, temperature)
    chosen = choose_backend(op, backend, q)
    check_precision(op, precision, q.dtype, chosen)

    number = compute_dtype(q.dtype)
    weights = [None if w is None else w.to(number) for w in (q_weights, d_weights)]
    learns = torch.is_grad_enabled()
    of_tokens = learns and (q.requires_grad or d.requires_grad)
    of_weights = learns and any(w is not None and w.requires_grad for w in weights)
    need_argmax = return_alignment or (of_tokens and temperature is None)
    outputs = max_sim_op(
        q, d, q_mask, d_mask, *weights, None if temperature is None else float(temperature), symmetric, pairs,
        need_argmax, return_alignment or of_weights, precision, chosen,
    )  # fmt: skip
    if pairs:
        outputs = tuple(x[:, 0] if x.ndim > 1 else x for x in outputs)
    return asked_for(outputs, symmetric, return_alignment)


def asked_for(outputs: Outputs, symmetric: bool, return_alignment: bool) -> Tensor | MaxSimOutput:
    """Of all that an op gave, what the caller wants."""
    scores, reverse_scores, argmax, values, reverse_argmax, reverse_values = outputs
    if not symmetric and not return_alignment:
        return scores
    both = symmetric and return_alignment
    return MaxSimOutput(
        scores,
        reverse_scores if symmetric else None,
        argmax if return_alignment else None,
        values if return_alignment else None,
        reverse_argmax if both else None,
        reverse_values if both else None,
    )
