"""The contract of PeakPatch's caption features, and their specification in plain torch.

One learned query q attends to a caption's tokens at the layer where contrasts are strongest (the peak); the
features set the result beside the end-of-text tokens of the peak and of an earlier layer (the anchor) and the
mean over the caption. Since q is the same for every caption, keys need not be computed: per head,

    keys[h]          = W_k[h]ᵀ q[h] / √(W / heads)                                    (heads, W), once
    attention[b, h]  = softmax_t ⟨keys[h], x[b, t]⟩                                   over kept t
    pooled[b, h]     = Σ_t factors[b, h, t] · attention[b, h, t] · x[b, t]            (W,)

and values and output projections are taken of `pooled`: two products per caption, not per token. With
`x = layer_norm(tokens) · norm_weight + norm_bias` when a norm is given, else the tokens as they are. One pass over
`peak (B, T, W)` gives `pooled (B, heads + 3, W)`, whose last rows are

    pooled[b, heads]      mean of x[b, t] over kept t
    pooled[b, heads + 1]  x[b, end[b]]
    pooled[b, heads + 2]  x of the anchor at end[b]

The anchor is `(B, T, W)`, or `(B, W)` when only those tokens were kept of it.

What holds at the edges, for every backend:

* A mask is True where a token is kept. A masked token has no influence whatever it, its factor or its gradient of
  attention holds; its attention is 0. The token at `end` is taken whether masked or not.
* With nothing kept, attention, pooled vectors and mean are 0. An `end` outside [0, T) means none: zeros.
  Neither gets the norm's bias. Emptiness is known from the mask, never from values.
* NaN in a kept token makes that caption's attention and pooled vectors NaN, and the mean in its place (everywhere
  with a norm); so does a score of +inf, or scores that are all −inf. Other captions are untouched.
* Arithmetic and results are float32, or float64 for float64 inputs. Gradients of tokens have the tokens' dtype.
* `norm_weight` and `norm_bias` belong to the frozen encoder and take no gradient. Gradients are
  reproducible bit by bit.

With g the gradient of `pooled`, G that of `attention` and f, a, x as above, per caption

    d[h, t]    = f[h, t] · ⟨g[h], x[t]⟩ + G[h, t]
    ds[h, t]   = a[h, t] · (d[h, t] − Σ_t' a[h, t'] · d[h, t'])
    keys[h]   += Σ_t ds[h, t] · x[t]
    x[t]      += Σ_h f[h, t] · a[h, t] · g[h] + ds[h, t] · keys[h] + g[mean] / n_kept + [t = end] · g[end]

Source: Lu, Chen and Chaterji, "PeakPatch" (2026).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.reference.unit import compute_dtype

MEAN, END, ANCHOR = 0, 1, 2  # rows of `pooled` after the heads


class TokenNorm(NamedTuple):
    """The layer norm of the encoder that tokens pass first: weight and bias `(W,)`, epsilon."""

    weight: Tensor
    bias: Tensor
    eps: float = 1e-5


def empty_outputs(peak: Tensor, keys: Tensor, need_attention: bool) -> tuple[Tensor, Tensor]:
    """`pooled` and `attention` to be filled; an attention that is not wanted has the shape (0,)."""
    number = compute_dtype(peak.dtype)
    n, length, width = peak.shape
    heads = keys.shape[0]
    shape = (n, heads, length) if need_attention else (0,)
    return peak.new_empty((n, heads + 3, width), dtype=number), peak.new_empty(shape, dtype=number)


def normalised(x: Tensor, norm: TokenNorm | None) -> Tensor:
    """Tokens in the dtype of the arithmetic, after the norm if there is one."""
    x = x.to(compute_dtype(x.dtype))
    if norm is None:
        return x
    return torch.nn.functional.layer_norm(x, x.shape[-1:], norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)


def normalised_backward(x: Tensor, norm: TokenNorm | None, grad: Tensor) -> Tensor:
    """Gradient of the tokens, given that of `normalised(x, norm)`."""
    if norm is None:
        return grad
    x = x.to(grad.dtype)
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    centred, grad = centred * scale, grad * norm.weight.to(grad.dtype)
    return scale * (grad - grad.mean(-1, keepdim=True) - centred * (grad * centred).mean(-1, keepdim=True))


def at_end(x: Tensor, end: Tensor) -> Tensor:
    """The tokens `(B, W)` at `end` of `x (B, T, W)`, or `x` itself if it is `(B, W)`; any token where `end` is none."""
    if x.ndim == 2:
        return x
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], x.shape[2])
    return x[torch.arange(x.shape[0], device=x.device), end.clamp(0, x.shape[1] - 1)]


def pool(
    peak: Tensor,
    anchor: Tensor,
    keys: Tensor,
    mask: Tensor,
    end: Tensor,
    factors: Tensor | None,
    norm: TokenNorm | None,
) -> tuple[Tensor, Tensor]:
    """Forward: `pooled (B, heads + 3, W)` and `attention (B, heads, T)`.

    Args:
        peak: tokens `(B, T, W)`. anchor: `(B, T, W)` or `(B, W)`.
        keys: `(heads, W)`, the folded query. mask: bool `(B, T)`, True = keep. end: int64 `(B,)`.
        factors: `(B, heads, T)` or None for ones: what multiplies the attention, for dropout.
        norm: what tokens pass first, or None.
    """
    x = normalised(peak.masked_fill(~mask[..., None], 0), norm).masked_fill(~mask[..., None], 0)
    keys = keys.to(x.dtype)
    scores = torch.einsum("btw,hw->bht", x, keys)
    keep = mask[:, None].expand(scores.shape)
    if scores.shape[-1] == 0:
        attention = scores
    else:
        scores = scores.masked_fill(~keep, -torch.inf)
        attention = (scores - scores.amax(-1, keepdim=True)).exp().masked_fill(~keep, 0)
        attention = (attention / attention.sum(-1, keepdim=True)).masked_fill(~keep, 0)
    pooled = torch.einsum("bht,btw->bhw", weighed(attention, factors, keep), x)
    count = mask.sum(1)[:, None]
    mean = torch.where(count > 0, x.sum(1) / count, 0)
    rows = [mean]
    found = ((end >= 0) & (end < peak.shape[1]))[:, None]
    for tokens in (peak, anchor):
        rows.append(torch.where(found, normalised(at_end(tokens, end), norm), 0))
    return torch.cat([pooled, torch.stack(rows, 1)], 1), attention


def weighed(attention: Tensor, factors: Tensor | None, keep: Tensor) -> Tensor:
    """Attention times factors; 0 at masked tokens, whatever their factors."""
    return attention if factors is None else (attention * factors.to(attention.dtype)).masked_fill(~keep, 0)


def pool_backward(
    grad_pooled: Tensor,
    grad_attention: Tensor | None,
    attention: Tensor,
    peak: Tensor,
    anchor: Tensor,
    keys: Tensor,
    mask: Tensor,
    end: Tensor,
    factors: Tensor | None,
    norm: TokenNorm | None,
    need_tokens: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of keys, peak and anchor; with `need_tokens` false the last two have the shape (0,)."""
    heads = keys.shape[0]
    masked = peak.masked_fill(~mask[..., None], 0)
    x = normalised(masked, norm).masked_fill(~mask[..., None], 0)
    keep = mask[:, None].expand(attention.shape)
    g, keys = grad_pooled[:, :heads].to(x.dtype), keys.to(x.dtype)
    d = torch.einsum("bhw,btw->bht", g, x)
    if factors is not None:
        d = d * factors.to(d.dtype)
    if grad_attention is not None:
        d = d + grad_attention
    d = d.masked_fill(~keep, 0)
    to_scores = attention * (d - (attention * d).sum(-1, keepdim=True))
    to_scores = to_scores.masked_fill(~keep, 0)
    grad_keys = torch.einsum("bht,btw->hw", to_scores, x)
    if not need_tokens:
        return grad_keys, peak.new_empty(0), anchor.new_empty(0)

    to_x = torch.einsum("bht,bhw->btw", weighed(attention, factors, keep), g)
    to_x = to_x + torch.einsum("bht,hw->btw", to_scores, keys)
    to_x = to_x + (grad_pooled[:, heads + MEAN] / mask.sum(1).clamp(min=1)[:, None])[:, None]
    grad_peak = normalised_backward(masked, norm, to_x).masked_fill(~mask[..., None], 0)
    found = ((end >= 0) & (end < peak.shape[1]))[:, None]
    grad_peak = grad_peak + _end_backward(peak, end, found, norm, grad_pooled[:, heads + END])
    grad_anchor = _end_backward(anchor, end, found, norm, grad_pooled[:, heads + ANCHOR])
    return grad_keys, grad_peak.to(peak.dtype), grad_anchor.to(anchor.dtype)


def _end_backward(x: Tensor, end: Tensor, found: Tensor, norm: TokenNorm | None, grad: Tensor) -> Tensor:
    """Gradient of all tokens, given that of those at `end`; `found (B, 1)` says where there is one."""
    to_token = torch.where(found, normalised_backward(at_end(x, end), norm, grad), 0)
    if x.ndim == 2:
        return to_token
    to_x = torch.zeros(x.shape, dtype=to_token.dtype, device=x.device)
    if x.shape[1]:
        to_x[torch.arange(x.shape[0], device=x.device), end.clamp(0, x.shape[1] - 1)] = to_token
    return to_x
