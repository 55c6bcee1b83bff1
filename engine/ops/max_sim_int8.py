"""Max-sim of int8 codes. Contract: `engine.reference.max_sim_int8`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.checks import check_bounds, check_cu_seqlens, check_flag, check_per_token, choose_backend
from engine.ops.max_sim import MaxSimOutput
from engine.ops.max_sim_varlen import fill_tail, launch, offsets_of
from engine.ops.native import as_array, dense_rows, extension, forced_isa
from engine.ops.quantize import check_quantized
from engine.reference import max_sim_int8 as reference
from engine.reference.max_sim import empty_outputs as of_dense
from engine.reference.max_sim_varlen import Items, empty_outputs
from engine.reference.quantize import QuantizedTokens

OP = "max_sim_int8"


def _max_sim_int8(
    q: Tensor,
    d: Tensor,
    q_scales: Tensor,
    d_scales: Tensor,
    q_cu_seqlens: Tensor | None,
    d_cu_seqlens: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    pairs: bool,
    need_argmax: bool,
    need_values: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op on checked arguments: scores, argmax and values; shape (0,) where one is not asked for."""
    for name, bounds, codes in (("q_cu_seqlens", q_cu_seqlens, q), ("d_cu_seqlens", d_cu_seqlens, d)):
        check_bounds(OP, name, bounds, codes.shape[0])
    if backend == "reference":
        sides = reference.items_of(
            QuantizedTokens(q, q_scales), QuantizedTokens(d, d_scales), q_cu_seqlens, d_cu_seqlens, q_mask, d_mask,
            q_weights,
        )  # fmt: skip
        scores, _, argmax, values, _, _ = reference.max_sim_int8(
            *sides, pairs=pairs, need_argmax=need_argmax, need_values=need_values
        )
        return scores, argmax, values
    outputs = _empty(q, d, q_cu_seqlens, d_cu_seqlens, pairs, need_argmax, need_values)
    fill_tail(outputs[1:], q_cu_seqlens)
    if outputs[0].numel() == 0:
        return outputs
    if backend == "triton":
        sides = Items(q, q_cu_seqlens, q_mask, q_weights), Items(d, d_cu_seqlens, d_mask, None)
        launch_codes(*sides, (q_scales, d_scales), outputs, pairs)
    else:
        extension(OP).max_sim_int8(
            *native_arguments(q, d, q_scales, d_scales, q_cu_seqlens, d_cu_seqlens, q_mask, d_mask, q_weights),
            pairs, *map(as_array, outputs), forced_isa(), torch.get_num_threads(),
        )  # fmt: skip
    return outputs


def launch_codes(
    q: Items, d: Items, scales: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor, Tensor], pairs: bool = False
) -> None:
    """Fill scores, argmax and values by the Triton kernels."""
    scores, argmax, values = outputs
    nothing, places = scores.new_empty(0), scores.new_empty(0, dtype=torch.int32)
    launch(q, d, (scores, nothing, argmax, values, places, nothing), scales=scales, pairs=pairs)


def native_arguments(q: Tensor, d: Tensor, q_scales: Tensor, d_scales: Tensor, *rest: Tensor | None) -> list:
    """Codes, scales, boundaries of both sides, masks and weights as the kernels take them."""
    q_cu_seqlens, d_cu_seqlens, *per_token = rest
    return [
        as_array(dense_rows(q)), as_array(dense_rows(d)), q_scales.contiguous().numpy(), d_scales.contiguous().numpy(),
        *map(offsets_of, (q_cu_seqlens, d_cu_seqlens)),
        *(as_array(x if x is None else x.contiguous()) for x in per_token),
    ]  # fmt: skip


