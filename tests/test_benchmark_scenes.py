"""The controlled benchmark: what those who know everything, nothing and the opposite get; features shared."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from engine.benchmarks.scenes import (
    STANDARD_SCORERS,
    ScenesBenchmark,
    ScenesReport,
    evaluate,
    retrieval_figures,
    score_categories,
    score_items,
)
from engine.benchmarks.shared_features import features_for, shared_needs
from engine.crops import crop_grid, crops
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.engine import Engine
from engine.metrics import group_scores
from engine.scenes.items import CATEGORIES, controlled_items
from engine.scenes.negation import retrieval_items
from engine.scorers.max_sim import MaxSim
from engine.scorers.registry import get_scorer
from engine.scorers.sgi import SGI
from tests.fake_encoder import FakeEncoder
from tests.keyed_encoder import constant, keyed
from tests.tolerances import assert_close

GLOBAL = {"global": get_scorer("global")}
# FakeEncoder cuts captions at its short context; that is no matter of these tests.
LONG = 48


def fake() -> Engine:
    return Engine(FakeEncoder(context_length=LONG), segmenter="rules")


def keys_of(benchmark: ScenesBenchmark, *, swapped: bool = False) -> dict[bytes, list[str]]:
    """Each picture of the benchmark with its own caption, or with the other one."""
    return {
        Image.fromarray(pixels).tobytes(): [item.captions[1 - side if swapped else side]]
        for category in benchmark.categories
        for item in controlled_items(category, benchmark.items, seed=benchmark.seed, split=benchmark.split)
        for side, pixels in enumerate(item.images())
    }


@pytest.mark.parametrize("split", ["held_out", "in_domain", "shifted"])
def test_the_oracle_gets_everything(split: str):
    benchmark = ScenesBenchmark(items=4, split=split)
    report = evaluate(keyed(keys_of(benchmark)), GLOBAL, benchmark)
    assert [result.category for result in report.results] == list(CATEGORIES)
    for result in report.results:
        assert (result.group.value, result.text.value, result.image.value) == (1, 1, 1)
        assert result.tie_rate == 0 and result.margin > 0.1 and result.items == 4
        assert result.group.low < 1


def test_the_opposite_of_the_oracle_gets_nothing():
    benchmark = ScenesBenchmark(items=6, categories=("color", "position"))
    report = evaluate(keyed(keys_of(benchmark, swapped=True)), GLOBAL, benchmark)
    for result in report.results:
        assert (result.group.value, result.text.value, result.image.value) == (0, 0, 0)
        assert result.tie_rate == 0 and result.margin < -0.1


def test_a_constant_gets_nothing_for_ties_are_no_wins():
    report = evaluate(constant(), GLOBAL, ScenesBenchmark(items=6, categories=("size",)))
    (result,) = report.results
    assert (result.group.value, result.text.value, result.image.value) == (0, 0, 0)
    assert result.tie_rate == 1 and result.margin == 0


def test_chance_is_a_sixth_and_a_quarter():
    report = evaluate(keyed(), GLOBAL, ScenesBenchmark(items=150, categories=("position",)))
    (result,) = report.results
    assert result.group.value == pytest.approx(1 / 6, abs=0.08)
    assert result.text.value == pytest.approx(1 / 4, abs=0.09)
    assert result.image.value == pytest.approx(1 / 4, abs=0.09)
    assert result.group.low < 1 / 6 < result.group.high


def test_scores_are_those_of_the_engine():
    peaksim = fake()
    benchmark = ScenesBenchmark(items=2, categories=("color",))
    (part,) = score_categories(peaksim, STANDARD_SCORERS, benchmark)
    assert list(part.scores) == list(STANDARD_SCORERS) and part.segmenter == "rules"
    for name, scorer in STANDARD_SCORERS.items():
        for row, item in enumerate(part.items):
            pictures = [Image.fromarray(pixels) for pixels in item.images()]
            alone = peaksim.score(pictures, item.captions, scorer=scorer)
            assert_close(part.scores[name][row], alone)
        assert_close(score_items(peaksim, part.items, scorer)[0], part.scores[name])
    report = evaluate(peaksim, STANDARD_SCORERS, benchmark)
    for name, scores in part.scores.items():
        assert report.result(name, "color").group.value == group_scores(scores).group.mean()


class Unasked:
    """A segmenter that must not be asked."""

    name = "unasked"

    def segment(self, captions):
        raise AssertionError(f"asked to split {captions}")


def test_given_segments_take_the_segmenters_place():
    benchmark = ScenesBenchmark(items=2, categories=("quantity",), segments="oracle")
    peaksim = Engine(FakeEncoder(context_length=LONG), segmenter=Unasked())
    report = evaluate(peaksim, {"sgi": SGI()}, benchmark)
    assert report.segmenter == "oracle"
    item = controlled_items("quantity", 2, seed=benchmark.seed)[0]
    given = peaksim.encode_texts(item.captions, scorer=SGI(), segments=item.segments)
    picture = Image.fromarray(item.images()[0])
    (part,) = score_categories(peaksim, {"sgi": SGI()}, benchmark)
    assert_close(part.scores["sgi"][0, 0], peaksim.score(picture, given, scorer=SGI())[0])


def test_a_category_does_not_change_with_the_others():
    alone = evaluate(fake(), GLOBAL, ScenesBenchmark(items=4, categories=("size",)))
    among = evaluate(fake(), GLOBAL, ScenesBenchmark(items=4, categories=("color", "size")))
    assert alone.result("global", "size") == among.result("global", "size")


def test_progress_goes_from_nothing_to_all():
    told: list[tuple[str, int, int]] = []
    evaluate(
        fake(),
        STANDARD_SCORERS,
        ScenesBenchmark(items=2, categories=("color", "size")),
        progress=lambda what, done, total: told.append((what, done, total)),
    )
    # Two categories, two crop plans, four pictures each.
    assert {total for _, _, total in told} == {16}
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told) and told[-1][1] == 16
    assert told[0][0] == "color: global, max_sim, sgi rescaled"


def test_report_survives_json_and_prints_every_cell():
    benchmark = ScenesBenchmark(items=3, categories=("color", "position"))
    report = evaluate(fake(), STANDARD_SCORERS, benchmark)
    assert ScenesReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    lines = report.to_markdown().splitlines()
    assert lines[0] == "| scorer | Color | Position |" and len(lines) == 2 + len(STANDARD_SCORERS)
    value = report.result("sgi native", "color").group.value
    assert f"| sgi native | {100 * value:.1f} ± " in lines[-1]
    with pytest.raises(KeyError, match="no result of 'sgi' on 'color'"):
        report.result("sgi", "color")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "test"}, "split must be of held_out, in_domain, shifted, got 'test'"),
        ({"segments": "none"}, "segments must be of parsed, oracle, got 'none'"),
        ({"categories": ("color", "shape")}, "categories must be of color, .*, got 'shape'"),
        ({"items": 0}, "needs at least one item"),
        ({"categories": ()}, "needs at least one item and one category"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ScenesBenchmark(**wrong)


def test_retrieval_finds_what_the_oracle_finds():
    items = retrieval_items(12, seed=5)
    keys = {Image.fromarray(item.image()).tobytes(): [item.caption] for item in items}
    assert retrieval_figures(keyed(keys), 12, seed=5) == {"image_to_text_r1": 1, "text_to_image_r1": 1}
    assert retrieval_figures(constant(), 12, seed=5) == {"image_to_text_r1": 0, "text_to_image_r1": 0}


def test_pictures_are_encoded_once_for_scorers_that_can_share():
    groups = shared_needs(STANDARD_SCORERS)
    assert [names for names, _ in groups] == [("global", "max_sim", "sgi rescaled"), ("sgi native",)]
    texts = shared_needs(STANDARD_SCORERS, texts_alone=True)
    assert [names for names, _ in texts] == [tuple(STANDARD_SCORERS)]
    apart = {
        "a": MaxSim(tap="projected"),
        "b": MaxSim(tap="hidden"),
        "c": SGI(template="a photo of {}"),
        "d": SGI(),
    }
    assert [names for names, _ in shared_needs(apart)] == [("a", "c"), ("b", "d")]
    peaksim = fake()
    pictures = [Image.new("RGB", (20, 20), color) for color in ("red", "green", "blue")]
    several = {"global": get_scorer("global"), "max_sim": MaxSim()}
    found = list(features_for(peaksim, pictures, ["a red box"] * 3, several))
    assert sum(peaksim.encoder.calls) == 3  # type: ignore[attr-defined]
    assert found[0][1] is found[1][1] and found[0][2] is found[1][2]


@pytest.mark.parametrize("mode", ["rescaled", "native"])
def test_equal_crops_are_encoded_once_and_nothing_else_changes(mode: str):
    peaksim, item = fake(), controlled_items("color", 1, seed=4)[0]
    pictures = [Image.fromarray(pixels) for pixels in item.images()]
    features = peaksim.encode_images(pictures, scorer=SGI(crops=mode))
    encoder, boxes = peaksim.encoder, crop_grid("scenes").boxes(96, 96)
    assert sum(encoder.calls) < 2 + 2 * len(boxes)  # type: ignore[attr-defined]
    assert features.regions is not None
    for row, picture in enumerate(pictures):
        cut = crops(picture, boxes, mode=mode)
        each = [encoder.encode_pixels(encoder.preprocess_region(crop)[None]).embedding[0] for crop in cut]
        assert_close(features.regions[row], torch.stack(each))


def test_class_state_is_that_of_the_whole_tower():
    torch.manual_seed(3)
    config = ScenesModelConfig(image_size=32, width=32, heads=2, image_layers=3, text_layers=1, stem_width=32)
    tower = ScenesModel(config).image.eval()
    pixels = torch.from_numpy(np.random.default_rng(3).normal(size=(5, 3, 32, 32)).astype(np.float32))
    with torch.no_grad():
        assert_close(tower.class_state(pixels), tower(pixels)[0][:, 0])
