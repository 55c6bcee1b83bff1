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


def by_loops(full: torch.Tensor, negatives: str, group: int) -> torch.Tensor:
    """The loss of all logits ``(2B, 2B)``, pair by pair."""
    size = len(full) // 2
    terms = []
    for i in range(size):
        first = i // group * group
        near = range(first, first + group)
        choices = [full[i, j] for j in near] + ([full[i, size + i]] if negatives == "captions" else [])
        found = torch.logsumexp(torch.stack(choices), 0) + torch.logsumexp(torch.stack([full[j, i] for j in near]), 0)
        term = (found - 2 * full[i, i]) / 2
        if negatives == "quads":
            n = size + i
            quad = torch.stack([full[i, i], full[i, n], full[n, i], full[n, n]]).view(2, 2)
            rows = torch.logsumexp(quad, 1).sum() + torch.logsumexp(quad, 0).sum()
            term = term + (rows - 2 * quad.trace()) / 4
        terms.append(term)
    return torch.stack(terms).mean()


@pytest.mark.parametrize("negatives", NEGATIVES)
@pytest.mark.parametrize("group", [2, 3, 6])
def test_the_loss_is_that_of_plain_loops(negatives, group):
    generator = torch.Generator().manual_seed(3)
    full = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    objective = NegativesObjective(negatives, group)
    image_rows, text_rows = objective.rows(6)
    assert len(image_rows) == 6 * (group + {"in_batch": 0, "captions": 1, "quads": 3}[negatives])
    found = objective.loss(full[image_rows, text_rows], 6)
    torch.testing.assert_close(found, by_loops(full, negatives, group))


@pytest.mark.parametrize("name", ["linear", "max_sim_head", "tfglobal", "tflocal"])
@pytest.mark.parametrize("negatives", NEGATIVES)
def test_heads_score_the_pairs_that_are_asked_for(name, negatives):
    head = HEADS[name].build(FACTS, seed=1).eval()
    images, texts = make_images(8), make_texts(8)
    found = NegativesObjective(negatives, 2)(head, images, texts)
    whole = head.scale() * head.matrix(images, texts)
    torch.testing.assert_close(found, by_loops(whole, negatives, 2), rtol=1e-4, atol=1e-5)
    found.backward()
    assert any(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in head.parameters())


@pytest.mark.parametrize("negatives", NEGATIVES)
def test_a_whole_encoder_encodes_what_is_asked_for(negatives):
    encoder = load_scenes()
    whole = WholeEncoder(encoder).eval()
    data = PixelQuads(tuple(ScenesQuads(items=1).draw()), encoder.tokenizer)
    pixels, captions = data.batch(torch.arange(4))
    with torch.no_grad():
        found = NegativesObjective(negatives, 2).of_encoder(whole, pixels, captions)
        full = whole.scale() * whole(pixels, captions)
    torch.testing.assert_close(found, by_loops(full, negatives, 2), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="negatives must be one of 'in_batch', 'captions', 'quads', got 'hard'"):
        NegativesObjective("hard")
    with pytest.raises(ValueError, match="group must be at least 2, got 1"):
        NegativesObjective("quads", 1)
    with pytest.raises(ValueError, match="multiple of 4 items, got 6"):
        NegativesObjective("quads", 4).rows(6)
