"""Explanations: what found what, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.engine import Engine
from engine.scorers.base import Match
from engine.scorers.explanation import COLOURS, MAX_ROWS, MIN_SIDE, Explanation
from engine.scorers.max_sim import MaxSim
from tests.fake_encoder import FakeEncoder, picture

# Red on the left, blue on the right; the encoder sees four columns of patches.
SCENE = picture("red", "blue", side=64)


@pytest.fixture
def fake() -> Engine:
    return Engine(FakeEncoder(), segmenter="rules")


def drawn(explanation: Explanation) -> np.ndarray:
    return np.asarray(explanation.draw())


def has_colour(pixels: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    return (pixels == np.array(colour, dtype=np.uint8)).all(axis=-1)


def make(image: Image.Image | None, *matches: Match, text: str = "words") -> Explanation:
    return Explanation(text, "sgi", 0.5, matches, image)


@pytest.mark.parametrize("scorer", ["global", "max_sim", "sgi", MaxSim(direction="symmetric")], ids=str)
def test_the_total_is_the_score_and_the_sum_of_its_parts(fake: Engine, scorer):
    explanation = fake.explain(SCENE, "red and blue", scorer=scorer)
    assert explanation.total == pytest.approx(fake.score(SCENE, "red and blue", scorer=scorer).item(), abs=1e-6)
    parts = sum(match.score * match.weight for match in explanation.matches)
    assert parts == pytest.approx(explanation.total, abs=1e-5)
    assert explanation.scorer == fake.scorer(scorer).name and explanation.text == "red and blue"


def test_lists_of_one_are_one(fake: Engine):
    found = fake.explain([SCENE], ["red and blue"])
    assert found.matches == fake.explain(SCENE, "red and blue").matches and found.image is not None


def test_words_find_their_colours(fake: Engine):
    by_word = {match.text: match for match in fake.explain(SCENE, "red blue", scorer="max_sim").matches}
    assert by_word["red"].box[2] <= 32 <= by_word["blue"].box[0]
    assert by_word["red"].score > 0.99 and by_word["blue"].score > 0.99
    texts = fake.encode_texts("red and blue", scorer="sgi", segments=[["red", "blue"]])
    red, blue = fake.explain(SCENE, texts).matches
    assert red.box[2] <= 32 <= blue.box[0]


@pytest.mark.parametrize(("resize", "offset"), [("squash", 0), ("crop", 32), ("pad", 0)])
def test_patches_lie_where_the_encoder_looked(resize: str, offset: int):
    wide = picture("red", "blue", side=64).resize((128, 64), Image.Resampling.NEAREST)
    fake = Engine(FakeEncoder(resize=resize))
    (match,) = fake.explain(wide, "blue", scorer="max_sim").matches
    left, top, right, bottom = match.box
    side = {"squash": (32, 16), "crop": (16, 16), "pad": (32, 32)}[resize]
    assert (right - left, bottom - top) == side and left >= offset


def test_the_table_names_words_scores_and_boxes():
    text = str(make(None, Match("a red box", (0, 1, 2, 3), 0.25, 0.5), Match("blue", (4, 5, 6, 7), -0.5, 0.5)))
    head, first, second = text.split("\n")
    assert head == "sgi +0.5000  'words'"
    assert first == "  a red box  +0.2500 × +0.500  box (0, 1, 2, 3)"
    assert second == "  blue       -0.5000 × +0.500  box (4, 5, 6, 7)"


def test_explaining_features_gives_no_picture(fake: Engine):
    images, texts = fake.encode_images(SCENE, scorer="sgi"), fake.encode_texts("red", scorer="sgi")
    explanation = fake.explain(images, texts)
    assert explanation == fake.explain(SCENE, "red")
    with pytest.raises(ValueError, match="needs the picture, but it was explained from features"):
        explanation.draw()
    two = fake.encode_texts(["red", "blue"], scorer="sgi")
    with pytest.raises(ValueError, match="explain: wants one image and one text, got 1 and 2"):
        fake.explain(images, two)
    with pytest.raises(ValueError, match="sgi: needs image regions"):
        fake.explain(fake.encode_images(SCENE), "red")


def test_small_pictures_are_enlarged_and_boxes_with_them():
    image = Image.new("RGB", (48, 24), (10, 10, 10))
    pixels = drawn(make(image, Match("box", (12, 6, 36, 18), 0.5, 1.0)))
    assert pixels.shape[1] == MIN_SIDE and pixels.shape[0] > 240
    frame = has_colour(pixels[:240], COLOURS[0])
    rows, columns = np.nonzero(frame)
    assert (columns.min(), columns.max()) == (121, 358) and (rows.min(), rows.max()) == (61, 178)
    assert image.getpixel((12, 6)) == (10, 10, 10)


def test_large_pictures_keep_their_size():
    pixels = drawn(make(Image.new("RGB", (800, 600)), Match("box", (0, 0, 800, 600), 0.5, 1.0)))
    assert pixels.shape[1] == 800 and pixels.shape[0] > 600


def test_the_legend_is_white_below_the_picture_and_grows_with_the_words():
    image = Image.new("RGB", (480, 480))
    short = drawn(make(image, Match("box", (0, 0, 9, 9), 0.5, 1.0)))
    long = drawn(make(image, Match("box " * 60, (0, 0, 9, 9), 0.5, 1.0), text="word " * 50))
    assert (short[-1] == 255).all() and (short[485:] < 100).any()
    assert long.shape[0] > short.shape[0] + 60
    assert has_colour(short[480:], COLOURS[0]).any()


def test_matches_that_share_a_box_stay_visible():
    box = (10, 10, 400, 400)
    matches = [Match(f"part {number}", box, 0.5, 0.25) for number in range(4)]
    pixels = drawn(make(Image.new("RGB", (480, 480)), *matches))[:480]
    for number in range(4):
        assert has_colour(pixels, COLOURS[number]).sum() > 1000


def test_only_the_strongest_matches_are_drawn():
    matches = [Match(f"part {number}", (0, 0, 9, 9), number / 100, 1.0) for number in range(MAX_ROWS + 5)]
    image = Image.new("RGB", (480, 480))
    assert drawn(make(image, *matches)).shape[0] > drawn(make(image, *matches[5:])).shape[0]
    shown, hidden = make(image, *matches)._shown()
    assert [match.text for match in shown] == [f"part {number}" for number in range(5, MAX_ROWS + 5)]
    assert hidden == 5
    assert len(set(COLOURS)) >= MAX_ROWS


def test_boxes_without_area_or_beyond_the_picture_do_not_break_the_drawing():
    image = Image.new("RGB", (40, 20))
    matches = [
        Match("nothing", (0, 0, 0, 0), 0.1, 0.0),
        Match("padding", (-10, -10, 50, 30), 0.2, 0.5),
        Match("outside", (60, 0, 70, 10), 0.3, 0.5),
        Match("a pixel", (0, 0, 1, 1), 0.3, 0.5),
    ]
    pixels = drawn(make(image, *matches))[:240]
    assert has_colour(pixels, COLOURS[1]).any() and not has_colour(pixels, COLOURS[2]).any()


def test_the_picture_is_saved(fake: Engine, tmp_path: Path):
    explanation = fake.explain(SCENE, "red box and a blue box")
    sheet = explanation.draw(tmp_path / "why.png")
    with Image.open(tmp_path / "why.png") as saved:
        assert saved.size == sheet.size
        assert (np.asarray(saved) == np.asarray(sheet)).all()


@pytest.mark.parametrize("name", ["why.txt", "why", "png"])
def test_a_suffix_of_no_picture_is_refused(tmp_path: Path, name: str):
    explanation = make(Image.new("RGB", (48, 24)), Match("box", (12, 6, 36, 18), 0.5, 1.0))
    with pytest.raises(ValueError, match=rf"Explanation.draw: path must end in a picture's suffix.*{name}'$"):
        explanation.draw(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
