"""Published figures without a model, and what an oracle, a constant, a random and blind scorers reach."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from engine.benchmarks import baselines
from engine.benchmarks.evaluate import evaluate
from engine.benchmarks.subject import Subject
from engine.benchmarks.summary import summarise_published_choices, summarise_published_groups
from engine.datasets.base import Dataset, ImageRef, Item, RetrievalDataset
from engine.datasets.bivlc import RESULT_COLUMNS, read_bivlc_outcomes
from engine.datasets.negbench import RULE as MCQ_RULE
from engine.datasets.sugarcrepe import read_sugarcrepe_outcomes
from engine.metrics import group_scores
from tests import benchmark_items as make

PUBLISHED = {
    "text": 75.83,
    "image": 52.40,
    "group": 49.06,
    "Ipos_2T": 84.32,
    "Ineg_2T": 89.50,
    "Tpos_2I": 69.21,
    "Tneg_2I": 82.82,
}


def lookup(dataset: Dataset, scores: dict[tuple[str, str], float]) -> Subject:
    """A subject that reads its scores from a table of (image name, text)."""

    def score(images, texts, *, pairs):
        assert pairs
        return np.array([scores[ref.name, text] for ref, text in zip(images, texts, strict=True)])

    return Subject("table", f"table of {dataset.fingerprint}", score, reads_images=False)


@pytest.mark.parametrize("names", [list(RESULT_COLUMNS), list(RESULT_COLUMNS.values())], ids=["code", "committed"])
def test_bivlc_published_outcomes_give_the_published_figures(tmp_path, names):
    kinds = [kind for kind, count in make.BIVLC_COUNTS.items() for _ in range(count)]
    path = tmp_path / "BiVLC_model.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow(("image", "caption", "negative_caption", "negative_image", "type", "subtype", *names))
        for kind, (ipos, ineg, tpos, tneg) in zip(kinds, make.gold_outcomes(), strict=True):
            totals = (ipos and ineg, tpos and tneg, ipos and ineg and tpos and tneg)
            printed = "<PIL.PngImagePlugin.PngImageFile image mode=RGB size=512x512 at 0x7F00>"
            writer.writerow((printed, "a", "b", printed, *kind, ipos, ineg, tpos, tneg, *totals))
    result = summarise_published_groups(read_bivlc_outcomes(path), "ViT-B/32")
    whole = result.line("all")
    assert whole.count == 2933
    assert {name: round(100 * cell.value, 2) for name, cell in whole.values.items()} == PUBLISHED
    assert result.score.value == 1439 / 2933
    counts = {line.name: line.count for line in result.lines}
    assert counts["replace"] == 2099 and counts["swap/obj"] == 81 and counts["add/att"] == 76


def test_bivlc_scores_with_these_outcomes_give_the_published_figures():
    data = make.bivlc_items()
    table = {}
    for item, outcome in zip(data.items, make.gold_outcomes(), strict=True):
        for ref, row in zip(item.images, make.scores_of(outcome), strict=True):
            table |= {(ref.name, text): score for text, score in zip(item.texts, row, strict=True)}
    result = evaluate(data, lookup(data, table), chunk_items=500)
    cells = result.line("all").values
    assert {name: round(100 * cell.value, 2) for name, cell in cells.items()} == PUBLISHED
    assert result.tie_rate == 0 and cells["group"].low < 0.4906 < cells["group"].high


def test_the_scores_made_for_an_outcome_have_that_outcome():
    for outcome in set(make.gold_outcomes()):
        found = group_scores([make.scores_of(outcome)])
        parts = (found.ipos_2t, found.ineg_2t, found.tpos_2i, found.tneg_2i)
        assert tuple(bool(part[0]) for part in parts) == outcome


def test_sugarcrepe_published_outcomes_give_the_published_figures(tmp_path):
    # ViT-B/32 on the edition of 7512: replace 80.76, swap 63.27, add 75.09, micro 76.56 per cent.
    counts = {"replace": (3846, 3106), "swap": (912, 577), "add": (2754, 2068)}
    path = tmp_path / "SUGARCREPE_CORRECT_model.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow(("filename", "caption", "negative_caption", "type", "subtype", "correct"))
        for kind, (total, right) in counts.items():
            writer.writerows([("1.jpg", "a", "b", kind, "obj", int(row < right)) for row in range(total)])
    result = summarise_published_choices(read_sugarcrepe_outcomes(path), "ViT-B/32")
    assert result.line("all").count == 7512 and round(100 * result.score.value, 2) == 76.56
    by_type = {kind: round(100 * result.line(kind).values["accuracy"].value, 2) for kind in counts}
    assert by_type == {"replace": 80.76, "swap": 63.27, "add": 75.09}


def test_negbench_right_answers_by_template_give_the_published_figures():
    # CLIP-OpenAI on COCO: 1405 of 2032 positive, 128 of 1870 negative, 791 of 2012 hybrid, 39.30 % in all.
    counts = {"positive": (2032, 1405), "negative": (1870, 128), "hybrid": (2012, 791)}
    items, table = [], {}
    for template, (total, right) in counts.items():
        for row in range(total):
            texts = tuple(f"{template} {row} {option}" for option in range(4))
            items.append(Item(f"{template}{row}", (ImageRef(texts[0]),), texts, 0, template))
            best = 0 if row < right else 1 + row % 3
            table |= {(texts[0], text): float(option == best) for option, text in enumerate(texts)}
    data = Dataset("negbench_mcq", f"{len(items)} items", MCQ_RULE, tuple(items))
    result = evaluate(data, lookup(data, table), chunk_items=1000)
    assert round(100 * result.score.value, 2) == 39.30
    for template, published in (("positive", 0.69143701), ("negative", 0.06844920), ("hybrid", 0.39314115)):
        assert result.line(template).values["accuracy"].value == pytest.approx(published, abs=1e-8)


# Benchmark, then the headline in per cent of a constant scorer and of a random one.
TABLE = [
    (make.sugarcrepe_items, 0.0, 50.0),
    (make.group_items, 0.0, 100 / 6),
    (lambda count: make.group_items("winoground", count), 0.0, 100 / 6),
    (lambda count: make.vg_items("relation", count), 0.0, 50.0),
    (lambda count: make.vg_items("attribution", count), 0.0, 50.0),
    (make.order_items, 100.0, 20.0),
    (lambda count: make.mcq_items(count=count), 100.0, 25.0),
    (lambda count: make.mcq_items(synthetic=True, count=count), 50.0, 25.0),
]
NAMES = ["SugarCrepe", "BiVLC", "Winoground", "VG-R", "VG-A", "Order", "MCQ COCO", "MCQ synthetic"]


@pytest.mark.parametrize(("factory", "constant", "random"), TABLE, ids=NAMES)
def test_oracle_constant_and_random_do_what_the_official_rule_says(factory, constant, random):
    small, large = factory(count=240), factory(count=1500)
    oracle = evaluate(small, baselines.oracle(small))
    assert oracle.score.value == 1.0 and oracle.tie_rate in (0.0, 1.0)
    flat = evaluate(small, baselines.constant())
    assert 100 * flat.score.value == constant
    assert flat.tie_rate == 1.0 and flat.tied_ids[0] == small.items[0].id
    noise = evaluate(large, baselines.random(seed=2), chunk_items=1000)
    assert 100 * noise.score.value == pytest.approx(random, abs=3.5)
    assert noise.tie_rate == 0.0


def test_the_honest_rules_stand_beside_the_official_one():
    flat = evaluate(make.mcq_items(), baselines.constant()).line("all").values
    assert {name: cell.value for name, cell in flat.items()} == {
        "accuracy": 1.0,
        "strict": 0.0,
        "argmax": 1.0,
        "shared": 0.25,
    }
    # CLIP_benchmark's rule on SugarCrepe: argmax with the truth first, so that ties count as right.
    flat = evaluate(make.sugarcrepe_items(), baselines.constant()).line("all").values
    assert (flat["accuracy"].value, flat["argmax"].value, flat["shared"].value) == (0.0, 1.0, 0.5)
    flat = evaluate(make.order_items(), baselines.constant()).line("all").values
    assert (flat["accuracy"].value, flat["strict"].value) == (1.0, 0.0)
    assert flat["shared"].value == pytest.approx(0.2)


def test_random_scores_have_winogrounds_chances():
    cells = evaluate(make.group_items(count=2000), baselines.random(), chunk_items=2000).line("all").values
    for metric, chance in (("text", 25.0), ("image", 25.0), ("group", 100 / 6), ("Ipos_2T", 50.0)):
        assert 100 * cells[metric].value == pytest.approx(chance, abs=2.5)


@pytest.mark.parametrize("name", list(baselines.BLIND))
def test_a_blind_scorer_cannot_win_a_group(name):
    cells = evaluate(make.group_items(), baselines.blind(name)).line("all").values
    assert cells["group"].value == cells["text"].value == cells["image"].value == 0.0


def test_blind_scorers_answer_by_the_text_alone():
    # Options: "a cup n but no dog", "a dog n", "a dog n here too", "no cup n"; the right one is the first.
    shares = {
        name: evaluate(make.mcq_items(), baselines.blind(name)).line("all").values["shared"].value
        for name in baselines.BLIND
    }
    assert shares == {
        "blind: longest text": 1.0,
        "blind: shortest text": 0.0,
        "blind: no negation word": 0.0,
    }
    result = evaluate(make.mcq_items(), baselines.constant())
    assert result.baselines == {"chance": 0.25, **shares}
    with pytest.raises(ValueError, match="blind: name must be one of 'blind: longest text'"):
        baselines.blind("longest")


@pytest.mark.parametrize(
    ("text", "negated"),
    [
        ("There is no dog.", True),
        ("A dog isn't here", True),
        ("A dog isn’t here", True),
        ("Neither cup nor dog", True),
        ("A table without cups", True),
        ("A note on a knot", False),
        ("Nothing Hill", True),
        ("The noble cat", False),
    ],
)
def test_negation_words_are_whole_words(text, negated):
    assert bool(baselines.NEGATION.search(text)) is negated


def test_macro_averages_follow_the_rule():
    result = evaluate(make.vg_items("relation"), baselines.random(seed=5))
    names = ("on", "wearing")
    shares = [result.line(name).values["accuracy"].value for name in names]
    macro = result.line("macro")
    assert macro.count == 2 and result.headline == ("macro", "accuracy")
    assert result.score.value == pytest.approx(np.mean(shares))
    assert result.line("next to").count == 20
    attribution = evaluate(make.vg_items("attribution"), baselines.random(seed=5))
    assert attribution.line("macro").count == 2, "a pair of 20 items is below the official 25"


def test_too_few_items_for_the_macro_average_say_so():
    result = evaluate(make.vg_items("attribution"), baselines.constant(), limit=10)
    assert result.headline == ("all", "accuracy")
    assert result.notes[-1].startswith("no type has enough items for the official macro average")


def test_the_oracle_stays_below_all_where_the_benchmark_contradicts_itself():
    items = tuple(
        Item(str(row), (ImageRef("a.jpg"),), texts, 0)
        for row, texts in enumerate([("red", "blue"), ("blue", "red"), ("same", "same"), ("pink", "grey")])
    )
    data = Dataset("negbench_mcq", "4 items", MCQ_RULE, items)
    cells = evaluate(data, baselines.oracle(data)).line("all").values
    assert cells["strict"].value == 0.25 and cells["shared"].value == pytest.approx(2.5 / 4)


def test_retrieval_oracle_constant_and_random():
    data = make.retrieval_items(images=60)
    oracle = evaluate(data, baselines.oracle(data))
    assert all(cell.value == 1.0 for line in oracle.lines for cell in line.values.values())
    flat = evaluate(data, baselines.constant())
    cells = flat.line("text → image").values
    assert cells["R@5"].value == 0.0 and cells["R@5 shared"].value == pytest.approx(5 / 60)
    assert flat.baselines == {"chance and blind, R@5 of text → image": 5 / 60}
    larger = make.retrieval_items(images=300)
    noise = evaluate(larger, baselines.random()).line("text → image").values
    assert noise["R@10"].value == pytest.approx(10 / 300, abs=0.02)


def test_retrieval_with_a_caption_of_several_images():
    refs = tuple(ImageRef(f"{row}.jpg") for row in range(12))
    texts = tuple("a train" if row < 11 else "a dog" for row in range(12))
    data = RetrievalDataset("negbench_retrieval", "12 images", refs, texts, tuple(range(12)))
    cells = evaluate(data, baselines.oracle(data)).line("text → image").values
    assert cells["R@1"].value == pytest.approx(1 / 12), "ties decide among eleven images of one caption"
    assert cells["R@1 shared"].value == pytest.approx((11 * 1 / 11 + 1) / 12)
    assert cells["R@1 any"].value == 1.0
