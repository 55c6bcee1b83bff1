"""What one step of a training does: rate, decay, clipping, precision, annealing, and the losses by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from engine.features import ImageFeatures, TextFeatures
from engine.heads.base import Head
from engine.heads.max_sim_head import MaxSimHead
from engine.heads.registry import HEADS
from engine.training.heads import HeadRun, train_head
from engine.training.losses import contrastive_loss
from tests.head_cases import FACTS
from tests.test_training_heads import TRAINED, config, data, head_of

__all__ = ["data"]
SIZE = 4


def test_the_temperature_of_the_max_sim_head_falls_while_it_is_trained(tmp_path, data):
    seen: list[float] = []

    def objective(head: Head, images: ImageFeatures, texts: TextFeatures) -> torch.Tensor:
        assert isinstance(head, MaxSimHead)
        seen.append(head.temperature)
        return contrastive_loss(head.scale() * head.matrix(images, texts))

    head = head_of("max_sim_head")
    train_head(head, data, config(tmp_path, steps=10), objective=objective)
    assert seen == pytest.approx([0.05 * 0.4 ** (step / 10) for step in range(10)])
    assert head.temperature == pytest.approx(0.02)


def test_every_step_is_taken_at_the_rate_of_its_own(tmp_path, data):
    settings = config(tmp_path, steps=12, warmup_steps=4, learning_rate=2e-3, weight_decay=0.0)
    run = HeadRun(head_of(), settings)
    applied = []
    for step in range(12):
        before = [weight.detach().clone() for weight in run.head.parameters()]
        rate = run.advance(*data.batch(torch.arange(SIZE)))["rate"]
        assert [group["lr"] for group in run.optimizer.param_groups] == [rate * 2e-3] * 2
        moved = max(float((a - b).detach().abs().max()) for a, b in zip(run.head.parameters(), before, strict=True))
        if step == 0:
            # The first step of Adam moves a weight by the learning rate, whatever its gradient.
            assert moved == pytest.approx(rate * 2e-3, rel=1e-2)
        applied.append(rate)
    assert applied[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert applied[4:] == pytest.approx([0.5 * (1 + math.cos(math.pi * done / 8)) for done in range(8)])


def test_the_gradients_norm_is_clipped(tmp_path, data):
    def after(clip_norm: float) -> tuple[float, float]:
        run = HeadRun(
            head_of("linear"),
            config(tmp_path, clip_norm=clip_norm),
            lambda head, images, texts: 1000 * head.matrix(images, texts).square().sum(),
        )
        told = run.advance(*data.batch(torch.arange(SIZE)))["gradient"]
        held = [weight.grad for weight in run.head.parameters() if weight.grad is not None]
        return float(torch.cat([gradient.flatten() for gradient in held]).norm()), told

    clipped, told = after(1e-3)
    whole, same = after(1e9)
    assert clipped == pytest.approx(1e-3, rel=1e-3)
    # What is told is the norm before it is clipped.
    assert whole == pytest.approx(same) == pytest.approx(told) and whole > 100


@pytest.mark.parametrize("name", TRAINED)
def test_bfloat16_computes_in_bfloat16(tmp_path, data, name):
    batch = data.batch(torch.arange(SIZE))
    exact, narrow = (
        HeadRun(head_of(name), config(tmp_path, precision=precision)).advance(*batch)["loss"]
        for precision in ("float32", "bfloat16")
    )
    assert 1e-6 < abs(narrow - exact) < 0.05 * exact


def missed(logits: list[float], right: int) -> float:
    """Cross-entropy of one choice."""
    return math.log(sum(map(math.exp, logits))) - logits[right]


def info_nce(logits: list[list[float]]) -> float:
    """Both directions of a contrastive loss, choice by choice; what is beyond the matched pairs are negatives."""
    matched = min(len(logits), len(logits[0]))
    by_image = sum(missed(logits[i], i) for i in range(matched)) / matched
    by_text = sum(missed([row[j] for row in logits], j) for j in range(matched)) / matched
    return (by_image + by_text) / 2


def within_quads(logits: list[list[float]]) -> float:
    """Which of both texts, and which of both images, of each item."""
    total = 0.0
    for item in range(SIZE):
        for own, other in ((item, item + SIZE), (item + SIZE, item)):
            total += missed([logits[own][own], logits[own][other]], 0)
            total += missed([logits[own][own], logits[other][own]], 0)
    return total / (4 * SIZE)


# Images and texts of a batch that take part: pairs alone, or with hard negatives.
SHAPES = {
    "batch": (SIZE, SIZE),
    "captions": (SIZE, 2 * SIZE),
    "images": (2 * SIZE, SIZE),
    "pairs": (2 * SIZE, 2 * SIZE),
}


@torch.no_grad()
@pytest.mark.parametrize("loss", ["quads", *SHAPES])
@pytest.mark.parametrize("name", ["max_sim_head", "linear"])
def test_losses_are_those_of_scaled_scores(tmp_path, data, name, loss):
    head = head_of(name).eval()
    head.log_scale.fill_(math.log(7.0))
    images, texts = data.batch(torch.tensor([3, 1, 8, 10]))
    logits = (7.0 * head.matrix(images, texts)).tolist()
    assert len(logits) == len(logits[0]) == 2 * SIZE
    if loss == "quads":
        wanted = within_quads(logits)
    else:
        rows, columns = SHAPES[loss]
        wanted = info_nce([row[:columns] for row in logits[:rows]])
    found = config(tmp_path, loss=loss, batch_size=SIZE).objective(head, images, texts)
    assert float(found) == pytest.approx(wanted, rel=1e-4)


@torch.no_grad()
def test_the_batch_loss_beside_quads_is_that_of_scaled_scores(tmp_path, data):
    head = head_of().eval()
    head.log_scale.fill_(math.log(7.0))
    images, texts = data.batch(torch.arange(SIZE))
    logits = (7.0 * head.matrix(images, texts)).tolist()
    wanted = within_quads(logits) + 0.5 * info_nce([row[:SIZE] for row in logits[:SIZE]])
    found = config(tmp_path, batch_weight=0.5, batch_size=SIZE).objective(head, images, texts)
    assert float(found) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("name", sorted(HEADS))
def test_matrices_decay_and_biases_and_norms_do_not(tmp_path, name):
    head = HEADS[name].build(FACTS)
    groups = HeadRun(head, config(tmp_path, weight_decay=0.3)).optimizer.param_groups
    decay = {weight: group["weight_decay"] for group in groups for weight in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(decay)
    assert set(decay) == {weight for weight in head.parameters() if weight.requires_grad}
    for module in head.modules():
        for part, weight in module.named_parameters(recurse=False):
            kept = isinstance(module, nn.LayerNorm) or part.endswith("bias") or weight.ndim < 2
            assert decay[weight] == (0.0 if kept else 0.3), (type(module).__name__, part)
    assert 0.0 in decay.values() and 0.3 in decay.values()


def test_decay_takes_from_matrices_alone(tmp_path, data):
    def trained(weight_decay: float) -> dict[str, torch.Tensor]:
        settings = config(tmp_path, weight_decay=weight_decay, learning_rate=1e-2, warmup_steps=0)
        run = HeadRun(head_of("tfglobal"), settings)
        run.advance(*data.batch(torch.arange(SIZE)))
        return {key: weight.detach() for key, weight in run.head.named_parameters()}

    first, plain = dict(head_of("tfglobal").named_parameters()), trained(0.0)
    for key, weight in trained(0.5).items():
        lost = 1e-2 * 0.5 * first[key].detach() if weight.ndim >= 2 else 0.0
        torch.testing.assert_close(weight, plain[key] - lost, rtol=1e-5, atol=1e-6)
