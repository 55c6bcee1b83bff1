"""Models of the hub where the hub cannot be reached: one request, one sentence, and what was fetched before."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import open_clip
import pytest
import transformers

from engine.encoders import hub, open_clip_sources
from engine.encoders.hub_tokenizer import read_hub_tokenizer
from engine.encoders.open_clip_checkpoints import Checkpoint
from engine.encoders.registry import load_encoder
from tests.tiny_open_clip import write_folder


@pytest.fixture
def dead_hub(monkeypatch: pytest.MonkeyPatch) -> str:
    """A hub nobody answers at; waiting for it to come back is an error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)

    def no_waiting(seconds: float) -> None:
        raise AssertionError(f"slept {seconds} s to try again")

    monkeypatch.setattr(time, "sleep", no_waiting)
    return address


def nothing_fetched(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError(f"tried to fetch {args} {kwargs}")


@pytest.mark.parametrize(
    ("name", "wanted", "instead"),
    [
        ("open_clip:ViT-B-32/openai", r"weights of timm/vit_base_patch32_clip_224\.openai", "open_clip:<folder>"),
        ("open_clip:hf-hub:owner/name", "settings of owner/name", "open_clip:<folder>"),
        ("hf:openai/clip-vit-base-patch32", "files of openai/clip-vit-base-patch32", "hf:<folder>"),
    ],
)
def test_a_hub_that_does_not_answer_is_said_at_once(
    name: str, wanted: str, instead: str, dead_hub: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(open_clip, "download_pretrained", nothing_fetched)
    monkeypatch.setattr(open_clip.pretrained, "download_pretrained_from_hf", nothing_fetched)
    message = rf"{name}: the {wanted} are not on this machine .*{dead_hub} could not be reached: .*by path: .*{instead}"
    with pytest.raises(OSError, match=message):
        load_encoder(name, device="cpu")


def test_what_was_fetched_before_is_used(dead_hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_folder(tmp_path, "clip-quickgelu")
    asked = []

    def cached(repository: str, name: str) -> str | None:
        asked.append((repository, name))
        return str(folder / name) if (folder / name).is_file() else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    monkeypatch.setattr(open_clip.pretrained, "download_pretrained_from_hf", nothing_fetched)
    spec = load_encoder("open_clip:hf-hub:owner/name", device="cpu").spec
    assert spec.fingerprint == load_encoder(f"open_clip:{folder}", device="cpu").spec.fingerprint
    assert asked[0] == ("owner/name", "open_clip_config.json")
    # A named file is looked for in its safe form first, as open_clip does.
    asked.clear()
    with pytest.raises(OSError, match="weights of owner/name are not"):
        open_clip_sources._download("x", "owner/name", "model.bin", nothing_fetched, "no network")
    assert asked == [("owner/name", "model.safetensors"), ("owner/name", "model.bin")]


@pytest.mark.parametrize("folder", [None, Path("/weights")])
def test_the_settings_of_a_text_tower_are_those_fetched_before(
    folder: Path | None, dead_hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = {"text_cfg": {"hf_model_name": "owner/tower", "context_length": 9}}
    source = open_clip_sources.Source("x", config, {}, Checkpoint(tmp_path, {}), folder)
    reason = "could not be reached" if folder is None else "a local checkpoint never touches the network"
    with pytest.raises(OSError, match=f"x: the settings of the text tower owner/tower are not .*{reason}"):
        open_clip_sources.buildable("x", source)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    wanted = {"hf_model_name": str(tmp_path), "context_length": 9}
    assert open_clip_sources.buildable("x", source) == {"text_cfg": wanted}
    # A folder is taken as it is, and the source's own configuration, which the fingerprint covers, stays.
    assert config["text_cfg"]["hf_model_name"] == "owner/tower"
    here = replace(source, config={"text_cfg": wanted})
    assert open_clip_sources.buildable("x", here) is here.config


def test_a_tokenizer_of_the_hub_says_how_to_name_a_folder(dead_hub: str):
    with pytest.raises(OSError, match=r"x: the tokenizer files of owner/words are not .*tokenizer=\.\.\."):
        read_hub_tokenizer("x", "owner/words")


def test_a_tokenizer_folder_that_lacks_its_files_is_named_before_the_hub_is_asked(dead_hub: str, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=rf"the tokenizer is missing: {tmp_path} holds none of"):
        load_encoder("hf:owner/name", tokenizer=tmp_path)


def test_a_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch):
    class Session:
        def head(self, address: str, *, timeout: float) -> None:
            assert address == huggingface_hub.constants.ENDPOINT and 0 < timeout <= 10

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    assert hub.why_unreachable() is None

    def refused(source: str, **options: Any) -> None:
        assert not options["local_files_only"]
        raise OSError(f"{source} is a gated repository")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refused)
    with pytest.raises(OSError, match=r"^owner/name is a gated repository"):
        load_encoder("hf:owner/name", device="cpu")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub.why_unreachable() == "HF_HUB_OFFLINE is set"
