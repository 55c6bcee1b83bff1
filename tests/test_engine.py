"""The engine: sources, batches, outputs, features in place of sources, failures, threads."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import engine
from engine.engine import Engine, load, score
from engine.features import ImageFeatures, Needs, TextFeatures
from engine.scorers.base import Scorer
from engine.scorers.max_sim import MaxSim
from engine.scorers.sgi import SGI
from engine.segments import RulesSegmenter, Segment
from tests.fake_encoder import FakeEncoder, picture
from tests.tolerances import assert_close

PICTURES = [picture("red", "blue"), picture("green"), picture("blue", "grey", "red")]
CAPTIONS = ["a red box and a blue box", "green grass", "no red box"]
SCORERS = ["global", "max_sim", "sgi", SGI(crops="native", full_caption=True), MaxSim(direction="symmetric")]


@pytest.fixture
def fake() -> Engine:
    return Engine(FakeEncoder(), segmenter="rules")


def encoder_of(peaksim: Engine) -> FakeEncoder:
    assert isinstance(peaksim.encoder, FakeEncoder)
    return peaksim.encoder


@pytest.mark.parametrize("scorer", SCORERS, ids=str)
def test_scores_are_the_scorers_on_the_features(fake: Engine, scorer: str | Scorer):
    images = fake.encode_images(PICTURES, scorer=scorer)
    texts = fake.encode_texts(CAPTIONS, scorer=scorer)
    scores = fake.score(PICTURES, CAPTIONS, scorer=scorer)
    assert scores.shape == (3, 3) and scores.dtype == torch.float32
    assert_close(scores, fake.scorer(scorer).matrix(images, texts))
    assert_close(fake.score(images, CAPTIONS, scorer=scorer), scores)
    assert_close(fake.score(PICTURES, texts, scorer=scorer), scores)
    assert_close(fake.score(images, texts, scorer=scorer), scores)
    assert_close(fake.score(images, texts, scorer=scorer, pairs=True), scores.diagonal())
    assert_close(fake.score(PICTURES, CAPTIONS, scorer=scorer, pairs=True, batch_size=2), scores.diagonal())


@pytest.mark.parametrize("scorer", SCORERS, ids=str)
@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_the_batch_size_changes_nothing(fake: Engine, scorer: str | Scorer, batch_size: int):
    whole = fake.score(PICTURES, CAPTIONS, scorer=scorer)
    assert_close(fake.score(PICTURES, CAPTIONS, scorer=scorer, batch_size=batch_size), whole)


def test_no_pass_of_the_encoder_is_larger_than_the_batch(fake: Engine):
    fake.score(PICTURES, CAPTIONS, scorer="sgi", batch_size=2)
    assert max(encoder_of(fake).calls) == 2


def test_sgi_finds_what_each_segment_names(fake: Engine):
    scores = fake.score([picture("red", "blue"), picture("red", "green")], ["red", "blue"], scorer="sgi")
    assert scores[0, 1] > 0.9 > scores[1, 1]
    assert_close(scores[0, 0], scores[1, 0])


def test_outputs_are_scaled_as_the_checkpoint_says(fake: Engine):
    similarity = fake.score(PICTURES, CAPTIONS)
    logit = fake.score(PICTURES, CAPTIONS, output="logit")
    assert_close(logit, 10 * similarity - 1)
    probability = fake.score(PICTURES, CAPTIONS, output="probability")
    assert_close(probability, torch.exp(logit) / torch.exp(logit).sum(1, keepdim=True))
    sigmoid = Engine(FakeEncoder(probability="sigmoid"))
    assert_close(sigmoid.score(PICTURES, CAPTIONS, output="probability"), 1 / (1 + torch.exp(-logit)))
    assert_close(
        sigmoid.score(PICTURES, CAPTIONS, output="probability", pairs=True),
        1 / (1 + torch.exp(-logit.diagonal())),
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.score([], ["red"]), "images: there must be at least one, got none"),
        (lambda e: e.score(PICTURES, []), "encode_texts: needs at least one text, got none"),
        (lambda e: e.score(PICTURES, ["red"], output="percent"), "output must be one of .* got 'percent'"),
        (lambda e: e.score(PICTURES, ["red"], scorer="colbert"), "scorer: must be one of .* got 'colbert'"),
        (lambda e: e.score(PICTURES, ["red"], pairs=True), "got 3 images and 1 texts"),
        (
            lambda e: e.score(PICTURES, CAPTIONS, pairs=True, output="probability"),
            "a softmax probability is one among several texts and pairs have one each",
        ),
        (lambda e: e.encode_images(PICTURES, on_error="ignore"), "on_error must be one of 'raise', 'skip'"),
        (lambda e: e.encode_images(PICTURES, ids=["a"]), "ids must name each of 3 images, got 1 ids"),
        (lambda e: e.encode_images(PICTURES, ids="abc"), "ids must name each of 3 images, got 'abc'"),
        (lambda e: e.encode_images(PICTURES, regions=[[[0, 0, 4, 4]]]), "regions .* each of 3 images, got 1"),
        (
            lambda e: e.encode_images(PICTURES, regions=[[[0, 0, 4, 4]], [], [[0, 0, 4, 4]]]),
            r"regions must be integer \(R, 4\) with R >= 1 for each image, got float64 \(0,\) for image 1",
        ),
        (lambda e: e.encode_images(PICTURES[0], regions=[[[0, 0, 0.5, 1]]]), r"R >= 1 .* got float64 \(1, 4\)"),
        (lambda e: e.encoder.encode_images(PICTURES[:1], boxes=[np.zeros((0, 4), int)]), r"got int64 \(0, 4\)"),
        (lambda e: e.score(PICTURES, CAPTIONS, batch_size=0), "score: batch_size must be at least 1, got 0"),
        (lambda e: e.encode_images(PICTURES, batch_size=-1), "encode_images: batch_size .* got -1"),
        (lambda e: e.encode_texts(CAPTIONS, batch_size=0), "encode_texts: batch_size .* got 0"),
        (lambda e: e.classify(PICTURES, ["red"], batch_size=0), "classify: batch_size .* got 0"),
        (lambda e: e.encoder.encode_images(PICTURES, batch_size=0), "encode_images: batch_size .* got 0"),
        (lambda e: e.encoder.encode_texts(CAPTIONS, batch_size=0), "encode_texts: batch_size .* got 0"),
        (lambda e: e.encoder.encode_crops(PICTURES, batch_size=0), "encode_crops: batch_size .* got 0"),
        (lambda e: e.encode_texts(CAPTIONS, segments=[["red"]]), "segments .* each of 3 texts, got 1"),
        (lambda e: e.explain(PICTURES[0], "red", scorer="x"), "scorer: must be one of"),
        (
            lambda e: e.encode_images(PICTURES, scorer=Needs(patches=True, tap="x")),
            r"\('hidden', 'projected'\)",
        ),
        (lambda e: e.classify(PICTURES, []), "classify: labels must be distinct and at least one, got"),
        (lambda e: e.classify(PICTURES, ["red", "red"]), "labels must be distinct and at least one"),
        (lambda e: e.classify(PICTURES, ["red"], templates=["a"]), r"every template must hold \{\}"),
    ],
)
def test_wrong_calls_say_what_was_wanted(fake: Engine, call, message: str):
    with pytest.raises(ValueError, match=message):
        call(fake)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.score(PICTURES, ["red", 3]), "text 1 must be a string, got int"),
        (lambda e: e.score([3.5], ["red"]), "source must be a path, bytes, a PIL image"),
        (
            lambda e: e.encode_texts(["red"], segments=["red"]),
            "segments of text 0 must be a list, got one string",
        ),
    ],
)
def test_wrong_types_say_what_was_wanted(fake: Engine, call, message: str):
    with pytest.raises(TypeError, match=message):
        call(fake)


def test_equal_strings_are_encoded_once(fake: Engine):
    texts = fake.encode_texts(["a red box", "a blue box", "a red box"], scorer="sgi")
    assert sorted(encoder_of(fake).encoded) == sorted(["a red box", "a blue box"] * 2)
    assert texts.texts == ("a red box", "a blue box", "a red box")
    assert_close(texts.embedding[0], texts.embedding[2])
    assert_close(texts.segments[0], texts.segments[2])
    encoder_of(fake).encoded.clear()
    fake.encode_texts(["a red box and a blue box", "a blue box and a red box"], scorer="sgi")
    assert encoder_of(fake).encoded[2:] == ["a red box", "a blue box"]


def test_segments_are_those_of_the_segmenter_in_the_template(fake: Engine):
    texts = fake.encode_texts(CAPTIONS, scorer=SGI(template="picture of {}"))
    assert texts.segmenter == "rules" and texts.segment_template == "picture of {}"
    parts = RulesSegmenter().segment(CAPTIONS)
    assert texts.segment_texts == tuple(tuple(part.text for part in row) for row in parts)
    assert texts.segment_mask.sum(1).tolist() == [2, 1, 1]
    assert texts.segment_negated.tolist() == [[False, False], [False, False], [True, False]]
    alone = fake.encode_texts("picture of a blue box").embedding
    assert_close(texts.segments[0, 1], alone[0])
    assert_close(texts.segments[1, 1], torch.zeros_like(alone[0]))


def test_segments_of_the_users_own(fake: Engine):
    own = [["red"], ["green", Segment("blue", 0, 4, negated=True)], []]
    texts = fake.encode_texts(CAPTIONS, scorer="sgi", segments=own)
    assert texts.segmenter == "" and texts.segment_texts == (("red",), ("green", "blue"), ())
    assert texts.segment_negated.tolist() == [[False, False], [False, True], [False, False]]
    assert texts.segment_mask.tolist() == [[True, False], [True, True], [False, False]]
    assert_close(texts.segments[1], fake.encode_texts(["green", "blue"]).embedding)
    assert fake.score(PICTURES, texts, scorer="sgi").shape == (3, 3)
    empty = fake.encode_texts(["red"], scorer="sgi", segments=[[]])
    assert empty.segments.shape[1] == 1 and not empty.segment_mask.any()


def test_regions_of_the_users_own(fake: Engine):
    boxes = [[[0, 0, 16, 32], [16, 0, 32, 32]], [[4, 4, 8, 8]], [[0, 0, 32, 32], [0, 0, 1, 1]]]
    images = fake.encode_images(PICTURES, regions=boxes)
    assert images.region_plan == "own/rescaled/border" and images.region_mask.tolist() == [
        [True, True],
        [True, False],
        [True, True],
    ]
    assert images.boxes[0].tolist() == boxes[0]
    halves = fake.encode_images([picture("red"), picture("blue")]).embedding
    assert_close(images.regions[0], halves)
    assert fake.score(images, CAPTIONS, scorer=SGI(grid="none", full_image=False)).shape == (3, 3)


def test_needs_are_met_one_by_one(fake: Engine):
    images = fake.encode_images(PICTURES, scorer=Needs(patches=True, tap="hidden", image_layers=(2,)))
    assert images.tap == "hidden" and not images.aligned and list(images.hidden) == [2]
    texts = fake.encode_texts(CAPTIONS, scorer=Needs(tokens=True, text_layers=(1, 2)))
    assert texts.tokens is not None and sorted(texts.hidden) == [1, 2]
    with pytest.raises(ValueError, match="tap 'hidden' do not; use tap 'projected'"):
        fake.score(images, texts, scorer="max_sim")


def test_an_encoder_without_an_aligned_tap_says_so():
    peaksim = Engine(FakeEncoder(taps={"hidden": False}))
    with pytest.raises(ValueError, match=r"patches in the text's space \(it has none\), got 'hidden'"):
        peaksim.score(PICTURES, CAPTIONS, scorer="max_sim")
    with pytest.raises(ValueError, match=r"patches \(it has none\), got None"):
        Engine(FakeEncoder(taps={})).encode_images(PICTURES, scorer=Needs(patches=True))


def test_features_of_another_encoder_are_refused(fake: Engine):
    other = Engine(FakeEncoder(name="other"))
    with pytest.raises(ValueError, match="must come from the encoder fake-1, got those of other-1"):
        fake.score(other.encode_images(PICTURES), CAPTIONS)
    with pytest.raises(ValueError, match="must come from the encoder fake-1, got those of other-1"):
        fake.score(PICTURES, other.encode_texts(CAPTIONS))


def test_features_without_what_the_scorer_needs_are_refused(fake: Engine):
    with pytest.raises(ValueError, match=r"sgi: needs image regions, which .*encode_texts\(\.\.\., scorer='sgi'\)"):
        fake.score(fake.encode_images(PICTURES), CAPTIONS, scorer="sgi")


def test_cut_captions_are_named_and_so_are_those_made_equal():
    peaksim = Engine(FakeEncoder(context_length=5))
    long = ["one two three four", "one two three five", "short"]
    with pytest.warns(UserWarning, match=r"cut: text 0 \('one two.*, 1 .*; equal after the cut, .*: texts \[0, 1\]"):
        texts = peaksim.encode_texts(long)
    assert texts.truncated.tolist() == [True, True, False]
    with pytest.warns(UserWarning, match=r"cut: text 0 .* and 2 more$"):
        peaksim.encode_texts([f"{n} x y z" for n in range(7)])


def test_progress_is_counted_in_images_and_in_texts(fake: Engine, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, int]] = []
    fake.score(PICTURES, CAPTIONS, batch_size=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 3), (3, 3)]
    seen.clear()
    monkeypatch.setattr("engine.encoders.sources.FEATURE_ROWS", 2)
    features = fake.encode_images(PICTURES)
    fake.score(features, CAPTIONS, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 3), (3, 3)]
    seen.clear()
    fake.encode_images(PICTURES, batch_size=1, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    seen.clear()
    fake.encode_texts(
        ["a red box and a box", "a box"],
        scorer="sgi",
        batch_size=1,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_the_bar_is_drawn_on_standard_error(fake: Engine, capsys: pytest.CaptureFixture[str]):
    fake.score(PICTURES, CAPTIONS, progress=True)
    assert capsys.readouterr().out == ""


def test_several_threads_get_the_same_scores():
    peaksim = Engine(FakeEncoder(), segmenter="rules")
    expected = peaksim.score(PICTURES, CAPTIONS, scorer="sgi")
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(peaksim.score, PICTURES, CAPTIONS, scorer="sgi") for _ in range(8)]
        for job in jobs:
            assert_close(job.result(), expected)


def test_classes_are_the_mean_of_their_sentences(fake: Engine):
    labels, templates = ["red", "blue", "green"], ["{}", "picture of {}"]
    shares = fake.classify(PICTURES, labels, templates=templates)
    assert_close(shares.sum(dim=1), torch.ones(3))
    assert shares[1].argmax() == 2
    images = fake.encode_images(PICTURES).embedding
    rows = []
    for label in labels:
        vectors = fake.encode_texts([template.replace("{}", label) for template in templates]).embedding
        rows.append(functional.normalize(vectors.mean(dim=0), dim=0))
    cosine = fake.classify(PICTURES, labels, templates=templates, output="similarity")
    assert_close(cosine, images @ torch.stack(rows).T)
    assert fake.classify(PICTURES[0], "red").shape == (1, 1)


def test_the_backend_reaches_the_scorers_that_name_none():
    peaksim = Engine(FakeEncoder(), segmenter="rules", backend="reference")
    assert peaksim.scorer("sgi") == SGI(backend="reference")
    assert peaksim.scorer(MaxSim(backend="cpp")) == MaxSim(backend="cpp")
    assert peaksim.scorer("global").name == "global"
    with pytest.raises(ValueError, match=r"Engine: backend must be one of 'auto', 'cpp', .* got 'gpu'"):
        Engine(FakeEncoder(), backend="gpu")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Replaces the loading of encoders; records what was asked for."""
    asked: list[tuple] = []

    def load_encoder(name: str, *, device: object, dtype: object) -> FakeEncoder:
        asked.append((name, device, dtype))
        return FakeEncoder(name=name)

    monkeypatch.setattr("engine.engine.load_encoder", load_encoder)
    engine.engine._load_once.cache_clear()
    yield asked
    engine.engine._load_once.cache_clear()


