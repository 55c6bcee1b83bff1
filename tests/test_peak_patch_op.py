"""PeakPatch's caption features as an operation: the published network on top, what it refuses, how it fits torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.ops.peak_patch import (
    AttentionPool,
    TokenNorm,
    peak_patch_features,
    peak_patch_pool_backward_op,
    peak_patch_pool_op,
)
from engine.ops.peak_patch_correct import peak_patch_correct
from tests.max_sim_oracle import BACKENDS, forced
from tests.peak_patch_oracle import TorchCorrection, arguments, pool_case
from tests.tolerances import assert_close

OPTIONS: list[dict[str, bool]] = [{}, {"norm": True}, {"norm": True, "dropped": True, "single": True}]


def correction_case(width: int = 16, n: int = 4, length: int = 7) -> dict[str, Tensor]:
    mask = torch.arange(length) < torch.tensor([length, 2, 5, 1])[:n, None]
    return {
        "f": nn.functional.normalize(torch.randn(n, width), dim=-1),
        "peak": torch.randn(n, length, width),
        "anchor": torch.randn(n, length, width),
        "mask": mask,
    }


def fused(module: TorchCorrection, f: Tensor, peak: Tensor, anchor: Tensor, mask: Tensor, **options: Any) -> Tensor:
    pool = AttentionPool.of(module.query, module.attention, module.norm)
    backend = options.get("backend")
    features = peak_patch_features(peak, anchor, pool, mask=mask, **options)
    return peak_patch_correct(f, module.network(features), module.log_alpha.exp(), backend=backend)


def test_the_published_network_has_its_parameters() -> None:
    assert sum(p.numel() for p in TorchCorrection().parameters()) == 4_728_833


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_published_network_is_the_same_in_torch(backend: str) -> None:
    module, case = TorchCorrection(16, 4, 12), correction_case()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.3)  # biases and norms of torch begin at 0 and 1, which hides faults
    weight = torch.randn(4, 16)
    wanted = module(**case)
    with forced(backend) as name:
        got = fused(module, **case, backend=name)
    assert_close(got, wanted, dtype=torch.float32, scale=5)
    parameters = list(module.parameters())
    for (name, _), actual, expected in zip(
        module.named_parameters(),
        torch.autograd.grad((got * weight).sum(), parameters),
        torch.autograd.grad((wanted * weight).sum(), parameters),
        strict=True,
    ):
        # Biases of the keys: zero up to rounding in torch, exactly here.
        assert_close(actual, expected, dtype=torch.float32, scale=10, what=name)


def test_hidden_states_pass_the_final_norm_inside() -> None:
    module, case = TorchCorrection(16, 4, 12), correction_case()
    final = nn.LayerNorm(16).requires_grad_(False)
    final.weight.copy_(torch.rand(16) + 0.5)
    final.bias.copy_(torch.randn(16))
    outside = {**case, "peak": final(case["peak"]), "anchor": final(case["anchor"])}
    got = fused(module, **case, norm=TokenNorm(final.weight, final.bias, final.eps))
    assert_close(got, module(**outside), dtype=torch.float32, scale=5)
    ends = case["mask"].sum(1) - 1
    single = {**case, "anchor": case["anchor"][torch.arange(4), ends]}
    assert_close(fused(module, **single, norm=TokenNorm(final.weight, final.bias, final.eps), end=ends), got)


@pytest.mark.parametrize("bias", [True, False])
def test_dropout_is_that_of_torch(bias: bool) -> None:
    attention, norm = nn.MultiheadAttention(16, 4, dropout=0.5, bias=bias, batch_first=True), nn.LayerNorm(16)
    with torch.no_grad():
        for p in attention.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    query, case = torch.randn(1, 16), correction_case()
    torch.manual_seed(5)
    attended, _ = attention(query.expand(4, 1, 16), case["peak"], case["peak"], key_padding_mask=~case["mask"])
    torch.manual_seed(5)
    pool = AttentionPool.of(query, attention, norm)
    got = peak_patch_features(case["peak"], case["anchor"], pool, mask=case["mask"], dropout=0.5)
    assert_close(got[:, 16:32], norm(attended[:, 0]), dtype=torch.float32, scale=5)
    assert not torch.equal(got, peak_patch_features(case["peak"], case["anchor"], pool, mask=case["mask"]))


def a_pool(width: int = 8, heads: int = 2) -> AttentionPool:
    return AttentionPool.of(torch.randn(1, width), nn.MultiheadAttention(width, heads), nn.LayerNorm(width))


PEAK = torch.zeros(3, 5, 8)


@pytest.mark.parametrize("change, error, message", [
    ({"peak": [1]}, TypeError, r"peak must be a torch.Tensor, got list"),
    ({"peak": torch.zeros(3, 8)}, ValueError, r"peak must have the shape \(B, T, W\), got \(3, 8\)"),
    ({"peak": PEAK.int()}, TypeError, r"peak must be one of float32, float16, bfloat16, float64, got int32"),
    ({"anchor": torch.zeros(3, 4, 8)}, ValueError,
     r"anchor must have the shape \(B, T, W\) = \(3, 5, 8\) or \(B, W\) = \(3, 8\), got \(3, 4, 8\)"),
    ({"anchor": PEAK.half()}, TypeError, r"anchor must be float32 on cpu as peak is, got float16 on cpu"),
    ({"mask": torch.ones(3, 5)}, TypeError, r"mask must be bool of shape \(B, T\) = \(3, 5\), got float32 \(3, 5\)"),
    ({"end": torch.zeros(3)}, ValueError, r"end must be int64 of shape \(B,\) = \(3,\), got float32 \(3,\)"),
    ({"end": torch.zeros(3, dtype=torch.int64, device="meta")}, ValueError,
     r"end must be on cpu as the tokens are, got meta"),
    ({"pool": None}, TypeError, r"pool must be an AttentionPool, got NoneType"),
    ({"pool": a_pool()._replace(heads=3)}, ValueError, r"pool.heads must divide W = 8, got 3"),
    ({"pool": a_pool()._replace(heads=2.0)}, ValueError, r"pool.heads must divide W = 8, got 2.0"),
    ({"pool": a_pool()._replace(query=None)}, TypeError, r"pool.query must be a torch.Tensor, got NoneType"),
    ({"pool": a_pool()._replace(norm_eps="0")}, TypeError, r"pool.norm_eps must be a number, got str"),
    ({"pool": a_pool(4)}, ValueError,
     r"pool.query must be floating of shape \(8,\) on cpu, got float32 \(1, 4\) on cpu"),
    ({"norm": TokenNorm(torch.ones(7), torch.ones(8))}, ValueError,
     r"norm's weight must be floating of shape \(8,\) on cpu, got float32 \(7,\) on cpu"),
    ({"norm": TokenNorm(torch.ones(8, requires_grad=True), torch.ones(8))}, ValueError,
     r"the norm's weight must not require a gradient .*, got one that does"),
    ({"norm": nn.LayerNorm(8)}, TypeError, r"norm must be a TokenNorm or None, got LayerNorm"),
    ({"norm": TokenNorm(torch.ones(8), torch.ones(8), None)}, TypeError, r"norm's eps must be a number, got NoneType"),
    ({"dropout": "0.1"}, TypeError, r"dropout must be a number, got str"),
    ({"dropout": True}, TypeError, r"dropout must be a number, got bool"),
    ({"dropout": float("nan")}, ValueError, r"dropout must be at least 0 and below 1, got nan"),
    ({"dropout": 1.0}, ValueError, r"dropout must be at least 0 and below 1, got 1.0"),
    ({"backend": "triton"}, ValueError, r"backend 'triton' takes CUDA tensors, got cpu"),
])  # fmt: skip
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given_arguments: dict[str, Any] = {"peak": PEAK, "anchor": PEAK, "pool": a_pool(), **change}
    peak, anchor, pool = (given_arguments.pop(name) for name in ("peak", "anchor", "pool"))
    with pytest.raises(error, match=f"^peak_patch_features: {message}$"):
        peak_patch_features(peak, anchor, pool, **given_arguments)


def test_odd_attention_modules_are_refused() -> None:
    for attention in (nn.MultiheadAttention(8, 2, kdim=4), nn.MultiheadAttention(8, 2, add_zero_attn=True)):
        with pytest.raises(ValueError, match=r"^peak_patch_features: attention must project query, keys and values"):
            AttentionPool.of(torch.randn(8), attention, nn.LayerNorm(8))


# opcheck itself looks at the .grad of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("options", OPTIONS)
def test_opcheck(backend: str, options: dict[str, bool]) -> None:
    case = pool_case(2, 3, 4, 2, **options)
    for name in ("peak", "anchor", "keys"):
        case[name].requires_grad_()
    for need in (True, False):
        torch.library.opcheck(peak_patch_pool_op, (*arguments(case), need, backend))
    pooled, attention = torch.randn(2, 5, 4), torch.randn(2, 2, 3)
    detached = [x.detach() if isinstance(x, Tensor) else x for x in arguments(case)]
    for need in (True, False):
        torch.library.opcheck(
            peak_patch_pool_backward_op, (pooled, attention, torch.rand(2, 2, 3), *detached, need, backend)
        )


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_the_op_alone_recomputes_the_attention(options: dict[str, bool]) -> None:
    case, grads = pool_case(2, 3, 4, 2, **options), []
    for need in (True, False):
        keys = case["keys"].clone().requires_grad_()
        pooled, _ = peak_patch_pool_op(*arguments({**case, "keys": keys}), need, "cpp")
        grads.append(torch.autograd.grad(pooled.square().sum(), keys)[0])
    assert torch.equal(*grads)


def test_compiles_to_one_graph() -> None:
    module, case = TorchCorrection(16, 4, 12), correction_case()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    got, wanted = compiled(module, **case), fused(module, **case)
    assert_close(got, wanted)
    weight, parameters = torch.randn(4, 16), list(module.parameters())
    for actual, expected in zip(
        torch.autograd.grad((got * weight).sum(), parameters),
        torch.autograd.grad((wanted * weight).sum(), parameters),
        strict=True,
    ):
        assert_close(actual, expected, scale=10)


def test_defaults_are_everything_and_the_last_kept() -> None:
    pool, peak, anchor = a_pool(), torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    plain = peak_patch_features(peak, anchor, pool)
    everything = torch.ones(3, 5, dtype=torch.bool)
    assert torch.equal(plain, peak_patch_features(peak, anchor, pool, mask=everything, end=torch.full((3,), 4)))
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    some = peak_patch_features(peak, anchor, pool, mask=mask)
    assert torch.equal(some[0, :8], peak[0, 1]) and torch.equal(some[1, 16:24], anchor[1, 3])
    assert (some[2, :8] == 0).all() and (some[2, 16:] == 0).all() and some[2].isfinite().all()
    assert peak_patch_features(peak.double(), anchor.double(), pool).dtype == torch.float64
    assert peak_patch_features(peak.half(), anchor.half(), pool).dtype == torch.float32
    assert peak_patch_features(peak[:, :0], anchor[:, :0], pool).shape == (3, 32)


def test_nothing_of_the_size_of_the_tokens_is_made() -> None:
    """Forward and backward to the pool's parameters over 64 MB of tokens, in a process of its own."""
    program = """
import torch
from torch import nn
from engine.ops.peak_patch import AttentionPool, TokenNorm, peak_patch_features
torch.set_num_threads(1)
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
pool = AttentionPool.of(torch.randn(64, requires_grad=True), nn.MultiheadAttention(64, 4), nn.LayerNorm(64))
norm = TokenNorm(torch.ones(64), torch.zeros(64))
tokens = torch.randn(512, 512, 64)
few = tokens[:1]
peak_patch_features(few, few, pool, norm=norm).sum().backward()
before = peak()
with torch.no_grad(): peak_patch_features(tokens, tokens, pool, norm=norm)
print(peak() - before)
peak_patch_features(tokens, tokens, pool, norm=norm).square().sum().backward()
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=600, capture_output=True, text=True)
    forward, both = map(float, done.stdout.split())
    assert forward < 8  # pooled vectors and features
    assert both < 24  # the attention is 4 MB and its copies, pooled vectors 1 MB; tokens are 64 MB
