"""Every op on the GPU against float64: the cases of `bench.gpu_check`.

A case calls an op with the backend under test, and again with the reference in float64 on the same numbers, and
compares results and gradients. Errors are relative to the size of the whole result (Euclidean norm), and none may stand
out by itself.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.ops.centroid import centroid
from engine.ops.crop_batch import crop_batch
from engine.ops.max_sim import MaxSimOutput, max_sim, max_sim_pairs
from engine.ops.max_sim_contrastive import max_sim_contrastive
from engine.ops.peak_patch import AttentionPool, peak_patch_features
from engine.ops.peak_patch_correct import peak_patch_correct, peak_patch_pairs
from engine.ops.window_attention import window_attention

# Norm of the error over the norm of the result, by dtype of the inputs: forward, gradients.
LIMITS = {torch.float32: (2e-5, 5e-5), torch.float16: (1e-3, 4e-3), torch.bfloat16: (5e-3, 1.6e-2)}
# Largest single error in units of limit times root mean square.
OUTLIER = 40.0

Result = Tensor | Sequence[Tensor | None]


@dataclass(frozen=True)
class Case:
    """`call(backend, *inputs)` with tensors of `dtype`; gradients of `leaves`, the places of inputs that have one."""

    name: str
    dtype: torch.dtype
    call: Callable[..., Result]
    inputs: tuple[Tensor, ...]
    leaves: tuple[int, ...] = ()


@dataclass(frozen=True)
class Parity:
    """How far a case lies from float64, in units of its limits; right if both are at most 1."""

    name: str
    dtype: str
    forward: float
    gradients: float | None

    @property
    def right(self) -> bool:
        return self.forward <= 1.0 and (self.gradients is None or self.gradients <= 1.0)


def check(case: Case, backend: str, device: torch.device) -> Parity:
    """Run a case on a device and in float64."""
    exact = [x.double() if x.is_floating_point() else x for x in case.inputs]
    given = [x.to(device) for x in case.inputs]
    got, got_grads = _run(case, backend, given)
    wanted, wanted_grads = _run(case, "reference", [x.to(device) for x in exact])
    ahead, behind = LIMITS[case.dtype]
    forward = max(distance(a, b) / ahead for a, b in zip(got, wanted, strict=True))
    gradients = [distance(a, b) / behind for a, b in zip(got_grads, wanted_grads, strict=True)]
    return Parity(case.name, str(case.dtype).removeprefix("torch."), forward, max(gradients) if gradients else None)


def _run(case: Case, backend: str, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Floating results, and gradients of the leaves for random gradients of the results."""
    for place in case.leaves:
        inputs[place] = inputs[place].detach().requires_grad_()
    result = case.call(backend, *inputs)
    results = [result] if isinstance(result, Tensor) else [x for x in result if x is not None]
    floating = [x for x in results if x.is_floating_point()]
    if not case.leaves:
        return [x.detach() for x in floating], []
    make = torch.Generator().manual_seed(5)
    upstream = [torch.randn(x.shape, generator=make).to(x.device, x.dtype) for x in floating]
    grads = torch.autograd.grad(floating, [inputs[place] for place in case.leaves], upstream)
    return [x.detach() for x in floating], list(grads)


def distance(got: Tensor, wanted: Tensor) -> float:
    """Norm of the error over the norm of what is wanted, or the largest single error if it stands out more."""
    got, wanted = got.detach().double().cpu(), wanted.detach().double().cpu()
    if got.shape != wanted.shape or not torch.equal(got.isfinite(), wanted.isfinite()):
        return float("inf")
    if wanted.numel() == 0:
        return 0.0
    error, size = (got - wanted).nan_to_num(0.0), wanted.nan_to_num(0.0)
    length = max(float(size.norm()), 1e-30)
    typical = max(length / wanted.numel() ** 0.5, 1e-30)
    return max(float(error.norm()) / length, float(error.abs().max()) / typical / OUTLIER)


