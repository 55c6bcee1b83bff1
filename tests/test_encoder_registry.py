"""Encoders by name: families, options in the name or in the call, devices and dtypes, text rules by hand."""

from __future__ import annotations

import open_clip
import pytest
import torch

import engine.encoders.open_clip as open_clip_family
import engine.encoders.transformers as transformers_family
from engine.encoders.base import Tokens
from engine.encoders.placement import place
from engine.encoders.registry import families, load_encoder
from engine.encoders.scenes import save_scenes
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.encoders.text_rules import cut_rows, end_positions, find_equal_after_cut
from engine.encoders.towers import TAPS


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict]]:
    """What the two loaders are called with, in place of loading."""
    seen: list[tuple[str, dict]] = []

    def record(reference: str, **options: object) -> str:
        seen.append((reference, options))
        return "encoder"

    monkeypatch.setattr(open_clip_family, "load_open_clip", record)
    monkeypatch.setattr(transformers_family, "load_transformers", record)
    return seen


def test_names_go_to_their_family(calls):
    load_encoder("open_clip:ViT-B-32/openai", device="cpu", dtype="float32")
    load_encoder("open_clip:hf-hub:owner/name", activation="gelu")
    load_encoder("hf:google/siglip-base-patch16-224", resize="source")
    auto = {"device": "auto", "dtype": "auto"}
    assert calls == [
        ("ViT-B-32/openai", {"device": "cpu", "dtype": "float32"}),
        ("hf-hub:owner/name", {**auto, "activation": "gelu"}),
        ("google/siglip-base-patch16-224", {**auto, "resize": "source"}),
    ]


def test_options_may_stand_in_the_name(calls):
    load_encoder("open_clip:ViT-B-32//data/my model.pt?activation=quick_gelu&preprocess=openai&resize=pad")
    reference, options = calls[0]
    assert reference == "ViT-B-32//data/my model.pt"
    assert (options["activation"], options["preprocess"], options["resize"]) == (
        "quick_gelu",
        "openai",
        "pad",
    )
    load_encoder("hf:folder?tokenizer=/words", tokenizer="/words")
    assert calls[1][1]["tokenizer"] == "/words"
    with pytest.raises(ValueError, match=r"resize is 'pad' in .* and 'crop' in the call"):
        load_encoder("hf:folder?resize=pad", resize="crop")
    with pytest.raises(ValueError, match="option must be one of resize, activation, preprocess, tokenizer, got 'size'"):
        load_encoder("hf:folder?size=3")
    with pytest.raises(ValueError, match="'hf:folder' has no use for activation, got 'gelu'"):
        load_encoder("hf:folder", activation="gelu")


@pytest.mark.parametrize("name", ["", "vit", "openclip:ViT-B-32/openai", "open_clip:", "hf:"])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match=r"name must be 'scenes', 'open_clip:<arch>/<tag or path>'.*got"):
        load_encoder(name)


def test_a_trained_scenes_folder_loads_by_name(tmp_path):
    config = ScenesModelConfig()
    save_scenes(tmp_path, ScenesModel(config), [f"word{number}" for number in range(config.vocabulary - 4)])
    encoder = load_encoder(f"scenes:{tmp_path}", device="cpu")
    assert encoder.spec.family == "scenes" and encoder.device.type == "cpu"
    with pytest.raises(ValueError, match="'scenes' runs in float32, got dtype='float16'"):
        load_encoder(f"scenes:{tmp_path}", dtype="float16")
    with pytest.raises(ValueError, match="has no use for resize, got 'pad'"):
        load_encoder("scenes", resize="pad")


def test_unknown_architectures_and_tags_name_what_there_is():
    with pytest.raises(ValueError, match=r"neither a folder nor an architecture .*nearest: ViT-B-32"):
        load_encoder("open_clip:ViT-B-33/openai")
    with pytest.raises(ValueError, match=r"'opnai' is neither a tag of ViT-B-32 nor a path; tags: openai, "):
        load_encoder("open_clip:ViT-B-32/opnai")
    with pytest.raises(ValueError, match=r"names no weights; append /<tag or path> \(tags: openai, "):
        load_encoder("open_clip:ViT-B-32")
    with pytest.raises(FileNotFoundError, match=r"checkpoint nowhere/negclip\.pt does not exist"):
        load_encoder("open_clip:ViT-B-32/nowhere/negclip.pt")


