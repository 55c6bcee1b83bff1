"""Encoders from transformers: the source library's numbers, taps, text rules, and local files alone."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional

from engine.encoders.text_rules import find_equal_after_cut
from engine.encoders.towers import TAPS
from engine.encoders.transformers import TransformersEncoder, load_transformers
from engine.engine import Engine
from engine.images import normalise, resize
from tests.tiny_transformers import CONTEXT, FAMILIES, clip_tokenizer, write_folder

CLOSE = {"rtol": 0, "atol": 1e-5}
SQUARE = tuple(name for name in FAMILIES if name != "siglip2-naflex")
TEXTS = ["a red dog", "THE Cat, left!", "no ball", "a photo of two red dogs and a small cat"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {family: write_folder(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def encoders(folders: dict[str, Path]) -> dict[str, TransformersEncoder]:
    return {name: load_transformers(str(folder), device="cpu") for name, folder in folders.items()}


@pytest.fixture(scope="module")
def exact(folders: dict[str, Path]) -> dict[str, TransformersEncoder]:
    return {name: load_transformers(str(folder), device="cpu", resize="source") for name, folder in folders.items()}


@pytest.fixture(scope="module")
def sources(folders: dict[str, Path]) -> dict[str, tuple]:
    """The same folders through transformers' own classes: model, tokenizer and image processor."""
    made = {}
    for name, folder in folders.items():
        model = transformers.AutoModel.from_pretrained(folder).eval()
        words = transformers.AutoTokenizer.from_pretrained(folder)
        made[name] = (model, words, transformers.AutoImageProcessor.from_pretrained(folder))
    return made


def pictures(count: int = 4) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    sizes = [(40, 64), (64, 40), (50, 50), (30, 50)]
    made = []
    for row in range(count):
        height, width = sizes[row % len(sizes)]
        made.append(Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)))
    return made


def pooled(features: object) -> torch.Tensor:
    return functional.normalize(getattr(features, "pooler_output", features), dim=-1)


