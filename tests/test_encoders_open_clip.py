"""Encoders from open_clip: the source library's numbers, taps, text rules, and what is kept when saved."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from torch.nn import functional

from engine.encoders.open_clip import OpenClipEncoder, load_open_clip
from engine.encoders.region_inputs import RegionInputs
from engine.encoders.text_rules import find_equal_after_cut
from engine.encoders.towers import TAPS
from engine.features import RegionPlan
from engine.images import normalise, resize
from tests.tiny_open_clip import CONFIGS, TEXTS, WORDS, pictures, write_folder

CLOSE = {"rtol": 0, "atol": 1e-5}
TRANSFORMERS = ("clip", "clip-quickgelu", "clip-average", "siglip", "siglip2", "pe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {family: write_folder(root / family, family) for family in CONFIGS}


@pytest.fixture(scope="module")
def encoders(folders: dict[str, Path]) -> dict[str, OpenClipEncoder]:
    return {name: load_open_clip(str(folder), device="cpu") for name, folder in folders.items()}


@pytest.fixture(scope="module")
def sources(folders: dict[str, Path]) -> dict[str, tuple]:
    """The same folders through open_clip's own loader: model, transform and tokenizer."""
    made = {}
    for name, folder in folders.items():
        model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
        made[name] = (model.eval(), transform, open_clip.get_tokenizer(f"local-dir:{folder}"))
    return made