def cases(small: bool) -> Iterator[Case]:
    """All ops in all dtypes; `small` for the interpreter, which is slow, and wrong for products of bfloat16."""
    for dtype in (torch.float16, torch.float32) if small else (torch.bfloat16, torch.float16, torch.float32):
        make = torch.Generator().manual_seed(11)
        yield from _max_sim(dtype, make, small)
        if small and dtype == torch.float16:
            continue
        yield from _contrastive(dtype, make, small)
        yield from _siblings(dtype, make, small)
        yield from _others(dtype, make, small)


def _unit(make: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return F.normalize(torch.randn(shape, generator=make), dim=-1).to(dtype)


def _alignment(result: Tensor | MaxSimOutput) -> Sequence[Tensor | None]:
    assert isinstance(result, MaxSimOutput)
    return result


def _max_sim(dtype: torch.dtype, make: torch.Generator, small: bool) -> Iterator[Case]:
    shapes = [(3, 5, 2, 9, 24)] if small else [
        (5, 77, 7, 196, 512), (1, 32, 9, 50, 768), (33, 16, 6, 65, 128), (3, 200, 4, 257, 1152), (4, 1, 5, 1, 33),
    ]  # fmt: skip
    for n_q, l_q, n_d, l_d, dim in shapes:
        shape = f"{n_q}x{l_q} {n_d}x{l_d} D={dim}"
        q, d = _unit(make, dtype, n_q, l_q, dim), _unit(make, dtype, n_d, l_d, dim)
        masks = torch.rand(n_q, l_q, generator=make) < 0.8, torch.rand(n_d, l_d, generator=make) < 0.8
        weights = torch.rand(n_q, l_q, generator=make), torch.rand(n_d, l_d, generator=make)

        def masked(
            backend: str, q: Tensor, d: Tensor, q_mask: Tensor, d_mask: Tensor, w: Tensor, v: Tensor,
            temperature: float | None,
        ) -> Sequence[Tensor | None]:  # fmt: skip
            return _alignment(max_sim(
                q, d, q_mask=q_mask, d_mask=d_mask, q_weights=w, d_weights=v, temperature=temperature, symmetric=True,
                return_alignment=True, backend=backend,
            ))  # fmt: skip

        for temperature in (None, 0.05):
            form = "hard" if temperature is None else "soft"

            def plain(backend: str, q: Tensor, d: Tensor, t: float | None = temperature) -> Result:
                return max_sim(q, d, temperature=t, backend=backend)

            def pairs(backend: str, q: Tensor, d: Tensor, t: float | None = temperature) -> Result:
                return max_sim_pairs(q, d, temperature=t, backend=backend)

            def full(backend: str, *inputs: Tensor, t: float | None = temperature) -> Result:
                return masked(backend, *inputs, temperature=t)

            yield Case(f"max_sim {form} {shape}", dtype, plain, (q, d), (0, 1))
            yield Case(f"max_sim {form} symmetric {shape}", dtype, full, (q, d, *masks, *weights), (0, 1, 4, 5))
            n = min(n_q, n_d)
            yield Case(f"max_sim_pairs {form} {shape}", dtype, pairs, (q[:n], d[:n]), (0, 1))


def _contrastive(dtype: torch.dtype, make: torch.Generator, small: bool) -> Iterator[Case]:
    """The loss of a batch with more texts than images, plain and with everything on."""
    n_q, n_d, l_q, l_d, dim = (4, 3, 5, 9, 24) if small else (24, 16, 77, 196, 512)
    q, d = _unit(make, dtype, n_q, l_q, dim), _unit(make, dtype, n_d, l_d, dim)
    masks = torch.rand(n_q, l_q, generator=make) < 0.8, torch.rand(n_d, l_d, generator=make) < 0.8
    weights = torch.rand(n_q, l_q, generator=make) / l_q, torch.rand(n_d, l_d, generator=make) / l_d
    for temperature in (None, 0.05):
        form = "hard" if temperature is None else "soft"

        def plain(backend: str, q: Tensor, d: Tensor, w: Tensor, t: float | None = temperature) -> Result:
            return max_sim_contrastive(q, d, logit_scale=5.0, q_weights=w, temperature=t, backend=backend)

        def full(
            backend: str, q: Tensor, d: Tensor, q_mask: Tensor, d_mask: Tensor, w: Tensor, v: Tensor, scale: Tensor,
            t: float | None = temperature,
        ) -> Result:  # fmt: skip
            return max_sim_contrastive(
                q, d, logit_scale=scale, q_mask=q_mask, d_mask=d_mask, q_weights=w, d_weights=v, temperature=t,
                symmetric=True, backend=backend,
            )  # fmt: skip

        yield Case(f"max_sim_contrastive {form}", dtype, plain, (q, d, weights[0]), (0, 1, 2))
        yield Case(
            f"max_sim_contrastive {form} symmetric", dtype, full, (q, d, *masks, *weights, torch.tensor(7.0)),
            (0, 1, 4, 5, 6),
        )  # fmt: skip


def found(name: str) -> Any:
    """An op of max-sim's family by the name of its file, or None where the package lacks it."""
    spec = importlib.util.find_spec(f"engine.ops.{name}")
    return None if spec is None else getattr(importlib.import_module(f"engine.ops.{name}"), name)


def _siblings(dtype: torch.dtype, make: torch.Generator, small: bool) -> Iterator[Case]:
    """Packed tokens, the best documents, int8 codes."""
    dim, lengths = (24, [3, 0, 7]) if small else (512, [50, 0, 196, 77, 1, 130, 64])
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    q, d = _unit(make, dtype, 3, 9, dim), _unit(make, dtype, int(bounds[-1]), dim)
    varlen, topk, int8 = found("max_sim_varlen"), found("max_sim_topk"), found("max_sim_int8")
    if varlen is not None:
        yield from _packed(varlen, dtype, make, (q, d, bounds))
    if topk is not None:
        yield Case(
            "max_sim_topk", dtype, lambda backend, q, d, bounds: topk(q, d, 2, d_cu_seqlens=bounds, backend=backend),
            (q, d, bounds),
        )  # fmt: skip
    if int8 is not None and dtype == torch.float32:
        quantize = importlib.import_module("engine.ops.quantize").quantize
        codes, scales, q_codes, q_scales = *quantize(d), *quantize(q)
        of = type(quantize(q))

        def coded(backend: str, a: Tensor, x: Tensor, b: Tensor, y: Tensor, bounds: Tensor) -> Result:
            return int8(of(a, x.float()), of(b, y.float()), d_cu_seqlens=bounds, backend=backend)

        yield Case("max_sim_int8", dtype, coded, (q_codes, q_scales, codes, scales, bounds))


def _packed(
    varlen: Callable[..., Result], dtype: torch.dtype, make: torch.Generator, inputs: tuple[Tensor, Tensor, Tensor]
) -> Iterator[Case]:
    """Packed documents alone, and packed sides with everything on; hard and soft, with gradients."""
    q, d, bounds = inputs
    mask, weights = torch.rand(d.shape[0], generator=make) < 0.8, torch.rand(d.shape[0], generator=make)
    for temperature in (None, 0.05):
        form = "hard" if temperature is None else "soft"

        def plain(backend: str, q: Tensor, d: Tensor, bounds: Tensor, t: float | None = temperature) -> Result:
            return varlen(q, d, d_cu_seqlens=bounds, temperature=t, backend=backend)

        def full(
            backend: str, q: Tensor, d: Tensor, w: Tensor, mask: Tensor, bounds: Tensor, t: float | None = temperature
        ) -> Result:
            return varlen(
                q, d, q_cu_seqlens=bounds, d_cu_seqlens=bounds, q_mask=mask.flip(0), d_mask=mask, q_weights=w,
                d_weights=w, temperature=t, symmetric=True, return_alignment=True, backend=backend,
            )  # fmt: skip

        yield Case(f"max_sim_varlen {form} documents", dtype, plain, (q, d, bounds), (0, 1))
        both = (d.flip(0).contiguous(), d, weights, mask, bounds)
        yield Case(f"max_sim_varlen {form} both, symmetric", dtype, full, both, (0, 1, 2))


def _others(dtype: torch.dtype, make: torch.Generator, small: bool) -> Iterator[Case]:
    """Window attention, PeakPatch, centroids, crops."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make).to(dtype)

    side, heads, dim, n_windows = (3, 1, 16, 2) if small else (14, 12, 64, 35)
    q, k, v = normal(2, n_windows, heads, dim), normal(2, side**2, heads, dim), normal(2, side**2, heads, dim)
    corners = torch.randint(0, side + 1, (n_windows, 2, 2), generator=make).sort(1).values
    windows = torch.cat([corners[:, 0], corners[:, 1]], 1).to(torch.int32)

    def attend(backend: str, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, boxes: Tensor) -> Result:
        return window_attention(q, k, v, boxes, grid=(side, side), own_k=own_k, own_v=own_v, backend=backend)

    yield Case("window_attention", dtype, attend, (q, k, v, q + 1, q - 1, windows), (0, 1, 2, 3, 4))

    n, length, width, n_heads = (2, 6, 16, 4) if small else (9, 77, 512, 8)
    torch.manual_seed(3)
    attention, norm = torch.nn.MultiheadAttention(width, n_heads, batch_first=True), torch.nn.LayerNorm(width)
    query = torch.randn(1, width)
    mask = torch.arange(length) < torch.randint(1, length + 1, (n, 1), generator=make)

    def caption(backend: str, peak: Tensor, anchor: Tensor, mask: Tensor) -> Result:
        number = torch.float64 if peak.dtype == torch.float64 else torch.float32
        pool = AttentionPool.of(
            query.to(peak.device, number), attention.to(peak.device, number), norm.to(peak.device, number)
        )
        return peak_patch_features(peak, anchor, pool, mask=mask, backend=backend)

    peak, anchor = normal(n, length, width), normal(n, length, width)
    yield Case("peak_patch_features", dtype, caption, (peak, anchor, mask), (0, 1))
    f, texts = normal(n, width), normal(n, 3, width)
    yield Case(
        "peak_patch_correct", dtype, lambda backend, f, delta: peak_patch_correct(f, delta, 0.7, backend=backend),
        (f, normal(n, width)), (0, 1),
    )  # fmt: skip
    yield Case(
        "peak_patch_pairs", dtype, lambda backend, *inputs: peak_patch_pairs(*inputs, backend=backend),
        (f, texts, normal(n, 3, width)), (0, 1, 2),
    )  # fmt: skip
    bounds = torch.tensor([0, 2, 2, 5, 9])
    classes = torch.tensor([1, 0, 1, 0])

    def to_classes(backend: str, x: Tensor, tokens: Tensor, bounds: Tensor, classes: Tensor) -> Result:
        return centroid(x, tokens, bounds, classes=classes, n_classes=2, backend=backend)

    yield Case("centroid", dtype, to_classes, (f, normal(9, width), bounds, classes), (0, 1))
    image = torch.randint(0, 256, (37, 51, 3), generator=make, dtype=torch.uint8)
    boxes = torch.tensor([[0, 0, 0, 51, 37], [0, -5, 3, 20, 60], [0, 7, 7, 8, 8]])

    def crops(backend: str, image: Tensor) -> Result:
        number = torch.float32 if backend == "reference" else dtype
        return crop_batch(
            [image], boxes, 9 if small else 224, mean=(0.5,) * 3, std=(0.25,) * 3, fill=(1, 2, 3), dtype=number,
            backend=backend,
        )  # fmt: skip

    yield Case("crop_batch", dtype, crops, (image,))
