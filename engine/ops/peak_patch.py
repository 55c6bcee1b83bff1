"""PeakPatch's caption features, from layer to feature vector. Contract: `engine.reference.peak_patch`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.ops.checks import FLOATS, check_number, check_per_token, check_tensor, choose_backend, name_of
from engine.ops.native import as_array, dense_rows, extension, forced_isa, on_device_of
from engine.reference import peak_patch as reference
from engine.reference.peak_patch import TokenNorm
from engine.reference.unit import compute_dtype

OP = "peak_patch_features"


class AttentionPool(NamedTuple):
    """The parameters of the attention pool: one learned query over a caption's tokens, then a layer norm.

    Shapes are those of `torch.nn.MultiheadAttention` of width W and of `torch.nn.LayerNorm`.
    """

    query: Tensor
    """(W,), or any shape of W elements."""
    in_weight: Tensor
    """(3 W, W): projections of query, key and value."""
    in_bias: Tensor | None
    """(3 W,) or None."""
    out_weight: Tensor
    """(W, W)."""
    out_bias: Tensor | None
    """(W,) or None."""
    norm_weight: Tensor
    """(W,)."""
    norm_bias: Tensor
    """(W,)."""
    heads: int
    """Number of heads; divides W."""
    norm_eps: float = 1e-5

    @classmethod
    def of(cls, query: Tensor, attention: nn.MultiheadAttention, norm: nn.LayerNorm) -> AttentionPool:
        """The parameters of two torch modules and a query.

        Raises:
            ValueError: keys or values have a width of their own, or a bias of their own among the tokens.
        """
        if attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
            got = f"kdim {attention.kdim}, vdim {attention.vdim}, add_zero_attn {attention.add_zero_attn}"
            raise ValueError(
                f"{OP}: attention must project query, keys and values of one width and add no tokens, got {got}"
            )
        out = attention.out_proj
        return cls(
            query, attention.in_proj_weight, attention.in_proj_bias, out.weight, out.bias,
            norm.weight, norm.bias, attention.num_heads, norm.eps,
        )  # fmt: skip


def _pool(
    peak: Tensor,
    anchor: Tensor,
    keys: Tensor,
    mask: Tensor,
    end: Tensor,
    factors: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    need_attention: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The op on checked arguments: `pooled (B, heads + 3, W)`, `attention (B, heads, T)` or `(0,)`."""
    norm = None if norm_weight is None or norm_bias is None else TokenNorm(norm_weight, norm_bias, eps)
    if backend == "reference":
        pooled, attention = reference.pool(peak, anchor, keys, mask, end, factors, norm)
        return pooled, attention if need_attention else attention.new_empty(0)
    outputs = reference.empty_outputs(peak, keys, need_attention)
    if outputs[0].numel() == 0:
        return outputs
    tensors = _prepared(peak, anchor, keys, mask, end, factors, norm_weight, norm_bias)
    if backend == "triton":
        from engine.kernels.peak_patch import pool_forward

        with on_device_of(peak):
            arguments: Any = (*tensors, eps, outputs)
            pool_forward(*arguments)
        return outputs
    extension(OP).peak_patch_pool(
        *_arrays(tensors, peak.dtype), eps, *map(as_array, outputs), forced_isa(), torch.get_num_threads()
    )
    return outputs


# peak, anchor, keys, mask, end, factors, norm_weight, norm_bias.
Prepared = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _prepared(peak: Tensor, anchor: Tensor, keys: Tensor, mask: Tensor, end: Tensor, *rest: Tensor | None) -> Prepared:
    """The tensors as kernels want them: tokens dense in the last axis, all else dense and float32."""
    factors, weight, bias = (x if x is None else x.float().contiguous() for x in rest)
    tokens = dense_rows(peak), dense_rows(anchor)
    return *tokens, keys.float().contiguous(), mask.contiguous(), end.contiguous(), factors, weight, bias


def _arrays(tensors: Prepared, dtype: torch.dtype) -> list[Any]:
    peak, anchor, *rest = map(as_array, tensors)
    return [peak, anchor, name_of(dtype), *rest]


peak_patch_pool_op = torch.library.custom_op("peaksim::peak_patch_pool", _pool, mutates_args=())


