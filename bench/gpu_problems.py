"""What `bench.gpu_check` times: our ops and the same in torch and in published kernels, on the same numbers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Problem:
    """What is timed: ours and siblings by name, their result, how much arithmetic and reading it is."""

    name: str
    shape: str
    dtype: torch.dtype
    ours: Callable[[], Any]
    siblings: dict[str, Callable[[], Any]]
    flops: float = 0.0
    read_bytes: float = 0.0
    tolerance: float = 2e-2


def eager(q: Tensor, d: Tensor, chunk: int = 64) -> Tensor:
    """Max-sim in torch, a chunk of documents at a time."""
    parts = [torch.einsum("auk,btk->abut", q, part).amax(-1).float().sum(-1) for part in d.split(chunk)]
    return torch.cat(parts, 1)


def eager_soft(q: Tensor, d: Tensor, temperature: float, chunk: int = 64) -> Tensor:
    parts = []
    for part in d.split(chunk):
        s = torch.einsum("auk,btk->abut", q, part).float() / temperature
        parts.append(temperature * s.logsumexp(-1).sum(-1))
    return torch.cat(parts, 1)


def with_gradients(score: Callable[[Tensor, Tensor], Tensor], q: Tensor, d: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward: the gradients of a loss that looks at every score."""

    def call() -> tuple[Tensor, ...]:
        leaves = q.detach().requires_grad_(), d.detach().requires_grad_()
        loss = score(*leaves).logsumexp(1).sum()
        return torch.autograd.grad(loss, leaves)

    return call


