"""The demonstration end to end on an untrained model: page, pictures and table agree with the scores."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from engine.benchmarks.demo import NEXT_STEPS, DemoConfig, DemoResult, run, score_choices
from engine.benchmarks.demo_examples import FOUND, MISSED, Sheet, controlled_examples, negation_examples
from engine.benchmarks.demo_page import page
from engine.benchmarks.scenes import STANDARD_SCORERS, ScenesReport, ScoredCategory, percent
from engine.encoders.scenes import ScenesEncoder, save_scenes
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.engine import Engine
from engine.metrics import group_scores, multiple_choice
from engine.scenes.captions import WORDS
from engine.scenes.items import CATEGORIES, controlled_items
from engine.scenes.negation import negation_items
from tests.tolerances import assert_close

VOCABULARY = tuple(word for word in WORDS if word.isalnum())
RIGHT = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
WRONG = RIGHT.flip(0)


def tiny_model() -> ScenesModel:
    torch.manual_seed(5)
    return ScenesModel(ScenesModelConfig(width=16, heads=2, image_layers=2, text_layers=1, stem_width=16))


@pytest.fixture(scope="module")
def peaksim() -> Engine:
    encoder = ScenesEncoder(tiny_model(), VOCABULARY, name="untrained", device=torch.device("cpu"))
    return Engine(encoder, segmenter="rules")


@pytest.fixture(scope="module")
def found(peaksim: Engine, tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    return run(DemoConfig(output=tmp_path_factory.mktemp("demo"), items=3), engine=peaksim)


class References(HTMLParser):
    """What a page refers to, and the tags it opens and closes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.files: list[str] = []
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.files += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_picture_of_the_page_is_there_and_nothing_comes_from_elsewhere(found: DemoResult):
    text = found.page.read_text(encoding="utf-8")
    references = References(text)
    assert not references.open and "script" not in references.seen and "link" not in references.seen
    assert "://" not in text and "url(" not in text
    assert len(references.files) >= 4 * len(found.examples) - 2 > 0
    for file in references.files:
        with Image.open(found.page.parent / file) as picture:
            assert picture.format == "PNG" and min(picture.size) >= 192
    on_disk = {path.relative_to(found.page.parent).as_posix() for path in found.page.parent.rglob("*.png")}
    assert on_disk == set(references.files)


def test_table_holds_every_score(found: DemoResult):
    text = found.page.read_text(encoding="utf-8")
    for result in found.report.results:
        assert percent(result.group) in text
    for share in found.negation.values():
        assert percent(share) in text
    assert text.count("<td>16.7</td>") == len(CATEGORIES) and "untrained" in text
    table = json.loads(found.table.read_text(encoding="utf-8"))
    assert ScenesReport.from_dict(table["report"]) == found.report
    assert table["negation_items"] == found.negation_items == 3
    assert [example["item"] for example in table["examples"]] == [example.item for example in found.examples]
    assert set(found.negation) == {"global", "max_sim", "sgi native"}
    assert found.next_steps == NEXT_STEPS and found.seconds > 0


def test_scores_are_those_of_the_engine(found: DemoResult, peaksim: Engine):
    assert {result.items for result in found.report.results} == {3}
    for example in found.examples:
        if example.category == "negation":
            continue
        item = controlled_items(example.category, 3, seed=2026)[example.item]
        assert example.captions == item.captions and example.right == (0, 1)
        pictures = [Image.fromarray(pixels) for pixels in item.images()]
        for name, scorer in STANDARD_SCORERS.items():
            assert_close(torch.tensor(example.scores[name]), peaksim.score(pictures, item.captions, scorer=scorer))


def test_verdicts_are_true(found: DemoResult):
    # An untrained model gets nearly all wrong: there is something to show everywhere.
    assert {example.category for example in found.examples} == {*CATEGORIES, "negation"}
    for example in found.examples:
        own = {}
        for name, rows in example.scores.items():
            if example.category == "negation":
                own[name] = bool(multiple_choice(rows, example.right).credit[0])
            else:
                own[name] = bool(group_scores([rows]).group[0])
        assert not own["sgi native"] if example.verdict == MISSED else own["sgi native"] > own["global"]
        first, second = example.drawings
        assert first.caption == example.right[first.picture] != second.caption
        assert first.picture == second.picture


