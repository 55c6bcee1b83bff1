"""The contract of max-sim of int8 codes, and its specification in plain torch.

    values[i, j, u] = scale_q[i, u] · max_t (⟨codes_q[i, u], codes_d[j, t]⟩ · scale_d[j, t])         over kept t
    scores[i, j] = Σ_u w[i, u] · values[i, j, u]                                                     over kept u

Codes and scales are those of `engine.reference.quantize`. Either side may be packed as in
`engine.reference.max_sim_varlen`; masks, weights, empty sets, ties and NaN are as in `engine.reference.max_sim`.
What is particular:

* Inner products of codes are exact integers, turned to float32 and multiplied by the document token's scale before the
  maximum, by the query token's after it: values are the same bit by bit on every backend.
* A token with scale NaN (its vector held NaN or an infinity) gives NaN; among documents' tokens its place is the
  argmax.
* There is the hard maximum alone, one direction, and no gradient. Pairs, as in `engine.reference.max_sim`, are of dense
  sides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.reference import max_sim as dense
from engine.reference.max_sim import Outputs, Side
from engine.reference.max_sim_varlen import Items, max_sim_varlen
from engine.reference.quantize import QuantizedTokens


def items_of(
    q: QuantizedTokens,
    d: QuantizedTokens,
    q_cu_seqlens: Tensor | None = None,
    d_cu_seqlens: Tensor | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    q_weights: Tensor | None = None,
) -> tuple[Items, Items]:
    """Codes as tokens; in the place of weights, those of queries with their scales, and documents' scales."""
    weights = torch.ones_like(q.scales) if q_weights is None else q_weights
    queries = Items(q.codes, q_cu_seqlens, q_mask, torch.stack([weights, q.scales], -1))
    return queries, Items(d.codes, d_cu_seqlens, d_mask, d.scales)


def max_sim_int8(
    q: Items, d: Items, *, pairs: bool = False, need_argmax: bool = False, need_values: bool = False
) -> Outputs:
    """The contract above, for sides of `items_of`; returns what `engine.reference.max_sim_varlen` does."""
    if pairs:
        assert q.weights is not None and d.weights is not None
        return score_codes(
            q.tokens, d.tokens, q.mask, d.mask, q.weights, d.weights, pairs=True, need_argmax=need_argmax,
            need_values=need_values,
        )  # fmt: skip
    return max_sim_varlen(q, d, need_argmax=need_argmax, need_values=need_values, scorer=score_codes)


def score_codes(
    q: Tensor,
    d: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor,
    d_scales: Tensor,
    *,
    temperature: float | None = None,
    precision: str = "ieee",
    symmetric: bool = False,
    pairs: bool = False,
    need_argmax: bool = False,
    need_values: bool = False,
) -> Outputs:
    """The dense form: codes `(N, L, D)`, weights and scales of queries `(Nq, Lq, 2)`, documents' scales `(Nd, Ld)`."""
    assert temperature is None and not symmetric and precision == "ieee", "codes have the hard form alone"
    q_keep, d_keep = Side.of(q, q_mask, None).keep, Side.of(d, d_mask, None).keep
    outputs = dense.empty_outputs(q, d, symmetric=False, pairs=pairs, need_argmax=need_argmax, need_values=need_values)
    scores, _, argmax, values, _, _ = outputs
    for tile in dense.tiles(q, d, pairs):
        a, b = tile.queries, tile.documents
        # float64 holds the integers exactly.
        products = dense.similarities(q[a].double(), d[b].double(), pairs, "ieee").to(torch.float32)
        b_scales, b_keep = (x[b, None, None] if pairs else x[None, b, None] for x in (d_scales, d_keep))
        best, place = dense.pool(products * b_scales, b_keep, None)
        place = place.masked_fill(~q_keep[a, None], -1)
        weight, scale = q_weights[a, None].unbind(-1)
        value = (scale * best).masked_fill(place < 0, 0)
        scores[tile.place] = (weight * value).masked_fill(place < 0, 0).sum(-1)
        if need_argmax:
            argmax[tile.place] = place.to(torch.int32)
        if need_values:
            values[tile.place] = value
    return outputs
