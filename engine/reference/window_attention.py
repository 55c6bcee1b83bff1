"""The contract of window attention, and its specification in plain torch.

    out[b, w, h] = Σ_p softmax_p(scale · ⟨q[b, w, h], k[b, p, h]⟩) · v[b, p, h]
                                            over the cells p in window w, and the window's own key and value

`k, v (B, P, H, hd)` are keys and values of the patches of `B` images, on a grid of rows × columns = P cells, row
by row; `q (B, W, H, hd)` holds one query for each of `W` windows, in `H` heads. A window x0, y0, x1, y1 sees the
cells with x0 <= column < x1 and y0 <= row < y1. With `own_k, own_v (B, W, H, hd)` it sees one more key and value,
its own: a class token attends to itself beside the patches. Attention-pooling heads have none.

The law: a window over the whole grid is ordinary attention over all patches (and the own key).

What holds at the edges, for every backend:

* A window reaches no further than the grid: what lies outside is no cell. It is empty when it then holds no cell.
* An empty window gives its own value, or 0 where there is none. Emptiness is known from the window alone.
* A cell that a window does not see has no influence on it, NaN and infinities included; nor has another window.
* Numbers follow IEEE 754: NaN in a key that is seen gives NaN in all of that head's output, NaN in a value in that
  column; so do a score of +inf, and scores that are all −inf. A score of −inf among finite ones has weight 0.
* Scores, weights and sums are float32, or float64 for float64 inputs; the result has the inputs' dtype.
* A cell that no window sees gets a gradient of exactly 0. Gradients are the same bit by bit from run to run.

With p the weights and g the gradient of `out`, the backward is

    slope[w, p] = p[w, p] · (⟨g[w], v[p]⟩ − Σ_j p[w, j] · ⟨g[w], v[j]⟩)
    grad_q[w] = scale · Σ_p slope[w, p] · k[p],   grad_k[p] = scale · Σ_w slope[w, p] · q[w],
    grad_v[p] = Σ_w p[w, p] · g[w],               and likewise for the own key and value of each window.

No buffer of shape (B, H, W, P) is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    windows: Tensor,
    *,
    rows: int,
    columns: int,
    scale: float,
) -> Tensor:
    """The contract above, for arguments that the op has checked; window after window."""
    out = q.new_zeros(q.shape)
    for images, w, cells in _seen(windows, rows, columns):
        keys, values = _gather(k, own_k, images, w, cells), _gather(v, own_v, images, w, cells)
        if keys.shape[1] > 0:
            p = _weights(_wide(q[images, w]), keys, scale)
            out[images, w] = torch.einsum("bhc,bchd->bhd", p, values).to(out.dtype)
    return out


def window_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    windows: Tensor,
    *,
    rows: int,
    columns: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, own_k and own_v in the inputs' dtype; the last two of shape (0,) where there are none."""
    number = _wide(q[:0]).dtype
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape, dtype=number) for x in (q, k, v))
    grad_own = [q.new_zeros((0,) if own_k is None else q.shape, dtype=number) for _ in range(2)]
    for images, w, cells in _seen(windows, rows, columns):
        keys, values = _gather(k, own_k, images, w, cells), _gather(v, own_v, images, w, cells)
        if keys.shape[1] == 0:
            continue
        query, g = _wide(q[images, w]), _wide(grad[images, w])
        p = _weights(query, keys, scale)
        slope = torch.einsum("bhd,bchd->bhc", g, values)
        slope = scale * p * (slope - (p * slope).sum(-1, keepdim=True))
        grad_q[images, w] = torch.einsum("bhc,bchd->bhd", slope, keys)
        to_keys = torch.einsum("bhc,bhd->bchd", slope, query)
        to_values = torch.einsum("bhc,bhd->bchd", p, g)
        grad_k[images, cells] += to_keys[:, : len(cells)]
        grad_v[images, cells] += to_values[:, : len(cells)]
        if own_k is not None:
            grad_own[0][images, w], grad_own[1][images, w] = to_keys[:, -1], to_values[:, -1]
    return tuple(x.to(q.dtype) for x in (grad_q, grad_k, grad_v, *grad_own))  # type: ignore[return-value]


def _seen(windows: Tensor, rows: int, columns: int) -> Iterator[tuple[slice, int, Tensor]]:
    """Images that share a window, its place, and the cells that it sees, `(C,)` int64."""
    place = torch.arange(rows * columns, device=windows.device).view(rows, columns)
    for image, boxes in enumerate(windows[None].tolist() if windows.ndim == 2 else windows.tolist()):
        images = slice(None) if windows.ndim == 2 else slice(image, image + 1)
        for w, (x0, y0, x1, y1) in enumerate(boxes):
            yield images, w, place[max(y0, 0) : max(y1, 0), max(x0, 0) : max(x1, 0)].reshape(-1)


def _gather(x: Tensor, own: Tensor | None, images: slice, w: int, cells: Tensor) -> Tensor:
    """Keys or values that a window sees, `(b, C, H, hd)`, its own one last."""
    seen = _wide(x[images].index_select(1, cells))
    return seen if own is None else torch.cat([seen, _wide(own[images, w : w + 1])], dim=1)


def _weights(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Softmax of the scores of `query (b, H, hd)`, `(b, H, C)`."""
    return torch.einsum("bhd,bchd->bhc", scale * query, keys).softmax(-1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
