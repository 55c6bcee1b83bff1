"""The contract of max-sim on packed tokens, and its specification in plain torch.

`q (q_total, D)` and `d (d_total, D)` hold the tokens of items of any lengths one after the other: item i is the rows
from `cu_seqlens[i]` up to, not including, `cu_seqlens[i + 1]`. Either side may also be dense, `(N, L, D)`. All else is
`engine.reference.max_sim`, of which this is the form without padding: an item of no tokens is an empty set, and a
winner's place counts from the beginning of its own item.

* Boundaries ascend from 0 to the number of rows or fewer; on CUDA reading them waits for the device. Rows beyond the
  last boundary belong to no item: they have no influence and gradient 0, in the alignment argmax −1 and value 0.
* Per-token results of packed queries are `(Nd, q_total)`, those of packed documents `(Nq, d_total)`.

Here, neighbouring items are padded to the longest among them and given to the dense form, in blocks of at most
`BLOCK_ROWS` rows or of a single item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.reference import max_sim as dense
from engine.reference.max_sim import Incoming, Outputs
from engine.reference.unit import compute_dtype

BLOCK_ROWS = 2**16


@dataclass(frozen=True)
class Items:
    """The queries or the documents: tokens `(N, L, D)`, or `(total, D)` with `cu_seqlens (N + 1,)`."""

    tokens: Tensor
    cu_seqlens: Tensor | None
    mask: Tensor | None
    weights: Tensor | None

    @property
    def number(self) -> int:
        return self.tokens.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def blocks(self) -> Iterator[Block]:
        """All items in order; packed ones padded."""
        if self.cu_seqlens is None:
            yield Block(slice(0, self.number), None, None, self.tokens, self.mask, self.weights)
            return
        bounds = self.cu_seqlens.tolist()
        first = 0
        while first < self.number:
            last, longest = first + 1, bounds[first + 1] - bounds[first]
            while last < self.number:
                longest = max(longest, bounds[last + 1] - bounds[last])
                if longest * (last + 1 - first) > BLOCK_ROWS:
                    break
                last += 1
            yield self._padded(first, bounds[first : last + 1])
            first = last

    def _padded(self, first: int, bounds: list[int]) -> Block:
        begin = torch.tensor(bounds, device=self.tokens.device)
        length = begin.diff()[:, None]
        place = torch.arange(max(int(n) for n in length), device=self.tokens.device)
        filled = place < length
        rows = torch.where(filled, begin[:-1, None] + place, 0)

        def spread(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows] if x.shape[0] else x.new_zeros((*rows.shape, *x.shape[1:]))

        tokens, mask = spread(self.tokens), spread(self.mask)
        assert tokens is not None
        span = slice(first, first + len(bounds) - 1)
        keep = filled if mask is None else filled & mask
        return Block(span, slice(bounds[0], bounds[-1]), filled, tokens, keep, spread(self.weights))


@dataclass(frozen=True)
class Block:
    """Some items in dense form: which they are, the rows they come from, and which places those fill.

    `rows` and `filled` are None for items that were dense already.
    """

    items: slice
    rows: slice | None
    filled: Tensor | None
    tokens: Tensor
    mask: Tensor | None
    weights: Tensor | None

    def put(self, to: Tensor, others: slice, block: Tensor, axis: int) -> None:
        """Write a block of per-token results `(a, b, L)`; these items' axis is 0 for queries, 1 for documents."""
        if self.rows is None:
            to[(self.items, others) if axis == 0 else (others, self.items)] = block
        else:
            to[others, self.rows] = (block.transpose(0, 1) if axis == 0 else block)[:, self.filled]

    def take(self, of: Tensor | None, others: slice, axis: int, fill: int) -> Tensor | None:
        """The inverse of `put`; places that nothing fills get `fill`."""
        if of is None:
            return None
        if self.rows is None:
            return of[(self.items, others) if axis == 0 else (others, self.items)]
        assert self.filled is not None
        packed = of[others, self.rows]
        block = packed.new_full((packed.shape[0], *self.filled.shape), fill)
        block[:, self.filled] = packed
        return block.transpose(0, 1) if axis == 0 else block

    def add(self, to: Tensor, grad: Tensor) -> None:
        """Add gradients of the block's tokens to those of all tokens."""
        if self.rows is None:
            to += grad
        else:
            to[self.rows] += grad[self.filled]


