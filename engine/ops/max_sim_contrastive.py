"""A contrastive loss on max-sim scores. Contract: `engine.reference.max_sim_contrastive`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engine.ops.checks import (
    check_per_token,
    check_precision,
    check_symmetric,
    check_temperature,
    check_tokens,
    choose_backend,
    name_of,
)
from engine.ops.max_sim import _max_sim, _max_sim_backward
from engine.reference import max_sim_contrastive as reference
from engine.reference.unit import compute_dtype

NAME = "max_sim_contrastive"

# What the results per token of some queries may take before they are narrowed or summed.
SPAN_BYTES = 16 * 2**20

# loss, scores, reverse_scores, argmax, reverse_argmax; what is not needed is empty.
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _spans(q: Tensor, d: Tensor, symmetric: bool) -> Iterator[slice]:
    """Spans of queries whose results per token stay within `SPAN_BYTES`."""
    tokens = q.shape[1] + (d.shape[1] if symmetric else 0)
    size = max(1, SPAN_BYTES // max(1, 4 * d.shape[0] * tokens))
    for first in range(0, q.shape[0], size):
        yield slice(first, min(first + size, q.shape[0]))


def _max_sim_contrastive(
    q: Tensor,
    d: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    d_weights: Tensor | None,
    logit_scale: Tensor,
    temperature: float | None,
    symmetric: bool,
    need_argmax: bool,
    precision: str,
    backend: str,
) -> Outputs:
    """The op on checked arguments: the loss, and what its backward needs."""
    outputs = _empty_outputs(q, d, symmetric, need_argmax)
    _, scores, reverse_scores, argmax, reverse_argmax = outputs
    for span in _spans(q, d, symmetric):
        mask, weights = (None if x is None else x[span] for x in (q_mask, q_weights))
        part = _max_sim(
            q[span], d, mask, d_mask, weights, d_weights, temperature, symmetric, False, need_argmax, False,
            precision, backend,
        )  # fmt: skip
        scores[span] = part[0]
        if symmetric:
            reverse_scores[span] = part[1]
        if need_argmax:
            argmax[span] = part[2]
        if need_argmax and symmetric:
            reverse_argmax[span] = part[4]
    loss = reference.loss_of(scores, reverse_scores if symmetric else scores, logit_scale)
    return loss, scores, reverse_scores, argmax, reverse_argmax


def _empty_outputs(q: Tensor, d: Tensor, symmetric: bool, need_argmax: bool) -> Outputs:
    """Uninitialised results of the right shapes and dtypes; shape (0,) where one is not needed."""
    grid, number = (q.shape[0], d.shape[0]), compute_dtype(q.dtype)

    def new(wanted: bool, dtype: torch.dtype, *length: int) -> Tensor:
        return q.new_empty((*grid, *length) if wanted else (0,), dtype=dtype)

    return (
        q.new_empty((), dtype=number),
        new(True, number),
        new(symmetric, number),
        new(need_argmax, reference.argmax_dtype(d.shape[1]), q.shape[1]),
        new(need_argmax and symmetric, reference.argmax_dtype(q.shape[1]), d.shape[1]),
    )


max_sim_contrastive_op = torch.library.custom_op(
    "peaksim::max_sim_contrastive", _max_sim_contrastive, mutates_args=()
)


@max_sim_contrastive_op.register_fake
def _max_sim_contrastive_fake(
    q: Tensor,
    d: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    d_weights: Tensor | None,
    logit_scale: Tensor,
    temperature: float | None,
    symmetric: bool,
    need_argmax: bool,
    precision: str,
    backend: str,
) -> Outputs:
    return _empty_outputs(q, d, symmetric, need_argmax)


def _max_sim_contrastive_backward(
    grad_loss: Tensor,
    scores: Tensor,
    reverse_scores: Tensor,
    argmax: Tensor,
    reverse_argmax: Tensor,
    q: Tensor,
    d: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    d_weights: Tensor | None,
    logit_scale: Tensor,
    temperature: float | None,
    symmetric: bool,
    needs_tokens: bool,
    needs_weights: bool,
    precision: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, d, their weights and logit_scale; shape (0,) where one is not needed."""
    grads = _empty_gradients(q, d, logit_scale, symmetric, needs_tokens, needs_weights)
    both = reverse_scores if symmetric else scores
    ahead, across, of_scale = reference.score_gradients(scores, both, logit_scale)
    back = across.mul_(grad_loss) if symmetric else None
    ahead = (ahead if symmetric else ahead.add_(across)).mul_(grad_loss)
    grad_q, grad_d, grad_q_weights, grad_d_weights, _ = grads
    if needs_tokens:
        # The Triton kernels read winners as int32 only.
        winners = [x.int() if backend == "triton" else x for x in (argmax, reverse_argmax)]
        hard = temperature is None
        grad_q, grad_d = _max_sim_backward(
            ahead, None, winners[0] if hard else None, back, None, winners[1] if hard and symmetric else None,
            q, d, q_mask, d_mask, q_weights, d_weights, temperature, False, precision, backend,
        )  # fmt: skip
    if needs_weights:
        grad_d_weights.zero_()
        for span in _spans(q, d, symmetric):
            mask, weights = (None if x is None else x[span] for x in (q_mask, q_weights))
            _, _, _, values, _, reverse_values = _max_sim(
                q[span], d, mask, d_mask, weights, d_weights, temperature, symmetric, False, False, True,
                precision, backend,
            )  # fmt: skip
            grad_q_weights[span] = torch.einsum("ij,iju->iu", ahead[span], values)
            if back is not None:
                grad_d_weights += torch.einsum("ij,ijt->jt", back[span], reverse_values)
    return grad_q, grad_d, grad_q_weights, grad_d_weights, of_scale * grad_loss