def source_embeddings(source: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    model, transform, tokenizer = source
    with torch.no_grad():
        image = model.encode_image(torch.stack([transform(picture) for picture in pictures()]))
        text = model.encode_text(tokenizer(TEXTS))
    image, text = (part[0] if isinstance(part, tuple) else part for part in (image, text))
    return functional.normalize(image, dim=-1), functional.normalize(text, dim=-1)


@pytest.mark.parametrize("family", CONFIGS)
def test_global_embeddings_equal_the_source(family, encoders, sources):
    image, text = source_embeddings(sources[family])
    encoder = encoders[family]
    torch.testing.assert_close(encoder.encode_images(pictures()).embedding, image, **CLOSE)
    torch.testing.assert_close(encoder.encode_texts(TEXTS).embedding, text, **CLOSE)
    alone = torch.cat([encoder.encode_texts([words]).embedding for words in TEXTS])
    torch.testing.assert_close(alone, text, **CLOSE)
    alone = torch.cat([encoder.encode_images([picture]).embedding for picture in pictures()])
    torch.testing.assert_close(alone, image, **CLOSE)


@pytest.mark.parametrize("family", CONFIGS)
def test_ids_and_pixels_equal_the_source(family, folders, encoders, sources):
    _, transform, tokenizer = sources[family]
    ids = encoders[family].tokenize(TEXTS).ids
    assert torch.equal(ids[:, : tokenizer.context_length], tokenizer(TEXTS))
    exact = load_open_clip(str(folders[family]), device="cpu", resize="source")
    for picture in pictures(4):
        assert torch.equal(exact.preprocess(picture), transform(picture))
        # The model's policy through our own resizing is the same arithmetic.
        torch.testing.assert_close(encoders[family].preprocess(picture), transform(picture), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_batches_of_one_and_of_64_rank_alike(family, encoders):
    encoder = encoders[family]
    images, texts = pictures(64), [" ".join(WORDS[row % 9 : row % 9 + 5]) for row in range(9)]
    single = encoder.encode_images(images, batch_size=1).embedding
    single = single @ encoder.encode_texts(texts, batch_size=1).embedding.T
    joint = encoder.encode_images(images, batch_size=64).embedding @ encoder.encode_texts(texts).embedding.T
    torch.testing.assert_close(single, joint, **CLOSE)
    # In the order of one, the scores of the other never fall by more than the tolerance.
    assert joint.gather(0, single.argsort(dim=0)).diff(dim=0).min() > -2e-5
    assert torch.equal(single.argmax(dim=1), joint.argmax(dim=1))


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_every_tap_says_whether_it_is_aligned(family, encoders):
    encoder = encoders[family]
    assert dict(encoder.spec.taps) == TAPS
    assert encoder.spec.default_tap == "projected"
    for tap, aligned in TAPS.items():
        features = encoder.encode_images(pictures(), tap=tap)
        assert features.aligned == aligned and features.tap == tap and features.grid == (4, 4)
        width = encoder.spec.embed_dim if aligned else encoder.spec.image_width
        assert features.patches.shape == (3, 16, width)
        if aligned:
            torch.testing.assert_close(features.patches.norm(dim=-1), torch.ones(3, 16))
    plain = encoder.encode_images(pictures())
    assert plain.patches is None and plain.grid is None and not plain.aligned


def project_by_hand(family: str, model: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    """States (n, W) to the shared space, written out from the weights."""
    if family.startswith("clip"):
        return model.visual.ln_post(states) @ model.visual.proj
    trunk = model.visual.trunk
    pool = trunk.attn_pool
    value = pool.kv(trunk.norm(states)).chunk(2, dim=-1)[1]
    pooled = pool.proj(value)
    return trunk.head(pooled + pool.mlp(pool.norm(pooled)))


def value_by_hand(family: str, model: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    """The attention branch of the last block when a position sees itself alone, from the weights."""
    if family.startswith("clip"):
        block = model.visual.transformer.resblocks[-1]
        weight, bias = block.attn.in_proj_weight.chunk(3)[2], block.attn.in_proj_bias.chunk(3)[2]
        return block.ls_1(block.attn.out_proj(functional.linear(block.ln_1(states), weight, bias)))
    block = model.visual.trunk.blocks[-1]
    return block.attn.proj(block.attn.qkv(block.norm1(states)).chunk(3, dim=-1)[2])


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_taps_equal_the_formula(family, encoders, sources):
    model, encoder = sources[family][0], encoders[family]
    last = encoder.spec.image_layers
    prefix = 0 if family.startswith("siglip") else 1
    with torch.no_grad():
        features = encoder.encode_images(pictures(), tap="projected", layers=[last - 1, last])
        wanted = project_by_hand(family, model, features.hidden[last][:, prefix:])
        torch.testing.assert_close(features.patches, functional.normalize(wanted, dim=-1), **CLOSE)
        value = encoder.encode_images(pictures(), tap="value")
        states = value_by_hand(family, model, features.hidden[last - 1][:, prefix:])
        wanted = project_by_hand(family, model, states)
        torch.testing.assert_close(value.patches, functional.normalize(wanted, dim=-1), **CLOSE)
        raw = encoder.encode_images(pictures(), tap="hidden")
        assert torch.equal(raw.patches, features.hidden[last][:, prefix:])


@pytest.mark.parametrize("family", ["clip", "siglip", "pe"])
def test_hidden_states_equal_the_source(family, encoders, sources):
    model, transform, tokenizer = sources[family]
    encoder = encoders[family]
    pixels = torch.stack([transform(picture) for picture in pictures()])
    layers = range(1, encoder.spec.image_layers + 1)
    ours = encoder.encode_images(pictures(), layers=list(layers))
    with torch.no_grad():
        wanted = model.visual.forward_intermediates(pixels, output_fmt="NLC")["image_intermediates"]
    for layer, states in zip(layers, wanted, strict=True):
        torch.testing.assert_close(ours.hidden[layer][:, -16:], states, **CLOSE)
    text = getattr(model, "text", None)
    if text is not None:
        layers = range(1, encoder.spec.text_layers + 1)
        with torch.no_grad():
            wanted = text.forward_intermediates(tokenizer(TEXTS), output_fmt="NLC")["text_intermediates"]
        ours = encoder.encode_texts(TEXTS, layers=list(layers))
        for layer, states in zip(layers, wanted, strict=True):
            torch.testing.assert_close(ours.hidden[layer], states, **CLOSE)


@pytest.mark.parametrize("family", [*TRANSFORMERS, "resnet", "coca"])
def test_the_token_at_the_end_is_the_embedding(family, encoders):
    features = encoders[family].encode_texts(TEXTS, token_vectors=True)
    rows = torch.arange(len(TEXTS))
    torch.testing.assert_close(features.tokens[rows, features.end], features.embedding, **CLOSE)
    assert features.tokens.shape[1] == features.token_mask.shape[1] == features.attention_mask.shape[1]
    assert not features.token_mask[rows, features.end].any() or family.startswith("siglip")


def test_towers_without_patches_have_no_aligned_tap(encoders):
    assert dict(encoders["resnet"].spec.taps) == {} and encoders["resnet"].spec.grid is None
    assert dict(encoders["coca"].spec.taps) == {"hidden": False}
    with pytest.raises(ValueError, match="tap must be one of none, got 'projected'"):
        encoders["resnet"].encode_images(pictures(), tap="projected")
    with pytest.raises(ValueError, match="tap must be one of 'hidden', got 'value'"):
        encoders["coca"].encode_images(pictures(), tap="value")


def test_layers_outside_the_tower_are_refused(encoders):
    with pytest.raises(ValueError, match="image layers are 1 to 3, got 4"):
        encoders["clip"].encode_images(pictures(), layers=[4])
    with pytest.raises(ValueError, match="text layers are 1 to 3, got 0"):
        encoders["clip"].encode_texts(TEXTS, layers=[0])
    with pytest.raises(ValueError, match="image layers are none"):
        encoders["resnet"].encode_images(pictures(), layers=[1])


def test_words_are_told_from_start_end_and_padding(encoders):
    tokens = encoders["clip"].tokenize(["a cat", "the left"])
    assert tokens.word_mask.sum(dim=1).tolist() == [2, 2]
    assert tokens.token_texts[0][:4] == ("<start_of_text>", "a", "cat", "<end_of_text>")
    assert tokens.attention_mask[0, :4].all() and not tokens.attention_mask[0, 4:].any()
    assert tokens.end.tolist() == [3, 3]
    tokens = encoders["siglip"].tokenize(["a cat"])
    assert tokens.token_texts[0][:4] == ("a", "cat", "</s>", "<pad>")
    assert tokens.word_mask[0].tolist() == [True, True] + [False] * 14
    assert tokens.end.tolist() == [15]


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_padding_changes_nothing(family, encoders):
    """A longer neighbour changes no caption; behind the end of a causal tower anything may stand."""
    encoder = encoders[family]
    short = encoder.encode_texts(["a cat"], token_vectors=True)
    for neighbour in ("a photo of two red dog on the left", "small cube and large ball " * 8):
        joint = encoder.encode_texts(["a cat", neighbour], token_vectors=True)[[0]]
        torch.testing.assert_close(joint.embedding, short.embedding, **CLOSE)
        torch.testing.assert_close(joint.tokens, short.tokens, **CLOSE)
        assert torch.equal(joint.token_mask, short.token_mask) and int(short.token_mask.sum()) == 2
    tokens = encoder.tokenize(["a cat"])
    noisy = tokens.ids.clone()
    noisy[~tokens.attention_mask] = 5
    other = encoder.encode_tokens(replace(tokens, ids=noisy)).embedding
    # SigLIP was trained with its padding in sight: there it must be the family's own, and it is.
    assert torch.allclose(other, short.embedding, rtol=0, atol=1e-5) != family.startswith("siglip")


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_case_does_not_matter(family, encoders):
    first, second = encoders[family].encode_texts(["a cat on the left", "A  Cat on the LEFT"]).embedding
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


def test_siglip_drops_punctuation_and_clip_keeps_it(encoders):
    pair = ["a cat on the left", "a cat, on the left!"]
    assert torch.equal(*encoders["siglip"].tokenize(pair).ids)
    assert not torch.equal(*encoders["clip"].tokenize(pair).ids)


@pytest.mark.parametrize("family", [*TRANSFORMERS, "coca"])
def test_long_captions_keep_their_end_and_are_flagged(family, encoders):
    encoder = encoders[family]
    long = "small cube and large ball on the left of a red dog and a blue cat on the right of no person"
    tokens = encoder.tokenize([long, long + " is green", "a cat", long])
    assert tokens.truncated.tolist() == [True, True, False, True]
    last = encoder.spec.context_length - 1
    assert tokens.token_texts[0][last] in ("</s>", "<end_of_text>")
    assert find_equal_after_cut(tokens) == [[0, 1]]
    assert find_equal_after_cut(encoder.tokenize(["a cat", "A cat", "a dog"])) == []
    assert encoder.encode_texts([long, "a cat"]).truncated.tolist() == [True, False]


@pytest.mark.parametrize("family", ["siglip", "siglip2"])
def test_siglip_is_a_sigmoid_with_scale_and_bias(family, encoders, sources):
    spec, model = encoders[family].spec, sources[family][0]
    assert spec.probability == "sigmoid" and spec.family == family
    assert spec.logit_scale == pytest.approx(float(model.logit_scale.detach().exp()))
    assert spec.logit_bias == pytest.approx(-10)
    image, text = source_embeddings(sources[family])
    ours = encoders[family].encode_images(pictures()).embedding @ encoders[family].encode_texts(TEXTS).embedding.T
    with torch.no_grad():
        wanted = image @ text.T * model.logit_scale.exp() + model.logit_bias
    torch.testing.assert_close(spec.logit_scale * ours + spec.logit_bias, wanted, rtol=0, atol=1e-4)


def test_specs_tell_the_family(encoders):
    facts = {name: (e.spec.family, e.spec.activation, e.spec.probability) for name, e in encoders.items()}
    assert facts["clip"] == ("clip", "gelu", "softmax")
    assert facts["clip-quickgelu"] == ("clip", "quick_gelu", "softmax")
    assert facts["pe"] == ("pe", "gelu", "softmax")
    assert encoders["clip"].spec.logit_scale == pytest.approx(1 / 0.07)
    assert encoders["siglip"].spec.resize == "squash" and encoders["clip"].spec.resize == "crop"
    assert encoders["pe"].spec.interpolation == "bilinear"


def test_everything_is_frozen(encoders):
    features = encoders["clip"].encode_images(pictures(), tap="projected", layers=[1])
    for tensor in (features.embedding, features.patches, features.hidden[1]):
        assert not tensor.requires_grad
    # Ordinary tensors, not inference tensors: a head can be trained on them.
    head = torch.nn.Linear(24, 2)
    head(features.embedding).sum().backward()
    assert head.weight.grad is not None


@pytest.mark.parametrize("family", CONFIGS)
def test_half_precision_gives_float32_embeddings_of_the_same_weights(family, folders, encoders):
    half = load_open_clip(str(folders[family]), device="cpu", dtype="bfloat16")
    features = half.encode_images(pictures(), tap=half.spec.default_tap)
    assert features.embedding.dtype == torch.float32
    assert features.patches is None or features.patches.dtype == torch.float32
    exact = encoders[family].encode_images(pictures()).embedding
    assert (features.embedding * exact).sum(dim=1).min() > 0.99
    assert not torch.equal(features.embedding, exact)
    texts = half.encode_texts(TEXTS, token_vectors=True, layers=[1])
    assert texts.tokens.dtype == texts.hidden[1].dtype == torch.float32
    assert (texts.embedding * encoders[family].encode_texts(TEXTS).embedding).sum(dim=1).min() > 0.99
    assert half.spec.fingerprint == encoders[family].spec.fingerprint
    with pytest.raises(ValueError, match="save wants an encoder of dtype float32"):
        half.save(folders[family])


def test_threads_do_not_mix_their_states(encoders):
    encoder = encoders["clip"]
    pixels = torch.stack([encoder.preprocess(picture) for picture in pictures(12)])
    wanted = [encoder.encode_pixels(pixels[row : row + 1], tap="value", layers=[1 + row % 3]) for row in range(12)]
    got: dict[int, object] = {}

    def work(row: int) -> None:
        for _ in range(5):
            got[row] = encoder.encode_pixels(pixels[row : row + 1], tap="value", layers=[1 + row % 3])

    threads = [threading.Thread(target=work, args=(row,)) for row in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row in range(12):
        assert set(got[row].hidden) == set(wanted[row].hidden)
        assert torch.equal(got[row].patches, wanted[row].patches)


@pytest.mark.parametrize("mode", ["model", "source", "pad"])
def test_a_region_is_seen_to_its_edges(mode, folders):
    """What a centre crop would cut off counts, whatever the policy for whole pictures is."""
    encoder = load_open_clip(str(folders["clip"]), device="cpu", resize=mode)
    plain = Image.new("RGB", (96, 32), (40, 90, 160))
    marked = plain.copy()
    marked.paste((250, 240, 10), (0, 0, 12, 32))
    window = [np.array([[0, 0, 96, 32]])] * 2
    found = encoder.encode_images([plain, marked], regions=RegionPlan(), boxes=window)
    assert (found.regions[0] - found.regions[1]).abs().max() > 1e-3
    if mode != "pad":
        assert encoder.spec.resize == "crop"
        torch.testing.assert_close(found.embedding[0], found.embedding[1], **CLOSE)
    spec = encoder.spec
    square = resize(marked, spec.image_size, "squash", interpolation=spec.interpolation)
    wanted = encoder.encode_pixels(normalise(square, spec.mean, spec.std)[None]).embedding[0]
    torch.testing.assert_close(found.regions[1, 0], wanted, **CLOSE)


def test_regions_are_the_inputs_that_crop_batch_makes(encoders):
    encoder = encoders["clip"]
    boxes = [np.array([[0, 0, 20, 40], [10, 5, 60, 15], [-4, 0, 30, 30]])]
    found = RegionInputs.of(pictures(1), boxes, mode="rescaled", fill="border")
    pixels = torch.cat(list(found.batches(encoder.spec, 8)))
    regions = encoder.encode_images(pictures(1), regions=RegionPlan(), boxes=boxes).regions[0]
    torch.testing.assert_close(regions, encoder.encode_pixels(pixels).embedding, **CLOSE)
