"""What the engine says of things that are none: names, texts, segments, pictures, features that are no number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import engine
from engine.encoders.registry import load_encoder
from engine.encoders.scenes import save_scenes
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.engine import Engine
from engine.features import ImageFeatures
from engine.heads.registry import HEADS
from engine.scorers.registry import get_scorer
from engine.scorers.sgi import SGI
from engine.training.scenes import VOCABULARY
from tests.fake_encoder import FakeEncoder, picture
from tests.scorer_cases import make_images, make_texts

PICTURE = picture("red", "blue")


@pytest.fixture
def fake() -> Engine:
    return Engine(FakeEncoder(), segmenter="rules")


def test_an_encoder_that_cannot_be_saved_says_so(fake: Engine):
    with pytest.raises(ValueError, match="fake: save is not known to FakeEncoder, got 'place'"):
        fake.encoder.save("place")


def test_a_model_is_named_by_a_string():
    for load in (engine.load, load_encoder):
        with pytest.raises(TypeError, match="load: name must be a string, got NoneType"):
            load(None)
    with pytest.raises(TypeError, match="load: name must be a string, got PosixPath"):
        engine.load(Path("/x"))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e: e.score(PICTURE, None), TypeError, "texts must be a string or a list of strings, got NoneType"),
        (lambda e: e.score(PICTURE, 3), TypeError, "texts must be a string or a list of strings, got int"),
        (lambda e: e.encode_texts(b"red"), TypeError, "texts must be a string or a list of strings, got bytes"),
        (lambda e: e.score(PICTURE, ["a", b"b"]), TypeError, "text 1 must be a string, got bytes"),
        (lambda e: e.explain(PICTURE, None), TypeError, "texts must be a string or a list"),
        (lambda e: e.score(PICTURE, ["a", "b \ud800"]), ValueError, r"text 1 must be text, .*'\\ud800'.* position 2"),
        (lambda e: e.encoder.encode_texts(["\udce9"]), ValueError, r"text 0 must be text, .*'\\udce9'.* position 0"),
        (lambda e: e.classify(PICTURE, ["a", "\udce9"]), ValueError, "classify: label 1 must be text"),
        (lambda e: e.classify(PICTURE, ["a", 2]), TypeError, "classify: label 1 must be a string, got int"),
        (lambda e: e.classify(PICTURE, ["a"], templates=[None]), TypeError, "template 0 must be a string, got None"),
        (lambda e: e.score(3, "a"), TypeError, "images: must be paths, bytes, .*, one or a list of them, got int"),
        (lambda e: e.encode_images(None), TypeError, "images: must be paths, .* got NoneType"),
        (
            lambda e: e.score(PICTURE, "a", progress=3),
            TypeError,
            "progress: must be True, False or a function .* got 3",
        ),
        (lambda e: e.encode_texts("a", progress=None), TypeError, "progress: must be True, False or a function"),
        (lambda e: e.score(PICTURE, "a", pairs="yes"), TypeError, "score: pairs must be True or False, got 'yes'"),
        (
            lambda e: e.classify(PICTURE, ["a"], templates="a {} x"),
            TypeError,
            "classify: templates must be a list of strings, got one string 'a {} x'",
        ),
        (lambda e: e.explain([PICTURE] * 2, "a"), ValueError, "explain: wants one image and one text, got 2 images"),
        (lambda e: e.explain([PICTURE], ["a", "b"]), ValueError, "explain: wants one image and one text, got 1 and 2"),
        (lambda e: e.score(PICTURE, "a", batch_size="8"), TypeError, "score: batch_size must be an integer, got str"),
    ],
)
def test_what_is_no_text_or_picture_is_named(
    fake: Engine, call: Callable[[Engine], object], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        call(fake)


@pytest.mark.parametrize(
    ("segments", "error", "message"),
    [
        ([["a"], [None]], TypeError, "segment 0 of text 1 must be a string or a Segment, got NoneType"),
        ([["a"], None], TypeError, "segments of text 1 must be a list, got NoneType"),
        ([["a"], ["b", "\ud800"]], ValueError, "segment 1 of text 1 must be text"),
    ],
)
def test_what_is_no_segment_is_named(fake: Engine, segments: list, error: type[Exception], message: str):
    with pytest.raises(error, match=f"encode_texts: {message}"):
        fake.encode_texts(["a", "b"], segments=segments)


def test_a_tensor_without_pixels_is_a_picture_that_cannot_be_read(fake: Engine):
    for odd in (torch.empty(3, 8, 8, device="meta"), torch.zeros(3, 8, 8).to_sparse()):
        with pytest.warns(UserWarning, match="1 of 2 images left out: image 1, torch tensor .*no plain pixels"):
            assert len(fake.encode_images([PICTURE, odd], on_error="skip")) == 1
        with pytest.raises(ValueError, match="no plain pixels"):
            fake.score([PICTURE, odd], "red")


def test_exclusive_assignment_of_what_is_no_number_names_picture_and_text():
    scorer, images, texts = SGI(exclusive=True), make_images(), make_texts()
    whole = scorer.matrix(images, texts)
    images.regions[1, 0, 0] = torch.nan
    found = scorer.matrix(images, texts)
    # The other pictures keep their scores, as without exclusive=True.
    assert found[1].isnan().all() and torch.equal(found[[0, 2]], whole[[0, 2]])
    assert torch.equal(found.isnan(), SGI().matrix(images, texts).isnan())
    assert scorer.pairs(images, texts[:3]).isnan().tolist() == [False, True, False]
    assert len(scorer.matches(images[1], texts[0])) == len(SGI().matches(images[1], texts[0]))
    fake = Engine(FakeEncoder())
    with pytest.raises(ValueError, match=r"the score of image 1 and text 0 \('caption 0'\) must be finite, got nan"):
        fake.score(images, texts, scorer=scorer)
    with pytest.raises(ValueError, match=r"sgi: the score of image 0 and text 0 .* must be finite"):
        fake.explain(images[1], texts[0], scorer=scorer)


def test_a_masked_region_that_is_no_number_takes_no_part():
    images, texts = make_images(), make_texts()
    whole = SGI(exclusive=True).matrix(images, texts)
    images.regions[2, -1] = torch.nan
    assert torch.equal(SGI(exclusive=True).matrix(images, texts), whole)


def test_files_that_are_no_features_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=rf"ImageFeatures.load: {tmp_path} is a folder"):
        ImageFeatures.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"ImageFeatures.load: {tmp_path}/absent does not exist"):
        ImageFeatures.load(tmp_path / "absent")
    ImageFeatures(torch.eye(4), ids=tuple("abcd")).save(tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    for length in (0, 3, 8, 40, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(ValueError, match=rf"ImageFeatures.load: {tmp_path}/cut is not a whole safetensors file"):
            ImageFeatures.load(tmp_path / "cut")


SHIPPED = [*(get_scorer(name) for name in HEADS), SGI(crops="windows", head="scenes")]


@pytest.mark.parametrize("scorer", SHIPPED, ids=lambda scorer: scorer.name)
def test_a_shipped_head_on_another_model_is_refused_before_layers_are_counted(tmp_path, scorer):
    torch.manual_seed(0)
    small = ScenesModelConfig(width=16, heads=2, image_layers=1, text_layers=1, stem_width=8, embed_dim=8)
    save_scenes(tmp_path, ScenesModel(small), VOCABULARY)
    other = engine.load(f"scenes:{tmp_path}", device="cpu")
    with pytest.raises(ValueError, match=rf"^{scorer.name}: features must come from the encoder the head was"):
        other.score(picture("red"), "a red circle", scorer=scorer)
