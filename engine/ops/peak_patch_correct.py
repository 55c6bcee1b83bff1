"""PeakPatch's corrections of embeddings and of scores. Contract: `engine.reference.peak_patch_correct`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.ops.checks import FLOATS, check_number, check_tensor, choose_backend, name_of
from engine.ops.native import as_array, dense_rows, extension, forced_isa, on_device_of
from engine.reference import peak_patch_correct as reference
from engine.reference.unit import compute_dtype

CORRECT, PAIRS = "peak_patch_correct", "peak_patch_pairs"


class PairFeatures(NamedTuple):
    """What the score correction reads off pairs of an image and a caption."""

    sims: Tensor
    """(N, K, 2): cosine of the image with the earlier layer's embedding, and with the (corrected) embedding."""
    cross: Tensor
    """(N, K, D): unit image embedding times unit text embedding, element by element."""


def _correct(f: Tensor, delta: Tensor, alpha: Tensor, backend: str) -> Tensor:
    """The op on checked arguments."""
    if backend == "reference":
        return reference.correct(f, delta, alpha)
    out = f.new_empty(f.shape, dtype=torch.float32)
    if out.numel() == 0:
        return out
    f, delta = dense_rows(f), dense_rows(delta)
    if backend == "triton":
        from engine.kernels.peak_patch_correct import correct_forward

        with on_device_of(f):
            correct_forward(f, delta, alpha.float(), out)
        return out
    extension(CORRECT).peak_patch_correct(
        as_array(f), name_of(f.dtype), as_array(delta), name_of(delta.dtype), alpha.item(), as_array(out),
        forced_isa(), torch.get_num_threads(),
    )  # fmt: skip
    return out


peak_patch_correct_op = torch.library.custom_op("peaksim::peak_patch_correct", _correct, mutates_args=())


@peak_patch_correct_op.register_fake
def _correct_fake(f: Tensor, delta: Tensor, alpha: Tensor, backend: str) -> Tensor:
    return f.new_empty(f.shape, dtype=compute_dtype(f.dtype))


