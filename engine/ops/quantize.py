"""Token vectors as int8 codes with one scale each. Contract: `engine.reference.quantize`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.checks import FLOATS, check_tensor, name_of
from engine.reference import quantize as reference
from engine.reference.quantize import QuantizedTokens

# Beyond, a product of all codes could pass int32.
MOST_CODES = 2**16


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    return reference.quantize(x)


def _dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    return reference.dequantize(QuantizedTokens(codes, scales))


quantize_op = torch.library.custom_op("peaksim::quantize", _quantize, mutates_args=())
dequantize_op = torch.library.custom_op("peaksim::dequantize", _dequantize, mutates_args=())


@quantize_op.register_fake
def _quantize_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


@dequantize_op.register_fake
def _dequantize_fake(codes: Tensor, scales: Tensor) -> Tensor:
    return scales.new_empty(codes.shape)


def quantize(x: Tensor) -> QuantizedTokens:
    """Rotate token vectors by a fixed orthogonal matrix and round each to int8 codes with a scale of its own.

        codes = round(R · x / scale),    scale = max |R · x| / 127

    Inner products of codes times both scales stand for those of the vectors: `max_sim_int8` and `max_sim_topk` take the
    result, a quarter of float32's memory. The codes are the same on every machine and for ever, and may be stored.

    Args:
        x: vectors `(..., D)`, float32, float16, bfloat16 or float64, D at most 65536.

    Returns:
        codes `(..., D)` int8 and scales `(...)` float32, without gradient. A vector of zeros has scale 0, one with NaN
        or an infinity scale NaN.

    Raises:
        TypeError, ValueError: x of the wrong type, dtype or shape.

    >>> x = torch.tensor([[3.0, -1.0, 0.5, 100.0]])
    >>> q = quantize(x)
    >>> q.codes.dtype, bool((dequantize(q) - x).abs().max() < 0.5)
    (torch.int8, True)
    """
    check_tensor("quantize", "x", x)
    if x.ndim == 0 or x.shape[-1] > MOST_CODES:
        raise ValueError(f"quantize: x must have the shape (..., D) with D <= {MOST_CODES}, got {tuple(x.shape)}")
    if x.dtype not in FLOATS:
        raise TypeError(f"quantize: x must be one of {', '.join(map(name_of, FLOATS))}, got {name_of(x.dtype)}")
    return QuantizedTokens(*quantize_op(x.detach()))


def dequantize(x: QuantizedTokens) -> Tensor:
    """The vectors that codes stand for, float32 `(..., D)`; `quantize` describes them.

    Raises:
        TypeError, ValueError: x is no QuantizedTokens of int8 codes `(..., D)` and float32 scales `(...)`.
    """
    check_quantized("dequantize", "x", x)
    return dequantize_op(*x)


def check_quantized(op: str, name: str, x: object) -> None:
    """int8 codes and one float32 scale for each vector, on one device."""
    if not isinstance(x, QuantizedTokens):
        raise TypeError(f"{op}: {name} must be QuantizedTokens as quantize returns, got {type(x).__name__}")
    for field, part in zip(x._fields, x, strict=True):
        check_tensor(op, f"{name}.{field}", part)
    codes, scales = x
    if codes.dtype != torch.int8 or scales.dtype != torch.float32:
        got = f"{name_of(codes.dtype)} and {name_of(scales.dtype)}"
        raise TypeError(f"{op}: {name} must hold int8 codes and float32 scales, got {got}")
    if codes.ndim == 0 or codes.shape[:-1] != scales.shape:
        got = f"{tuple(codes.shape)} and {tuple(scales.shape)}"
        raise ValueError(f"{op}: {name} must hold codes of shape (..., D) and scales of shape (...), got {got}")
    if codes.shape[-1] > MOST_CODES:
        raise ValueError(f"{op}: {name} must hold at most {MOST_CODES} codes a vector, got {codes.shape[-1]}")
    if codes.device != scales.device:
        raise ValueError(f"{op}: {name}'s codes and scales must be on one device, got {codes.device}, {scales.device}")