def test_weights_that_must_be_fetched_say_so_without_a_network():
    with pytest.raises(OSError, match=r"open_clip:ViT-B-32/openai: the weights of .* are not on this machine"):
        load_encoder("open_clip:ViT-B-32/openai", device="cpu")


def test_a_tag_does_not_take_what_it_states_itself():
    with pytest.raises(ValueError, match="these weights were trained with quick_gelu, got activation='gelu'"):
        load_encoder("open_clip:ViT-B-32/openai?activation=gelu")
    with pytest.raises(ValueError, match="a tag brings its own preprocessing"):
        load_encoder("open_clip:ViT-B-32/openai?preprocess=clip")


def test_the_table_of_families_is_true():
    table = families()
    assert len({row.example for row in table}) == len(table)
    assert {"scenes", "clip", "siglip", "siglip2", "pe"} == {row.family for row in table}
    for row in table:
        assert row.text_rules and row.context_length and row.probability in ("softmax", "sigmoid")
        assert all(TAPS[tap] == aligned for tap, aligned in row.taps.items())
        family, _, reference = row.example.partition(":")
        if family == "open_clip":
            assert tuple(reference.split("/")) in open_clip.list_pretrained()
            text = open_clip.get_model_config(reference.split("/")[0])["text_cfg"]
            assert str(text.get("context_length", 77)) in row.context_length.split()
            dropped = (text.get("tokenizer_kwargs") or {}).get("clean") == "canonicalize"
            assert ("punctuation dropped" in row.text_rules) == dropped


def test_places(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert place("cpu", "auto") == (cpu, torch.float32)
    assert place(cpu, torch.bfloat16) == (cpu, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert place("auto", "auto") == (cpu, torch.float32)
    with pytest.raises(ValueError, match="device 'cuda:1' was wanted, but torch sees no CUDA device"):
        place("cuda:1", "auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert place("auto", "auto") == (cuda, torch.float16)
    assert place("auto", "float32") == (cuda, torch.float32)
    with pytest.raises(ValueError, match="dtype must be 'auto', 'float32', 'float16' or 'bfloat16', got 'int8'"):
        place("cpu", "int8")


def test_rows_are_cut_before_their_end_token():
    cut = cut_rows([[5, 6, 7, 8, 1], [5, 1], [5, 6, 7, 8, 9], [5, 6, 7, 1]], 4, end_ids=(1,))
    assert cut.rows == [[5, 6, 7, 1], [5, 1], [5, 6, 7, 8], [5, 6, 7, 1]]
    assert cut.truncated == [True, False, True, False]


def test_pooled_positions():
    ids = torch.tensor([[3, 9, 4, 9, 0], [3, 4, 4, 4, 2]])
    assert end_positions(ids, "first", 0).tolist() == [0, 0]
    assert end_positions(ids, "last", 0).tolist() == [4, 4]
    assert end_positions(ids, "argmax", 0).tolist() == [1, 1]
    assert end_positions(ids, "eos", 2).tolist() == [0, 4]
    with pytest.raises(ValueError, match="pooling must be 'first', 'last', 'argmax' or 'eos', got 'mean'"):
        end_positions(ids, "mean", 0)


def test_captions_made_equal_by_the_cut():
    ids = torch.tensor([[1, 2], [1, 3], [1, 2], [1, 2], [1, 3], [1, 3]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    texts = ("a b c", "a d", "a b e", "a b c", "a d", "A d")
    truncated = torch.tensor([True, False, True, True, False, False])
    tokens = Tokens(ids, mask, mask, ids[:, 0], truncated, texts, ((),) * 6)
    # Rows 0 and 3 are one string, rows 1 and 5 differ in case alone and were not cut.
    assert find_equal_after_cut(tokens) == [[0, 2]]