def _empty_gradients(
    q: Tensor, d: Tensor, logit_scale: Tensor, symmetric: bool, needs_tokens: bool, needs_weights: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised gradients; shape (0,) where one is not needed."""
    number = compute_dtype(q.dtype)
    return (
        q.new_empty(q.shape if needs_tokens else (0,)),
        d.new_empty(d.shape if needs_tokens else (0,)),
        q.new_empty(q.shape[:2] if needs_weights else (0,), dtype=number),
        d.new_empty(d.shape[:2] if needs_weights and symmetric else (0,), dtype=number),
        torch.empty_like(logit_scale),
    )


max_sim_contrastive_backward_op = torch.library.custom_op(
    "peaksim::max_sim_contrastive_backward", _max_sim_contrastive_backward, mutates_args=()
)


@max_sim_contrastive_backward_op.register_fake
def _max_sim_contrastive_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    q, d, logit_scale, (symmetric, needs_tokens, needs_weights) = args[5], args[6], args[11], args[13:16]
    return _empty_gradients(q, d, logit_scale, symmetric, needs_tokens, needs_weights)


def _setup_context(ctx: Any, inputs: tuple, output: Outputs) -> None:
    ctx.save_for_backward(*inputs[:7], *output[1:])
    ctx.options = inputs[7:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * len(ctx.options)
    if grad_loss is None:
        return (None,) * 7 + nothing
    *inputs, scores, reverse_scores, argmax, reverse_argmax = ctx.saved_tensors
    temperature, symmetric, need_argmax, precision, backend = ctx.options
    needs_tokens, needs_weights = any(ctx.needs_input_grad[:2]), any(ctx.needs_input_grad[4:6])
    if needs_tokens and temperature is None and not need_argmax:
        # The op was called directly without what its backward needs: recompute it.
        saved = max_sim_contrastive_op(*inputs, temperature, symmetric, True, precision, backend)
        _, scores, reverse_scores, argmax, reverse_argmax = saved
    grads = max_sim_contrastive_backward_op(
        grad_loss, scores, reverse_scores, argmax, reverse_argmax, *inputs, temperature, symmetric, needs_tokens,
        needs_weights, precision, backend,
    )  # fmt: skip
    grad_q, grad_d, grad_q_weights, grad_d_weights, of_scale = grads
    return (
        grad_q if needs_tokens else None,
        grad_d if needs_tokens else None,
        None,
        None,
        grad_q_weights if ctx.needs_input_grad[4] else None,
        grad_d_weights if ctx.needs_input_grad[5] and symmetric else None,
        of_scale,
        *nothing,
    )


torch.library.register_autograd("peaksim::max_sim_contrastive", _backward, setup_context=_setup_context)


def max_sim_contrastive(
    q: Tensor,
    d: Tensor,
    *,
    logit_scale: Tensor | float,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    q_weights: Tensor | None = None,
    d_weights: Tensor | None = None,
    temperature: float | None = None,
    symmetric: bool = False,
    precision: str = "ieee",
    backend: str | None = None,
) -> Tensor:
    """Contrastive loss: each query tells its document, each document its query, by their max-sim scores.

        loss = ½ mean_i (log Σ_j exp z[i, j] - z[i, i]) + ½ mean_j (log Σ_i exp z[i, j] - z[j, j]),
        z = logit_scale · max_sim(q, d)

    Query i belongs to document i. With more queries than documents the rest are negatives for the documents alone
    (2B texts, the second half hard negatives, against B images), and with more documents likewise: the means are
    over the first min(Nq, Nd). Scores are sums over tokens; for means, pass `q_weights` of 1 / length.

    Memory beyond the gradients is a few times `(Nq, Nd)` and, with the hard maximum, its argmax in the narrowest
    integers. Edges: `engine.reference.max_sim_contrastive`. After Radford et al. (CLIP, 2021) and Yao et al.
    (FILIP, 2021).

    Args:
        q, d: `(Nq, Lq, D)` and `(Nd, Ld, D)`, at least one of each; dtypes and strides as in `max_sim`.
        logit_scale: what scores are multiplied with: a number, or a floating tensor `()` on the tokens' device,
            which then gets a gradient (CLIP's is the exponential of a parameter).
        q_mask, d_mask, q_weights, d_weights, temperature: as in `max_sim`.
        symmetric: take the second term from the reverse scores, where documents' tokens look for queries' (FILIP).
        precision, backend: as in `max_sim`.

    Returns:
        The loss `()`, float32 (float64 for float64 inputs). It has gradients for q, d, the weights and logit_scale,
        the same bit by bit from run to run.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or range; no pair.
        RuntimeError: the backend is missing; the message says how to get it.

    >>> q = torch.eye(3)[:, None]
    >>> max_sim_contrastive(q, q, logit_scale=100.0).item()
    0.0
    >>> max_sim_contrastive(q, q.roll(1, 0), logit_scale=100.0).item()
    100.0
    """
    per_token = (q_mask, d_mask, q_weights, d_weights)
    chosen = _check(q, d, per_token, temperature, symmetric, precision, backend)
    number = compute_dtype(q.dtype)
    weights = [None if w is None else w.to(number) for w in (q_weights, d_weights)]
    scale = _as_scale(logit_scale, q, number)
    learns = torch.is_grad_enabled() and (q.requires_grad or d.requires_grad)
    loss, *_ = max_sim_contrastive_op(
        q, d, q_mask, d_mask, *weights, scale, None if temperature is None else float(temperature), symmetric,
        learns and temperature is None, precision, chosen,
    )  # fmt: skip
    return loss


def _check(
    q: Tensor,
    d: Tensor,
    per_token: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    temperature: float | None,
    symmetric: bool,
    precision: str,
    backend: str | None,
) -> str:
    """Everything but logit_scale is right; the backend."""
    check_tokens(NAME, q, d)
    for name, x in zip(("q_mask", "d_mask", "q_weights", "d_weights"), per_token, strict=True):
        tokens, axes = (q, "(Nq, Lq)") if name[0] == "q" else (d, "(Nd, Ld)")
        check_per_token(NAME, name, x, tokens, axes, mask=name.endswith("mask"))
    if not (q.shape[0] and d.shape[0]):
        raise ValueError(f"{NAME}: q and d must make at least one pair, got Nq = {q.shape[0]} and Nd = {d.shape[0]}")
    check_symmetric(NAME, symmetric, per_token[3])
    check_temperature(NAME, temperature)
    chosen = choose_backend(NAME, backend, q)
    check_precision(NAME, precision, q.dtype, chosen)
    return chosen


def _as_scale(logit_scale: object, q: Tensor, number: torch.dtype) -> Tensor:
    """logit_scale as a tensor `()` of the dtype of the arithmetic."""
    if isinstance(logit_scale, Tensor):
        if not logit_scale.dtype.is_floating_point or logit_scale.ndim != 0:
            got = f"{name_of(logit_scale.dtype)} {tuple(logit_scale.shape)}"
            raise ValueError(f"{NAME}: logit_scale must be a number or a floating tensor of shape (), got {got}")
        if logit_scale.device != q.device:
            raise ValueError(f"{NAME}: logit_scale must be on {q.device} as the tokens are, got {logit_scale.device}")
        return logit_scale.to(number)
    if isinstance(logit_scale, bool) or not isinstance(logit_scale, (int, float)):
        raise TypeError(f"{NAME}: logit_scale must be a number or a torch.Tensor, got {type(logit_scale).__name__}")
    return torch.full((), float(logit_scale), dtype=number, device=q.device)
