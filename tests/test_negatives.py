"""The loss of the comparison of negatives: against plain loops, for heads and for a whole encoder."""

from __future__ import annotations

import pytest
import torch

from engine.encoders.scenes import load_scenes
from engine.heads.registry import HEADS
from engine.training.finetune import PixelQuads, WholeEncoder
from engine.training.head_data import ScenesQuads
from engine.training.negatives import NEGATIVES, NegativesObjective
from tests.head_cases import FACTS, make_images, make_texts


def by_loops(full: torch.Tensor, objective: NegativesObjective) -> torch.Tensor:
    """The loss of all logits ``(2B, 2B)``, pair by pair."""
    size, group, kind = len(full) // 2, objective.group, objective.negatives

    def missed(right: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(torch.stack([right, *others]), 0) - right

    terms = []
    for i in range(size):
        n, near = size + i, [j for j in range(i // group * group, i // group * group + group) if j != i]
        term = full.new_zeros(())
        if kind == "captions":
            term = missed(full[i, i], full[i, n])
        if kind == "quads":
            by_image = missed(full[i, i], full[i, n]) + missed(full[n, n], full[n, i])
            term = (by_image + missed(full[i, i], full[n, i]) + missed(full[n, n], full[i, n])) / 4
        weight = 1.0 if kind == "in_batch" else objective.batch_weight
        if weight:
            by_image, by_text = (missed(m[i, i], *(m[i, j] for j in near)) for m in (full, full.T))
            term = term + weight * (by_image + by_text) / 2
        terms.append(term)
    return torch.stack(terms).mean()


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("negatives", NEGATIVES)
@pytest.mark.parametrize("group", [2, 3, 6])
def test_the_loss_is_that_of_plain_loops(negatives, group, weight):
    generator = torch.Generator().manual_seed(3)
    full = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    objective = NegativesObjective(negatives, group, weight)
    image_rows, text_rows = objective.rows(6)
    pairs = {"in_batch": group, "captions": 2, "quads": 4}[negatives] + (
        group if weight and negatives != "in_batch" else 0
    )
    assert len(image_rows) == len(text_rows) == 6 * pairs
    torch.testing.assert_close(objective.loss(full[image_rows, text_rows], 6), by_loops(full, objective))


@pytest.mark.parametrize("name", ["linear", "max_sim_head", "tfglobal", "tflocal"])
@pytest.mark.parametrize("negatives", NEGATIVES)
def test_heads_score_the_pairs_that_are_asked_for(name, negatives):
    head = HEADS[name].build(FACTS, seed=1).eval()
    images, texts = make_images(8), make_texts(8)
    objective = NegativesObjective(negatives, 2, 0.5)
    found = objective(head, images, texts)
    whole = head.scale() * head.matrix(images, texts)
    torch.testing.assert_close(found, by_loops(whole, objective), rtol=1e-4, atol=1e-5)
    found.backward()
    assert any(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in head.parameters())


@pytest.mark.parametrize("negatives", NEGATIVES)
def test_a_whole_encoder_encodes_what_is_asked_for(negatives):
    encoder = load_scenes()
    whole = WholeEncoder(encoder).eval()
    data = PixelQuads(tuple(ScenesQuads(items=1).draw()), encoder.tokenizer)
    pixels, captions = data.batch(torch.arange(4))
    objective = NegativesObjective(negatives, 2)
    with torch.no_grad():
        found = objective.of_encoder(whole, pixels, captions)
        full = whole.scale() * whole(pixels, captions)
    torch.testing.assert_close(found, by_loops(full, objective), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="negatives must be one of 'in_batch', 'captions', 'quads', got 'hard'"):
        NegativesObjective("hard")
    with pytest.raises(ValueError, match="group must be at least 2 and batch_weight at least 0, got 1 and 0"):
        NegativesObjective("quads", 1)
    with pytest.raises(ValueError, match="multiple of 4 items, got 6"):
        NegativesObjective("quads", 4, 1.0).rows(6)
    assert len(NegativesObjective("quads", 4).rows(6)[0]) == 24
