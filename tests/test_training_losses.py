"""The losses of heads against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from engine.training.losses import contrastive_loss, quad_loss


def log_share(values: list[float], own: int) -> float:
    return values[own] - math.log(sum(math.exp(value) for value in values))


@pytest.mark.parametrize("shape", [(3, 3), (3, 6), (6, 3), (6, 6), (1, 1), (2, 3)])
def test_contrastive_loss_is_the_loop(shape):
    logits = torch.randn(shape)
    table = logits.tolist()
    matched = min(shape)
    by_image = -sum(log_share(table[i], i) for i in range(matched)) / matched
    by_text = -sum(log_share([row[j] for row in table], j) for j in range(matched)) / matched
    assert float(contrastive_loss(logits)) == pytest.approx((by_image + by_text) / 2, abs=1e-6)


def test_quad_loss_is_the_loop():
    logits = torch.randn(5, 2, 2)
    total = 0.0
    for quad in logits.tolist():
        for own in range(2):
            total -= log_share(quad[own], own) + log_share([quad[0][own], quad[1][own]], own)
    assert float(quad_loss(logits)) == pytest.approx(total / 20, abs=1e-6)


def test_losses_fall_when_what_belongs_together_rises():
    logits = torch.randn(4, 2, 2)
    assert quad_loss(logits + 2 * torch.eye(2)) < quad_loss(logits)
    logits = torch.randn(4, 8)
    assert contrastive_loss(logits + 2 * torch.eye(8)[:4]) < contrastive_loss(logits)


def test_hard_negative_captions_raise_the_images_term_alone():
    logits = torch.zeros(2, 4)
    logits[:, 2:] = 5.0
    assert float(contrastive_loss(logits) - contrastive_loss(logits[:, :2])) == pytest.approx(
        (math.log(2 + 2 * math.exp(5)) - math.log(2)) / 2, abs=1e-5
    )


@pytest.mark.parametrize(
    ("loss", "shape", "message"),
    [
        (contrastive_loss, (3,), r"contrastive_loss: logits must have shape \(n_images, n_texts\), got \(3,\)"),
        (contrastive_loss, (0, 3), r"got \(0, 3\)"),
        (quad_loss, (4, 2, 3), r"quad_loss: logits must have shape \(B, 2, 2\), got \(4, 2, 3\)"),
    ],
)
def test_other_shapes_are_refused(loss, shape, message):
    with pytest.raises(ValueError, match=message):
        loss(torch.zeros(shape))
