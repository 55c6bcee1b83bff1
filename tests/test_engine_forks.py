"""The engine in a forked child, after threads worked for the parent: torch's own pool would hang there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from PIL import Image

from engine.engine import load
from engine.forks import is_forked
from engine.scenes.items import controlled_items
from tests.index_faults import in_child

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_forked_child_scores_encodes_explains_and_classifies(threads: None):
    peaksim = load("scenes", device="cpu")
    (item,) = controlled_items("color", 1, seed=3, split="held_out")
    images, texts = [Image.fromarray(pixels) for pixels in item.images()] * 16, list(item.captions)

    def answers() -> list[torch.Tensor]:
        return [
            peaksim.score(images, texts),
            peaksim.score(images, texts, scorer="sgi"),
            peaksim.score(peaksim.encode_images(images, scorer="max_sim"), texts, scorer="max_sim"),
            peaksim.classify(images, ["circle", "square"]),
            torch.tensor(peaksim.explain(images[0], texts[0]).total),
        ]

    wanted = answers()

    def work() -> None:
        assert is_forked() and torch.get_num_threads() == 2
        for found, own in zip(answers(), wanted, strict=True):
            torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-5)
        assert torch.get_num_threads() == 2

    assert in_child(work, timeout_s=60) == 0