def peers(q: Tensor, d: Tensor, training: bool) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The published kernels that are installed."""
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    if q.device.type != "cuda":
        return found
    if importlib.util.find_spec("flash_maxsim"):
        import flash_maxsim

        name = "flash_maxsim_batched_train" if training else "flash_maxsim_batched"
        found["flash-maxsim"] = getattr(flash_maxsim, name)
    if importlib.util.find_spec("late_interaction_kernels"):
        import late_interaction_kernels

        found["late-interaction-kernels"] = late_interaction_kernels.maxsim
    return found


def unit(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return F.normalize(torch.randn(shape, device=device, dtype=torch.float32), dim=-1).to(dtype)


def scoring(device: torch.device, name: str, sizes: tuple[int, int, int, int, int]) -> Problem:
    """Scores of `Nq` queries of `T` tokens against `N` documents of `P` patches."""
    from engine.ops.max_sim import max_sim

    n_q, tokens, n_d, patches, dim = sizes
    dtype = torch.bfloat16
    q, d = unit(device, dtype, n_q, tokens, dim), unit(device, dtype, n_d, patches, dim)
    siblings: dict[str, Callable[[], Any]] = {"torch": lambda: eager(q, d, max(1, 2**29 // (n_q * tokens * patches)))}
    for peer, call in peers(q, d, False).items():
        siblings[peer] = lambda call=call: call(q, d)  # type: ignore[misc]
    return Problem(
        name, f"Nq={n_q} T={tokens} N={n_d} P={patches} D={dim}", dtype, lambda: max_sim(q, d), siblings,
        flops=2.0 * n_q * tokens * n_d * patches * dim, read_bytes=d.numel() * 2.0,
    )  # fmt: skip


def training(device: torch.device, sizes: tuple[int, int, int, int], temperature: float | None) -> Problem:
    """Forward and backward of all captions of a batch against all its images."""
    from engine.ops.max_sim import max_sim

    n, tokens, patches, dim = sizes
    dtype = torch.bfloat16
    q, d = unit(device, dtype, n, tokens, dim), unit(device, dtype, n, patches, dim)

    def ours(a: Tensor, b: Tensor) -> Tensor:
        result = max_sim(a, b, temperature=temperature)
        assert isinstance(result, Tensor)
        return result

    rivals: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"torch": eager}
    if temperature is not None:
        soft = temperature
        rivals = {"torch": lambda a, b: eager_soft(a, b, soft)}
    else:
        rivals |= peers(q, d, True)
    return Problem(
        f"training, {'hard' if temperature is None else 'soft'}", f"B={n} T={tokens} P={patches} D={dim}", dtype,
        with_gradients(ours, q, d), {name: with_gradients(call, q, d) for name, call in rivals.items()},
        flops=3 * 2.0 * n * n * tokens * patches * dim, tolerance=8e-2,
    )  # fmt: skip


def ragged(device: torch.device, sizes: tuple[int, int, int, int], temperature: float | None) -> Problem:
    """Forward and backward with packed documents of 1 to `patches` rows, against the same padded and masked."""
    from engine.ops.max_sim import max_sim
    from engine.ops.max_sim_varlen import max_sim_varlen

    n, tokens, patches, dim = sizes
    lengths = 1 + (torch.arange(n, device=device) * 7919) % patches
    kept = torch.arange(patches, device=device) < lengths[:, None]
    bounds = F.pad(lengths.cumsum(0), (1, 0))
    q, padded = unit(device, torch.bfloat16, n, tokens, dim), unit(device, torch.bfloat16, n, patches, dim)
    packed = padded[kept]

    def ours(a: Tensor, b: Tensor) -> Tensor:
        result = max_sim_varlen(a, b, d_cu_seqlens=bounds, temperature=temperature)
        assert isinstance(result, Tensor)
        return result

    def dense(a: Tensor, b: Tensor) -> Tensor:
        spread = b.new_zeros(n, patches, dim).masked_scatter(kept[..., None], b)
        result = max_sim(a, spread, d_mask=kept, temperature=temperature)
        assert isinstance(result, Tensor)
        return result

    return Problem(
        f"training, packed, {'hard' if temperature is None else 'soft'}",
        f"B={n} T={tokens} P=1..{patches} D={dim}", torch.bfloat16, with_gradients(ours, q, packed),
        {"ours, padded": with_gradients(dense, q, packed)},
        flops=3 * 2.0 * n * tokens * float(lengths.sum()) * dim, tolerance=8e-2,
    )  # fmt: skip


def contrastive(device: torch.device, sizes: tuple[int, int, int, int], temperature: float | None) -> Problem:
    """Forward and backward of the loss of all captions against all images: fused, and put together from torch's ops."""
    from engine.ops.max_sim_contrastive import max_sim_contrastive

    n, tokens, patches, dim = sizes
    dtype, scale = torch.bfloat16, 5.0
    q, d = unit(device, dtype, n, tokens, dim), unit(device, dtype, n, patches, dim)
    weights, labels = torch.full((n, tokens), 1.0 / tokens, device=device), torch.arange(n, device=device)

    def ours() -> tuple[Tensor, ...]:
        leaves = q.detach().requires_grad_(), d.detach().requires_grad_()
        loss = max_sim_contrastive(*leaves, logit_scale=scale, q_weights=weights, temperature=temperature)
        return loss, *torch.autograd.grad(loss, leaves)

    def composed() -> tuple[Tensor, ...]:
        a, b = q.detach().requires_grad_(), d.detach().requires_grad_()
        z = scale / tokens * (eager(a, b) if temperature is None else eager_soft(a, b, temperature))
        loss = (F.cross_entropy(z, labels) + F.cross_entropy(z.T, labels)) / 2
        return loss, *torch.autograd.grad(loss, (a, b))

    return Problem(
        f"contrastive loss, {'hard' if temperature is None else 'soft'}", f"B={n} T={tokens} P={patches} D={dim}",
        dtype, ours, {"torch": composed}, flops=3 * 2.0 * n * n * tokens * patches * dim, tolerance=8e-2,
    )  # fmt: skip


