"""The runner: what a subject is given, cut-outs, and errors that name their item."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

from engine.benchmarks import baselines, ranking
from engine.benchmarks.evaluate import evaluate
from engine.benchmarks.subject import Subject, subject_of
from engine.datasets.base import CHOICE, Dataset, ImageRef, Item, Rule
from engine.engine import Engine
from engine.scorers.global_cosine import GlobalCosine
from tests import benchmark_items as make
from tests.fake_encoder import FakeEncoder, picture
from tests.recorder import Recorder


def test_items_of_one_picture_are_scored_together():
    recorder = Recorder()
    evaluate(make.sugarcrepe_items(24), recorder.subject(), chunk_items=6)
    assert [pairs for _, _, pairs in recorder.asked] == [True] * 4
    for images, texts, _ in recorder.asked:
        assert len(images) == len(texts) == 12
        assert len({ref.name for ref in images}) == 2, "six items of two pictures"


def test_a_group_item_is_asked_as_image_times_text():
    recorder = Recorder()
    data = make.group_items(count=1)
    evaluate(data, recorder.subject())
    images, texts, _ = recorder.asked[0]
    assert [ref.name for ref in images] == ["0_0.png", "0_0.png", "0_1.png", "0_1.png"]
    assert texts == list(data.items[0].texts) * 2


def test_features_are_made_once_for_every_image_and_text_of_a_chunk():
    encoded: list[list] = []

    def encode(sources):
        encoded.append(list(sources))
        return np.array([hash_of(source) for source in sources])

    def hash_of(source):
        return float(sum(map(ord, getattr(source, "name", source))))

    def score(images, texts, *, pairs):
        assert pairs and isinstance(images, np.ndarray)
        return images * 7 % 11 + texts % 5

    subject = Subject("arrays", "v1", score, encode, encode, reads_images=False)
    data = make.sugarcrepe_items(24)
    result = evaluate(data, subject, chunk_items=24)
    assert [len(sources) for sources in encoded] == [8, 48]
    right = [
        hash_of(item.texts[0]) % 5 > hash_of(item.texts[1]) % 5  # the image adds the same to both
        for item in data.items
    ]
    assert result.score.value == np.mean(right)
    with pytest.raises(ValueError, match="must be given together"):
        Subject("half", "v1", score, encode)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_names_item_image_and_text(tmp_path, bad):
    data = make.group_items(count=2)
    where = re.escape("item \"1 (image 1_0.png, text 'plate 1 on cup')\"")
    with pytest.raises(ValueError, match=f"evaluate: recorder: scores must be finite, got .* for {where}"):
        evaluate(data, Recorder(bad=bad).subject(), resume_path=tmp_path / "s.jsonl")
    with pytest.raises(ValueError, match="scores must be finite"):
        evaluate(make.retrieval_items(4), Recorder(bad=bad).subject())


def test_scores_of_another_shape_are_refused():
    flat = Subject("flat", "v1", lambda images, texts, *, pairs: np.zeros(3), reads_images=False)
    with pytest.raises(ValueError, match=r"flat must give one score a pair, \(8,\), got \(3,\)"):
        evaluate(make.group_items(count=2), flat)
    with pytest.raises(ValueError, match=r"flat must give scores \(n_images, n_texts\) = \(4, 12\), got \(3,\)"):
        evaluate(make.retrieval_items(4), flat)


def test_nothing_to_score_is_an_error():
    with pytest.raises(ValueError, match="has no items to score"):
        evaluate(make.sugarcrepe_items(3), baselines.constant(), shard=(5, 6))
    with pytest.raises(ValueError, match="chunk_items must be >= 1"):
        evaluate(make.sugarcrepe_items(3), baselines.constant(), chunk_items=0)


def test_retrieval_in_small_blocks_equals_one_block(monkeypatch):
    data = make.retrieval_items(images=20)
    whole = evaluate(data, Recorder().subject())
    monkeypatch.setattr(ranking, "PART_ROWS", 7)
    monkeypatch.setattr(ranking, "BLOCK_VALUES", 50)
    recorder = Recorder()
    assert evaluate(data, recorder.subject()) == whole
    assert all(len(images) * len(texts) <= 7 * 7 for images, texts, _ in recorder.asked)


def coloured(folder, name, *colours, side=32):
    picture(*colours, side=side).save(folder / name)
    return ImageRef(name, folder / name)


def colour_items(folder, **changed):
    """One image of each colour against two colour words; the right one is named first."""
    names = ("red", "green", "blue")
    return Dataset(
        "colours",
        "3 items",
        Rule(CHOICE),
        tuple(
            Item(name, (coloured(folder, f"{name}.png", name),), (name, names[row - 1]), 0)
            for row, name in enumerate(names)
        ),
        **changed,
    )


def test_an_engine_is_a_subject(tmp_path):
    encoder = FakeEncoder()
    subject = subject_of(Engine(encoder), GlobalCosine())
    assert subject.name == "fake · global" and "GlobalCosine(" in subject.fingerprint
    assert subject.fingerprint.startswith("fake-1 · ")
    result = evaluate(colour_items(tmp_path), subject, resume_path=tmp_path / "s.jsonl")
    assert result.score.value == 1.0 and result.subject == "fake · global"
    assert sum(encoder.calls) == 3, "each picture went through the encoder once"
    assert sorted(encoder.encoded) == ["blue", "green", "red"], "and each text"


def test_texts_cut_by_the_encoder_are_a_slice_and_a_note(tmp_path):
    data = colour_items(tmp_path)
    long = " ".join(["red", *["of"] * 12])
    items = (*data.items[1:], Item("long", data.items[0].images, (f"{long} one", f"{long} two"), 0))
    data = Dataset("colours", "3 items", data.rule, items)
    result = evaluate(data, subject_of(Engine(FakeEncoder())), resume_path=tmp_path / "s.jsonl")
    assert result.line("#text cut by the encoder").count == 1
    assert result.tied_ids == ("long",), "the cut made both texts one"
    assert result.notes[-1].startswith("1 items have a text that the encoder cut")


def test_a_box_is_cut_out_of_the_upright_picture(tmp_path):
    given = []

    def score(images, texts, *, pairs):
        given.extend(images)
        return np.zeros(len(images))

    path = tmp_path / "turned.jpg"
    stripes = picture("red", "blue", side=40)  # red on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # a viewer turns it a quarter to the right: red on top
    stripes.save(path, exif=exif, quality=95)
    refs = [ImageRef("turned.jpg", path, box) for box in ((4, 2, 34, 12), (30, 30, 50, 44), None)]
    items = tuple(Item(str(row), (ref,), ("a", "b"), 1) for row, ref in enumerate(refs))
    evaluate(Dataset("vg", "3 items", Rule(CHOICE), items), Subject("eyes", "v1", score))
    cut, over = (next(p for p in given if getattr(p, "size", None) == size) for size in ((30, 10), (20, 14)))
    assert np.asarray(cut)[..., 0].min() > 200, "the top of the upright picture is red"
    assert np.asarray(over)[12, 15].tolist() == [0, 0, 0], "outside is black, as in the official loader"
    assert given[-1] == given[-2] == str(path), "a whole picture goes by path"


@pytest.mark.parametrize("box", [(40, 0, 50, 10), (0, 40, 10, 50), (-10, 0, 0, 10), (0, -10, 10, 0)])
def test_a_box_outside_the_picture_names_item_and_picture(tmp_path, box):
    ref = coloured(tmp_path, "small.png", "red", side=40)
    inside = Item("0", (ImageRef(ref.name, ref.path, (0, 0, 10, 10)),), ("a", "b"), 1)
    outside = Item("1", (ImageRef(ref.name, ref.path, box),), ("a", "b"), 1)
    eyes = Subject("eyes", "v1", lambda images, texts, *, pairs: np.zeros(len(images)))
    message = rf"item '1': the box {re.escape(str(box))} must overlap the picture 'small\.png' .* of 40 x 40 pixels"
    with pytest.raises(ValueError, match=message):
        evaluate(Dataset("vg", "2 items", Rule(CHOICE), (inside, outside)), eyes)


def test_a_text_without_words_is_refused_before_anything_is_scored(tmp_path):
    items = colour_items(tmp_path).items
    odd = Item("odd", items[0].images, ("red", " "), 0)
    data = Dataset("colours", "4 items", Rule(CHOICE), (*items, odd))
    encoder = FakeEncoder()
    with pytest.raises(ValueError, match=r"colours: item 'odd': every text must have a word that fake · max_sim can"):
        evaluate(data, subject_of(Engine(encoder), "max_sim"), resume_path=tmp_path / "s.jsonl", chunk_items=1)
    assert not encoder.calls and not encoder.encoded
    # What reads the whole caption scores it.
    for scorer in ("global", "sgi"):
        assert evaluate(data, subject_of(Engine(FakeEncoder(), segmenter="rules"), scorer)).line("all").count == 4
    base = make.retrieval_items(2, 1)
    pair = type(base)(base.name, "2 images", tuple(item.images[0] for item in items[:2]), ("red", ""), (0, 1))
    with pytest.raises(ValueError, match=r"query 'text/1': every text must have a word .* got ''; choose a scorer"):
        evaluate(pair, subject_of(Engine(FakeEncoder()), "max_sim"))
    assert evaluate(data, subject_of(Engine(FakeEncoder()), "max_sim"), limit=2).line("all").count == 2


def test_pictures_in_no_file_are_made_when_they_are_needed():
    made = []

    def load():
        made.append(1)
        return picture("red")

    item = Item("0", (ImageRef("rendered", load=load),), ("red", "blue"), 0)
    result = evaluate(Dataset("scenes", "1 item", Rule(CHOICE), (item,)), subject_of(Engine(FakeEncoder())))
    assert result.score.value == 1.0 and made == [1]


def test_a_dataset_read_without_pictures_cannot_be_shown_to_a_model():
    with pytest.raises(ValueError, match=r"fake · global needs the picture '0\.jpg', but .* without an image"):
        evaluate(make.sugarcrepe_items(3), subject_of(Engine(FakeEncoder())))


def test_retrieval_with_an_engine_encodes_each_side_once(tmp_path):
    colours = ("red", "green", "blue", "grey")
    refs = tuple(coloured(tmp_path, f"{name}.png", name) for name in colours)
    owner = (0, 1, 2, 3, 0)
    texts = (*(f"{name}" for name in colours), "red red")
    base = make.retrieval_items(4, 1)
    data = type(base)(base.name, "4 images", refs, texts, owner)
    encoder = FakeEncoder()
    result = evaluate(data, subject_of(Engine(encoder)))
    assert result.line("text → image").values["R@1"].value == 1.0
    assert result.line("image → text").count == 4
    assert sum(encoder.calls) == 4 and len(encoder.encoded) == 5
    cut = type(base)(base.name, "4 images", refs, (*texts[:4], "red " * 30), owner)
    path = tmp_path / "s.jsonl"
    for _ in range(2):  # the second time from the file
        noted = evaluate(cut, subject_of(Engine(FakeEncoder())), resume_path=path)
        assert noted.notes == ("1 texts were cut at the encoder's context length",)