def _empty(
    q: Tensor,
    d: Tensor,
    q_bounds: Tensor | None,
    d_bounds: Tensor | None,
    pairs: bool,
    need_argmax: bool,
    need_values: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if pairs:
        scores, _, argmax, values, _, _ = of_dense(
            q, d, symmetric=False, pairs=True, need_argmax=need_argmax, need_values=need_values
        )
        return scores, argmax, values
    scores, _, argmax, values, _, _ = empty_outputs(
        Items(q, q_bounds, None, None), Items(d, d_bounds, None, None),
        symmetric=False, need_argmax=need_argmax, need_values=need_values,
    )  # fmt: skip
    return scores, argmax, values


max_sim_int8_op = torch.library.custom_op("peaksim::max_sim_int8", _max_sim_int8, mutates_args=())


@max_sim_int8_op.register_fake
def _max_sim_int8_fake(
    q: Tensor,
    d: Tensor,
    q_scales: Tensor,
    d_scales: Tensor,
    q_cu_seqlens: Tensor | None,
    d_cu_seqlens: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    pairs: bool,
    need_argmax: bool,
    need_values: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(q, d, q_cu_seqlens, d_cu_seqlens, pairs, need_argmax, need_values)


def max_sim_int8(
    q: QuantizedTokens,
    d: QuantizedTokens,
    *,
    q_cu_seqlens: Tensor | None = None,
    d_cu_seqlens: Tensor | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    q_weights: Tensor | None = None,
    pairs: bool = False,
    return_alignment: bool = False,
    backend: str | None = None,
) -> Tensor | MaxSimOutput:
    """`max_sim` of quantised tokens: a quarter of float32's memory, close to its order.

        scores[i, j] = Σ_u q_weights[i, u] · scale_q[i, u] · max_t (⟨codes_q[i, u], codes_d[j, t]⟩ · scale_d[j, t])

    Args:
        q, d: what `quantize` gives for queries `(Nq, Lq, D)` and documents `(Nd, Ld, D)`; for packed tokens
            `(total, D)` with their boundaries as in `max_sim_varlen`.
        q_mask, d_mask: bool `(Nq, Lq)` and `(Nd, Ld)`, `(total,)` for packed sides, True = keep.
        q_weights: `(Nq, Lq)` or `(q_total,)` floating, what each query token counts; by default 1.
        pairs: score query i and document i alone, as `max_sim_pairs` does; both sides are dense.
        return_alignment: also give each query token's winner and value.
        backend: "cpp" (CPU), "triton" (CUDA) or "reference" (plain torch, any device); by default, or with "auto", by
            the tensors' device.

    Returns:
        scores `(Nq, Nd)` float32, or a `MaxSimOutput` with argmax and values laid out as those of `max_sim_varlen`.
        With `pairs` all lack the axis Nd. There is no gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or range.
        RuntimeError: the backend is missing; the message says how to get it.

    >>> from engine.ops.quantize import quantize
    >>> q, d = torch.eye(4)[None], torch.eye(4)[:2].repeat(1, 1, 1)
    >>> max_sim_int8(quantize(q), quantize(d)).round(decimals=2)
    tensor([[2.]])
    """
    check_codes(OP, q, d, q_cu_seqlens, d_cu_seqlens, q_mask, d_mask, q_weights)
    check_flag(OP, "pairs", pairs)
    check_flag(OP, "return_alignment", return_alignment)
    if pairs:
        _check_pairs(q, d, q_cu_seqlens, d_cu_seqlens)
    chosen = choose_backend(OP, backend, q.codes)
    weights = None if q_weights is None else q_weights.to(torch.float32)
    scores, argmax, values = max_sim_int8_op(
        q.codes, d.codes, q.scales, d.scales, q_cu_seqlens, d_cu_seqlens, q_mask, d_mask, weights, pairs,
        return_alignment, return_alignment, chosen,
    )  # fmt: skip
    if pairs:
        scores, argmax, values = (x[:, 0] if x.ndim > 1 else x for x in (scores, argmax, values))
    if not return_alignment:
        return scores
    if q_cu_seqlens is not None:
        argmax, values = argmax.T, values.T
    return MaxSimOutput(scores, None, argmax, values)


def _check_pairs(
    q: QuantizedTokens, d: QuantizedTokens, q_cu_seqlens: Tensor | None, d_cu_seqlens: Tensor | None
) -> None:
    """Two dense sides of one number of items."""
    for name, bounds in (("q_cu_seqlens", q_cu_seqlens), ("d_cu_seqlens", d_cu_seqlens)):
        if bounds is not None:
            raise ValueError(f"{OP}: pairs are of dense sides and need {name}=None, got boundaries")
    if q.codes.shape[0] != d.codes.shape[0]:
        numbers = f"{q.codes.shape[0]} and {d.codes.shape[0]}"
        raise ValueError(f"{OP}: q and d must be equal in number, got {numbers}")


def check_codes(
    op: str,
    q: object,
    d: object,
    q_cu_seqlens: object,
    d_cu_seqlens: object,
    q_mask: object,
    d_mask: object,
    q_weights: object,
) -> None:
    """Types, shapes and devices of all tensors."""
    sides = ("q", q, q_cu_seqlens, "Nq", "Lq"), ("d", d, d_cu_seqlens, "Nd", "Ld")
    for name, x, bounds, number, length in sides:
        check_quantized(op, name, x)
        assert isinstance(x, QuantizedTokens)
        shape = f"({number}, {length}, D)" if bounds is None else f"({name}_total, D)"
        if x.codes.ndim != shape.count(",") + 1:
            raise ValueError(f"{op}: {name} must hold codes of shape {shape}, got {tuple(x.codes.shape)}")
        check_cu_seqlens(op, f"{name}_cu_seqlens", bounds, f"({number} + 1,)", x.codes)
        axes = f"({number}, {length})" if bounds is None else f"({name}_total,)"
        check_per_token(op, f"{name}_mask", q_mask if name == "q" else d_mask, x.codes, axes, mask=True)
        check_per_token(op, f"{name}_weights", q_weights if name == "q" else None, x.codes, axes, mask=False)
    assert isinstance(q, QuantizedTokens) and isinstance(d, QuantizedTokens)
    if q.codes.shape[-1] != d.codes.shape[-1]:
        widths = f"{q.codes.shape[-1]} and {d.codes.shape[-1]}"
        raise ValueError(f"{op}: q and d must have one last dimension D, got {widths}")
    if q.codes.device != d.codes.device:
        raise ValueError(f"{op}: q and d must be on one device, got {q.codes.device} and {d.codes.device}")
