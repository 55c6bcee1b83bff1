"""PeakPatch's features and corrections and class centroids as plain Python loops in float64, for their tests.

The loops share no code with the references: they are what those are checked against.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from engine.ops.peak_patch import TokenNorm


def standardised(row: list[float], norm: TokenNorm | None) -> list[float]:
    """One token after the layer norm."""
    if norm is None:
        return row
    mean = sum(row) / len(row)
    scale = 1 / math.sqrt(sum((x - mean) ** 2 for x in row) / len(row) + norm.eps)
    weight, bias = norm.weight.double().tolist(), norm.bias.double().tolist()
    return [(x - mean) * scale * w + b for x, w, b in zip(row, weight, bias, strict=True)]


def softmax(scores: list[float]) -> list[float]:
    """IEEE's softmax: +inf among the scores, or nothing but -inf, gives NaN."""
    if any(map(math.isnan, scores)) or max(scores) in (math.inf, -math.inf):
        return [math.nan] * len(scores)
    e = [math.exp(s - max(scores)) for s in scores]
    return [x / sum(e) for x in e]


def weighed_sum(weights: list[float], rows: list[list[float]], width: int) -> list[float]:
    return [sum((w * row[k] for w, row in zip(weights, rows, strict=True)), 0.0) for k in range(width)]


def pool_oracle(
    peak: Tensor,
    anchor: Tensor,
    keys: Tensor,
    mask: Tensor,
    end: Tensor,
    factors: Tensor | None,
    norm: TokenNorm | None,
) -> tuple[Tensor, Tensor]:
    """`pooled` and `attention`, in float64."""
    n, length, width = peak.shape
    heads = keys.shape[0]
    pooled = torch.zeros(n, heads + 3, width, dtype=torch.float64)
    attention = torch.zeros(n, heads, length, dtype=torch.float64)
    for b in range(n):
        kept = [t for t in range(length) if mask[b, t]]
        rows = [standardised(peak[b, t].double().tolist(), norm) for t in kept]
        for h in range(heads):
            key = keys[h].double().tolist()
            if not kept:
                continue
            weights = softmax([sum((x * k for x, k in zip(row, key, strict=True)), 0.0) for row in rows])
            attention[b, h, kept] = torch.tensor(weights, dtype=torch.float64)
            if factors is not None:
                weights = [w * float(factors[b, h, t]) for w, t in zip(weights, kept, strict=True)]
            pooled[b, h] = torch.tensor(weighed_sum(weights, rows, width), dtype=torch.float64)
        if kept:
            mean = [x / len(kept) for x in weighed_sum([1.0] * len(kept), rows, width)]
            pooled[b, heads] = torch.tensor(mean, dtype=torch.float64)
        at = int(end[b])
        if 0 <= at < length:
            pooled[b, heads + 1] = torch.tensor(standardised(peak[b, at].double().tolist(), norm))
            other = anchor[b] if anchor.ndim == 2 else anchor[b, at]
            pooled[b, heads + 2] = torch.tensor(standardised(other.double().tolist(), norm))
    return pooled, attention


def pool_case(
    n: int,
    length: int,
    width: int,
    heads: int,
    dtype: torch.dtype = torch.float32,
    *,
    norm: bool = False,
    dropped: bool = False,
    single: bool = False,
) -> dict[str, Any]:
    """Random arguments of the pooling op; masks keep about three quarters, at least the first token."""
    mask = torch.rand(n, length) < 0.75
    mask[:, :1] = True
    return {
        "peak": torch.randn(n, length, width).to(dtype),
        "anchor": torch.randn(*((n, width) if single else (n, length, width))).to(dtype),
        "keys": torch.randn(heads, width) / math.sqrt(width),
        "mask": mask,
        "end": torch.randint(0, max(length, 1), (n,)),
        "factors": torch.rand(n, heads, length) * 2 if dropped else None,
        "norm": TokenNorm(torch.rand(width) + 0.5, torch.randn(width)) if norm else None,
    }


