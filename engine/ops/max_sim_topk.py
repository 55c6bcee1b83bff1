"""The best documents under max-sim, without all scores. Contract: `engine.reference.max_sim_topk`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.ops.checks import (
    check_bounds,
    check_cu_seqlens,
    check_per_token,
    check_precision,
    check_temperature,
    check_tokens,
    choose_backend,
    name_of,
)
from engine.ops.max_sim_int8 import check_codes, native_arguments
from engine.ops.max_sim_varlen import launch, offsets_of
from engine.ops.native import as_array, dense_rows, extension, forced_isa
from engine.reference import max_sim_topk as reference
from engine.reference.max_sim_int8 import items_of, score_codes
from engine.reference.max_sim_varlen import Items
from engine.reference.quantize import QuantizedTokens
from engine.reference.unit import compute_dtype

OP = "max_sim_topk"
# Scores held at a time on a GPU.
BLOCK_SCORES = 2**22


class TopKOutput(NamedTuple):
    """The best documents of each query, best first."""

    scores: Tensor
    """(Nq, k) float32, or float64 for float64 inputs; −inf where there are fewer than k documents."""
    indices: Tensor
    """(Nq, k) int64; −1 where there are fewer than k documents."""


def _max_sim_topk(
    q: Tensor,
    d: Tensor,
    q_scales: Tensor | None,
    d_scales: Tensor | None,
    q_cu_seqlens: Tensor | None,
    d_cu_seqlens: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    k: int,
    temperature: float | None,
    precision: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The op on checked arguments; with scales, q and d are int8 codes."""
    for name, bounds, tokens in (("q_cu_seqlens", q_cu_seqlens, q), ("d_cu_seqlens", d_cu_seqlens, d)):
        check_bounds(OP, name, bounds, tokens.shape[0])
    rest = (q_cu_seqlens, d_cu_seqlens, q_mask, d_mask, q_weights)
    if q_scales is not None and d_scales is not None:
        return _of_codes(QuantizedTokens(q, q_scales), QuantizedTokens(d, d_scales), rest, k, backend)
    queries, documents = Items(q, q_cu_seqlens, q_mask, q_weights), Items(d, d_cu_seqlens, d_mask, None)
    if backend == "reference":
        return reference.max_sim_topk(queries, documents, k, temperature=temperature, precision=precision)
    if backend == "triton":
        return _in_blocks(queries, documents, k, temperature, precision, None)
    outputs = _empty(queries, k)
    if queries.number > 0:
        extension(OP).max_sim_topk(
            as_array(dense_rows(q)), as_array(dense_rows(d)), name_of(q.dtype),
            *map(offsets_of, (q_cu_seqlens, d_cu_seqlens)),
            *(as_array(x if x is None else x.contiguous()) for x in (q_mask, d_mask, q_weights)),
            temperature or 0.0, *map(as_array, outputs), forced_isa(), torch.get_num_threads(),
        )  # fmt: skip
    return outputs


def _of_codes(
    q: QuantizedTokens, d: QuantizedTokens, rest: tuple[Tensor | None, ...], k: int, backend: str
) -> tuple[Tensor, Tensor]:
    if backend == "reference":
        return reference.max_sim_topk(*items_of(q, d, *rest), k, scorer=score_codes)
    if backend == "triton":
        q_bounds, d_bounds, q_mask, d_mask, weights = rest
        queries, documents = Items(q.codes, q_bounds, q_mask, weights), Items(d.codes, d_bounds, d_mask, d.scales)
        return _in_blocks(queries, documents, k, None, "ieee", q.scales)
    outputs = _empty(Items(q.codes, rest[0], None, None), k)
    if outputs[0].shape[0] > 0:
        extension(OP).max_sim_int8_topk(
            *native_arguments(q.codes, d.codes, q.scales, d.scales, *rest), *map(as_array, outputs),
            forced_isa(), torch.get_num_threads(),
        )  # fmt: skip
    return outputs


def _empty(q: Items, k: int) -> tuple[Tensor, Tensor]:
    shape = (q.number, k)
    return q.tokens.new_empty(shape, dtype=compute_dtype(q.tokens.dtype)), q.tokens.new_empty(shape, dtype=torch.int64)


