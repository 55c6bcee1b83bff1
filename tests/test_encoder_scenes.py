"""The embedded encoder: its words, its two ways to the same state, its files, and the gates of the shipped weights."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import engine
from engine.encoders.scenes import ScenesEncoder, WordTokenizer, load_scenes, pixels_from_uint8, save_scenes
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.scenes.render import training_batch
from engine.training.scenes import VOCABULARY
from tests.tolerances import assert_close

TINY = ScenesModelConfig(width=16, heads=2, image_layers=2, text_layers=3, stem_width=8, embed_dim=8)


@pytest.fixture
def encoder() -> ScenesEncoder:
    torch.manual_seed(3)
    return ScenesEncoder(ScenesModel(TINY), VOCABULARY, name="scenes", device=torch.device("cpu"))


def pictures(n: int) -> list[Image.Image]:
    return [Image.fromarray(pixels) for pixels in training_batch(5, 0, n).images]


def test_words_are_whole_lower_case_and_without_punctuation():
    tokens = WordTokenizer(("a", "red", "circle"), 6)(["A red, CIRCLE.", "a"])
    assert tokens.ids.tolist() == [[1, 4, 5, 6, 2, 0], [1, 4, 2, 0, 0, 0]]
    assert tokens.word_mask.tolist()[1] == [False, True, False, False, False, False]
    assert tokens.attention_mask.sum(dim=1).tolist() == [5, 3]
    assert tokens.end.tolist() == [4, 2]
    assert tokens.token_texts[1][:4] == ("<start>", "a", "<end>", "<pad>")


def test_a_long_caption_keeps_its_end_token_and_is_flagged():
    tokens = WordTokenizer(("a",), 5)(["a a a", "a a a a"])
    assert tokens.truncated.tolist() == [False, True]
    assert tokens.ids[1].tolist() == [1, 4, 4, 4, 2]


def test_words_must_be_distinct():
    with pytest.raises(ValueError, match="words must be distinct"):
        WordTokenizer(("a", "a"), 5)


def test_unknown_words_are_named(encoder):
    with pytest.warns(UserWarning, match="knows 135 words and not dog, zebra; they count as one unknown word"):
        encoder.encode_texts(["a dog", "a red zebra"])


def test_words_of_any_script_are_words(encoder):
    with pytest.warns(UserWarning, match="not rötes, круг; they count"):
        tokens = encoder.tokenize(["rötes круг"])
    assert tokens.ids[0, :4].tolist() == [1, 3, 3, 2]


def test_the_short_ways_to_a_state_give_the_long_ways_state(encoder):
    model = encoder._model
    pixels = torch.randn(3, 3, 96, 96)
    assert_close(model.image.class_state(pixels), model.image(pixels)[0][:, 0])
    tokens = encoder.tokenize(["a red circle", "two small blue stars and a ring", "ring"])
    states, _ = model.text(tokens.ids)
    assert_close(model.text.end_state(tokens.ids, tokens.end), states[torch.arange(3), tokens.end])


def test_global_embedding_is_the_same_with_and_without_patches(encoder):
    images = pictures(3)
    plain, tapped = encoder.encode_images(images), encoder.encode_images(images, tap="projected", layers=(1, 2))
    assert_close(plain.embedding, tapped.embedding)
    assert tapped.patches is not None and tuple(tapped.patches.shape) == (3, 36, 8)
    assert tapped.grid == (6, 6) and tapped.aligned
    assert sorted(tapped.hidden) == [1, 2] and tuple(tapped.hidden[1].shape) == (3, 37, 16)


def test_batches_and_padding_change_nothing(encoder):
    texts = ["a red circle", "there is a large blue metal star and two rings", "ring"]
    together = encoder.encode_texts(texts, token_vectors=True)
    for row, text in enumerate(texts):
        alone = encoder.encode_texts([text], token_vectors=True)
        assert_close(alone.embedding[0], together.embedding[row])
    images = pictures(5)
    assert_close(encoder.encode_images(images, batch_size=2).embedding, encoder.encode_images(images).embedding)


def test_causal_attention_does_not_look_ahead(encoder):
    ids = encoder.tokenize(["a red circle and a blue ring"]).ids
    other = ids.clone()
    other[0, 5:] = 7
    states, _ = encoder._model.text(ids)
    changed, _ = encoder._model.text(other)
    assert_close(states[:, :5], changed[:, :5])
    assert not torch.allclose(states[:, 5:], changed[:, 5:])


def test_pixels_of_arrays_and_of_pictures_agree(encoder):
    picture = pictures(1)[0]
    pixels = torch.from_numpy(np.array(picture))[None]
    assert_close(encoder.preprocess(picture), pixels_from_uint8(pixels)[0])


def test_saved_and_loaded_again_it_gives_the_same_vectors(encoder, tmp_path):
    save_scenes(tmp_path / "first", encoder._model, VOCABULARY)
    first = load_scenes(tmp_path / "first")
    save_scenes(tmp_path / "second", first._model, VOCABULARY)
    second = load_scenes(tmp_path / "second")
    assert first.spec.fingerprint == second.spec.fingerprint
    texts = ["a red circle"]
    assert torch.equal(first.encode_texts(texts).embedding, second.encode_texts(texts).embedding)


def test_an_encoder_saved_is_the_encoder_exactly(encoder, tmp_path):
    weights = encoder._model.state_dict()
    assert not torch.equal(weights["image.projection.weight"].half().float(), weights["image.projection.weight"])
    encoder.save(tmp_path / "deep" / "exact")
    again = engine.load(f"scenes:{tmp_path / 'deep' / 'exact'}", device="cpu").encoder
    assert again.spec.fingerprint == encoder.spec.fingerprint
    assert_close(again.encode_images(pictures(2)).embedding, encoder.encode_images(pictures(2)).embedding)
    assert_close(again.encode_texts(["a red ring"]).embedding, encoder.encode_texts(["a red ring"]).embedding)
    # What float16 holds exactly stays half as long: the shipped weights, and those of a training.
    save_scenes(tmp_path / "half", encoder._model, VOCABULARY)
    load_scenes(tmp_path / "half").save(tmp_path / "again")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("half", "again"))
    assert first == second


def test_an_encoder_is_saved_into_a_folder(encoder, tmp_path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(FileExistsError, match=r"^scenes: save wants a folder, but .*file is a file"):
        encoder.save(tmp_path / "file")
    with pytest.raises(OSError, match=r"^scenes: save wants a folder, and .*below could not be made"):
        encoder.save(tmp_path / "file" / "below")
    with pytest.raises(ValueError, match=r"^scenes: save wants the path of a folder, got ''"):
        encoder.save("")
    assert (tmp_path / "file").read_text() == "here"


def test_a_changed_weight_or_word_changes_the_fingerprint(encoder, tmp_path):
    save_scenes(tmp_path, encoder._model, VOCABULARY)
    base = load_scenes(tmp_path).spec.fingerprint
    facts = json.loads((tmp_path / "model.json").read_text())
    facts["words"][0], facts["words"][1] = facts["words"][1], facts["words"][0]
    (tmp_path / "model.json").write_text(json.dumps(facts))
    assert load_scenes(tmp_path).spec.fingerprint != base
    with torch.no_grad():
        encoder._model.text.norm.bias[0] += 1
    save_scenes(tmp_path, encoder._model, VOCABULARY)
    assert load_scenes(tmp_path).spec.fingerprint != base


@pytest.mark.parametrize("file", ["model.json", "model.safetensors"])
def test_a_missing_file_is_named(encoder, tmp_path, file):
    save_scenes(tmp_path, encoder._model, VOCABULARY)
    (tmp_path / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"{file} is missing"):
        load_scenes(tmp_path)


def test_another_format_is_refused(encoder, tmp_path):
    save_scenes(tmp_path, encoder._model, VOCABULARY)
    facts = json.loads((tmp_path / "model.json").read_text()) | {"format_version": 2}
    (tmp_path / "model.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="has format 2, wanted 1"):
        load_scenes(tmp_path)


def test_an_unknown_tap_is_refused(encoder):
    with pytest.raises(ValueError, match="tap must be one of 'projected', 'value', got 'raw'"):
        encoder.encode_images(pictures(1), tap="raw")


def test_layers_outside_the_tower_are_refused(encoder):
    with pytest.raises(ValueError, match="scenes: image layers are 1 to 2, got 3"):
        encoder.encode_images(pictures(1), layers=[3])
    with pytest.raises(ValueError, match="scenes: text layers are 1 to 3, got 0"):
        encoder.encode_texts(["red"], layers=[0])


def test_loading_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    model = engine.load("scenes", device="cpu").encoder._model
    assert torch.equal(torch.get_rng_state(), before)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_a_damaged_weight_file_is_an_error_and_not_another_model(encoder, tmp_path):
    save_scenes(tmp_path / "whole", encoder._model, VOCABULARY)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    data = (tmp_path / "whole" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"cut.*model\.safetensors"):
        load_scenes(tmp_path / "cut")