def test_loading_hands_its_options_on(loads: list[tuple]):
    peaksim = load("scenes", device="cpu", dtype="float32", segmenter="rules", backend="reference")
    assert loads == [("scenes", "cpu", "float32")]
    assert peaksim.segmenter.name == "rules" and peaksim.backend == "reference"
    loads.clear()
    with pytest.raises(ValueError, match=r"Engine: segmenter must be one of 'auto', 'spacy', .* got 'regex'"):
        load("scenes", segmenter="regex")
    with pytest.raises(ValueError, match=r"Engine: backend must be one of .* got 'nope'"):
        load("scenes", backend="nope")
    assert loads == []
    own = RulesSegmenter()
    assert load(segmenter=own).segmenter is own
    assert peaksim.spec.name == "scenes"


def test_the_one_liner_keeps_its_engines(loads: list[tuple]):
    expected = Engine(FakeEncoder(name="a")).score(PICTURES, CAPTIONS, scorer="max_sim", output="logit")
    assert_close(score(PICTURES, CAPTIONS, model="a", scorer="max_sim", output="logit"), expected)
    seen: list[tuple[int, int]] = []
    done = score(PICTURES, CAPTIONS, model="a", pairs=True, progress=lambda *step: seen.append(step))
    assert done.shape == (3,) and seen == [(3, 3)]
    assert [name for name, *_ in loads] == ["a"]
    score(PICTURES, "red", model="b")
    score(PICTURES, "red", model="c")
    score(PICTURES, "red", model="a")
    assert [name for name, *_ in loads] == ["a", "b", "c", "a"]


def test_the_one_liner_loads_once_for_two_threads(loads: list[tuple]):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: score(PICTURES[0], "red", model="a"), range(8)))
    assert len(loads) == 1


def test_an_unknown_model_is_refused_by_name():
    with pytest.raises(ValueError, match="got 'sceness'"):
        load("sceness")


def test_features_survive_a_file(fake: Engine, tmp_path: Path):
    images, texts = fake.encode_images(PICTURES, scorer="sgi"), fake.encode_texts(CAPTIONS, scorer="sgi")
    images.save(tmp_path / "images.safetensors")
    texts.save(tmp_path / "texts.safetensors")
    again = fake.score(
        ImageFeatures.load(tmp_path / "images.safetensors"),
        TextFeatures.load(tmp_path / "texts.safetensors"),
        scorer="sgi",
    )
    assert_close(again, fake.score(images, texts, scorer="sgi"))


def test_importing_the_package_loads_no_torch():
    code = "import sys, engine; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "False"
    assert set(engine.__all__) <= set(dir(engine))
    assert engine.RegionPlan().grid == "scenes"
    with pytest.raises(AttributeError, match="module 'engine' has no attribute 'scores'"):
        engine.scores  # noqa: B018
