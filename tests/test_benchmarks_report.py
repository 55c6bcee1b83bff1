"""Tables, JSON and charts of results."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from engine.benchmarks import baselines
from engine.benchmarks.evaluate import evaluate
from engine.benchmarks.report import bar_chart, comparison, comparison_json, percent, to_markdown
from engine.benchmarks.summary import Result, make_lines, margins
from engine.metrics import Interval
from tests import benchmark_items as make


@pytest.fixture(scope="module")
def results():
    sets = (make.sugarcrepe_items(), make.group_items("winoground"), make.vg_items(), make.mcq_items())
    subjects = [lambda data: baselines.oracle(data), lambda data: baselines.random(3)]
    return [evaluate(data, subject(data)) for data in (*sets, make.retrieval_items()) for subject in subjects]


def test_json_holds_everything_and_comes_back(results):
    for result in results:
        assert Result.from_json(result.to_json()) == result
    assert [one["benchmark"] for one in json.loads(comparison_json(results))][:2] == ["sugarcrepe"] * 2


def test_a_table_shows_the_official_figure_first_and_what_to_doubt(results):
    text = to_markdown(results[1])
    lines = text.splitlines()
    assert lines[0] == "### sugarcrepe: random"
    assert lines[2].startswith(f"**accuracy (all): {percent(results[1].score)} %** – RAIVNLab/sugar-crepe")
    assert lines[4] == "|  | n | accuracy | strict | argmax | shared |"
    assert lines[6].startswith("| **all (micro)** | 240 | ")
    assert lines[7].startswith("| macro (n = types) | 7 | ")
    assert any(line.startswith("| swap/obj | 34 | ") for line in lines)
    assert "- without looking (ties shared): chance 50.0, blind: longest text 0.0" in text
    assert "- ties in 0.00 % of the items" in text and "- deciding differences: mean " in text
    assert "- options picked: 0: " in text


def test_ties_and_missing_images_are_said(results):
    flat = evaluate(make.mcq_items(), baselines.constant())
    text = to_markdown(replace(flat, missing=3))
    assert "- ties in 100.00 % of the items, e.g. 0, 1, 2, 3, 4" in text
    assert "- 3 images were missing: this is no official figure" in text


def test_long_tables_are_cut_and_say_so(results):
    text = to_markdown(results[0], max_lines=3)
    assert f"{len(results[0].lines) - 3} further slices are in the JSON." in text
    assert text.count("\n| ") == 4 - 1 + 1


def test_a_bar_in_a_name_does_not_break_the_table(results):
    text = comparison([replace(results[0], subject="a|b")])
    assert "| a\\|b | " in text


def test_comparison_has_a_row_a_subject_and_a_column_a_benchmark(results):
    some = [result for result in results if (result.subject, result.benchmark) != ("random", "winoground")]
    lines = comparison(some).splitlines()
    assert lines[0] == (
        "|  | sugarcrepe (accuracy) | winoground (group) | vg_relation (macro accuracy) | "
        "negbench_mcq_coco (accuracy) | negbench_retrieval (R@5) |"
    )
    assert lines[2].startswith("| oracle | 100.0 [") and lines[3].split(" | ")[2] == "–"
    assert lines[4].startswith("| *best text-only scorer or chance* | 100.0 | 16.7 | ")
    assert "- winoground: 240 items" in lines


def test_comparison_refuses_what_cannot_stand_side_by_side(results):
    with pytest.raises(ValueError, match="needs at least one result"):
        comparison([])
    with pytest.raises(ValueError, match="oracle comes twice on sugarcrepe"):
        comparison([results[0], replace(results[0])])
    other = replace(results[1], edition="7 items")
    with pytest.raises(ValueError, match="sugarcrepe must be one edition throughout, got '240 items' and '7 items'"):
        comparison([results[0], other])


def test_a_chart_shows_each_figure_as_high_as_it_is(results, tmp_path):
    path = bar_chart(results, tmp_path / "chart.png")
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > 400
        pixels = np.asarray(image.convert("RGB")).astype(int)
    first = (abs(pixels - (31, 119, 180)).sum(-1) < 12).any(0).sum()  # columns of the first subject's bars
    second = (abs(pixels - (255, 127, 14)).sum(-1) < 12).sum()
    assert first > 50 and 0 < second < (abs(pixels - (31, 119, 180)).sum(-1) < 12).sum()
    empty = bar_chart([result for result in results if result.subject == "oracle"], tmp_path / "one.png")
    assert empty.stat().st_size != path.stat().st_size


def test_a_chart_without_matplotlib_says_how_to_get_it(results, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"needs matplotlib, which is missing; pip install 'peaksim\[plots\]'"):
        bar_chart(results, tmp_path / "chart.png")
    assert not (tmp_path / "chart.png").exists()


def test_lines_put_all_first_then_types_then_subtypes_then_tags():
    values = {"accuracy": np.array([1.0, 0.0, 1.0])}
    slices = [["all", "b", "b/x", "#t"], ["all", "a", "a/y"], ["all", "b", "b/y"]]
    lines = make_lines(values, slices)
    assert [line.name for line in lines] == ["all", "b", "a", "b/x", "a/y", "b/y", "#t"]
    assert [line.count for line in lines] == [3, 2, 1, 1, 1, 1, 1]
    assert lines[1].values["accuracy"].value == 1.0
    with pytest.raises(KeyError, match="has no line 'c', only"):
        Result("x", "e", "s", "f", ("all", "accuracy"), lines, "r").line("c")


def test_margins_tell_a_model_whose_differences_vanish():
    wide = margins(np.array([0.2, 0.3, -0.1]), np.array([True, True, False]))
    thin = margins(np.array([0.0002, 0.0003, -0.1]), np.array([True, True, False]))
    assert wide["median_right"] == pytest.approx(0.25) and wide["thin"] == 0.0
    assert thin["median_right"] == pytest.approx(0.00025) and thin["thin"] == 1.0
    assert "thin" not in margins(np.array([-1.0]), np.array([False]))


def test_percent():
    assert percent(Interval(0.4906, 0.4721, 0.5087)) == "49.1 [47.2, 50.9]"
