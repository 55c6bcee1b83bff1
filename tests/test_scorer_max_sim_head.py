"""The scorer of the max-sim head: the head's numbers, soft or hard, its matches, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from engine.features import ImageFeatures, TextFeatures
from engine.heads.max_sim_head import MaxSimHead, MaxSimHeadConfig
from engine.scorers.max_sim_head import MaxSimHeadScorer
from engine.scorers.registry import get_scorer
from tests.head_cases import FACTS, make_images, make_texts


@pytest.fixture
def head() -> MaxSimHead:
    return MaxSimHead.build(FACTS, MaxSimHeadConfig(width=16, dim=8, heads=2, final_temperature=0.05)).eval()


def loop(head: MaxSimHead, images: ImageFeatures, texts: TextFeatures, temperature: float | None) -> torch.Tensor:
    """Scores of all pairs, one word and one patch after the other."""
    d, (q, gates, words) = head.encode_images(images), head.encode_texts(texts)
    rows = []
    for i in range(len(images)):
        row = []
        for j in range(len(texts)):
            total = 0.0
            for u in words[j].nonzero().flatten().tolist():
                found = [float(q[j, u] @ d[i, p]) for p in range(d.shape[1])]
                best = max(found)
                if temperature is not None:
                    best = temperature * math.log(sum(math.exp(value / temperature) for value in found))
                total += float(gates[j, u]) * best
            row.append(total)
        rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize("maximum", ["soft", "hard"])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_scores_are_the_loop(head, maximum, backend):
    images, texts = make_images(3), make_texts(4)
    scorer = MaxSimHeadScorer(head, maximum=maximum, backend=backend)
    with torch.no_grad():
        expected = loop(head, images, texts, 0.05 if maximum == "soft" else None)
    scores = scorer.matrix(images, texts)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scorer.pairs(images, texts[:3]), scores.diagonal(), rtol=1e-5, atol=1e-6)
    assert not scores.requires_grad


def test_soft_is_what_the_head_was_trained_with(head):
    images, texts = make_images(3), make_texts(4)
    torch.testing.assert_close(MaxSimHeadScorer(head).matrix(images, texts), head.matrix(images, texts))


def test_vectors_gates_and_masks_are_as_an_index_needs_them(head):
    d, (q, gates, words) = head.encode_images(make_images(3)), head.encode_texts(make_texts(4))
    assert d.shape == (3, 6, 8) and q.shape == (4, 6, 8)
    torch.testing.assert_close(d.norm(dim=-1), torch.ones(3, 6))
    torch.testing.assert_close(gates.sum(dim=1), torch.ones(4))
    assert bool((gates[~words] == 0).all())
    assert words.sum(dim=1).tolist() == [1, 2, 3, 4]


def test_a_caption_without_words_is_asked_by_its_start_and_end(head):
    texts = make_texts(1)
    texts = replace(texts, token_mask=torch.zeros_like(texts.token_mask))
    score = MaxSimHeadScorer(head).matrix(make_images(2), texts)
    assert bool(score.isfinite().all())


def test_padding_changes_nothing(head):
    texts = make_texts(2)
    noise = {k: torch.where(texts.attention_mask[..., None], v, 100.0) for k, v in texts.hidden.items()}
    scorer, images = MaxSimHeadScorer(head), make_images(2)
    torch.testing.assert_close(scorer.matrix(images, replace(texts, hidden=noise)), scorer.matrix(images, texts))


def test_words_look_at_each_other(head):
    texts = make_texts(1, seed=5)
    other = {k: v.clone() for k, v in texts.hidden.items()}
    other[2][0, 0, :3] += 3
    changed = head.encode_texts(replace(texts, hidden=other))[0]
    assert not torch.allclose(changed[0, 1], head.encode_texts(texts)[0][0, 1])


def test_matches_name_words_and_patches_and_add_up_to_the_hard_score(head):
    images, texts = make_images(1), make_texts(4)[3]
    scorer = MaxSimHeadScorer(head, maximum="hard")
    matches = scorer.matches(images, texts)
    assert [match.text for match in matches] == ["word31", "word32", "word33", "word34"]
    total = sum(match.score * match.weight for match in matches)
    assert total == pytest.approx(float(scorer.pairs(images, texts)), abs=1e-6)
    cells = {(10 * column, 10 * row, 10 * column + 10, 10 * row + 10) for row in range(2) for column in range(3)}
    assert {match.box for match in matches} <= cells
    # Image features without patches have no grid of their own: the head knows it.
    bare = replace(images, patches=None, grid=None, aligned=False, tap="")
    assert scorer.matches(bare, texts) == matches


def test_the_head_may_come_from_a_file(head, tmp_path):
    path = tmp_path / "head.safetensors"
    head.save(path)
    images, texts = make_images(3), make_texts(3)
    scorer = MaxSimHeadScorer(str(path))
    assert scorer.needs() == head.needs()
    assert torch.equal(scorer.matrix(images, texts), MaxSimHeadScorer(head).matrix(images, texts))
    other = MaxSimHead.build(FACTS, head.config, seed=1).eval()
    other.save(path)
    assert torch.equal(scorer.matrix(images, texts), MaxSimHeadScorer(other).matrix(images, texts))


def test_what_does_not_fit_is_refused(head, tmp_path):
    images, texts = make_images(1), make_texts(1)
    with pytest.raises(ValueError, match=r"max_sim_head: the images must come from the encoder the head was trained"):
        MaxSimHeadScorer(head).matrix(replace(images, fingerprint="x"), replace(texts, fingerprint="x"))
    with pytest.raises(ValueError, match="max_sim_head: needs image layer 1, text layer 2, which the features"):
        MaxSimHeadScorer(head).matrix(replace(images, hidden={2: images.hidden[2]}), replace(texts, hidden={}))
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors is missing"):
        MaxSimHeadScorer(str(tmp_path / "none.safetensors")).needs()
    with pytest.raises(ValueError, match="maximum must be one of 'soft', 'hard', got 'top'"):
        MaxSimHeadScorer(head, maximum="top")
    with pytest.raises(ValueError, match="backend must be one of"):
        MaxSimHeadScorer(head, backend="x")


def test_the_registry_has_it():
    assert get_scorer("max_sim_head") == MaxSimHeadScorer()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "width must be a multiple of heads, got 128 and 5"),
        ({"final_temperature": 0.5}, "temperatures must be above 0 and fall, got 0.05 to 0.5"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(MaxSimHeadConfig(), **change)


def test_the_temperature_falls_geometrically():
    head = MaxSimHead.build(FACTS, MaxSimHeadConfig(temperature=0.1, final_temperature=0.001))
    found = []
    for share in (-1.0, 0.0, 0.5, 1.0, 2.0):
        head.anneal(share)
        found.append(head.temperature)
    assert found == pytest.approx([0.1, 0.1, 0.01, 0.001, 0.001])
