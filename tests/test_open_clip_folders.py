"""Folders of open_clip models: saved and read again, changed, incomplete, and never a question to the network."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.encoders.open_clip import OpenClipEncoder, load_open_clip
from engine.encoders.open_clip_text import build_tokenizer
from tests.tiny_open_clip import CONFIGS, TEXTS, pictures, write_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {family: write_folder(root / family, family) for family in CONFIGS}


@pytest.fixture(scope="module")
def encoders(folders: dict[str, Path]) -> dict[str, OpenClipEncoder]:
    return {name: load_open_clip(str(folder), device="cpu") for name, folder in folders.items()}


@pytest.mark.parametrize("family", CONFIGS)
def test_saved_and_loaded_again_is_the_same(family, encoders, tmp_path):
    encoder = encoders[family]
    encoder.save(tmp_path)
    again = load_open_clip(str(tmp_path), device="cpu")
    assert again.spec.fingerprint == encoder.spec.fingerprint
    assert torch.equal(again.encode_images(pictures()).embedding, encoder.encode_images(pictures()).embedding)
    assert torch.equal(again.encode_texts(TEXTS).embedding, encoder.encode_texts(TEXTS).embedding)


def test_changed_files_are_refused(encoders, tmp_path):
    encoders["clip"].save(tmp_path)
    weights = tmp_path / "open_clip_model.safetensors"
    original = load_file(weights)
    save_file({**original, "visual.proj": original["visual.proj"] + 1e-3}, weights)
    with pytest.raises(ValueError, match="the files were changed since they were saved"):
        load_open_clip(str(tmp_path), device="cpu")
    save_file(original, weights)
    config = tmp_path / "open_clip_config.json"
    content = json.loads(config.read_text())
    content["model_cfg"]["quick_gelu"] = True
    config.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="the files were changed since they were saved"):
        load_open_clip(str(tmp_path), device="cpu")


def test_fingerprints_cover_weights_activation_pixels_and_text(folders, encoders, tmp_path):
    marks = {encoders[name].spec.fingerprint for name in CONFIGS}
    other_seed = load_open_clip(str(write_folder(tmp_path / "seed", "clip", seed=1)), device="cpu")
    squashed = load_open_clip(str(folders["clip"]), device="cpu", resize="squash")
    marks |= {other_seed.spec.fingerprint, squashed.spec.fingerprint}
    assert len(marks) == len(CONFIGS) + 2
    folder = write_folder(tmp_path / "words", "siglip")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"cube"', '"cone"'))
    assert load_open_clip(str(folder), device="cpu").spec.fingerprint not in marks


def test_a_local_folder_names_what_is_missing(folders, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"open_clip_config\.json is missing"):
        load_open_clip(str(tmp_path))
    (tmp_path / "open_clip_config.json").write_bytes((folders["siglip"] / "open_clip_config.json").read_bytes())
    with pytest.raises(FileNotFoundError, match="the weights are missing"):
        load_open_clip(str(tmp_path))
    name = "open_clip_model.safetensors"
    (tmp_path / name).write_bytes((folders["siglip"] / name).read_bytes())
    with pytest.raises(FileNotFoundError, match=r"the tokenizer is missing: .*timm/ViT-B-16-SigLIP"):
        load_open_clip(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"the tokenizer is missing: .* holds none of tokenizer\.json"):
        load_open_clip(str(tmp_path), tokenizer=tmp_path)
    other = load_open_clip(str(tmp_path), device="cpu", tokenizer=folders["siglip"])
    assert other.tokenize(["a cat"]).token_texts[0][:3] == ("a", "cat", "</s>")


def test_a_local_path_never_asks_the_network(folders, monkeypatch):
    asked = []

    def record(*args: object, **kwargs: object) -> None:
        asked.append(args)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", record)
    monkeypatch.setattr(socket.socket, "connect", record)
    for family in ("clip", "siglip2", "pe"):
        load_open_clip(str(folders[family]), device="cpu")
    with pytest.raises(FileNotFoundError, match=r"checkpoint /nowhere/negclip\.pt does not exist"):
        load_open_clip("ViT-B-32-quickgelu//nowhere/negclip.pt", device="cpu")
    assert asked == []


def test_options_that_have_no_use_are_refused(folders):
    with pytest.raises(ValueError, match="this model uses CLIP's own tokenizer"):
        load_open_clip(str(folders["clip"]), tokenizer=folders["siglip"])
    with pytest.raises(ValueError, match="resize must be one of 'model', 'source'"):
        load_open_clip(str(folders["clip"]), resize="stretch")
    with pytest.raises(ValueError, match="states the preprocessing"):
        load_open_clip(str(folders["clip"]), preprocess="clip")
    with pytest.raises(ValueError, match="trained with gelu, got activation='quick_gelu'"):
        load_open_clip(str(folders["clip"]), activation="quick_gelu")


@pytest.mark.parametrize(
    ("text_cfg", "option"),
    [({"tokenizer_kwargs": {"reduction_mask": "syntax"}}, "reduction_mask"), ({"tokenizer_mode": "hard"}, "hard")],
)
def test_a_tokenizer_option_of_unknown_meaning_is_refused(text_cfg: dict, option: str):
    with pytest.raises(ValueError, match=f"^model: tokenizer option '{option}' is not supported"):
        build_tokenizer("model", torch.nn.Identity(), text_cfg, folder=None, chosen=None)
