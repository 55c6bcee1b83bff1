"""Scorers with a trained head: the head's numbers, where it comes from, what it explains and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.heads.base import Head
from engine.heads.registry import HEADS
from engine.scorers.linear import LinearScorer
from engine.scorers.registry import SCORERS
from engine.scorers.tflocal import TFLocalScorer
from tests.head_cases import FACTS, make_images, make_texts

NAMES = ("linear", "tfglobal", "tflocal")


def built(name: str) -> Head:
    return HEADS[name].build(FACTS).eval()


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_the_heads_without_gradients(name):
    head = built(name)
    scorer = SCORERS[name](head)
    images, texts = make_images(3), make_texts(4)
    scores = scorer.matrix(images, texts)
    assert torch.equal(scores, head.matrix(images, texts)) and not scores.requires_grad
    pairs = scorer.pairs(images, texts[:3])
    torch.testing.assert_close(pairs, scores.diagonal(), rtol=1e-5, atol=1e-5)
    assert not pairs.requires_grad and scorer.needs() == head.needs()


@pytest.mark.parametrize("name", NAMES)
def test_the_head_may_come_from_a_file_that_is_read_again_when_it_changes(name, tmp_path):
    path = tmp_path / "head.safetensors"
    head = built(name)
    head.save(path)
    scorer = SCORERS[name](str(path))
    images, texts = make_images(2), make_texts(2)
    assert torch.equal(scorer.matrix(images, texts), head.matrix(images, texts))
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    head.save(path)
    assert torch.equal(scorer.matrix(images, texts), head.matrix(images, texts))


@pytest.mark.parametrize("name", ["linear", "tfglobal"])
def test_scorers_without_parts_show_the_whole(name):
    scorer = SCORERS[name](built(name))
    images, texts = make_images(1), make_texts(1)
    (match,) = scorer.matches(images, texts)
    assert match.text == "caption 0" and match.box == (0, 0, 30, 20)
    assert match.score * match.weight == pytest.approx(float(scorer.pairs(images, texts)))


def test_tflocal_shows_where_words_look():
    head = built("tflocal")
    images, texts = make_images(1), make_texts(4)[3]
    matches = TFLocalScorer(head).matches(images, texts)
    assert [match.text for match in matches] == ["word31", "word32", "word33", "word34"]
    attention = head.attention(images, texts)[0, 1:5]
    assert [match.score for match in matches] == pytest.approx(attention.max(dim=1).values.tolist())
    for match, place in zip(matches, attention.argmax(dim=1).tolist(), strict=True):
        row, column = divmod(place, 3)
        assert match.box == (10 * column, 10 * row, 10 * column + 10, 10 * row + 10) and match.weight == 0
    bare = replace(images, patches=None, grid=None, aligned=False, tap="")
    assert TFLocalScorer(head).matches(bare, texts) == matches


@pytest.mark.parametrize("name", NAMES)
def test_strangers_are_refused(name, tmp_path):
    images, texts = (replace(features, fingerprint="x") for features in (make_images(1), make_texts(1)))
    with pytest.raises(
        ValueError, match=f"{name}: the images must come from the encoder the head was trained on, tiny"
    ):
        SCORERS[name](built(name)).matrix(images, texts)
    other = "tflocal" if name == "linear" else "linear"
    with pytest.raises(ValueError, match=f"{name}: head must be a {name}, got a {other}"):
        SCORERS[name](built(other)).needs()
    built(other).save(tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match=f"{name}: head must be a {name}, got a {other}"):
        SCORERS[name](str(tmp_path / "head.safetensors")).matrix(make_images(1), make_texts(1))


def test_a_head_elsewhere_is_refused():
    head = built("linear").to("meta")
    with pytest.raises(ValueError, match="linear: the head must be on cpu, where the features are, got meta; move it"):
        LinearScorer(head).matrix(make_images(1), make_texts(1))
