"""The contract of the cosine to class centroids, and its specification in plain torch.

    centroids[c] = unit(mean of all tokens of all sets of class c)                    (C, D)
    cosines[i, c] = ⟨unit(queries[i]), centroids[c]⟩                                  (Nq, C)

`tokens (total, D)` are packed: set s holds the rows from `cu_seqlens[s]` up to, not including, `cu_seqlens[s + 1]`.
A set is an image of any number of tokens; a class is any number of sets, which need not be neighbours: `classes[s]`
names the class of set s, and −1 none. The centroid weighs tokens alike, so that an image of many tokens counts for
more. Queries are single vectors, or packed sets likewise, of which each is its mean.

What holds at the edges, for every backend:

* A class without tokens (no set, or empty ones) has a centroid of zeros and cosine 0 with every query; an empty
  query set likewise. So has a mean shorter than 1e-12. None of them passes a gradient.
* Tokens that no set covers, and sets of class −1 or of no class below C, have no influence whatever they hold.
* NaN in a token makes that class's column NaN, and in a query its row. An infinity gives a mean of infinite length and
  so NaN. Other classes are untouched.
* Arithmetic and results are float32, or float64 for float64 inputs; sums go over blocks of tokens first and then
  over the blocks. Gradients have the inputs' dtype. All is reproducible bit by bit.

Source: the nearest-centroid probe and the similarity term of Vompa, Tammet and Vaishnav (2025).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.reference.unit import compute_dtype, unit, unit_backward


def class_of_tokens(total: int, cu_seqlens: Tensor, classes: Tensor, n_classes: int) -> Tensor:
    """The class of every token, int64 `(total,)`; those of none get `n_classes`."""
    rows = torch.arange(total, device=cu_seqlens.device)
    sets = torch.searchsorted(cu_seqlens.contiguous(), rows, right=True) - 1
    inside = (sets >= 0) & (sets < classes.shape[0])
    named = torch.cat([classes, classes.new_full((1,), n_classes)])[torch.where(inside, sets, classes.shape[0])]
    return torch.where((named >= 0) & (named < n_classes), named, n_classes)


def means(tokens: Tensor, labels: Tensor, n_classes: int) -> tuple[Tensor, Tensor]:
    """Mean token of each class `(C, D)`, 0 of none, and how many there are `(C, 1)`.

    Args:
        labels: from `class_of_tokens`.
    """
    number = compute_dtype(tokens.dtype)
    # A product with zeros would turn the NaN of one class into the NaN of all: each class by itself.
    sums, counts = [], []
    for c in range(n_classes):
        own = tokens[labels == c].to(number)
        sums.append(own.sum(0))
        counts.append(own.shape[0])
    if not sums:
        return tokens.new_zeros((0, tokens.shape[1]), dtype=number), tokens.new_zeros((0, 1), dtype=number)
    count = torch.tensor(counts, dtype=number, device=tokens.device)[:, None]
    return torch.stack(sums) / count.clamp(min=1), count


def centroids(tokens: Tensor, cu_seqlens: Tensor, classes: Tensor, n_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unit centroids `(C, D)`, lengths `(C,)` of the means and numbers of tokens `(C,)`."""
    labels = class_of_tokens(tokens.shape[0], cu_seqlens, classes, n_classes)
    mean, count = means(tokens, labels, n_classes)
    direction, length = unit(mean)
    return direction, length[:, 0], count[:, 0]


def centroids_backward(
    grad: Tensor,
    direction: Tensor,
    length: Tensor,
    count: Tensor,
    tokens: Tensor,
    cu_seqlens: Tensor,
    classes: Tensor,
) -> Tensor:
    """Gradient of tokens, given that of the unit centroids: all tokens of a class get the same row."""
    to_mean = unit_backward(direction, length[:, None], grad) / count.clamp(min=1)[:, None]
    labels = class_of_tokens(tokens.shape[0], cu_seqlens, classes, direction.shape[0])
    rows = torch.cat([to_mean, to_mean.new_zeros(1, tokens.shape[1])]).to(tokens.dtype)
    return rows[labels]