def source_ids(family: str, words: object) -> torch.Tensor:
    # The published Gemma tokenizer of fixed-resolution SigLIP 2 keeps case, the model was trained without.
    texts = [text.lower() for text in TEXTS] if family == "siglip2" else TEXTS
    encoded = words(texts, padding="max_length", truncation=True, max_length=CONTEXT, return_tensors="pt")
    return encoded["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_global_embeddings_equal_the_source(family, exact, sources):
    model, words, processor = sources[family]
    ids = source_ids(family, words)
    with torch.no_grad():
        image = pooled(model.get_image_features(**processor(images=pictures(), return_tensors="pt")))
        text = pooled(model.get_text_features(input_ids=ids))
    encoder = exact[family]
    assert torch.equal(encoder.tokenize(TEXTS).ids, ids)
    torch.testing.assert_close(encoder.encode_images(pictures()).embedding, image, **CLOSE)
    torch.testing.assert_close(encoder.encode_texts(TEXTS).embedding, text, **CLOSE)
    alone = torch.cat([encoder.encode_images([picture]).embedding for picture in pictures()])
    torch.testing.assert_close(alone, image, **CLOSE)
    alone = torch.cat([encoder.encode_texts([words]).embedding for words in TEXTS])
    torch.testing.assert_close(alone, text, **CLOSE)


@pytest.mark.parametrize("family", SQUARE)
def test_pixels_equal_the_source_or_the_named_policy(family, encoders, exact, sources):
    processor, spec = sources[family][2], encoders[family].spec
    assert spec.resize == ("crop" if family.startswith("clip") else "squash") and spec.image_size == 32
    for picture in pictures():
        wanted = processor(images=picture, return_tensors="pt")["pixel_values"][0]
        assert torch.equal(exact[family].preprocess(picture), wanted)
        ours = encoders[family].preprocess(picture)
        assert torch.equal(ours, normalise(resize(picture, 32, spec.resize), spec.mean, spec.std))
    # transformers resizes tensors, we resize with Pillow: at most a grey level apart, by rounding.
    # (Where the margin of a crop is odd, transformers cuts one pixel further left and up.)
    even = pictures(3)[2].resize((60, 40))
    wanted = processor(images=even, return_tensors="pt")["pixel_values"][0]
    assert (encoders[family].preprocess(even) - wanted).abs().max() < 1.01 / 255 / min(spec.std)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tap_says_whether_it_is_aligned(family, encoders):
    encoder = encoders[family]
    assert dict(encoder.spec.taps) == TAPS
    for tap, aligned in TAPS.items():
        features = encoder.encode_images(pictures(), tap=tap)
        assert features.aligned == aligned and features.tap == tap
        assert features.grid == (None if family == "siglip2-naflex" else (4, 4))
        width = encoder.spec.embed_dim if aligned else encoder.spec.image_width
        assert features.patches.shape == (4, 16, width)
        if aligned:
            torch.testing.assert_close(features.patches.norm(dim=-1), torch.ones(4, 16))


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_equal_the_formula(family, encoders, sources):
    model, encoder = sources[family][0], encoders[family]
    vision, prefix = model.vision_model, 1 if family.startswith("clip") else 0
    layer = vision.encoder.layers[-1]

    def project(states: torch.Tensor) -> torch.Tensor:
        states = vision.post_layernorm(states)
        if family.startswith("clip"):
            return functional.normalize(model.visual_projection(states), dim=-1)
        pool = vision.head
        weight, bias = pool.attention.in_proj_weight.chunk(3)[2], pool.attention.in_proj_bias.chunk(3)[2]
        states = pool.attention.out_proj(functional.linear(states, weight, bias))
        return functional.normalize(states + pool.mlp(pool.layernorm(states)), dim=-1)

    with torch.no_grad():
        features = encoder.encode_images(pictures(), tap="projected", layers=[2, 3])
        torch.testing.assert_close(features.patches, project(features.hidden[3][:, prefix:]), **CLOSE)
        value = encoder.encode_images(pictures(), tap="value").patches
        states = layer.self_attn.v_proj(layer.layer_norm1(features.hidden[2][:, prefix:]))
        torch.testing.assert_close(value, project(layer.self_attn.out_proj(states)), **CLOSE)


@pytest.mark.parametrize("family", SQUARE)
def test_hidden_states_equal_the_source(family, exact, sources):
    model, words, processor = sources[family]
    ids = source_ids(family, words)
    with torch.no_grad():
        image = model.vision_model(**processor(images=pictures(), return_tensors="pt"), output_hidden_states=True)
        text = model.text_model(input_ids=ids, output_hidden_states=True)
    ours = exact[family].encode_images(pictures(), layers=[1, 2, 3])
    theirs = exact[family].encode_texts(TEXTS, layers=[1, 2, 3])
    for layer in (1, 2, 3):
        torch.testing.assert_close(ours.hidden[layer], image.hidden_states[layer], **CLOSE)
        torch.testing.assert_close(theirs.hidden[layer], text.hidden_states[layer], **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_token_at_the_end_is_the_embedding(family, encoders):
    features = encoders[family].encode_texts(TEXTS, token_vectors=True)
    rows = torch.arange(len(TEXTS))
    torch.testing.assert_close(features.tokens[rows, features.end], features.embedding, **CLOSE)
    with pytest.raises(ValueError, match="text layers are 1 to 3, got 4"):
        encoders[family].encode_texts(TEXTS, layers=[4])


@pytest.mark.parametrize("family", FAMILIES)
def test_text_rules(family, encoders):
    encoder = encoders[family]
    first, second = encoder.encode_texts(["the cat left", "THE Cat left"]).embedding
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)
    long = "a photo of two red dogs and a small cat on the left"
    tokens = encoder.tokenize([long, long + " and a ball", "a dog"])
    assert tokens.truncated.tolist() == [True, True, False]
    assert find_equal_after_cut(tokens) == [[0, 1]]
    # The cut caption still ends with its end token, the short one is words between start, end and padding.
    assert tokens.token_texts[0][-1] in ("<|endoftext|>", "</s>", "<eos>")
    assert not tokens.word_mask[0, -1] and tokens.attention_mask[0].all()
    words = [piece for piece, keep in zip(tokens.token_texts[2], tokens.word_mask[2].tolist(), strict=True) if keep]
    assert "".join(words).replace("</w>", "").replace("▁", "") == "adog"
    count = int(tokens.attention_mask[2].sum())
    assert count == len(words) + (2 if family.startswith("clip") else 1)
    assert tokens.end[2] == (count - 1 if family.startswith("clip") else CONTEXT - 1)


def test_siglip_drops_punctuation_and_case_with_any_tokenizer(encoders, folders):
    pair = ["the cat left", "The  cat, left!"]
    assert torch.equal(*encoders["siglip"].tokenize(pair).ids)
    assert not torch.equal(*encoders["siglip2"].tokenize(pair).ids)
    # The tokenizer of another folder keeps both; the rule is the model's.
    other = load_transformers(str(folders["siglip"]), device="cpu", tokenizer=folders["clip"])
    assert torch.equal(*other.tokenize(pair).ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_of_one_and_of_64_rank_alike(family, encoders):
    encoder = encoders[family]
    images, texts = pictures(64), ["a dog", "the cat", "two red cubes", "a ball", "no person", "blue"]
    single = encoder.encode_images(images, batch_size=1).embedding
    single = single @ encoder.encode_texts(texts, batch_size=1).embedding.T
    joint = encoder.encode_images(images, batch_size=64).embedding @ encoder.encode_texts(texts).embedding.T
    torch.testing.assert_close(single, joint, **CLOSE)
    # In the order of one, the scores of the other never fall by more than the tolerance.
    assert joint.gather(0, single.argsort(dim=0)).diff(dim=0).min() > -2e-5
    assert torch.equal(single.argmax(dim=1), joint.argmax(dim=1))


def test_specs_tell_the_family(encoders):
    facts = {name: (e.spec.family, e.spec.activation, e.spec.probability) for name, e in encoders.items()}
    assert facts == {
        "clip": ("clip", "quick_gelu", "softmax"),
        "clip-old": ("clip", "gelu", "softmax"),
        "siglip": ("siglip", "gelu_pytorch_tanh", "sigmoid"),
        "siglip2": ("siglip2", "gelu_pytorch_tanh", "sigmoid"),
        "siglip2-naflex": ("siglip2", "gelu_pytorch_tanh", "sigmoid"),
    }
    for encoder in encoders.values():
        assert encoder.spec.logit_scale == pytest.approx(float(np.exp(2.5)), rel=1e-5)
        assert encoder.spec.logit_bias == (0.0 if encoder.spec.probability == "softmax" else -7.0)
    assert len({encoder.spec.fingerprint for encoder in encoders.values()}) == len(encoders)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith("siglip")])
