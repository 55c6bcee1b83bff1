"""The runner: what a subject is given, resuming, shards, cut-outs, and errors that name their item."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from PIL import Image

from engine.benchmarks import baselines, ranking
from engine.benchmarks.evaluate import evaluate
from engine.benchmarks.score_file import ScoreFile, header_of, merge_score_files
from engine.benchmarks.subject import Subject, subject_of
from engine.datasets.base import CHOICE, Dataset, ImageRef, Item, Rule
from engine.engine import Engine
from engine.scorers.global_cosine import GlobalCosine
from tests import benchmark_items as make
from tests.fake_encoder import FakeEncoder, picture


class Recorder:
    """Scores like the random baseline, keeps what it was asked, and can stop after so many calls."""

    def __init__(self, stop_after: int | None = None, bad: float | None = None) -> None:
        self.asked: list[tuple[list, list, bool]] = []
        self.stop_after, self.bad = stop_after, bad

    def __call__(self, images, texts, *, pairs):
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise RuntimeError("stopped")
        self.asked.append((list(images), list(texts), pairs))
        scores = baselines.random().score(images, texts, pairs=pairs)
        if self.bad is not None:
            scores[5 if pairs else (1, 1)] = self.bad
        return scores

    def subject(self, name: str = "recorder") -> Subject:
        return Subject(name, "v1", self, reads_images=False)


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


def test_a_run_that_stopped_goes_on_where_it_was(tmp_path):
    data, path = make.sugarcrepe_items(60), tmp_path / "scores.jsonl"
    with pytest.raises(RuntimeError, match="stopped"):
        evaluate(data, Recorder(stop_after=2).subject(), resume_path=path, chunk_items=10)
    recorder, seen = Recorder(), []
    progress = lambda done, total: seen.append((done, total))  # noqa: E731
    resumed = evaluate(data, recorder.subject(), resume_path=path, chunk_items=10, progress=progress)
    assert len(recorder.asked) == 4 and seen == [(20, 60), (30, 60), (40, 60), (50, 60), (60, 60)]
    assert resumed == evaluate(data, Recorder().subject())
    again = Recorder(stop_after=0)
    assert evaluate(data, again.subject(), resume_path=path) == resumed
    assert evaluate(data, again.subject(), resume_path=path, limit=12).line("all").count == 12


def test_a_torn_last_line_is_dropped_and_made_again(tmp_path):
    data, path = make.sugarcrepe_items(12), tmp_path / "scores.jsonl"
    whole = evaluate(data, Recorder().subject(), resume_path=path)
    text = path.read_text()
    path.write_text(text[:-20])
    recorder = Recorder()
    assert evaluate(data, recorder.subject(), resume_path=path) == whole
    assert len(recorder.asked) == 1 and len(recorder.asked[0][0]) == 2
    assert sorted(path.read_text().splitlines()) == sorted(text.splitlines())
    path.write_text(text[:10])
    assert evaluate(data, Recorder().subject(), resume_path=path) == whole


def test_scores_of_another_evaluation_are_refused(tmp_path):
    data, path = make.sugarcrepe_items(12), tmp_path / "scores.jsonl"
    evaluate(data, Recorder().subject(), resume_path=path)
    for dataset, subject, word in (
        (make.sugarcrepe_items(15), Recorder().subject(), "dataset must be"),
        (data, Recorder().subject("other"), "subject must be 'other', got 'recorder'"),
        (data, Subject("recorder", "v2", Recorder(), reads_images=False), "model must be 'v2', got 'v1'"),
        (make.group_items(count=12), Recorder().subject(), "benchmark must be 'bivlc', got 'sugarcrepe'"),
    ):
        with pytest.raises(ValueError, match=rf"belongs to another evaluation: .*{word}"):
            evaluate(dataset, subject, resume_path=path)


def test_a_broken_score_file_is_refused(tmp_path):
    data, path = make.sugarcrepe_items(3), tmp_path / "scores.jsonl"
    header = json.dumps(header_of(data, Recorder().subject()))
    for body, message in (
        ("{broken\n{}\n", "line 2 must be JSON"),
        ('{"scores": []}\n', "line 2 must be the only record of an id, got None"),
        ('{"id": "a"}\n{"id": "a"}\n', "line 3 must be the only record of an id, got 'a'"),
        ("[1]\n", "line 2 must be an object"),
    ):
        path.write_text(f"{header}\n{body}")
        with pytest.raises(ValueError, match=message):
            evaluate(data, Recorder().subject(), resume_path=path)
    path.write_text(f'{header}\n{{"id": "{data.items[0].id}", "scores": [[1.0, 2.0, 3.0]]}}\n')
    with pytest.raises(ValueError, match=r"must have scores of one shape \[\(1, 2\)\], got"):
        evaluate(data, Recorder().subject(), resume_path=path)


@pytest.mark.parametrize(
    "factory", [make.sugarcrepe_items, make.group_items, lambda: make.retrieval_items(12)], ids=str
)
def test_shards_merged_are_the_whole(tmp_path, factory):
    data = factory()
    paths = [tmp_path / f"{k}.jsonl" for k in range(3)]
    for k, path in enumerate(paths):
        part = evaluate(data, Recorder().subject(), shard=(k, 3), resume_path=path)
        assert f"shard {k} of 3" in part.edition
    merged = tmp_path / "all.jsonl"
    assert merge_score_files(paths, merged) == len(data)
    nothing = Recorder(stop_after=0)
    assert evaluate(data, nothing.subject(), resume_path=merged) == evaluate(data, Recorder().subject())
    with pytest.raises(ValueError, match="must not exist yet"):
        merge_score_files(paths, merged)


def test_merging_refuses_what_does_not_belong_together(tmp_path):
    data = make.sugarcrepe_items(3)
    ScoreFile(tmp_path / "a", header_of(data, Recorder().subject())).add([{"id": "x", "scores": [1.0]}])
    ScoreFile(tmp_path / "b", header_of(data, Recorder().subject())).add([{"id": "x", "scores": [2.0]}])
    ScoreFile(tmp_path / "c", header_of(data, Recorder().subject("other")))
    with pytest.raises(ValueError, match="item 'x' has two different scores"):
        merge_score_files([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    with pytest.raises(ValueError, match="belongs to another evaluation"):
        merge_score_files([tmp_path / "a", tmp_path / "c"], tmp_path / "m")
    with pytest.raises(ValueError, match="needs at least one file"):
        merge_score_files([], tmp_path / "m")


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