def codes(device: torch.device, sizes: tuple[int, int, int, int, int]) -> Problem | None:
    """int8 codes against our own bfloat16: the ratio is what codes gain."""
    from bench.gpu_cases import found
    from engine.ops.max_sim import max_sim

    int8 = found("max_sim_int8")
    if int8 is None:
        return None
    quantize = import_module("engine.ops.quantize").quantize
    n_q, tokens, n_d, patches, dim = sizes
    sides = ((n_q, tokens, dim), (n_d, patches, dim))
    q, d = (unit(device, torch.bfloat16, *sizes_of) for sizes_of in sides)
    a, b = quantize(q), quantize(d)
    return Problem(
        "int8 codes", f"Nq={n_q} T={tokens} N={n_d} P={patches} D={dim}", torch.int8, lambda: int8(a, b),
        {"our bfloat16": lambda: max_sim(q, d)}, flops=2.0 * n_q * tokens * n_d * patches * dim,
        read_bytes=float(d.numel()),
    )  # fmt: skip


def windows(device: torch.device, n: int, n_windows: int, side: int) -> Problem:
    """Window attention against torch's with a mask."""
    from engine.ops.window_attention import window_attention

    heads, dim, dtype = 12, 64, torch.bfloat16
    q = torch.randn(n, n_windows, heads, dim, device=device, dtype=dtype)
    k, v = (torch.randn(n, side * side, heads, dim, device=device, dtype=dtype) for _ in range(2))
    corners = torch.arange(n_windows, device=device) % max(1, side // 2)
    boxes = torch.stack([corners, corners, corners + side // 2, corners + side // 2], 1).to(torch.int32)
    cells = torch.arange(side * side, device=device)
    x, y = cells % side, cells // side
    seen = (x >= boxes[:, :1]) & (x < boxes[:, 2:3]) & (y >= boxes[:, 1:2]) & (y < boxes[:, 3:4])

    def masked() -> Tensor:
        parts = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*parts, attn_mask=seen).transpose(1, 2)

    return Problem(
        "window attention", f"images={n} windows={n_windows} grid={side}x{side} heads={heads} D={dim}", dtype,
        lambda: window_attention(q, k, v, boxes, grid=(side, side)), {"torch, masked": masked},
    )  # fmt: skip


def problems(device: torch.device, dry: bool) -> list[Callable[[], Problem | None]]:
    """What is timed, most important first; each is built only when its turn comes."""
    if dry:
        return [
            lambda: scoring(device, "one query", (1, 4, 3, 5, 16)),
            lambda: training(device, (3, 4, 5, 16), None),
            lambda: training(device, (3, 4, 5, 16), 0.07),
            lambda: ragged(device, (3, 4, 5, 16), None),
            lambda: contrastive(device, (3, 4, 5, 16), None),
            lambda: contrastive(device, (3, 4, 5, 16), 0.07),
            lambda: codes(device, (1, 4, 3, 5, 16)),
            lambda: windows(device, 1, 2, 4),
        ]
    return [
        lambda: scoring(device, "one query", (1, 32, 20_000, 196, 512)),
        lambda: scoring(device, "batch", (32, 77, 2048, 196, 512)),
        lambda: scoring(device, "32 queries, stationary documents", (32, 32, 10_000, 1024, 128)),
        lambda: training(device, (512, 77, 196, 512), None),
        lambda: training(device, (512, 77, 196, 512), 0.07),
        lambda: ragged(device, (512, 77, 196, 512), None),
        lambda: ragged(device, (512, 77, 196, 512), 0.07),
        lambda: contrastive(device, (512, 77, 196, 512), None),
        lambda: contrastive(device, (512, 77, 196, 512), 0.07),
        lambda: codes(device, (32, 77, 2048, 196, 512)),
        lambda: codes(device, (1, 32, 20_000, 196, 512)),
        lambda: scoring(device, "batch", (32, 32, 4096, 257, 768)),
        lambda: scoring(device, "batch", (32, 64, 1024, 576, 1024)),
        lambda: scoring(device, "batch", (32, 77, 4096, 50, 1152)),
        lambda: scoring(device, "one query", (1, 77, 4096, 1024, 768)),
        lambda: windows(device, 64, 35, 14),
        lambda: windows(device, 16, 270, 16),
    ]
