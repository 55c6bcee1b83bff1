"""A step of the contrastive loss against torch, in turn: `pytest bench/bench_max_sim_contrastive.py` prints the ratios.

Both losses and gradients are checked against float64 before anything is timed; the peaks of memory stand in
`extra_info`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.bench_max_sim_backward import check, inputs, words
from bench.paired import Paired
from bench.peak_memory import peak_mib
from engine.ops.max_sim import max_sim
from engine.ops.max_sim_contrastive import max_sim_contrastive

# items a side, tokens, patches, D
SHAPES = [(64, 32, 49, 512), (128, 32, 49, 128), (128, 32, 49, 512)]
LOGIT_SCALE = 3.0
Loss = Callable[[Tensor, Tensor, "float | None", bool], Tensor]


def ours(q: Tensor, d: Tensor, temperature: float | None, symmetric: bool) -> Tensor:
    return max_sim_contrastive(q, d, logit_scale=LOGIT_SCALE, temperature=temperature, symmetric=symmetric)


def torch_composition(q: Tensor, d: Tensor, temperature: float | None, symmetric: bool) -> Tensor:
    """What one writes in torch: one large product, maxima, sums, two cross-entropies."""
    sims = (q.flatten(0, 1) @ d.flatten(0, 1).T).view(*q.shape[:2], *d.shape[:2])

    def scores(axis: int) -> Tensor:
        if temperature is None:
            return sims.amax(axis).float().sum(1 if axis == 3 else 2)
        return (temperature * (sims.float() / temperature).logsumexp(axis)).sum(1 if axis == 3 else 2)

    ahead = scores(3)
    return losses(ahead, scores(1) if symmetric else ahead)


def losses(ahead: Tensor, back: Tensor) -> Tensor:
    target = torch.arange(ahead.shape[0])
    return (cross_entropy(LOGIT_SCALE * ahead, target) + cross_entropy(LOGIT_SCALE * back.T, target)) / 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("symmetric", [False, True], ids=["one way", "symmetric"])
@pytest.mark.parametrize("temperature", [None, 0.1], ids=["hard", "soft"])
def bench_max_sim_contrastive(
    paired: Paired, shape: tuple[int, int, int, int], symmetric: bool, temperature: float | None
) -> None:
    """Forward and backward in float32."""
    q, d, _ = inputs(shape, torch.float32)
    exact = [x.detach().double().requires_grad_() for x in (q, d)]
    out = max_sim(*exact, temperature=temperature, symmetric=True, backend="reference")
    wanted_loss = losses(out.scores, out.reverse_scores if symmetric else out.scores)
    wanted = torch.autograd.grad(wanted_loss, exact)

    def step(implementation: Loss) -> tuple[Tensor, ...]:
        loss = implementation(q, d, temperature, symmetric)
        return loss, *torch.autograd.grad(loss, (q, d))

    def check_step(result: tuple[Tensor, ...]) -> None:
        torch.testing.assert_close(result[0].double(), wanted_loss, rtol=1e-4, atol=1e-4)
        check(result[1:], wanted)

    paired.benchmark.extra_info["step_peak_mib"] = {
        "ours": peak_mib(lambda: step(ours)),
        "torch": peak_mib(lambda: step(torch_composition)),
    }
    paired(
        "max_sim_contrastive",
        f"{'hard' if temperature is None else 'soft'}, {'symmetric' if symmetric else 'one way'}, {words(shape)}",
        lambda: step(ours),
        {"torch": lambda: step(torch_composition)},
        expected=check_step,
    )
