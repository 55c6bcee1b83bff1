"""Zero-shot figures: right for who knows the answers, chance for who does not, refused without scenes."""

from __future__ import annotations

import pytest
import torch

from engine.benchmarks.scenes_zero_shot import LABELS, zero_shot_figures
from engine.encoders.scenes import ScenesEncoder
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.engine import Engine, load
from engine.training.scenes import VOCABULARY

TINY = ScenesModelConfig(width=16, heads=2, image_layers=1, text_layers=2, stem_width=8, embed_dim=8)


# Measured on 1,000 scenes each (RESULTS.md): looks seen in training, and looks that it never showed.
SHIPPED = {
    False: {"shape": 0.963, "color": 1.0, "size": 0.999, "material": 0.985, "count": 0.988},
    True: {"shape": 0.862, "color": 1.0, "size": 0.995, "material": 0.971, "count": 0.990},
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.manual_seed(0)
    return Engine(ScenesEncoder(ScenesModel(TINY), VOCABULARY, name="scenes", device=torch.device("cpu")))


@pytest.mark.parametrize("withheld", [False, True])
def test_random_weights_are_near_chance(engine, withheld):
    figures = zero_shot_figures(engine, 150, seed=1, withheld=withheld)
    assert list(figures) == list(LABELS)
    for attribute, interval in figures.items():
        chance = 1 / len(LABELS[attribute])
        # Four standard deviations of 150 guesses.
        slack = 4 * (chance * (1 - chance) / 150) ** 0.5
        assert abs(interval.value - chance) < slack and interval.low <= interval.value <= interval.high, attribute


@pytest.mark.parametrize("withheld", [False, True])
def test_the_shipped_model_knows_its_words(withheld):
    figures = zero_shot_figures(load("scenes", device="cpu"), 150, seed=1, withheld=withheld)
    for attribute, measured in SHIPPED[withheld].items():
        assert figures[attribute].value > measured - 0.06, attribute


def test_every_label_is_a_sentence_of_known_words(engine, recwarn):
    zero_shot_figures(engine, 2, seed=1)
    assert not [warning for warning in recwarn if "unknown word" in str(warning.message)]


def test_no_scene_is_refused(engine):
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        zero_shot_figures(engine, 0, seed=1)