def test_sigmoid_logits_equal_the_source(family, exact, sources):
    model, words, processor = sources[family]
    with torch.no_grad():
        inputs = processor(images=pictures(), return_tensors="pt")
        wanted = model(input_ids=source_ids(family, words), **inputs).logits_per_image
    spec = exact[family].spec
    images, texts = exact[family].encode_images(pictures()), exact[family].encode_texts(TEXTS)
    ours = images.embedding @ texts.embedding.T
    torch.testing.assert_close(spec.logit_scale * ours + spec.logit_bias, wanted, rtol=0, atol=2e-4)
    assert spec.probability == "sigmoid"
    named = Engine(exact[family])
    for output, values in (("similarity", ours), ("logit", wanted), ("probability", wanted.sigmoid())):
        torch.testing.assert_close(named.score(images, texts, output=output), values, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(family, encoders):
    """A longer neighbour changes no caption; behind the end of a causal tower anything may stand."""
    encoder = encoders[family]
    short = encoder.encode_texts(["a dog"], token_vectors=True)
    for neighbour in ("two red dogs left", "a photo of two red dogs and a small cat on the left"):
        joint = encoder.encode_texts(["a dog", neighbour], token_vectors=True)[[0]]
        torch.testing.assert_close(joint.embedding, short.embedding, **CLOSE)
        torch.testing.assert_close(joint.tokens, short.tokens, **CLOSE)
        assert torch.equal(joint.token_mask, short.token_mask)
    tokens = encoder.tokenize(["a dog"])
    noisy = tokens.ids.clone()
    noisy[~tokens.attention_mask] = 5
    other = encoder.encode_tokens(replace(tokens, ids=noisy)).embedding
    # SigLIP was trained with its padding in sight: there it must be the family's own, and it is.
    assert torch.allclose(other, short.embedding, rtol=0, atol=1e-5) != family.startswith("siglip")


def test_native_aspect_marks_the_patches_that_are_padding(encoders):
    encoder = encoders["siglip2-naflex"]
    features = encoder.encode_images(pictures(), tap="projected")
    shapes = torch.stack([encoder.preprocess(picture)[0, :2] for picture in pictures()])
    assert features.patch_mask.sum(dim=1).tolist() == shapes.prod(dim=1).tolist()
    assert not features.patch_mask.all() and features.grid is None
    # What stands in the padding changes nothing.
    packed = torch.stack([encoder.preprocess(picture) for picture in pictures()])
    noisy = packed.clone()
    noisy[:, 1:][~features.patch_mask] = 5.0
    torch.testing.assert_close(encoder.encode_pixels(noisy).embedding, features.embedding, **CLOSE)
    with pytest.raises(ValueError, match="native aspect ratio has its own resizing, got resize='squash'"):
        load_transformers(encoder.spec.name.removeprefix("hf:"), device="cpu", resize="squash")


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_again_is_the_same(family, encoders, tmp_path):
    encoder = encoders[family]
    encoder.save(tmp_path)
    again = load_transformers(str(tmp_path), device="cpu")
    assert again.spec.fingerprint == encoder.spec.fingerprint
    assert torch.equal(again.encode_images(pictures()).embedding, encoder.encode_images(pictures()).embedding)
    assert torch.equal(again.encode_texts(TEXTS).embedding, encoder.encode_texts(TEXTS).embedding)


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_gives_float32_embeddings_of_the_same_weights(family, folders, encoders):
    half = load_transformers(str(folders[family]), device="cpu", dtype="bfloat16")
    features = half.encode_images(pictures(), tap="value")
    assert features.embedding.dtype == features.patches.dtype == torch.float32
    exact = encoders[family].encode_images(pictures()).embedding
    assert (features.embedding * exact).sum(dim=1).min() > 0.99
    assert not torch.equal(features.embedding, exact)
    texts = half.encode_texts(TEXTS, token_vectors=True)
    assert (texts.embedding * encoders[family].encode_texts(TEXTS).embedding).sum(dim=1).min() > 0.99
    assert half.spec.fingerprint == encoders[family].spec.fingerprint


def test_changed_files_are_refused(encoders, tmp_path):
    encoders["clip"].save(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("quick_gelu", "gelu"))
    with pytest.raises(ValueError, match="the files were changed since they were saved"):
        load_transformers(str(tmp_path), device="cpu")


def test_weights_that_are_missing_are_not_made_up(folders, tmp_path):
    folder = write_folder(tmp_path, "clip")
    weights = load_file(folder / "model.safetensors")
    removed = weights.pop("visual_projection.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"do not fit the configuration: missing 1 \(visual_projection\.weight\)$"):
        load_transformers(str(folder), device="cpu")
    weights |= {"visual_projection.weight": removed, "extra.weight": torch.zeros(1)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected 1 \(extra\.weight\)$"):
        load_transformers(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json"], r"the configuration is missing: .* holds none of config\.json"),
        (["model.safetensors"], r"the weights is missing|the weights are missing"),
        (["preprocessor_config.json"], r"the image preprocessor is missing: .* preprocessor_config\.json"),
        (["tokenizer.json", "tokenizer_config.json"], r"the tokenizer is missing: .* tokenizer\.json"),
    ],
)
def test_a_local_folder_names_what_is_missing(names, message, folders, tmp_path):
    for file in folders["clip"].iterdir():
        if file.name not in names:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(FileNotFoundError, match=message):
        load_transformers(str(tmp_path), device="cpu")
    if "tokenizer.json" in names:
        words = tmp_path / "words"
        clip_tokenizer().save_pretrained(words)
        assert load_transformers(str(tmp_path), device="cpu", tokenizer=words).tokenize(["a"]).end.tolist() == [2]


def test_a_local_folder_never_asks_the_network(folders, monkeypatch):
    asked = []

    def record(*args: object, **kwargs: object) -> None:
        asked.append(args)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", record)
    monkeypatch.setattr(socket.socket, "connect", record)
    for family in ("clip", "siglip", "siglip2-naflex"):
        load_transformers(str(folders[family]), device="cpu")
    with pytest.raises(FileNotFoundError, match="folder /nowhere/at/all does not exist"):
        load_transformers("/nowhere/at/all")
    assert asked == []


def test_other_models_and_other_preprocessing_are_refused(folders, tmp_path):
    for file in folders["clip"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    pixels = tmp_path / "preprocessor_config.json"
    content = json.loads(pixels.read_text())
    pixels.write_text(json.dumps({**content, "size": {"shortest_edge": 40}}))
    with pytest.raises(ValueError, match=r"no named policy for a 32 x 32 input; use resize='source'"):
        load_transformers(str(tmp_path), device="cpu")
    kept = load_transformers(str(tmp_path), device="cpu", resize="source")
    assert kept.preprocess(pictures()[0]).shape == (3, 32, 32)
    assert load_transformers(str(tmp_path), device="cpu", resize="squash").spec.resize == "squash"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="model_type must be one of clip, siglip, siglip2, got 'bert'"):
        load_transformers(str(tmp_path), device="cpu")
