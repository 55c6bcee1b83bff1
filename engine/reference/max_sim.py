"""The contract of max-sim, and its specification in plain torch.

    scores[i, j] = Σ_u w[i, u] · max_t ⟨q[i, u], d[j, t]⟩            over kept u and t

`q (Nq, Lq, D)` are queries (texts) of `Lq` tokens, `d (Nd, Ld, D)` documents (images) of `Ld` tokens (patches).
With a `temperature` τ the maximum becomes soft: τ · log Σ_t exp(⟨q[i, u], d[j, t]⟩ / τ). The symmetric form also
gives reverse_scores[i, j] = Σ_t v[j, t] · max_u ⟨q[i, u], d[j, t]⟩ (soft likewise) from the same similarities.
In pairs, query i meets document i alone and the second axis of every result has length 1.

What holds at the edges, for every backend:

* A mask is True where a token is kept. A masked token has no influence whatever it holds, NaN and infinities
  in its vector and in its weight included.
* A token with nothing to match (no kept token on the other side) adds 0 and has argmax −1 and value 0, whatever
  its weight. So does, in the alignment, a masked token. Emptiness is known from the masks, never from values.
* NaN counts as the greatest similarity: NaN in a kept token gives NaN, and its place is the argmax.
* Infinities are numbers: a similarity of −inf that wins is a genuine −inf, with its place as the argmax.
* Of equal similarities the one with the lowest index wins. In the soft form too, the argmax is the place of the
  greatest similarity, and the value is the soft maximum.
* Weights multiply by the rules of IEEE 754: weight 0 times an infinite or NaN value is NaN. To leave a token
  out, mask it.
* Similarities, sums and results are float32, or float64 for float64 inputs. `precision="tf32"` allows the
  products of float32 inputs to be rounded to TF32 (10 bits of fraction); "ieee" does not.
* The gradient of the hard form goes to the winner; −1 and masked tokens get exactly 0. The soft form
  distributes it by the softmax of the similarities. Both are reproducible bit by bit.

With c[i, j, u] = grad_scores[i, j] · w[i, u] + grad_values[i, j, u] the backward is

    hard:  grad_q[i, u] = Σ_j c[i, j, u] · d[j, argmax],   grad_d[j, t] = Σ_{i, u: argmax = t} c[i, j, u] · q[i, u]
    soft:  the same with c · softmax_t(⟨q[i, u], d[j, t]⟩ / τ) on every kept t,

and likewise for the reverse direction. For bfloat16 inputs, kernels may round the soft form's gradients of
similarities (c · softmax) to bfloat16 before these products; the sums are float32.

No tensor of shape (Nq, Nd, Lq, Ld) is made: work goes in tiles of queries × documents of at most
`TILE_BYTES`, or of a single pair.

The hard form is late interaction after Khattab and Zaharia, "ColBERT" (2020); the symmetric one follows
Yao et al., "FILIP" (2021).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.reference.unit import compute_dtype

TILE_BYTES = 32 * 2**20

# scores, reverse_scores, argmax, values, reverse_argmax, reverse_values; what was not asked for is empty.
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Side:
    """The queries or the documents: `tokens (N, L, D)`, `keep (N, L)` bool, `weights (N, L)` or None for ones."""

    tokens: Tensor
    keep: Tensor
    weights: Tensor | None

    @staticmethod
    def of(tokens: Tensor, mask: Tensor | None, weights: Tensor | None) -> Side:
        keep = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask is None else mask
        return Side(tokens, keep, weights)

    def part(self, span: slice) -> Part:
        """The rows of `span` in the dtype of the arithmetic; masked tokens and their weights become 0."""
        keep = self.keep[span]
        tokens = self.tokens[span].to(compute_dtype(self.tokens.dtype))
        tokens = tokens.masked_fill(~keep[..., None], 0)
        if self.weights is None:
            return Part(tokens, keep, keep.to(tokens.dtype))
        return Part(tokens, keep, self.weights[span].to(tokens.dtype).masked_fill(~keep, 0))


@dataclass(frozen=True)
class Part:
    """Some rows of a side, as the arithmetic takes them."""

    tokens: Tensor
    keep: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Tile:
    """`a` queries against `b` documents; in pairs, `a` queries each against its own (`b` = 1)."""

    queries: slice
    documents: slice
    pairs: bool

    @property
    def place(self) -> tuple[slice, slice]:
        """Where the tile lies in a result of shape (Nq, Nd, ...) or, in pairs, (N, 1, ...)."""
        return self.queries, slice(0, 1) if self.pairs else self.documents


def round_to_tf32(x: Tensor) -> Tensor:
    """`x` (float32) rounded to nearest, ties to even, at 10 bits of fraction; NaN and infinities stay."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def tiles(q: Tensor, d: Tensor, pairs: bool) -> Iterator[Tile]:
    """Tiles that cover all scores, in a fixed order, each within `TILE_BYTES` or of a single pair."""
    n_q, n_d = q.shape[0], d.shape[0]
    wide = max(q.shape[1] * max(d.shape[1], q.shape[2]), d.shape[1] * q.shape[2], 1)
    size = max(1, TILE_BYTES // (wide * compute_dtype(q.dtype).itemsize))
    if pairs:
        for i in range(0, n_q, size):
            yield Tile(slice(i, min(i + size, n_q)), slice(i, min(i + size, n_q)), True)
        return
    b = min(size, max(n_d, 1))
    a = max(1, size // b)
    for j in range(0, n_d, b):
        for i in range(0, n_q, a):
            yield Tile(slice(i, min(i + a, n_q)), slice(j, min(j + b, n_d)), False)


def similarities(q: Tensor, d: Tensor, pairs: bool, precision: str) -> Tensor:
    """All inner products of a tile, (a, b, Lq, Ld)."""
    if precision == "tf32":
        q, d = round_to_tf32(q), round_to_tf32(d)
    if pairs:
        return torch.einsum("auk,atk->aut", q, d)[:, None]
    return torch.einsum("auk,btk->abut", q, d)


def pool(s: Tensor, keep: Tensor, temperature: float | None) -> tuple[Tensor, Tensor]:
    """Hard or soft maximum of `s (..., n)` over its last axis where `keep` (broadcast) says so, and its place.

    Returns:
        values `(...)` and argmax `(...)` int64; 0 and −1 where nothing is kept.
    """
    if s.shape[-1] == 0:
        return s.new_zeros(s.shape[:-1]), s.new_full(s.shape[:-1], -1, dtype=torch.int64)
    keep = keep.expand(s.shape)
    s = s.masked_fill(~keep, -torch.inf)
    values, argmax = s.max(-1)  # NaN is the greatest, of equals the first
    # A maximum of −inf means that all kept similarities are −inf: the first kept one wins, not a masked one.
    argmax = torch.where(values == -torch.inf, keep.to(torch.uint8).argmax(-1), argmax)
    if temperature is not None:
        shift = values.masked_fill(values.isinf(), 0)
        total = ((s - shift[..., None]) / temperature).exp().sum(-1)
        values = shift + temperature * total.log()
    some = keep.any(-1)
    return values.masked_fill(~some, 0), argmax.masked_fill(~some, -1)


def softmax(s: Tensor, keep: Tensor, temperature: float) -> Tensor:
    """exp(s / τ) / Σ exp(s / τ) over the last axis where `keep` (broadcast) says so; what is elsewhere means nothing.

    Where the greatest is infinite, this is exp((s - log-sum-exp) / τ): 0, and NaN at the infinities.
    """
    if s.shape[-1] == 0:
        return s
    keep = keep.expand(s.shape)
    shift = s.masked_fill(~keep, -torch.inf).amax(-1, keepdim=True)
    weights = ((s - shift) / temperature).exp().masked_fill(~keep, 0)
    return torch.where(shift.isinf(), weights, weights / weights.sum(-1, keepdim=True))


def max_sim(
    q: Tensor,
    d: Tensor,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    q_weights: Tensor | None = None,
    d_weights: Tensor | None = None,
    *,
    temperature: float | None = None,
    symmetric: bool = False,
    pairs: bool = False,
    need_argmax: bool = False,
    need_values: bool = False,
    precision: str = "ieee",
) -> Outputs:
    """The contract above, for arguments that the op has checked.

    Returns:
        scores `(Nq, Nd)`, reverse_scores likewise, argmax `(Nq, Nd, Lq)` int32, values likewise,
        reverse_argmax `(Nq, Nd, Ld)` int32, reverse_values likewise. In pairs Nd is 1. What was not asked
        for is an empty tensor.
    """
    left, right = Side.of(q, q_mask, q_weights), Side.of(d, d_mask, d_weights)
    outputs = empty_outputs(q, d, symmetric=symmetric, pairs=pairs, need_argmax=need_argmax, need_values=need_values)
    scores, reverse_scores, argmax, values, reverse_argmax, reverse_values = outputs
    for tile in tiles(q, d, pairs):
        a, b = left.part(tile.queries), right.part(tile.documents)
        s = similarities(a.tokens, b.tokens, pairs, precision)
        a_keep, b_keep = _broadcast(a.keep, 0, pairs), _broadcast(b.keep, 1, pairs)
        directions = [(s, a_keep, b_keep, _broadcast(a.weights, 0, pairs), scores, argmax, values)]
        if symmetric:
            reverse = (reverse_scores, reverse_argmax, reverse_values)
            directions.append((s.mT, b_keep, a_keep, _broadcast(b.weights, 1, pairs), *reverse))
        for sims, own, other, weights, to_scores, to_argmax, to_values in directions:
            value, index = pool(sims, other[..., None, :], temperature)
            value, index = value.masked_fill(~own, 0), index.masked_fill(~own, -1)
            to_scores[tile.place] = (weights * value).masked_fill(index < 0, 0).sum(-1)
            if need_argmax:
                to_argmax[tile.place] = index.to(torch.int32)
            if need_values:
                to_values[tile.place] = value
    return outputs


def empty_outputs(
    q: Tensor, d: Tensor, *, symmetric: bool, pairs: bool, need_argmax: bool, need_values: bool
) -> Outputs:
    """Uninitialised results of the right shapes and dtypes; shape (0,) where one is not asked for."""
    grid = (q.shape[0], 1 if pairs else d.shape[0])

    def new(wanted: bool, dtype: torch.dtype, *length: int) -> Tensor:
        return q.new_empty((*grid, *length) if wanted else (0,), dtype=dtype)

    number, n_u, n_t = compute_dtype(q.dtype), q.shape[1], d.shape[1]
    return (
        new(True, number),
        new(symmetric, number),
        new(need_argmax, torch.int32, n_u),
        new(need_values, number, n_u),
        new(need_argmax and symmetric, torch.int32, n_t),
        new(need_values and symmetric, number, n_t),
    )


def _broadcast(x: Tensor, axis: int, pairs: bool) -> Tensor:
    """Per-token numbers `(N, L)` of queries (axis 0) or documents (axis 1) against a tile `(a, b, L)`."""
    return x[:, None] if axis == 0 or pairs else x[None]


@dataclass(frozen=True)
class Incoming:
    """What one direction's backward gets: gradients of scores `(Nq, Nd)` and values `(Nq, Nd, L)`, the argmax."""

    scores: Tensor
    values: Tensor | None = None
    argmax: Tensor | None = None

    def coefficients(self, tile: Tile, weights: Tensor) -> Tensor:
        """c of the module docstring for one tile, (a, b, L)."""
        c = self.scores[tile.place][..., None].to(weights.dtype) * weights
        return c if self.values is None else c + self.values[tile.place]

    def winners(self, tile: Tile) -> Tensor:
        assert self.argmax is not None, "the hard form's backward needs the argmax"
        return self.argmax[tile.place]


def max_sim_backward(
    q: Tensor,
    d: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weights: Tensor | None,
    d_weights: Tensor | None,
    forward: Incoming | None,
    reverse: Incoming | None = None,
    *,
    temperature: float | None = None,
    pairs: bool = False,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor]:
    """Gradients of `q` and `d` in their dtypes; the hard form needs the argmax of each direction."""
    left, right = Side.of(q, q_mask, q_weights), Side.of(d, d_mask, d_weights)
    number = compute_dtype(q.dtype)
    grad_q, grad_d = q.new_zeros(q.shape, dtype=number), d.new_zeros(d.shape, dtype=number)
    for tile in tiles(q, d, pairs):
        a, b = left.part(tile.queries), right.part(tile.documents)
        to_q, to_d = grad_q[tile.queries], grad_d[tile.documents]
        if temperature is not None:
            p = _softmax_coefficients(forward, reverse, tile, a, b, temperature, precision)
            to_each = ("aut,atk->auk", "aut,auk->atk") if pairs else ("abut,btk->auk", "abut,auk->btk")
            p = p[:, 0] if pairs else p
            to_q += torch.einsum(to_each[0], p, b.tokens)
            to_d += torch.einsum(to_each[1], p, a.tokens)
            continue
        i = torch.arange(a.tokens.shape[0], device=q.device)[:, None]
        j = i if pairs else torch.arange(b.tokens.shape[0], device=q.device)[None]
        from_q, from_d = (a.tokens, i, to_q), (b.tokens, j, to_d)
        if forward is not None:
            c = forward.coefficients(tile, _broadcast(a.weights, 0, pairs))
            _to_winners(c, forward.winners(tile), from_q, from_d)
        if reverse is not None:
            c = reverse.coefficients(tile, _broadcast(b.weights, 1, pairs))
            _to_winners(c, reverse.winners(tile), from_d, from_q)
    # The soft form multiplies the zeros of p by whatever the other side holds: 0 · NaN stays off masked tokens.
    grad_q.masked_fill_(~left.keep[..., None], 0)
    grad_d.masked_fill_(~right.keep[..., None], 0)
    return grad_q.to(q.dtype), grad_d.to(d.dtype)


def _softmax_coefficients(
    forward: Incoming | None,
    reverse: Incoming | None,
    tile: Tile,
    a: Part,
    b: Part,
    temperature: float,
    precision: str,
) -> Tensor:
    """d(loss) / d(similarity) of a tile, (a, b, Lq, Ld): each c spread by its softmax, 0 at masked tokens."""
    s = similarities(a.tokens, b.tokens, tile.pairs, precision)
    a_keep, b_keep = _broadcast(a.keep, 0, tile.pairs)[..., None], _broadcast(b.keep, 1, tile.pairs)[..., None, :]
    p = torch.zeros_like(s)
    if forward is not None:
        c = forward.coefficients(tile, _broadcast(a.weights, 0, tile.pairs))
        p = c[..., None] * softmax(s, b_keep, temperature)
    if reverse is not None:
        c = reverse.coefficients(tile, _broadcast(b.weights, 1, tile.pairs))
        p = p + (c[..., None] * softmax(s.mT, a_keep.mT, temperature)).mT
    return p.masked_fill(~(a_keep & b_keep), 0)


def _to_winners(
    c: Tensor, argmax: Tensor, own: tuple[Tensor, Tensor, Tensor], other: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Add c times the winner's vector to each token, and c times the token's vector to its winner.

    Args:
        c, argmax: `(a, b, L)`, L the number of own tokens.
        own, other: tokens `(n, L, D)`, the row of each pair among them (broadcast to `(a, b)`), the gradient.
    """
    won = argmax >= 0
    place = torch.arange(argmax.shape[-1], device=argmax.device)
    own_rows = (own[1][..., None] * own[0].shape[1] + place).expand(won.shape)[won]
    other_rows = (other[1][..., None] * other[0].shape[1] + argmax)[won]
    c = c[won][:, None]
    _add_rows(own[2], own_rows, c * other[0].flatten(0, 1)[other_rows])
    _add_rows(other[2], other_rows, c * own[0].flatten(0, 1)[own_rows])


def _add_rows(to: Tensor, rows: Tensor, what: Tensor) -> None:
    """to.flatten(0, 1)[rows] += what, repeated rows added in a fixed order."""
    flat = to.view(to.shape[0] * to.shape[1], to.shape[2])
    if flat.is_cuda:
        # index_add_ would use atomic additions there; this form sorts its indices first.
        flat.index_put_((rows,), what, accumulate=True)
    else:
        flat.index_add_(0, rows, what)
