"""Heads as stored things: what is saved comes back, what does not belong is refused, gradients stay inside."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.features import TextFeatures
from engine.heads.base import Head, HeadConfig, read_head, shipped_head
from engine.heads.inputs import kept_tokens, shortened
from engine.heads.registry import HEADS, load_head
from tests.head_cases import FACTS, make_images, make_texts

# PeakPatch, which also needs its encoder's readout, has tests of its own.
KINDS = sorted(set(HEADS) - {"peakpatch"})


def built(name: str, seed: int = 0) -> Head:
    return HEADS[name].build(FACTS, seed=seed)


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_head_comes_back_and_scores_the_same(name, tmp_path):
    head = built(name).eval()
    head.save(tmp_path / "sub" / "head.safetensors", facts={"seed": 3})
    again = load_head(tmp_path / "sub" / "head.safetensors", fingerprint=FACTS.fingerprint)
    assert type(again) is type(head) and again.config == head.config and not again.training
    assert (again.encoder, again.fingerprint) == (FACTS.name, FACTS.fingerprint)
    images, texts = make_images(3), make_texts(4)
    assert torch.equal(head.matrix(images, texts), again.matrix(images, texts))
    assert read_head(tmp_path / "sub" / "head.safetensors").facts == {"seed": 3}
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["head.safetensors"]


@pytest.mark.parametrize("name", KINDS)
def test_a_head_stored_in_float16_takes_half_the_room_and_scores_alike(name, tmp_path):
    head = built(name).eval()
    head.save(tmp_path / "half.safetensors", half=True)
    assert all(tensor.dtype == torch.float16 for tensor in read_head(tmp_path / "half.safetensors").state.values())
    again = load_head(tmp_path / "half.safetensors")
    assert all(weight.dtype == torch.float32 for weight in again.parameters())
    images, texts = make_images(3), make_texts(4)
    torch.testing.assert_close(again.matrix(images, texts), head.matrix(images, texts), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", KINDS)
def test_pairs_are_the_diagonal_and_both_are_float32(name):
    head = built(name).eval()
    images, texts = make_images(4), make_texts(4)
    scores = head.matrix(images, texts)
    assert scores.shape == (4, 4) and scores.dtype == torch.float32
    torch.testing.assert_close(head.pairs(images, texts), scores.diagonal(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_scores_of_rows_do_not_depend_on_their_neighbours(name):
    head = built(name).eval()
    images, texts = make_images(4), make_texts(4)
    alone = torch.cat([torch.cat([head.matrix(images[i], texts[j]) for j in range(4)], dim=1) for i in range(4)], dim=0)
    torch.testing.assert_close(alone, head.matrix(images, texts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_every_weight_gets_a_gradient_and_the_features_none(name):
    head = built(name).eval()
    images, texts = make_images(4), make_texts(4)
    (torch.as_tensor(head.scale()) * head.matrix(images, texts)).square().sum().backward()
    without = [key for key, weight in head.named_parameters() if weight.grad is None]
    assert not without, without
    assert not any(state.requires_grad for state in (*images.hidden.values(), *texts.hidden.values()))


@pytest.mark.parametrize("name", KINDS)
def test_half_precision_features_are_read_in_the_precision_of_the_head(name):
    head = built(name).eval()
    images, texts = make_images(3), make_texts(3)
    narrow = replace(
        images,
        patches=images.patches.half(),
        hidden={k: v.half() for k, v in images.hidden.items()},
    )
    scores = head.matrix(narrow, texts)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, head.matrix(images, texts), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", KINDS)
def test_equal_seeds_build_equal_heads_and_leave_the_callers_numbers_alone(name):
    state = torch.get_rng_state()
    a, b, c = built(name), built(name), built(name, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    if a.parameter_count > a.config.__dict__.get("embed_dim", 0) ** 2 + 1:
        assert any(not torch.equal(x, y) for x, y in zip(a.state_dict().values(), c.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_features_of_another_encoder_are_refused(name):
    head = built(name)
    with pytest.raises(ValueError, match=r"the texts must come from the encoder the head was trained on, tiny"):
        head.matrix(make_images(1), replace(make_texts(1), fingerprint="other"))
    with pytest.raises(ValueError, match="pairs need as many images as texts, got 2 images and 1 texts"):
        head.pairs(make_images(2), make_texts(1))


def test_a_head_of_another_encoder_is_refused(tmp_path):
    built("max_sim_head").save(tmp_path / "head.safetensors")
    with pytest.raises(
        ValueError,
        match=r"must come from the encoder the head was trained on, tiny \(tiny-1\), got those of other; "
        "train a head for this encoder",
    ):
        load_head(tmp_path / "head.safetensors", fingerprint="other")


def test_missing_layers_are_named():
    head = built("max_sim_head")
    with pytest.raises(ValueError, match="max_sim_head: needs image layer 1, which the features do not hold"):
        head.matrix(replace(make_images(1), hidden={2: make_images(1).hidden[2]}), make_texts(1))


def rewritten(path, change):
    """The file with another header."""
    stored = read_head(path)
    plain = {
        "kind": "head",
        "format_version": 1,
        "head": stored.head,
        "config": dict(stored.config),
        "encoder": stored.encoder,
        "fingerprint": stored.fingerprint,
        "facts": {},
    }
    change(plain)
    save_file(load_file(path), path, metadata={"peaksim": json.dumps(plain)})


BROKEN = {
    "format 9": (lambda plain: plain.update(format_version=9), "must hold a head of format 1 or lower, got 'head' of"),
    "kind": (lambda plain: plain.update(kind="features"), "got 'features' of format 1"),
    "head": (lambda plain: plain.update(head="other"), "must hold one of .*, got 'other'"),
    "option": (lambda plain: plain["config"].update(depth=2), "options that max_sim_head has no place for: depth"),
    "size": (lambda plain: plain["config"].update(dim=8), "must hold the weights its header describes, got"),
    "field": (lambda plain: plain.pop("encoder"), "has a header that cannot be read"),
    "no config": (lambda plain: plain.update(config=None), "a header whose config is a dict, got NoneType"),
    "list for config": (lambda plain: plain.update(config=[]), "a header whose config is a dict, got list"),
    "list for head": (lambda plain: plain.update(head=[]), "a header whose head is a str, got list"),
    "no fingerprint": (lambda plain: plain.update(fingerprint=None), "whose fingerprint is a str, got NoneType"),
    "no facts": (lambda plain: plain.update(facts=None), "a header whose facts is a dict, got NoneType"),
    "word for a size": (lambda plain: plain["config"].update(dim="x"), "a configuration of max_sim_head, got .*'x'"),
    "size below 0": (lambda plain: plain["config"].update(dim=-1), "a configuration of max_sim_head, got .* -1"),
    "size for layers": (lambda plain: plain["config"].update(image_layers=1), "a configuration of max_sim_head, got"),
    "huge size": (lambda plain: plain["config"].update(dim=10**30), "a configuration of max_sim_head, got"),
    "endless format": (lambda plain: plain.update(format_version=float("inf")), "got 'head' of format inf"),
    "word for a format": (lambda plain: plain.update(format_version="1"), "got 'head' of format 1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused(tmp_path, case):
    change, message = BROKEN[case]
    path = tmp_path / "head.safetensors"
    built("max_sim_head").save(path)
    rewritten(path, change)
    with pytest.raises(ValueError, match=message):
        load_head(path)


def test_files_that_are_no_heads_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="is missing; `peaksim train` writes it"):
        load_head(tmp_path / "none.safetensors")
    path = tmp_path / "head.safetensors"
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        load_head(path)
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="was not written by peaksim"):
        load_head(path)
    for header in ("[]", "3", '"head"', "[" * 100_000):
        save_file({"x": torch.ones(1)}, path, metadata={"peaksim": header})
        with pytest.raises(ValueError, match="was not written by peaksim"):
            load_head(path)


def test_a_head_that_is_not_shipped_is_named_with_those_that_are():
    with pytest.raises(FileNotFoundError, match=r"nothing: no head of this name is shipped for 'scenes' \(there are: "):
        shipped_head("nothing")


def test_a_layer_the_encoder_lacks_is_refused():
    kind = HEADS["max_sim_head"]
    with pytest.raises(ValueError, match="max_sim_head: image layers must be 1 to 2, got 3"):
        kind.build(FACTS, replace(kind.config_type(), image_layers=(3,)))
    with pytest.raises(ValueError, match="max_sim_head: needs an encoder with a fixed patch grid, got tiny without"):
        kind.build(replace(FACTS, grid=None))


def test_configurations_are_plain_values():
    @dataclass(frozen=True)
    class Empty(HeadConfig):
        def fitted(self, encoder):
            return self

    assert Empty().fitted(FACTS) == Empty()
    with pytest.raises(TypeError, match="abstract"):
        HeadConfig()


def test_texts_are_shortened_to_what_any_of_them_keeps():
    texts = make_texts(3)
    short = shortened(texts)
    assert short.hidden[1].shape == (3, 5, 16) and short.tokens.shape[1] == 5 and len(short.token_texts[0]) == 5
    assert torch.equal(short.hidden[2], texts.hidden[2][:, :5]) and shortened(short) is short
    bare = TextFeatures(texts.embedding)
    assert shortened(bare) is bare and kept_tokens(bare)[0].shape == (3, 0)
    plain = replace(texts, token_mask=None)
    assert all(torch.equal(mask, texts.attention_mask) for mask in kept_tokens(plain))
    whole = replace(plain, attention_mask=None)
    assert all(mask.all() and mask.shape == (3, 7) for mask in kept_tokens(whole))
