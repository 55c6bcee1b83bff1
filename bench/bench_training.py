"""A training step on the max-sim contrastive loss, fused against einsum: `pytest -q -s bench/bench_training.py`.

A step is a projection of frozen tokens and patches, the loss and the whole backward. Loss and gradients of both are
checked against float64 first. The peak of resident memory is that of the loss and its backward in a process of its own,
which does nothing else; it must be a quarter of einsum's or less.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from bench.paired import Paired
from bench.peak_memory import peak_mib
from engine.ops.max_sim_contrastive import max_sim_contrastive

# Items a side, tokens, patches; widths of the frozen features (ViT-B/32) and of the shared space.
B, T, P, WIDTHS, D = 64, 32, 64, (512, 768), 128
LOGIT_SCALE = 3.0
KINDS = {"hard": None, "soft": 0.1}
MOST_MEMORY = 1 / 4
Loss = Callable[[Tensor, Tensor, "float | None"], Tensor]


def fused(q: Tensor, d: Tensor, temperature: float | None) -> Tensor:
    return max_sim_contrastive(q, d, logit_scale=LOGIT_SCALE, temperature=temperature)


def einsum(q: Tensor, d: Tensor, temperature: float | None) -> Tensor:
    sims = torch.einsum("iud,jtd->ijut", q, d)
    best = sims.amax(-1) if temperature is None else temperature * (sims / temperature).logsumexp(-1)
    logits = LOGIT_SCALE * best.sum(-1)
    target = torch.arange(len(logits))
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2


LOSSES: dict[str, Loss] = {"fused": fused, "einsum": einsum}


def leaves() -> tuple[Tensor, Tensor]:
    """Unit tokens and patches that want gradients."""
    make = torch.Generator().manual_seed(7)
    rows = (normalize(torch.randn(B, length, D, generator=make), dim=-1) for length in (T, P))
    q, d = (x.requires_grad_() for x in rows)
    return q, d


def gradients(loss: Loss, q: Tensor, d: Tensor, temperature: float | None) -> tuple[Tensor, ...]:
    value = loss(q, d, temperature)
    return (value.detach(), *torch.autograd.grad(value, (q, d)))


def peak_in_child(name: str, kind: str) -> float:
    """The peak of one loss with its backward, in MiB, in a process that does nothing else."""
    call = [sys.executable, "-m", "bench.bench_training", name, kind, str(torch.get_num_threads())]
    done = subprocess.run(call, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    return float(done.stdout)


def training_step(loss: Loss, temperature: float | None) -> Callable[[], tuple[Tensor, ...]]:
    """Projections of frozen features, the loss, and gradients of the projections."""
    make = torch.Generator().manual_seed(5)
    features = [torch.randn(B, length, width, generator=make) for length, width in zip((T, P), WIDTHS, strict=True)]
    weights = [(torch.randn(width, D, generator=make) / width**0.5).requires_grad_() for width in WIDTHS]

    def step() -> tuple[Tensor, ...]:
        q, d = (normalize(x @ weight, dim=-1) for x, weight in zip(features, weights, strict=True))
        value = loss(q, d, temperature)
        return (value.detach(), *torch.autograd.grad(value, weights))

    return step


@pytest.mark.parametrize("kind", KINDS)
def bench_training(paired: Paired, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    temperature = KINDS[kind]
    q, d = leaves()
    exact = [x.detach().double().requires_grad_() for x in (q, d)]
    wanted = gradients(einsum, *exact, temperature)
    for loss in LOSSES.values():
        check(gradients(loss, q, d, temperature), wanted)
    step = {name: training_step(loss, temperature) for name, loss in LOSSES.items()}
    reference = step["einsum"]()
    case = f"B {B} T {T} P {P} D {D} {kind}"
    paired(
        "training step",
        case,
        step["fused"],
        {"einsum": step["einsum"]},
        expected=lambda found: check(found, reference),
    )
    peaks = {name: peak_in_child(name, kind) for name in LOSSES}
    paired.benchmark.extra_info["peak_mib"] = peaks
    with capsys.disabled():
        print(f"\n{case}: peak of loss and backward {peaks['fused']:.1f} MiB, einsum {peaks['einsum']:.1f} MiB")
    assert peaks["fused"] <= MOST_MEMORY * peaks["einsum"], peaks


def check(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Few tokens may find another winner where rounding makes a tie; nearly all of the gradient is there."""
    torch.testing.assert_close(found[0].double(), wanted[0].double(), rtol=1e-4, atol=1e-4)
    for actual, expected in zip(found[1:], wanted[1:], strict=True):
        error = (actual.double() - expected.double()).norm() / expected.double().norm()
        assert error < 1e-3, error


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    leaf = leaves()
    chosen, heat = LOSSES[sys.argv[1]], KINDS[sys.argv[2]]
    gradients(chosen, *leaf, heat)  # what is made once is not part of it
    print(peak_mib(lambda: gradients(chosen, *leaf, heat)))