def _in_blocks(
    q: Items, d: Items, k: int, temperature: float | None, precision: str, q_scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Blocks of documents through the forward kernel, each merged into the best so far.

    With `q_scales`, tokens are codes, and documents' weights are their scales.
    """
    scores, indices = _empty(q, k)
    best = scores[:, :0], indices[:, :0]
    nothing, places = scores.new_empty(0), indices.new_empty(0, dtype=torch.int32)
    step = max(1, BLOCK_SCORES // max(1, q.number))
    for first in range(0, d.number if q.number else 0, step):
        part = _part_of(d, first, min(d.number, first + step))
        block = scores.new_empty((q.number, part.number))
        launch(
            q, Items(part.tokens, part.cu_seqlens, part.mask, None), (block, nothing, places, nothing, places, nothing),
            temperature=temperature, precision=precision, scales=(q_scales, part.weights),
        )  # fmt: skip
        own = torch.arange(first, first + part.number, device=scores.device).expand(block.shape)
        # The best so far stand first: their indices are lower.
        best = reference.best_of(torch.cat([best[0], block], 1), torch.cat([best[1], own], 1), k)
        # Fewer than k so far: what fills up must not stand before later documents.
        there = min(k, first + part.number)
        best = best[0][:, :there], best[1][:, :there]
    return reference.best_of(*best, k)


def _part_of(d: Items, first: int, last: int) -> Items:
    """Documents [first, last) alone; nothing is copied but boundaries."""
    rows, bounds = slice(first, last), None
    if d.cu_seqlens is not None:
        bounds = d.cu_seqlens[first : last + 1]
        rows = slice(int(bounds[0]), int(bounds[-1]))
        bounds = bounds - bounds[0]
    mask, weights = (None if x is None else x[rows] for x in (d.mask, d.weights))
    return Items(d.tokens[rows], bounds, mask, weights)


max_sim_topk_op = torch.library.custom_op("peaksim::max_sim_topk", _max_sim_topk, mutates_args=())


@max_sim_topk_op.register_fake
def _max_sim_topk_fake(
    q: Tensor,
    d: Tensor,
    q_scales: Tensor | None,
    d_scales: Tensor | None,
    q_cu_seqlens: Tensor | None,
    d_cu_seqlens: Tensor | None,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    k: int,
    temperature: float | None,
    precision: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return _empty(Items(q, q_cu_seqlens, None, None), k)


def max_sim_topk(
    q: Tensor | QuantizedTokens,
    d: Tensor | QuantizedTokens,
    k: int,
    *,
    q_cu_seqlens: Tensor | None = None,
    d_cu_seqlens: Tensor | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    q_weights: Tensor | None = None,
    temperature: float | None = None,
    precision: str = "ieee",
    backend: str | None = None,
) -> TopKOutput:
    """The k documents in which each query's tokens are found best, out of a collection of any size.

    Scores are `max_sim`'s; those of all documents are never held at once, and documents in a memory-mapped file are
    read in place. Of equal scores the lower index comes first. NaN comes first of all, as in `torch.topk`. There is
    no gradient.

    Args:
        q, d: queries and documents, dense or packed as in `max_sim_varlen`; or both as `quantize` gives them, to be
            scored as by `max_sim_int8`.
        k: how many documents, 1 or more. If there are fewer, the rest holds score −inf and index −1.
        q_cu_seqlens, d_cu_seqlens: boundaries of packed queries and documents as in `max_sim_varlen`.
        All else as in `max_sim`; quantised tokens have no `temperature` and no `precision`.

    Returns:
        scores `(Nq, k)` float32 (float64 for float64 inputs) and indices `(Nq, k)` int64, best first.

    Raises:
        TypeError, ValueError, RuntimeError: as `max_sim_varlen`; ValueError also for a k below 1.

    >>> q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> d = torch.tensor([[[0.5, 0.0]], [[3.0, 1.0]], [[1.0, 1.0]], [[2.0, 2.0]]])
    >>> max_sim_topk(q, d, 3)
    TopKOutput(scores=tensor([[4., 4., 2.]]), indices=tensor([[1, 3, 2]]))
    """
    _check_k(k)
    rest = (q_cu_seqlens, d_cu_seqlens, q_mask, d_mask)
    if isinstance(q, QuantizedTokens) or isinstance(d, QuantizedTokens):
        check_codes(OP, q, d, *rest, q_weights)
        if temperature is not None or precision != "ieee":
            given = f"{temperature} and {precision!r}"
            raise ValueError(f"{OP}: quantised tokens take no temperature or precision, got {given}")
        assert isinstance(q, QuantizedTokens) and isinstance(d, QuantizedTokens)
        chosen = choose_backend(OP, backend, q.codes)
        weights = None if q_weights is None else q_weights.to(torch.float32)
        tensors = (q.codes, d.codes, q.scales, d.scales, *rest, weights)
        return TopKOutput(*max_sim_topk_op(*tensors, k, None, precision, chosen))
    _check_tokens(q, d, *rest, q_weights)
    check_temperature(OP, temperature)
    chosen = choose_backend(OP, backend, q)
    check_precision(OP, precision, q.dtype, chosen)
    weights = None if q_weights is None else q_weights.to(compute_dtype(q.dtype))
    soft = None if temperature is None else float(temperature)
    return TopKOutput(*max_sim_topk_op(q, d, None, None, *rest, weights, k, soft, precision, chosen))


def _check_k(k: object) -> None:
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"{OP}: k must be an int, got {type(k).__name__}")
    if not 1 <= k < 2**31:
        raise ValueError(f"{OP}: k must be 1 or more and below 2**31, got {k}")


def _check_tokens(
    q: Tensor,
    d: Tensor,
    q_cu_seqlens: object,
    d_cu_seqlens: object,
    q_mask: object,
    d_mask: object,
    q_weights: object,
) -> None:
    """Types, shapes and devices of all tensors."""
    check_tokens(OP, q, d, q_packed=q_cu_seqlens is not None, d_packed=d_cu_seqlens is not None)
    check_cu_seqlens(OP, "q_cu_seqlens", q_cu_seqlens, "(Nq + 1,)", q)
    check_cu_seqlens(OP, "d_cu_seqlens", d_cu_seqlens, "(Nd + 1,)", d)
    q_axes = "(Nq, Lq)" if q_cu_seqlens is None else "(q_total,)"
    check_per_token(OP, "q_mask", q_mask, q, q_axes, mask=True)
    check_per_token(OP, "d_mask", d_mask, d, "(Nd, Ld)" if d_cu_seqlens is None else "(d_total,)", mask=True)
    check_per_token(OP, "q_weights", q_weights, q, q_axes, mask=False)