def arguments(case: dict[str, Any]) -> tuple[Any, ...]:
    """A case as arguments of the pooling op, up to the epsilon."""
    norm = case["norm"]
    rest = (None, None, 0.0) if norm is None else tuple(norm)
    return (*(case[name] for name in ("peak", "anchor", "keys", "mask", "end", "factors")), *rest)


def unit_row(row: list[float]) -> list[float]:
    length = math.sqrt(sum(x * x for x in row))
    return [0.0] * len(row) if length < 1e-12 else [x / length for x in row]


def correct_oracle(f: Tensor, delta: Tensor, alpha: float) -> Tensor:
    rows = zip(f.double().tolist(), delta.double().tolist(), strict=True)
    moved = [unit_row([x + alpha * y for x, y in zip(a, b, strict=True)]) for a, b in rows]
    return torch.tensor(moved, dtype=torch.float64).reshape(f.shape)


def pairs_oracle(image: Tensor, text: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    n, count, dim = text.shape
    sims, cross = torch.zeros(n, count, 2, dtype=torch.float64), torch.zeros(n, count, dim, dtype=torch.float64)
    for i in range(n):
        v = unit_row(image[i].double().tolist())
        for k in range(count):
            t, early = unit_row(text[i, k].double().tolist()), unit_row(low[i, k].double().tolist())
            product = [a * b for a, b in zip(v, t, strict=True)]
            cross[i, k] = torch.tensor(product, dtype=torch.float64)
            sims[i, k, 0] = sum((a * b for a, b in zip(v, early, strict=True)), 0.0)
            sims[i, k, 1] = sum(product, 0.0)
    return sims, cross


def mean_row(rows: list[list[float]], dim: int) -> list[float]:
    return [sum((row[k] for row in rows), 0.0) / max(len(rows), 1) for k in range(dim)]


def centroid_oracle(
    queries: Tensor, tokens: Tensor, cu_seqlens: Tensor, classes: Tensor, n_classes: int
) -> Tensor:
    """Cosines of single queries."""
    rows, bounds = tokens.double().tolist(), cu_seqlens.tolist()
    dim = tokens.shape[1]
    own: list[list[list[float]]] = [[] for _ in range(n_classes)]
    for s, c in enumerate(classes.tolist()):
        if 0 <= c < n_classes:
            own[c] += rows[bounds[s] : bounds[s + 1]]
    directions = [unit_row(mean_row(members, dim)) for members in own]
    units = [unit_row(row) for row in queries.double().tolist()]
    cosines = [[sum((a * b for a, b in zip(u, d, strict=True)), 0.0) for d in directions] for u in units]
    return torch.tensor(cosines, dtype=torch.float64).reshape(queries.shape[0], n_classes)


class TorchCorrection(nn.Module):
    """The embedding correction as one writes it in torch, with nn.MultiheadAttention and the tokens' layer norm.

    `fused` computes the same features with the ops.
    """

    def __init__(self, width: int = 512, heads: int = 8, hidden: int = 1024, dropout: float = 0.0) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(1, width).normal_(0, 0.02))
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(4 * width, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(hidden, width),
        )  # fmt: skip
        self.log_alpha = nn.Parameter(torch.tensor(0.5).log())

    def features(self, peak: Tensor, anchor: Tensor, mask: Tensor) -> Tensor:
        """From tokens after the encoder's final norm; every caption keeps something."""
        query = self.query.expand(peak.shape[0], 1, -1)
        attended, _ = self.attention(query, peak, peak, key_padding_mask=~mask)
        last = (mask * torch.arange(mask.shape[1])).argmax(1)
        rows = torch.arange(peak.shape[0])
        mean = (peak * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.cat([peak[rows, last], self.norm(attended[:, 0]), anchor[rows, last], mean], 1)

    def forward(self, f: Tensor, peak: Tensor, anchor: Tensor, mask: Tensor) -> Tensor:
        delta = self.network(self.features(peak, anchor, mask))
        return nn.functional.normalize(f + self.log_alpha.exp() * delta, dim=-1)