def _correct_backward(
    grad: Tensor, f: Tensor, delta: Tensor, alpha: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of f, delta and alpha; that of alpha row by row, `(B,)`."""
    if backend == "reference" or grad.numel() == 0:
        return reference.correct_backward(grad, f, delta, alpha)
    grads = tuple(f.new_empty(shape, dtype=torch.float32) for shape in (f.shape, f.shape, f.shape[:1]))
    grad, f, delta = grad.contiguous(), dense_rows(f), dense_rows(delta)
    if backend == "triton":
        from engine.kernels.peak_patch_correct import correct_backward

        with on_device_of(f):
            correct_backward(f, delta, alpha.float(), grad, grads)
    else:
        extension(CORRECT).peak_patch_correct_backward(
            as_array(f), name_of(f.dtype), as_array(delta), name_of(delta.dtype), alpha.item(), as_array(grad),
            *map(as_array, grads), forced_isa(), torch.get_num_threads(),
        )  # fmt: skip
    return grads[0].to(f.dtype), grads[1].to(delta.dtype), grads[2]


peak_patch_correct_backward_op = torch.library.custom_op(
    "peaksim::peak_patch_correct_backward", _correct_backward, mutates_args=()
)


@peak_patch_correct_backward_op.register_fake
def _correct_backward_fake(
    grad: Tensor, f: Tensor, delta: Tensor, alpha: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return f.new_empty(f.shape), delta.new_empty(delta.shape), f.new_empty(f.shape[:1], dtype=compute_dtype(f.dtype))


def _correct_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    f, delta, alpha, ctx.backend = inputs
    ctx.save_for_backward(f, delta, alpha)


def _correct_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    f, delta, alpha = ctx.saved_tensors
    to_f, to_delta, to_alpha = peak_patch_correct_backward_op(grad, f, delta, alpha, ctx.backend)
    needs = ctx.needs_input_grad
    return (
        to_f if needs[0] else None, to_delta if needs[1] else None,
        to_alpha.sum().to(alpha.dtype) if needs[2] else None, None,
    )  # fmt: skip


peak_patch_correct_op.register_autograd(_correct_autograd, setup_context=_correct_context)


def _pairs(image: Tensor, text: Tensor, low: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """The op on checked arguments: sims and cross."""
    if backend == "reference":
        return reference.pairs(image, text, low)
    outputs = _empty_pairs(text, torch.float32)
    if text.numel() == 0:
        outputs[0].zero_()
        return outputs
    image, text, low = dense_rows(image), dense_rows(text), dense_rows(low)
    if backend == "triton":
        from engine.kernels.peak_patch_correct import pairs_forward

        with on_device_of(image):
            pairs_forward(image, text, low, outputs)
        return outputs
    extension(PAIRS).peak_patch_pairs(
        as_array(image), as_array(text), as_array(low), name_of(image.dtype), *map(as_array, outputs),
        forced_isa(), torch.get_num_threads(),
    )  # fmt: skip
    return outputs


def _empty_pairs(text: Tensor, number: torch.dtype) -> tuple[Tensor, Tensor]:
    n, count, dim = text.shape
    return text.new_empty((n, count, 2), dtype=number), text.new_empty((n, count, dim), dtype=number)


peak_patch_pairs_op = torch.library.custom_op("peaksim::peak_patch_pairs", _pairs, mutates_args=())


@peak_patch_pairs_op.register_fake
def _pairs_fake(image: Tensor, text: Tensor, low: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return _empty_pairs(text, compute_dtype(image.dtype))


def _pairs_backward(
    grad_sims: Tensor, grad_cross: Tensor, image: Tensor, text: Tensor, low: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of image, text and low."""
    if backend == "reference" or text.numel() == 0:
        return reference.pairs_backward(grad_sims, grad_cross, image, text, low)
    grads = tuple(x.new_empty(x.shape, dtype=torch.float32) for x in (image, text, low))
    incoming = grad_sims.contiguous(), grad_cross.contiguous()
    image, text, low = dense_rows(image), dense_rows(text), dense_rows(low)
    if backend == "triton":
        from engine.kernels.peak_patch_correct import pairs_backward

        with on_device_of(image):
            pairs_backward(image, text, low, incoming, grads)
    else:
        extension(PAIRS).peak_patch_pairs_backward(
            as_array(image), as_array(text), as_array(low), name_of(image.dtype), *map(as_array, incoming),
            *map(as_array, grads), forced_isa(), torch.get_num_threads(),
        )  # fmt: skip
    return grads[0].to(image.dtype), grads[1].to(text.dtype), grads[2].to(low.dtype)


peak_patch_pairs_backward_op = torch.library.custom_op(
    "peaksim::peak_patch_pairs_backward", _pairs_backward, mutates_args=()
)


@peak_patch_pairs_backward_op.register_fake
def _pairs_backward_fake(
    grad_sims: Tensor, grad_cross: Tensor, image: Tensor, text: Tensor, low: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return image.new_empty(image.shape), text.new_empty(text.shape), low.new_empty(low.shape)


def _pairs_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _pairs_autograd(ctx: Any, grad_sims: Tensor, grad_cross: Tensor) -> tuple[Tensor | None, ...]:
    grads = peak_patch_pairs_backward_op(grad_sims, grad_cross, *ctx.saved_tensors, ctx.backend)
    needed = [grad if need else None for grad, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return (*needed, None)


peak_patch_pairs_op.register_autograd(_pairs_autograd, setup_context=_pairs_context)


def peak_patch_correct(f: Tensor, delta: Tensor, alpha: Tensor | float = 1.0, *, backend: str | None = None) -> Tensor:
    """Embeddings moved by a correction and put back on the sphere.

        corrected[b] = unit(f[b] + alpha · delta[b])

    Args:
        f: embeddings `(B, D)`, float32, float16, bfloat16 or float64.
        delta: corrections `(B, D)`; of any of these dtypes, but float64 goes with float64 alone.
        alpha: a number, or a tensor of one floating element, which may be learned.
        backend: "cpp" (CPU), "triton" (CUDA) or "reference" (plain torch, any device); by default, or with
            "auto", by the tensors' device. float64 always goes to the reference.

    Returns:
        `(B, D)` float32, or float64 for float64 inputs; rows of length 1, or 0 where f + alpha · delta is shorter than
        1e-12. Gradients for f, delta and alpha are the same bit by bit from run to run.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
        RuntimeError: the backend is missing; the message says how to get it.

    >>> peak_patch_correct(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 2.0]]), 2.0)
    tensor([[0.6000, 0.8000]])
    """
    _check_vectors(CORRECT, "f", f, "(B, D)", 2)
    _check_vectors(CORRECT, "delta", delta, "(B, D)", 2)
    if delta.shape != f.shape:
        raise ValueError(f"{CORRECT}: delta must have f's shape {tuple(f.shape)}, got {tuple(delta.shape)}")
    if compute_dtype(delta.dtype) != compute_dtype(f.dtype):
        raise TypeError(
            f"{CORRECT}: f and delta must both be float64 or neither, got {name_of(f.dtype)} and {name_of(delta.dtype)}"
        )
    if not isinstance(alpha, Tensor):
        alpha = torch.tensor(check_number(CORRECT, "alpha", alpha), dtype=compute_dtype(f.dtype), device=f.device)
    if alpha.numel() != 1 or not alpha.dtype.is_floating_point:
        got = f"{name_of(alpha.dtype)} {tuple(alpha.shape)}"
        raise ValueError(f"{CORRECT}: alpha must be one floating number, got {got}")
    for name, x in (("delta", delta), ("alpha", alpha)):
        if x.device != f.device:
            raise ValueError(f"{CORRECT}: {name} must be on {f.device} as f is, got {x.device}")
    return peak_patch_correct_op(f, delta, alpha.reshape(()), choose_backend(CORRECT, backend, f))


def peak_patch_pairs(image: Tensor, text: Tensor, low: Tensor, *, backend: str | None = None) -> PairFeatures:
    """What the score correction reads off each image and its captions.

        sims[n, k]  = (cos(image[n], low[n, k]), cos(image[n], text[n, k]))
        cross[n, k] = unit(image[n]) ⊙ unit(text[n, k])

    The score is then `sims[..., 1] + bound · tanh(network(sims, cross, ...))`.

    Args:
        image: embeddings `(N, D)`, float32, float16, bfloat16 or float64; of any length.
        text: (corrected) embeddings of the K captions of each image, `(N, K, D)`, of the same dtype. For all images
            against the same captions pass `text.expand(N, K, D)`: strides are followed, nothing is copied.
        low: embeddings of these captions at an earlier layer, `(N, K, D)`.
        backend: as for `peak_patch_correct`.

    Returns:
        PairFeatures, float32 or float64, with gradients for all three, the same bit by bit from run to run.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
        RuntimeError: the backend is missing; the message says how to get it.

    >>> sims, cross = peak_patch_pairs(torch.eye(2), torch.ones(2, 3, 2), torch.eye(2).expand(2, 2, 2)[:, [0, 1, 1]])
    >>> sims[1]
    tensor([[0.0000, 0.7071],
            [1.0000, 0.7071],
            [1.0000, 0.7071]])
    """
    _check_vectors(PAIRS, "image", image, "(N, D)", 2)
    for name, x in (("text", text), ("low", low)):
        _check_vectors(PAIRS, name, x, "(N, K, D)", 3)
        wanted = (image.shape[0], text.shape[1], image.shape[1])
        if tuple(x.shape) != wanted:
            raise ValueError(f"{PAIRS}: {name} must have the shape (N, K, D) = {wanted}, got {tuple(x.shape)}")
        if x.dtype != image.dtype or x.device != image.device:
            as_image, got = (f"{name_of(t.dtype)} on {t.device}" for t in (image, x))
            raise TypeError(f"{PAIRS}: {name} must be {as_image} as image is, got {got}")
    return PairFeatures(*peak_patch_pairs_op(image, text, low, choose_backend(PAIRS, backend, image)))


def _check_vectors(op: str, name: str, x: object, axes: str, ndim: int) -> None:
    check_tensor(op, name, x)
    assert isinstance(x, Tensor)
    if x.ndim != ndim:
        raise ValueError(f"{op}: {name} must have the shape {axes}, got {tuple(x.shape)}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} must be one of {', '.join(map(name_of, FLOATS))}, got {name_of(x.dtype)}")
