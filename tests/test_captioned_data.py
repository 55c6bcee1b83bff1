"""Features of captioned pictures: rows never move, a picture is stored once, batches draw captions, broken ones go."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.datasets.captioned import CaptionedImages
from engine.datasets.coco import read_coco
from engine.datasets.trohn import read_trohn
from engine.datasets.web_dataset import read_web_dataset
from engine.engine import Engine
from engine.features import Needs
from engine.heads.registry import HEADS
from engine.store import FeatureStore
from engine.training.captioned_data import CaptionedData, captioned_data, shape_of
from engine.training.hard_negatives import with_negatives
from engine.training.heads import HeadTrainConfig, train_head
from engine.training.held_out import HeldOutFigures, held_out
from tests.captioned_files import sample, write_coco, write_shard, write_trohn
from tests.fake_encoder import FakeEncoder

PLAIN = Needs()


@pytest.fixture
def engine() -> Engine:
    return Engine(FakeEncoder(context_length=24))


def rows_of(data: CaptionedData, engine: Engine, items: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    images, texts = data.batch(torch.tensor(items))
    return images.embedding, texts.embedding


def test_batches_hold_pictures_with_their_captions(tmp_path, engine):
    rows, images, others = write_trohn(tmp_path)
    read = read_trohn(rows, images, others)
    data = captioned_data(engine, PLAIN, read, tmp_path / "features")
    assert (len(data), data.images_per_item, data.texts_per_item) == (6, 2, 2)
    found, texts = rows_of(data, engine, [4, 1])
    files = [images / "000000000004.jpg", images / "000000000001.jpg"]
    files += [others / "000000000004.jpg", others / "000000000001.jpg"]
    torch.testing.assert_close(found, engine.encode_images(files).embedding)
    captions = ["a red cube 4", "a red cube 1", "a blue cube 4", "a blue cube 1"]
    torch.testing.assert_close(texts, engine.encode_texts(captions).embedding)


def test_a_picture_and_a_text_are_stored_once_and_captions_are_drawn(tmp_path, engine):
    read = read_coco(*write_coco(tmp_path, captions=4)[:2])
    data = captioned_data(engine, PLAIN, read, tmp_path / "features")
    assert len(data.images) == 6 and len(data.texts) == 24 and shape_of(read) == (1, 1)
    seen = {int(data.caption_rows[2].index((row,))) for row in drawn(data, 2)}
    assert seen == {0, 1, 2, 3}
    # The same batch draws the same.
    first, again = (data.batch(torch.tensor([3, 2, 5]))[1].embedding for _ in range(2))
    assert torch.equal(first, again)


def drawn(data: CaptionedData, item: int) -> list[int]:
    """Rows of the captions that batches with an item drew for it."""
    found = []
    for other in torch.cartesian_prod(torch.arange(6), torch.arange(6)).tolist():
        _, texts = data.batch(torch.tensor([item, *other]))
        every = data.texts[:].embedding
        found.append(int((every - texts.embedding[0]).abs().sum(1).argmin()))
    return found


def test_broken_pictures_are_named_and_move_nothing(tmp_path, engine):
    captions, images, _ = write_coco(tmp_path, count=8)
    whole = captioned_data(engine, PLAIN, read_coco(captions, images), tmp_path / "whole")
    (images / "000000000002.png").write_bytes(b"")
    content = (images / "000000000005.png").read_bytes()
    (images / "000000000005.png").write_bytes(content[: len(content) // 2])
    read = read_coco(captions, images)
    said: list[tuple[str, int, int]] = []
    data = captioned_data(engine, PLAIN, read, tmp_path / "features", told=lambda *words: said.append(words))
    assert [problem.path for problem in data.problems] == [str(images / f"{k:012d}.png") for k in (2, 5)]
    assert data.problems[0].reason == "the file is empty" and "truncated" in data.problems[1].reason
    assert len(data) == 6 and said == [("images", 8, 8), ("texts", 16, 16)]
    kept = [0, 1, 3, 4, 6, 7]
    assert [data.image_rows[item] for item in range(6)] == [(row,) for row in kept]
    for item, row in enumerate(kept):
        assert torch.equal(data.images[[data.image_rows[item][0]]].embedding, whole.images[[row]].embedding)
        assert data.caption_rows[item] == whole.caption_rows[row]
    # Opened again nothing is computed, and the broken ones are still known.
    again = captioned_data(engine, PLAIN, read, tmp_path / "features", told=lambda *words: said.append(words))
    assert again.problems == data.problems and len(said) == 2 and again.source == data.source != whole.source
    for path in images.iterdir():
        path.write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"must hold a picture that can be read, got none; the first: .*0\.png"):
        captioned_data(engine, PLAIN, read_coco(captions, images), tmp_path / "features")


@pytest.mark.parametrize(
    ("note", "message"),
    [
        (None, "unread.json is missing"),
        ("", "unread.json: Expecting value"),
        ("[]", "unread.json: .*no attribute"),
        ('{"x": "y"}', "unread.json: invalid literal"),
        ('{"999": "x"}', "unread.json: row 999 of 6"),
    ],
)
def test_a_damaged_note_of_unread_pictures_is_named(tmp_path, engine, note, message):
    captions, images, _ = write_coco(tmp_path)
    (images / "000000000002.png").write_bytes(b"broken")
    read = read_coco(captions, images)
    data = captioned_data(engine, PLAIN, read, tmp_path / "features")
    folder = data.images.folder
    path = folder / "unread.json"
    path.unlink()
    if note is not None:
        path.write_text(note)
    with pytest.raises(ValueError, match=rf"{folder} is damaged \({message}.*\); remove this folder, it is made again"):
        captioned_data(engine, PLAIN, read, tmp_path / "features")
    shutil.rmtree(folder)
    assert captioned_data(engine, PLAIN, read, tmp_path / "features").problems == data.problems


def test_a_store_of_the_first_format_has_no_note_where_all_could_be_read(tmp_path, engine):
    read = read_coco(*write_coco(tmp_path)[:2])
    folder = captioned_data(engine, PLAIN, read, tmp_path / "features").images.folder
    assert (folder / "unread.json").read_text() == "{}\n"
    (folder / "unread.json").unlink()
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 2', '"format_version": 1'))
    assert captioned_data(engine, PLAIN, read, tmp_path / "features").problems == ()


def test_a_picture_that_was_replaced_is_encoded_again(tmp_path, engine):
    captions, images, _ = write_coco(tmp_path)
    first = captioned_data(engine, PLAIN, read_coco(captions, images), tmp_path / "features")
    # Of the same size, and so known by its time alone.
    os.utime(images / "000000000002.png", ns=(1, 1))
    again = captioned_data(engine, PLAIN, read_coco(captions, images), tmp_path / "features")
    assert again.source != first.source and again.texts.manifest == first.texts.manifest


def test_a_filling_that_was_stopped_goes_on(tmp_path, engine, monkeypatch):
    monkeypatch.setattr("engine.training.captioned_data.SHARD_ROWS", 2)
    captions, images, _ = write_coco(tmp_path)
    (images / "000000000000.png").write_bytes(b"broken")
    (images / "000000000004.png").write_bytes(b"broken")
    read = read_coco(captions, images)

    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        captioned_data(engine, PLAIN, read, tmp_path / "features", told=stop)
    (folder,) = (tmp_path / "features").glob("images*")
    assert FeatureStore.open(folder).missing() == [1, 2]
    data = captioned_data(engine, PLAIN, read, tmp_path / "features")
    assert [problem.path[-5:] for problem in data.problems] == ["0.png", "4.png"]
    whole = captioned_data(engine, PLAIN, read, tmp_path / "other")
    assert torch.equal(data.images[:].embedding, whole.images[:].embedding) and data.problems == whole.problems


def test_pictures_of_shards_are_read_from_there(tmp_path, engine):
    members = sample("1", 1) | sample("2", 2, negative_txt=b"not 2") | {"3.txt": b"three", "3.png": b"broken"}
    write_shard(tmp_path / "a.tar", members)
    data = captioned_data(engine, PLAIN, read_web_dataset(str(tmp_path / "*.tar")), tmp_path / "features")
    assert len(data) == 2 and [problem.path for problem in data.problems] == ["a.tar/3.png"]
    # Not every sample has a negative: captions alone.
    assert (data.images_per_item, data.texts_per_item) == (1, 1)
    picture = np.random.default_rng(2).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    expected = engine.encode_images([Image.fromarray(picture)]).embedding
    torch.testing.assert_close(data.batch(torch.tensor([1]))[0].embedding, expected)


def test_other_data_is_refused_by_a_run(tmp_path, engine):
    captions, images, _ = write_coco(tmp_path)
    read = with_negatives(read_coco(captions, images), "swaps")
    head = HEADS["linear"].build(engine.spec)
    config = HeadTrainConfig(tmp_path / "run", steps=2, batch_size=2, warmup_steps=0, loss="captions")
    train_head(head, captioned_data(engine, head.needs(), read, tmp_path / "features"), config)
    fewer = replace(read, items=read.items[:4])
    with pytest.raises(ValueError, match="was written with other settings"):
        train_head(head, captioned_data(engine, head.needs(), fewer, tmp_path / "features"), config)
    quads = replace(config, loss="quads", output=tmp_path / "other")
    message = "loss 'quads' needs 2 images and 2 texts an item, got 1 and 2; these data fit auto"
    with pytest.raises(ValueError, match=message):
        train_head(head, captioned_data(engine, head.needs(), read, tmp_path / "features"), quads)


def test_held_out_items_are_evaluated_and_not_trained_on(tmp_path, engine):
    read = read_trohn(*write_trohn(tmp_path, count=40))
    data = captioned_data(engine, PLAIN, read, tmp_path / "features")
    seen, unseen = held_out(data, 100)
    assert unseen is not None and (len(seen), len(unseen)) == (36, 4)
    assert not {rows[0] for rows in seen.image_rows} & {rows[0] for rows in unseen.image_rows}
    assert held_out(data, 0) == (data, None) and held_out(seen, 2)[1] is not None
    head = HEADS["linear"].build(engine.spec).eval()
    figures = HeldOutFigures(unseen)(head)
    images, texts = unseen.batch(torch.arange(4))
    matrix = head.matrix(images, texts).detach()
    own = head.matrix(images[:4], texts[:4]).detach()
    by_row = sum(bool(own[k, k] > max(own[k, j] for j in range(4) if j != k)) for k in range(4))
    by_column = sum(bool(own[k, k] > max(own[j, k] for j in range(4) if j != k)) for k in range(4))
    group = 0
    for k in range(4):
        a, b, c, d = matrix[k, k], matrix[k, k + 4], matrix[k + 4, k], matrix[k + 4, k + 4]
        group += bool(a > b and a > c and d > b and d > c)
    over = sum(bool(matrix[k, k] > matrix[k, k + 4]) for k in range(4))
    assert figures == {"found": (by_row + by_column) / 8, "over_negative": over / 4, "group": group / 4}


def test_items_need_images_and_captions(tmp_path, engine):
    data = captioned_data(engine, PLAIN, read_trohn(*write_trohn(tmp_path)), Path(tmp_path / "features"))
    with pytest.raises(ValueError, match="as many items must have images as captions, and at least one, got 6 and 5"):
        replace(data, caption_rows=data.caption_rows[:5])
    assert isinstance(read_trohn(*write_trohn(tmp_path / "again")), CaptionedImages)
