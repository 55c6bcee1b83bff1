"""The contract of PeakPatch's corrections, and their specification in plain torch.

The embedding correction moves a caption's embedding by what a small network found, and puts it back on the sphere:

    corrected = unit(f + α · δ)                                                       (B, D)

The score correction looks at an image and a caption together. What it costs per pair is fused; the network's
products, which want `cross`, stay with the library:

    sims[n, k]  = (⟨v, l⟩, ⟨v, t⟩)
    cross[n, k] = v ⊙ t                      with v = unit(image[n]), l = unit(low[n, k]), t = unit(text[n, k])

`image (N, D)` meets its own `K` captions: K = 1 for pairs, 4 for a question with four answers; for all images against
all captions pass `text.expand(N, K, D)`, which copies nothing. `text` is the corrected embedding, `low` that of an
earlier layer. The score is then sims[..., 1] + bound · tanh(network).

`unit` is that of `engine.reference.unit`: a zero vector stays zero, has cosine 0 with all others and passes no
gradient. NaN and infinities follow IEEE 754; they stay within their rows of the results, save that an image meets
all of its captions. Arithmetic and results are float32, or float64 for float64 inputs; gradients have the inputs'
dtype and are reproducible bit by bit.

Source: Lu, Chen and Chaterji, "PeakPatch" (2026).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.reference.unit import compute_dtype, unit, unit_backward


def correct(f: Tensor, delta: Tensor, alpha: Tensor) -> Tensor:
    """`unit(f + alpha · delta)`, `(B, D)`; alpha is a scalar tensor."""
    number = compute_dtype(f.dtype)
    return unit(f.to(number) + alpha.to(number) * delta.to(number))[0]


def correct_backward(grad: Tensor, f: Tensor, delta: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of f, delta and alpha; that of alpha row by row, `(B,)`."""
    number = compute_dtype(f.dtype)
    moved = f.to(number) + alpha.to(number) * delta.to(number)
    to_moved = unit_backward(*unit(moved), grad.to(number))
    to_alpha = (to_moved * delta.to(number)).sum(-1)
    return to_moved.to(f.dtype), (alpha.to(number) * to_moved).to(delta.dtype), to_alpha


def pairs(image: Tensor, text: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """`sims (N, K, 2)` and `cross (N, K, D)` of `image (N, D)`, `text` and `low (N, K, D)`."""
    number = compute_dtype(image.dtype)
    v, t, early = (unit(x.to(number))[0] for x in (image[:, None], text, low))
    cross = v * t
    return torch.stack([(v * early).sum(-1), cross.sum(-1)], -1), cross


def pairs_backward(
    grad_sims: Tensor, grad_cross: Tensor, image: Tensor, text: Tensor, low: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of image, text and low."""
    number = compute_dtype(image.dtype)
    (v, v_length), (t, t_length), (early, early_length) = (
        unit(x.to(number)) for x in (image[:, None], text, low)
    )
    # The second similarity is the sum of cross.
    to_cross = grad_cross + grad_sims[..., 1:]
    to_early = grad_sims[..., :1]
    to_v = (to_cross * t + to_early * early).sum(1, keepdim=True)
    grads = (
        unit_backward(v, v_length, to_v)[:, 0],
        unit_backward(t, t_length, to_cross * v),
        unit_backward(early, early_length, to_early * v),
    )
    return grads[0].to(image.dtype), grads[1].to(text.dtype), grads[2].to(low.dtype)