def max_sim_varlen(
    q: Items,
    d: Items,
    *,
    temperature: float | None = None,
    symmetric: bool = False,
    need_argmax: bool = False,
    need_values: bool = False,
    precision: str = "ieee",
    scorer: Callable[..., Outputs] = dense.max_sim,
) -> Outputs:
    """The contract above, for arguments that the op has checked.

    Args:
        scorer: the dense form that blocks are given to, with the arguments of `engine.reference.max_sim.max_sim`.

    Returns:
        As `engine.reference.max_sim.max_sim`, per-token results of packed items packed likewise.
    """
    options: dict[str, Any] = {"symmetric": symmetric, "need_argmax": need_argmax, "need_values": need_values}
    outputs = empty_outputs(q, d, **options)
    scores, reverse_scores, argmax, values, reverse_argmax, reverse_values = outputs
    for index, fill in ((argmax, -1), (values, 0), (reverse_argmax, -1), (reverse_values, 0)):
        index.fill_(fill)
    for a in q.blocks():
        for b in d.blocks():
            done = scorer(
                a.tokens, b.tokens, a.mask, b.mask, a.weights, b.weights,
                temperature=temperature, precision=precision, **options,
            )  # fmt: skip
            scores[a.items, b.items] = done[0]
            if symmetric:
                reverse_scores[a.items, b.items] = done[1]
            for to, block in ((argmax, done[2]), (values, done[3])):
                if block.ndim == 3:
                    a.put(to, b.items, block, 0)
            for to, block in ((reverse_argmax, done[4]), (reverse_values, done[5])):
                if block.ndim == 3:
                    b.put(to, a.items, block, 1)
    return outputs


def empty_outputs(q: Items, d: Items, *, symmetric: bool, need_argmax: bool, need_values: bool) -> Outputs:
    """Uninitialised results of the right shapes and dtypes; shape (0,) where one is not asked for."""
    number, grid = compute_dtype(q.tokens.dtype), (q.number, d.number)
    of_q = (*grid, q.tokens.shape[1]) if q.cu_seqlens is None else (d.number, q.tokens.shape[0])
    of_d = (*grid, d.tokens.shape[1]) if d.cu_seqlens is None else (q.number, d.tokens.shape[0])

    def new(wanted: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        return q.tokens.new_empty(shape if wanted else (0,), dtype=dtype)

    return (
        new(True, number, grid),
        new(symmetric, number, grid),
        new(need_argmax, torch.int32, of_q),
        new(need_values, number, of_q),
        new(need_argmax and symmetric, torch.int32, of_d),
        new(need_values and symmetric, number, of_d),
    )


def max_sim_varlen_backward(
    q: Items,
    d: Items,
    forward: Incoming | None,
    reverse: Incoming | None = None,
    *,
    temperature: float | None = None,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens of `q` and `d` in their dtypes; the hard form needs the argmax of each direction."""
    number = compute_dtype(q.tokens.dtype)
    grad_q, grad_d = (x.tokens.new_zeros(x.tokens.shape, dtype=number) for x in (q, d))
    for a in q.blocks():
        for b in d.blocks():
            grads = dense.max_sim_backward(
                a.tokens.to(number), b.tokens.to(number), a.mask, b.mask, a.weights, b.weights,
                _part(forward, a, b, 0), _part(reverse, b, a, 1), temperature=temperature, precision=precision,
            )  # fmt: skip
            a.add(grad_q, grads[0])
            b.add(grad_d, grads[1])
    return grad_q.to(q.tokens.dtype), grad_d.to(d.tokens.dtype)


def _part(incoming: Incoming | None, own: Block, other: Block, axis: int) -> Incoming | None:
    """What one direction's backward gets, for a block of its own items (queries on axis 0) and one of the others."""
    if incoming is None:
        return None
    scores = incoming.scores[(own.items, other.items) if axis == 0 else (other.items, own.items)]
    values = own.take(incoming.values, other.items, axis, 0)
    return Incoming(scores, values, own.take(incoming.argmax, other.items, axis, -1))
