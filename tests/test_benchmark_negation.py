"""The negation sets: what those who know everything, nothing, or the captions alone get."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from engine.benchmarks.baselines import NEGATION
from engine.benchmarks.scenes_negation import (
    NEGATION_SCORERS,
    NegationBenchmark,
    NegationReport,
    choice_dataset,
    evaluate,
    retrieval_dataset,
)
from engine.engine import Engine
from engine.metrics import multiple_choice
from engine.scenes.negation import NEGATION_TEMPLATES, negation_items, retrieval_items
from engine.scorers.registry import get_scorer
from tests.fake_encoder import FakeEncoder
from tests.keyed_encoder import constant, keyed
from tests.tolerances import assert_close

GLOBAL = {"global": get_scorer("global")}
SMALL = NegationBenchmark(items=24, scenes=12)


def keys_of(benchmark: NegationBenchmark) -> dict[bytes, list[str]]:
    """Each picture with the captions that are its own."""
    keys = {
        Image.fromarray(item.image()).tobytes(): [item.captions[item.correct]]
        for item in negation_items(benchmark.items, seed=benchmark.seed, split=benchmark.split)
    }
    for item in retrieval_items(benchmark.scenes, seed=benchmark.seed, split=benchmark.split):
        keys[Image.fromarray(item.image()).tobytes()] = [item.caption, item.negated_caption]
    return keys


def test_the_oracle_gets_everything():
    report = evaluate(keyed(keys_of(SMALL)), GLOBAL, SMALL)
    result = report.result("global")
    for name in ("all", *NEGATION_TEMPLATES):
        assert result.accuracy(name).value == 1
    assert result.choice.tie_rate == 0 and result.choice.margin["median"] > 0.1
    for negated in (False, True):
        for k in (1, 5):
            recall = result.recall(k, negated=negated)
            assert recall is not None and recall.value == 1


def test_a_constant_gets_nothing_though_the_first_of_equals_would_get_a_quarter():
    result = evaluate(constant(), GLOBAL, SMALL).result("global")
    assert result.accuracy().value == 0 and result.choice.tie_rate == 1
    values = result.choice.line("all").values
    assert values["argmax"].value == 0.25 and values["shared"].value == 0.25
    for k in (1, 5):
        recall = result.recall(k)
        assert recall is not None and recall.value == 0


def test_chance_is_a_quarter():
    result = evaluate(keyed(), GLOBAL, NegationBenchmark(items=200, scenes=0)).result("global")
    assert result.accuracy().value == pytest.approx(0.25, abs=0.08)
    assert result.choice.baselines["chance"] == 0.25


def test_wordings_change_the_sentences_and_nothing_else():
    plain, other = choice_dataset(SMALL), choice_dataset(replace(SMALL, wording="held_out"))
    assert other.edition.startswith("24 items in held_out wordings, ") and plain.edition.startswith("24 items, ")
    assert plain.fingerprint != other.fingerprint
    for one, item in zip(plain.items, other.items, strict=True):
        assert (one.right, one.type) == (item.right, item.type) and one.texts != item.texts
        assert np.array_equal(np.asarray(one.images[0].load()), np.asarray(item.images[0].load()))
        assert not any("image features" in text or "feature" in text for text in item.texts)
    report = evaluate(keyed(), GLOBAL, replace(SMALL, wording="held_out"))
    assert NegationReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    with pytest.raises(ValueError, match="wordings: sets must be one or more of training, benchmark, held_out"):
        NegationBenchmark(wording="rhymes")


def test_who_does_not_understand_denials_loses_negated_retrieval_alone():
    # Any caption with a denial is the same to this one.
    def deaf(caption: str) -> str:
        return "denied" if NEGATION.search(caption) else caption

    result = evaluate(keyed(keys_of(SMALL), deaf), GLOBAL, SMALL).result("global")
    plain, negated = result.recall(5), result.recall(5, negated=True)
    assert plain is not None and plain.value == 1
    assert negated is not None and negated.value < 1


def test_text_alone_does_not_tell_the_answer():
    benchmark = NegationBenchmark(items=150, scenes=0)
    items = negation_items(150, seed=benchmark.seed, split="held_out")
    found = evaluate(keyed(), GLOBAL, benchmark).result("global").choice.baselines
    affirms = [[0.0 if NEGATION.search(caption) else 1.0 for caption in item.captions] for item in items]
    longest = [[float(len(caption)) for caption in item.captions] for item in items]
    right = [item.correct for item in items]
    for name, scores in (("blind: no negation word", affirms), ("blind: longest text", longest)):
        assert found[name] == multiple_choice(scores, right, ties="share").credit.mean()
    assert max(found.values()) <= 0.3


def test_right_places_and_templates_rotate():
    dataset = choice_dataset(SMALL)
    assert dataset.notes == ("right option by number: 0: 6, 1: 6, 2: 6, 3: 6",)
    assert [item.type for item in dataset.items[:3]] == list(NEGATION_TEMPLATES)
    result = evaluate(keyed(keys_of(SMALL)), GLOBAL, NegationBenchmark(items=24, scenes=0)).result("global")
    counts = {line.name: line.count for line in result.choice.lines}
    assert counts == {"all": 24, "macro": 3, "positive": 8, "negative": 8, "hybrid": 8}
    assert result.choice.picked == {"0": 0.25, "1": 0.25, "2": 0.25, "3": 0.25}


def test_negated_captions_are_the_plain_ones_after_a_denial():
    plain, negated = retrieval_dataset(SMALL), retrieval_dataset(SMALL, negated=True)
    assert [ref.name for ref in plain.images] == [ref.name for ref in negated.images]
    for before, after in zip(plain.texts, negated.texts, strict=True):
        assert after.lower().endswith(before.lower()) and NEGATION.search(after[: -len(before)])
    assert plain.fingerprint != negated.fingerprint


def test_every_scorer_is_measured_as_the_engine_scores():
    peaksim = Engine(FakeEncoder(context_length=48), segmenter="rules")
    benchmark = NegationBenchmark(items=3, scenes=0)
    told: list[tuple[str, int, int]] = []
    report = evaluate(
        peaksim,
        benchmark=benchmark,
        progress=lambda what, done, total: told.append((what, done, total)),
    )
    assert [result.scorer for result in report.results] == list(NEGATION_SCORERS)
    assert report.segmenter == "rules" and report.fingerprint == peaksim.spec.fingerprint
    assert told[0] == ("negation, choice: global", 0, 5) and told[-1] == ("done", 5, 5)
    items = negation_items(3, seed=benchmark.seed, split="held_out")
    for name, scorer in NEGATION_SCORERS.items():
        scores = [
            peaksim.score(Image.fromarray(item.image()), item.captions, scorer=scorer)[0].tolist() for item in items
        ]
        outcome = multiple_choice(scores, [item.correct for item in items])
        assert report.result(name).accuracy().value == outcome.credit.mean()
        assert_close(report.result(name).choice.tie_rate, outcome.tied.mean())


def test_report_survives_json_and_prints_baselines():
    report = evaluate(keyed(keys_of(SMALL)), GLOBAL, SMALL)
    assert NegationReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    lines = report.to_markdown().splitlines()
    assert lines[0].startswith("| scorer | all | positive | negative | hybrid | ties | margin | R@1 | R@5 |")
    assert lines[2].startswith("| global | 100.0 ± ")
    assert any(line.startswith("| chance | 25.0 |") and line.endswith("| 8.3 | 41.7 | 41.7 |") for line in lines)
    assert any(line.startswith("| blind: no negation word | ") for line in lines)
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    with pytest.raises(KeyError, match="no result of 'sgi'"):
        report.result("sgi")


def test_retrieval_may_be_left_out():
    benchmark = NegationBenchmark(items=4, scenes=0)
    report = evaluate(keyed(), GLOBAL, benchmark)
    assert report.result("global").recall(5) is None
    assert NegationReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert "R@" not in report.to_markdown()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "test"}, "split must be of held_out, in_domain, shifted, got 'test'"),
        ({"items": 0}, "items must be at least 1 .* got 0 and 300"),
        ({"scenes": 5}, "scenes 0 or above 5, got 400 and 5"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        NegationBenchmark(**wrong)


def test_no_scorer_is_refused():
    with pytest.raises(ValueError, match="needs at least one scorer, got none"):
        evaluate(keyed(), {}, SMALL)
