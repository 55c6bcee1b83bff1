"""Losses over the scores of a head: contrastive, with hard negatives as further rows and columns, or in quads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def contrastive_loss(logits: Tensor) -> Tensor:
    """Symmetric InfoNCE (Radford et al. 2021, CLIP) with any hard negatives beyond the matched pairs.

        m = min(rows, columns);   loss = ½ · (mean_{i<m} CE(logits[i, :], i) + mean_{j<m} CE(logits[:, j], j))

    Image i and text i belong together for i < m; what lies beyond are negatives of one side. B × B are the pairs
    alone, B × 2B adds hard negative captions (the texts' term runs over the matched ones, as in Yuksekgonul et al.
    2023), 2B × B hard negative pictures, and 2B × 2B hard negative pairs, which are true of each other (Miranda et
    al. 2024, TROHN-Img).

    Arguments: `logits (n_images, n_texts)`, scores times their scale. Raises ValueError for another shape.

    >>> contrastive_loss(torch.zeros(2, 4))
    tensor(1.0397)
    """
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(f"contrastive_loss: logits must have shape (n_images, n_texts), got {tuple(logits.shape)}")
    matched = min(logits.shape)
    target = torch.arange(matched, device=logits.device)
    by_image = functional.cross_entropy(logits[:matched], target)
    by_text = functional.cross_entropy(logits[:, :matched].T, target)
    return (by_image + by_text) / 2


def quad_rows(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Images `(4 n,)` and texts `(4 n,)` of the four pairs of each quad, in the order of `quad_loss`.

    Arguments: rows `(n,)` of the first image and text of each quad, and of the second ones.

    >>> quad_rows(torch.tensor([0]), torch.tensor([1]))
    (tensor([0, 0, 1, 1]), tensor([0, 1, 0, 1]))
    """
    images = torch.stack([first, first, second, second], dim=1)
    texts = torch.stack([first, second, first, second], dim=1)
    return images.flatten(), texts.flatten()


def quad_loss(logits: Tensor) -> Tensor:
    """Cross-entropy of both choices within each 2 × 2 quad: which of two texts, and which of two images.

    Arguments: `logits (B, 2, 2)` as `[quad, image, text]`; image i and text i belong together. Raises ValueError
    for another shape.

    >>> quad_loss(torch.zeros(3, 2, 2))
    tensor(0.6931)
    """
    if logits.ndim != 3 or logits.shape[1:] != (2, 2):
        raise ValueError(f"quad_loss: logits must have shape (B, 2, 2), got {tuple(logits.shape)}")
    target = torch.arange(2, device=logits.device).expand(len(logits), 2)
    by_image = functional.cross_entropy(logits.transpose(1, 2), target)
    by_text = functional.cross_entropy(logits, target)
    return (by_image + by_text) / 2