def test_clearest_item_of_each_verdict_is_taken(peaksim: Engine, tmp_path: Path):
    items = tuple(controlled_items("size", 5, seed=1))
    sheet = Sheet(tmp_path, tmp_path, peaksim, STANDARD_SCORERS["sgi native"])
    # Items 1 and 3 are found, the second of them by far; 2 and 4 are missed, the first of them by far.
    by_sgi = torch.stack([RIGHT, RIGHT * 0.01, WRONG * 2, RIGHT, WRONG])
    by_global = torch.stack([RIGHT, WRONG, RIGHT, WRONG, RIGHT])
    part = ScoredCategory("size", items, {"global": by_global, "sgi native": by_sgi}, "rules")
    examples = controlled_examples(part, sheet)
    assert [(example.verdict, example.item) for example in examples] == [(FOUND, 3), (MISSED, 2)]
    always = replace(part, scores={"global": by_global, "sgi native": RIGHT.expand(5, 2, 2)})
    assert [(example.verdict, example.item) for example in controlled_examples(always, sheet)] == [(FOUND, 1)]
    never = replace(part, scores={"global": by_global, "sgi native": WRONG.expand(5, 2, 2)})
    assert [(example.verdict, example.item) for example in controlled_examples(never, sheet)] == [(MISSED, 0)]


def test_a_choice_that_is_nearly_a_tie_is_not_the_one_shown(peaksim: Engine, tmp_path: Path):
    items = negation_items(3, seed=1)
    sheet = Sheet(tmp_path, tmp_path, peaksim, STANDARD_SCORERS["sgi native"])
    by_global, by_sgi = torch.zeros(3, 4), torch.zeros(3, 4)
    for row, (item, worth) in enumerate(zip(items, (0.001, 0.3, 0.1), strict=True)):
        by_sgi[row, item.correct] = worth
    (example,) = negation_examples(items, {"global": by_global, "sgi native": by_sgi}, sheet)
    assert (example.verdict, example.item) == (FOUND, 1)


def test_picture_shown_is_the_one_that_went_wrong(peaksim: Engine, tmp_path: Path):
    items = tuple(controlled_items("color", 1, seed=1))
    sheet = Sheet(tmp_path, tmp_path, peaksim, STANDARD_SCORERS["sgi native"])
    second_wrong = torch.tensor([[[1.0, 0.0], [1.0, 0.5]]])
    part = ScoredCategory("color", items, {"global": second_wrong, "sgi native": second_wrong}, "rules")
    (example,) = controlled_examples(part, sheet)
    assert [(drawing.picture, drawing.caption) for drawing in example.drawings] == [(1, 1), (1, 0)]


def test_negation_shows_the_caption_that_won_in_place_of_the_right_one(peaksim: Engine, tmp_path: Path):
    items = negation_items(2, seed=1)
    sheet = Sheet(tmp_path, tmp_path, peaksim, STANDARD_SCORERS["sgi native"])
    right = torch.zeros(2, 4)
    for row, item in enumerate(items):
        right[row, item.correct] = 1
    wrong = right.clone()
    wrong[1, (items[1].correct + 2) % 4] = 2
    (example,) = negation_examples(items, {"global": right, "sgi native": wrong}, sheet)
    assert (example.verdict, example.item) == (MISSED, 1)
    assert [drawing.caption for drawing in example.drawings] == [items[1].correct, (items[1].correct + 2) % 4]
    assert not negation_examples(items, {"global": right, "sgi native": right}, sheet)


def test_page_says_where_there_is_nothing_to_show(found: DemoResult):
    text = page(replace(found, examples=()))
    assert text.count("No item that sgi gets wrong among the 3 items.") == len(CATEGORIES) + 1
    assert text.count("No item that global gets wrong and sgi right among the 3 items.") == len(CATEGORIES) + 1


def test_choices_are_scored_as_the_engine_does(peaksim: Engine):
    items = negation_items(2, seed=8)
    for name, scores in score_choices(peaksim, items).items():
        for row, item in enumerate(items):
            alone = peaksim.score(Image.fromarray(item.image()), item.captions, scorer=STANDARD_SCORERS[name])
            assert_close(scores[row], alone[0])


def test_model_is_loaded_by_name_and_progress_is_told(tmp_path: Path):
    save_scenes(tmp_path / "model", tiny_model(), VOCABULARY)
    told: list[tuple[str, int, int]] = []
    config = DemoConfig(output=tmp_path / "a" / "b", items=1, split="shifted", model=f"scenes:{tmp_path / 'model'}")
    result = run(config, progress=lambda what, done, total: told.append((what, done, total)))
    assert result.report.model == f"scenes:{tmp_path / 'model'}" and result.page.exists()
    assert result.report.benchmark.split == "shifted" and "among further objects" in result.page.read_text()
    assert all(0 < done <= total for _, done, total in told)
    assert told[0][0].startswith("color: global") and told[-1][0].startswith("negation: ")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"split": "test"}, "DemoConfig: split must be of .* got 'test'"), ({"items": 0}, "at least 1, got 0")],
)
def test_settings_that_mean_nothing_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        DemoConfig(**wrong)
