"""Pictures on their way into the engine: kinds of source, names, what cannot be read, what is no number."""

from __future__ import annotations

import io
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.encoders import sources
from engine.encoders.base import view
from engine.engine import Engine
from engine.images import ImageError, ImageFailure
from tests.fake_encoder import FakeEncoder, picture
from tests.tolerances import assert_close

PICTURES = [picture("red", "blue"), picture("green"), picture("blue", "grey", "red")]
CAPTIONS = ["a red box and a blue box", "green grass", "no red box"]


@pytest.fixture
def fake() -> Engine:
    return Engine(FakeEncoder(), segmenter="rules")


def test_every_kind_of_source_gives_the_same_score(fake: Engine, tmp_path: Path):
    image = PICTURES[0]
    file = tmp_path / "scene.png"
    image.save(file)
    buffer = io.BytesIO()
    image.save(buffer, "png")
    array = np.asarray(image)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    expected = fake.score([image], CAPTIONS)
    for one in (image, str(file), file, buffer.getvalue(), array, tensor):
        assert_close(fake.score(one, CAPTIONS), expected, what=type(one).__name__)
        assert_close(fake.score([one], CAPTIONS), expected, what=type(one).__name__)
    assert_close(fake.score(np.stack([array, array]), CAPTIONS), expected.expand(2, -1))
    assert fake.score(image, "red").shape == (1, 1)
    assert fake.score(image, "red", pairs=True).shape == (1,)


def test_ids_are_given_or_paths_or_rows(fake: Engine, tmp_path: Path):
    file = tmp_path / "a.png"
    PICTURES[0].save(file)
    assert fake.encode_images([file, PICTURES[0], str(file)]).ids == (str(file), "1", str(file))
    assert fake.encode_images(PICTURES, ids=["x", "y", "z"], batch_size=2).ids == ("x", "y", "z")


@pytest.fixture
def broken(tmp_path: Path) -> list[Path | Image.Image]:
    (tmp_path / "broken.png").write_bytes(b"no picture")
    PICTURES[0].save(tmp_path / "good.png")
    return [tmp_path / "good.png", tmp_path / "broken.png", PICTURES[1], tmp_path / "absent.png"]


def test_a_broken_picture_stops_the_run_by_name(fake: Engine, broken):
    with pytest.raises(ImageError, match=r"broken\.png: "):
        fake.encode_images(broken)
    with pytest.raises(ImageError, match=r"broken\.png: "):
        fake.score(broken, CAPTIONS)
    with pytest.raises(ImageError, match="image 1, bytes"):
        fake.score([PICTURES[0], b"no picture"], CAPTIONS)


def test_broken_pictures_are_left_out_and_named(fake: Engine, broken):
    with pytest.warns(UserWarning, match=r"2 of 4 images left out: .*broken.png \(.*; .*absent.png \("):
        images = fake.encode_images(broken, on_error="skip", batch_size=3)
    assert images.ids == (str(broken[0]), "2")
    assert_close(images.embedding, fake.encode_images([broken[0], broken[2]]).embedding)
    failures: list[ImageFailure] = []
    images = fake.encode_images(broken, on_error=failures.append, ids=["a", "b", "c", "d"], batch_size=1)
    assert images.ids == ("a", "c") and [failure.id for failure in failures] == ["b", "d"]
    with pytest.raises(ImageError, match="none of 2 images could be read"):
        fake.encode_images([broken[1], broken[3]], on_error="skip")


def test_many_broken_pictures_are_counted(fake: Engine):
    sources = [PICTURES[0], *[b"no picture"] * 8]
    with pytest.warns(UserWarning, match="8 of 9 images left out: image 1, bytes .*; and 3 more"):
        assert len(fake.encode_images(sources, on_error="skip")) == 1


def test_pictures_are_held_a_batch_at_a_time(fake: Engine, monkeypatch: pytest.MonkeyPatch):
    alive: list[weakref.ref] = []
    seen: list[int] = []
    decode_many, encode = sources.decode_many, fake.encoder.encode_pixels

    def decode(*args, **options):
        done = decode_many(*args, **options)
        alive.extend(weakref.ref(image) for image in done.images)
        return done

    def count(pixels, **options):
        seen.append(sum(reference() is not None for reference in alive))
        return encode(pixels, **options)

    monkeypatch.setattr(sources, "decode_many", decode)
    monkeypatch.setattr(fake.encoder, "encode_pixels", count)
    fake.score([picture("red")] * 12, ["red"], batch_size=3)
    fake.encode_images([picture("blue")] * 12, batch_size=3)
    # The batch before is let go when the next is there.
    assert len(alive) == 24 and len(seen) == 8 and max(seen) <= 6


def test_a_score_that_is_no_number_names_image_and_text(fake: Engine):
    images = fake.encode_images(PICTURES, ids=["a", "b", "c"])
    images.embedding[1] = torch.nan
    with pytest.raises(ValueError, match=r"the score of image 1 \(b\) and text 0 \('red'\) must be finite, got nan"):
        fake.score(images, ["red", "blue"])
    with pytest.raises(ValueError, match=r"image 1 \(b\) and text 1 \('blue'\) must be finite"):
        fake.score(images, ["red", "blue", "green"], pairs=True)


class Overflowing(FakeEncoder):
    """Gives no finite embedding for grey pictures."""

    def encode_pixels(self, pixels, *, tap=None, layers=()):
        features = super().encode_pixels(pixels, tap=tap, layers=layers)
        grey = pixels.flatten(1).std(dim=1) < 1e-3
        return replace(features, embedding=features.embedding.masked_fill(grey[:, None], torch.inf))


def test_an_embedding_that_is_no_number_names_the_picture():
    sources = [picture("red"), picture("blue"), picture("grey")]
    with pytest.raises(ValueError, match="the embedding of image 2 must be finite"):
        Engine(Overflowing()).score(sources, ["red"], batch_size=1)


@pytest.mark.parametrize(
    ("resize", "expected"),
    [("squash", (0, 0, 40, 20)), ("crop", (10, 0, 30, 20)), ("pad", (0, -10, 40, 30))],
)
def test_the_part_of_the_picture_that_the_encoder_sees(resize: str, expected: tuple[int, ...]):
    assert view(resize, 20, 40) == expected
    images = Engine(FakeEncoder(resize=resize)).encode_images(Image.new("RGB", (40, 20)))
    assert images.views.tolist() == [list(expected)] and images.sizes.tolist() == [[20, 40]]
    with pytest.raises(ValueError, match="resize must be 'crop', 'squash' or 'pad', got 'tile'"):
        view("tile", 1, 1)
