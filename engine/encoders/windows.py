"""Windows of an image on an encoder's patch grid, and the step that lets class rows ride along with patches.

Regions of mode `"windows"` cost one pass of the tower: the patch states are computed once, and a class row for
each window goes through all blocks beside them, attending to its own window's patches and to itself. Nothing else
sees it, so the patches and the ordinary class token are as they are without it. A window over the whole image gives
the ordinary global embedding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.ops.window_attention import window_attention


def window_cells(boxes: np.ndarray, view: tuple[int, int, int, int], grid: tuple[int, int]) -> np.ndarray:
    """The patches that belong to each box, as half-open boxes of cells x0, y0, x1, y1, int32 `(R, 4)`.

    A patch belongs to a box when at least half of its width and half of its height lie inside. A box too small to
    have any patch (or any column, or row) gets the one that holds its middle; a box beside the view the nearest.

    Args:
        boxes: half-open pixel rectangles `(R, 4)` x0, y0, x1, y1 of the upright image.
        view: the rectangle of the upright image that the grid covers.
        grid: rows and columns.

    >>> window_cells(np.array([[0, 0, 48, 96], [20, 8, 30, 9]]), (0, 0, 96, 96), (6, 6)).tolist()
    [[0, 0, 3, 6], [1, 0, 2, 1]]
    """
    boxes = np.asarray(boxes, dtype=np.int64).reshape(-1, 4)
    left, top, right, bottom = view
    x0, x1 = _span(boxes[:, 0] - left, boxes[:, 2] - left, right - left, grid[1])
    y0, y1 = _span(boxes[:, 1] - top, boxes[:, 3] - top, bottom - top, grid[0])
    return np.stack([x0, y0, x1, y1], axis=1).astype(np.int32)


def _span(first: np.ndarray, last: np.ndarray, length: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Cells of an axis of `length` pixels that have at least half of themselves in `[first, last)`."""
    # In whole numbers: ceil(first · cells / length - 1/2) and floor(last · cells / length + 1/2).
    begin = np.clip(-((length - 2 * first * cells) // (2 * length)), 0, cells)
    end = np.clip((2 * last * cells + length) // (2 * length), 0, cells)
    middle = np.clip((first + last) * cells // (2 * length), 0, cells - 1)
    empty = end <= begin
    return np.where(empty, middle, begin), np.where(empty, middle + 1, end)


def class_rows_attention(qkv: Tensor, n_rows: int, windows: Tensor, grid: tuple[int, int]) -> Tensor:
    """What the last `n_rows` positions of a sequence read: each its window's patches and itself.

    Args:
        qkv: queries, keys and values `(B, T, 3, H, hd)` of a sequence that ends with patches row by row, then the
            class rows; what stands before the patches is not looked at.
        windows: int32 `(B, n_rows, 4)` in cells.
        grid: rows and columns of the patches.

    Returns:
        `(B, n_rows, H, hd)`.
    """
    first = qkv.shape[1] - n_rows
    q, k, v = qkv.unbind(2)
    patches = slice(first - grid[0] * grid[1], first)
    return attend_windows(
        q[:, first:], k[:, patches], v[:, patches], windows, grid=grid, own_k=k[:, first:], own_v=v[:, first:]
    )


def attend_windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Tensor,
    *,
    grid: tuple[int, int],
    own_k: Tensor | None = None,
    own_v: Tensor | None = None,
) -> Tensor:
    """`window_attention`; while a graph is traced, which has no such operator, as ordinary attention under a mask."""
    if torch.jit.is_tracing():
        return _masked_attention(q, k, v, windows, grid, None if own_k is None or own_v is None else (own_k, own_v))
    return window_attention(q, k, v, windows, grid=grid, own_k=own_k, own_v=own_v)


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, windows: Tensor, grid: tuple[int, int], own: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Every window against every patch: more work than the op's, in operators that every runtime has."""
    x0, y0, x1, y1 = windows.unsqueeze(-1).unbind(2)  # each (B, W, 1)
    cells = torch.arange(grid[0] * grid[1], device=q.device)
    column, row = cells % grid[1], cells // grid[1]
    seen = (x0 <= column) & (column < x1) & (y0 <= row) & (row < y1)  # (B, W, P)
    query, keys, values = (x.float().transpose(1, 2) for x in (q, k, v))  # each (B, H, W or P, hd)
    query = query * float(q.shape[-1]) ** -0.5
    hidden = ~seen[:, None]
    scores = (query @ keys.transpose(-2, -1)).masked_fill(hidden, -torch.inf)  # (B, H, W, P)
    if own is None:
        # Of a window without a cell the softmax is no number, which the mask takes away.
        mixed = scores.softmax(dim=-1).masked_fill(hidden, 0) @ values
    else:
        own_key, own_value = (x.float().transpose(1, 2) for x in own)  # (B, H, W, hd)
        weights = torch.cat([scores, (query * own_key).sum(-1, keepdim=True)], dim=-1).softmax(dim=-1)
        mixed = weights[..., :-1] @ values + weights[..., -1:] * own_value
    return mixed.transpose(1, 2).to(q.dtype)


def pad_windows(cells: list[np.ndarray], device: torch.device) -> Tensor:
    """Windows `(B, W, 4)` of images that have different numbers of them; the rest are empty."""
    padded = np.zeros((len(cells), max(map(len, cells)), 4), dtype=np.int32)
    for row, own in enumerate(cells):
        padded[row, : len(own)] = own
    return torch.from_numpy(padded).to(device)
