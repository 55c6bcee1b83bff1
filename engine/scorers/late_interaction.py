"""Max-sim as the scorers use it: one way, for a whole matrix (the op) or for pairs (row by row)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.max_sim import max_sim

# Similarities that the pair form holds at once: 2^24 float32 numbers are 64 MiB.
PAIR_BLOCK = 1 << 24


def mean_weights(q: Tensor, q_mask: Tensor | None) -> Tensor:
    """Weights ``(Nq, Lq)`` that turn the sum over kept query tokens into their mean (0 where none is kept)."""
    if q_mask is None:
        return q.new_full(q.shape[:2], 1.0 / max(q.shape[1], 1), dtype=torch.float32)
    kept = q_mask.float()
    return kept / kept.sum(dim=1, keepdim=True).clamp(min=1.0)


def matrix_max(
    q: Tensor,
    d: Tensor,
    *,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    weights: Tensor | None,
    temperature: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """``scores[i, j] = Σ_u w[i,u] · max_t ⟨q[i,u], d[j,t]⟩`` of shape ``(Nq, Nd)``, float32.

    ``q (Nq, Lq, D)``, ``d (Nd, Ld, D)``, masks True = keep, ``weights (Nq, Lq)``; a temperature makes the
    maximum soft, ``τ·logsumexp(s/τ)``. Memory beyond the result does not grow with ``Nq · Nd``.
    """
    return max_sim(
        q, d, q_mask=q_mask, d_mask=d_mask, q_weights=weights, temperature=temperature, backend=backend
    )


def pair_max(
    q: Tensor,
    d: Tensor,
    *,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    weights: Tensor | None,
    temperature: float | None = None,
) -> Tensor:
    """The same score of row i of ``q`` with row i of ``d``, ``(N,)``, without the other pairs."""
    rows = max(1, PAIR_BLOCK // max(1, q.shape[1] * d.shape[1]))
    parts = []
    for start in range(0, len(q), rows):
        at = slice(start, start + rows)
        block = torch.bmm(q[at].float(), d[at].float().transpose(1, 2))  # (rows, Lq, Ld)
        if d_mask is not None:
            block = block.masked_fill(~d_mask[at, None, :], -torch.inf)
        if temperature is None:
            best = block.amax(dim=2)
        else:
            best = temperature * torch.logsumexp(block / temperature, dim=2)
        # What is empty is known from the mask: a document without kept tokens gives 0 to every query token.
        if d_mask is not None:
            best = best.masked_fill(~d_mask[at].any(dim=1, keepdim=True), 0.0)
        if weights is not None:
            best = best * weights[at]
        if q_mask is not None:
            best = best.masked_fill(~q_mask[at], 0.0)
        parts.append(best.sum(dim=1))
    return torch.cat(parts)