@peak_patch_pool_op.register_fake
def _pool_fake(*args: Any) -> tuple[Tensor, Tensor]:
    peak, _, keys, *_, need_attention, _ = args
    return reference.empty_outputs(peak, keys, need_attention)


def _pool_backward(
    grad_pooled: Tensor,
    grad_attention: Tensor | None,
    attention: Tensor,
    peak: Tensor,
    anchor: Tensor,
    keys: Tensor,
    mask: Tensor,
    end: Tensor,
    factors: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    need_tokens: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of keys, peak and anchor; the last two have the shape (0,) unless needed."""
    norm = None if norm_weight is None or norm_bias is None else TokenNorm(norm_weight, norm_bias, eps)
    if backend == "reference" or grad_pooled.numel() == 0:
        return reference.pool_backward(
            grad_pooled, grad_attention, attention, peak, anchor, keys, mask, end, factors, norm, need_tokens
        )
    tensors = _prepared(peak, anchor, keys, mask, end, factors, norm_weight, norm_bias)
    grads = (
        keys.new_empty(keys.shape, dtype=torch.float32),
        *(x.new_empty(x.shape if need_tokens else (0,), dtype=torch.float32) for x in (peak, anchor)),
    )
    incoming = [x if x is None else x.contiguous() for x in (grad_pooled, grad_attention, attention)]
    if backend == "triton":
        from engine.kernels.peak_patch_backward import pool_backward

        with on_device_of(peak):
            arguments: Any = (*tensors, eps, incoming, grads)
            pool_backward(*arguments)
    else:
        extension(OP).peak_patch_pool_backward(
            *_arrays(tensors, peak.dtype), eps, *map(as_array, incoming), *map(as_array, grads),
            forced_isa(), torch.get_num_threads(),
        )  # fmt: skip
    return grads[0].to(keys.dtype), grads[1].to(peak.dtype), grads[2].to(anchor.dtype)


peak_patch_pool_backward_op = torch.library.custom_op(
    "peaksim::peak_patch_pool_backward", _pool_backward, mutates_args=()
)


@peak_patch_pool_backward_op.register_fake
def _pool_backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    peak, anchor, keys, need_tokens = args[3], args[4], args[5], args[-2]
    return keys.new_empty(keys.shape), *(x.new_empty(x.shape if need_tokens else (0,)) for x in (peak, anchor))


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, eps, need_attention, backend = inputs
    ctx.options = eps, need_attention, backend
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_pooled: Tensor | None, grad_attention: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, attention = ctx.saved_tensors
    eps, need_attention, backend = ctx.options
    nothing = (None,) * 8
    if grad_pooled is None and grad_attention is None:
        return (None, None, None, *nothing)
    if not need_attention:
        # The op was called directly without what its backward needs: recompute it.
        grad_attention = None
        _, attention = peak_patch_pool_op(*tensors, eps, True, backend)
    if grad_pooled is None:
        peak, _, keys, *_ = tensors
        grad_pooled = torch.zeros_like(reference.empty_outputs(peak, keys, False)[0])
    grad_keys, grad_peak, grad_anchor = peak_patch_pool_backward_op(
        grad_pooled, grad_attention, attention, *tensors, eps, any(ctx.needs_input_grad[:2]), backend
    )
    to_peak, to_anchor, to_keys, *_ = ctx.needs_input_grad
    return (
        grad_peak if to_peak else None, grad_anchor if to_anchor else None, grad_keys if to_keys else None, *nothing
    )  # fmt: skip


peak_patch_pool_op.register_autograd(_backward, setup_context=_setup_context)


def folded_keys(pool: AttentionPool, number: torch.dtype) -> Tensor:
    """`W_k[h]ᵀ q[h] / √(W / heads)` for each head, `(heads, W)`: what tokens are compared with."""
    width = pool.query.numel()
    to_query, to_key, _ = pool.in_weight.to(number).chunk(3)
    bias = None if pool.in_bias is None else pool.in_bias[:width].to(number)
    query = F.linear(pool.query.reshape(width).to(number), to_query, bias)
    per_head = query.view(pool.heads, -1) / math.sqrt(width / pool.heads)
    # The bias of the keys adds the same to all scores of a head, which the softmax takes away again.
    return torch.einsum("hd,hdw->hw", per_head, to_key.view(pool.heads, -1, width))


def projected(pool: AttentionPool, pooled: Tensor, mass: Tensor) -> Tensor:
    """Values, output projection and norm of `pooled (B, heads, W)`; `mass (B, heads)` is what its weights sum to."""
    n, heads, width = pooled.shape
    number = pooled.dtype
    to_value = pool.in_weight[2 * width :].to(number).view(heads, -1, width)
    values = torch.einsum("bhw,hdw->bhd", pooled, to_value)
    if pool.in_bias is not None:
        values = values + mass[..., None] * pool.in_bias[2 * width :].to(number).view(heads, -1)
    bias = None if pool.out_bias is None else pool.out_bias.to(number)
    out = F.linear(values.reshape(n, width), pool.out_weight.to(number), bias)
    return F.layer_norm(out, (width,), pool.norm_weight.to(number), pool.norm_bias.to(number), pool.norm_eps)


def peak_patch_features(
    peak: Tensor,
    anchor: Tensor,
    pool: AttentionPool,
    *,
    mask: Tensor | None = None,
    end: Tensor | None = None,
    norm: TokenNorm | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """What PeakPatch's embedding correction reads off a caption.

        features = [peak[end]; layer_norm(attention(query, peak)); anchor[end]; mean of peak]

    Args:
        peak: tokens at the layer where contrasts peak, `(B, T, W)`, float32, float16, bfloat16 or float64. Any
            strides will do; a last axis that is not dense costs a copy.
        anchor: tokens at the earlier layer `(B, T, W)`, or `(B, W)` of them those at `end`.
        pool: the learned query, attention and norm.
        mask: bool `(B, T)`, True = keep: start, words and end of the caption; by default all.
        end: int64 `(B,)`, position of the end-of-text token, outside [0, T) for none; by default the last kept one.
        norm: the encoder's final layer norm, if tokens are hidden states from before it; it takes no gradient.
        dropout: probability with which an attention weight is dropped (and others scaled up); for training.
        backend: "cpp" (CPU), "triton" (CUDA) or "reference" (plain torch, any device); by default, or with
            "auto", by the tensors' device. float64 always goes to the reference.

    Returns:
        `(B, 4 W)` float32, or float64 for float64 tokens, with gradients for the pool's parameters and the tokens, the
        same bit by bit from run to run. Of a caption with nothing kept the second part is the norm of the output bias.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or range.
        RuntimeError: the backend is missing; the message says how to get it.

    >>> attention, layer_norm = nn.MultiheadAttention(8, num_heads=2), nn.LayerNorm(8)
    >>> pool = AttentionPool.of(torch.randn(1, 8), attention, layer_norm)
    >>> peak_patch_features(torch.randn(3, 5, 8), torch.randn(3, 5, 8), pool).shape
    torch.Size([3, 32])
    """
    _check(peak, anchor, pool, mask, end, norm, dropout)
    chosen, number = choose_backend(OP, backend, peak), compute_dtype(peak.dtype)
    n, length, _ = peak.shape
    if mask is None:
        mask = torch.ones((n, length), dtype=torch.bool, device=peak.device)
    end = last_kept(mask) if end is None else end
    keys = folded_keys(pool, number)
    ones = torch.ones((n, pool.heads, length), dtype=number, device=peak.device) if dropout else None
    factors = None if ones is None else F.dropout(ones, dropout)
    learns = torch.is_grad_enabled() and (keys.requires_grad or peak.requires_grad or anchor.requires_grad)
    weight, bias, eps = (None, None, 0.0) if norm is None else norm
    pooled, attention = peak_patch_pool_op(
        peak, anchor, keys, mask, end, factors, weight, bias, eps, learns or factors is not None, chosen
    )
    if factors is None:
        mass = mask.any(1, keepdim=True).expand(n, pool.heads).to(number)
    else:
        mass = (attention * factors).sum(-1)
    mean, at_end, of_anchor = pooled[:, pool.heads :].unbind(1)
    return torch.cat([at_end, projected(pool, pooled[:, : pool.heads], mass), of_anchor, mean], 1)


def last_kept(mask: Tensor) -> Tensor:
    """Index of the last True of each row `(B, T)`, −1 without one; int64 `(B,)`."""
    if mask.shape[1] == 0:
        return torch.full(mask.shape[:1], -1, dtype=torch.int64, device=mask.device)
    places = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, places, -1).amax(1)


def _check(
    peak: Tensor,
    anchor: Tensor,
    pool: AttentionPool,
    mask: Tensor | None,
    end: Tensor | None,
    norm: TokenNorm | None,
    dropout: float,
) -> None:
    for name, x in (("peak", peak), ("anchor", anchor)):
        check_tensor(OP, name, x)
    if peak.ndim != 3:
        raise ValueError(f"{OP}: peak must have the shape (B, T, W), got {tuple(peak.shape)}")
    if peak.dtype not in FLOATS:
        raise TypeError(f"{OP}: peak must be one of {', '.join(map(name_of, FLOATS))}, got {name_of(peak.dtype)}")
    n, _, width = peak.shape
    if tuple(anchor.shape) not in (tuple(peak.shape), (n, width)):
        wanted = f"(B, T, W) = {tuple(peak.shape)} or (B, W) = {(n, width)}"
        raise ValueError(f"{OP}: anchor must have the shape {wanted}, got {tuple(anchor.shape)}")
    if anchor.dtype != peak.dtype or anchor.device != peak.device:
        wanted, got = (f"{name_of(x.dtype)} on {x.device}" for x in (peak, anchor))
        raise TypeError(f"{OP}: anchor must be {wanted} as peak is, got {got}")
    check_per_token(OP, "mask", mask, peak, "(B, T)", mask=True)
    if end is not None:
        check_tensor(OP, "end", end)
        if end.dtype != torch.int64 or tuple(end.shape) != (n,):
            raise ValueError(
                f"{OP}: end must be int64 of shape (B,) = {(n,)}, got {name_of(end.dtype)} {tuple(end.shape)}"
            )
        if end.device != peak.device:
            raise ValueError(f"{OP}: end must be on {peak.device} as the tokens are, got {end.device}")
    if not 0 <= check_number(OP, "dropout", dropout) < 1:
        raise ValueError(f"{OP}: dropout must be at least 0 and below 1, got {dropout}")
    _check_pool(pool, width, peak.device)
    if norm is not None:
        if not isinstance(norm, TokenNorm):
            raise TypeError(f"{OP}: norm must be a TokenNorm or None, got {type(norm).__name__}")
        check_number(OP, "norm's eps", norm.eps)
        for name, x in (("weight", norm.weight), ("bias", norm.bias)):
            _check_parameter(f"norm's {name}", x, (width,), peak.device)
            if torch.is_grad_enabled() and x.requires_grad:
                raise ValueError(
                    f"{OP}: the norm's {name} must not require a gradient (it is the frozen encoder's; "
                    "to learn it, apply it before and leave norm out), got one that does"
                )


def _check_pool(pool: AttentionPool, width: int, device: torch.device) -> None:
    if not isinstance(pool, AttentionPool):
        raise TypeError(f"{OP}: pool must be an AttentionPool, got {type(pool).__name__}")
    check_tensor(OP, "pool.query", pool.query)
    check_number(OP, "pool.norm_eps", pool.norm_eps)
    if isinstance(pool.heads, bool) or not isinstance(pool.heads, int) or pool.heads < 1 or width % pool.heads:
        raise ValueError(f"{OP}: pool.heads must divide W = {width}, got {pool.heads!r}")
    shapes = {
        "query": tuple(pool.query.shape) if pool.query.numel() == width else (width,),
        "in_weight": (3 * width, width), "in_bias": (3 * width,), "out_weight": (width, width),
        "out_bias": (width,), "norm_weight": (width,), "norm_bias": (width,),
    }  # fmt: skip
    for name, shape in shapes.items():
        x = getattr(pool, name)
        if x is not None or name not in ("in_bias", "out_bias"):
            _check_parameter(f"pool.{name}", x, shape, device)


def _check_parameter(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    check_tensor(OP, name, x)
    if tuple(x.shape) != shape or not x.dtype.is_floating_point or x.device != device:
        got = f"{name_of(x.dtype)} {tuple(x.shape)} on {x.device}"
        raise ValueError(f"{OP}: {name} must be floating of shape {shape} on {device}, got {got}")
