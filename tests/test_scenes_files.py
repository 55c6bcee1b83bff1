"""Files of the embedded model that were cut, changed or swapped: an error that names the file, never another model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.encoders.scenes import load_scenes, save_scenes
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.training.scenes import VOCABULARY, ScenesTrainConfig, train

TINY = ScenesModelConfig(width=16, heads=2, image_layers=1, text_layers=1, stem_width=8, embed_dim=8)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_scenes(tmp_path, ScenesModel(TINY), VOCABULARY)
    return tmp_path


@pytest.mark.parametrize("kept", [0, 1, 100, 1000])
def test_a_cut_description_is_named(saved: Path, kept: int):
    text = (saved / "model.json").read_text()
    (saved / "model.json").write_text(text[:kept])
    with pytest.raises(ValueError, match=rf"scenes:{saved}: {saved}/model.json is damaged: it is no JSON"):
        load_scenes(saved)


def test_bytes_that_are_no_text_are_named(saved: Path):
    (saved / "model.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match=r"model\.json is damaged: it is no JSON"):
        load_scenes(saved)


def _without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda facts: {name: value for name, value in facts.items() if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda facts: [facts], "has format None, wanted 1"),
        (_without("format_version"), "has format None, wanted 1"),
        (_without("config"), r"must state as config \['context_length', .* got None"),
        (lambda facts: facts | {"config": {"width": 16}}, r"must state as config .* got \['width'\]"),
        (lambda facts: facts | {"config": facts["config"] | {"depth": 1}}, "must state as config .*'depth'"),
        (
            lambda facts: facts | {"config": facts["config"] | {"width": "16"}},
            "width must be a positive integer, got '16'",
        ),
        (lambda facts: facts | {"config": facts["config"] | {"width": 0}}, "width must be a positive integer, got 0"),
        (
            lambda facts: facts | {"config": facts["config"] | {"heads": True}},
            "heads must be a positive integer, got True",
        ),
        (
            lambda facts: facts | {"config": facts["config"] | {"heads": 3}},
            "width must be a multiple of heads, got 16 and 3",
        ),
        (
            lambda facts: facts | {"config": facts["config"] | {"patch_size": 6}},
            "patch_size must be a multiple of 4, got 6",
        ),
        (_without("words"), "must state its words as a list of strings, got None"),
        (lambda facts: facts | {"words": ["red", 3]}, r"must state its words as a list of strings, got \['red', 3\]"),
        (lambda facts: facts | {"words": ["red", "red"]}, "words must be distinct"),
        (
            lambda facts: facts | {"words": [f"w{i}" for i in range(253)]},
            "must have a vocabulary of at least 257, one for each of its 253 words and 4 special ones, got 256",
        ),
    ],
)
def test_a_changed_description_is_refused_by_name(saved: Path, change: Callable, message: str):
    file = saved / "model.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match=rf"scenes:{saved}: {file} .*{message}"):
        load_scenes(saved)


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
def test_cut_weights_are_named(saved: Path, kept: int):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"scenes:{saved}: {file} must hold the weights that model.json describes"):
        load_scenes(saved)


def config(folder: Path) -> ScenesTrainConfig:
    return ScenesTrainConfig(output=folder, steps=2, batch_size=2, checkpoint_every=1, evaluate_every=1, model=TINY)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config(tmp_path_factory.mktemp("run")))


def copied(run: Path, folder: Path, name: str, content: bytes) -> Path:
    for file in run.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_training_does_not_go_on_from_a_cut_checkpoint(run: Path, tmp_path: Path, share: float):
    content = (run / "checkpoint.pt").read_bytes()
    file = copied(run, tmp_path, "checkpoint.pt", content[: int(share * len(content))])
    with pytest.raises(ValueError, match=rf"train scenes: {file} is damaged \(.+\); remove it, or choose another"):
        train(config(tmp_path))
    assert file.exists()


@pytest.mark.parametrize("key", ["settings", "weights", "optimizers", "step", "seconds"])
def test_training_does_not_go_on_from_half_a_state(run: Path, tmp_path: Path, key: str):
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    file = copied(run, tmp_path, "checkpoint.pt", b"")
    for broken in ({name: value for name, value in state.items() if name != key}, [state], {**state, key: None}):
        torch.save(broken, file)
        with pytest.raises(ValueError, match=f"train scenes: {file} (is damaged|was written with other settings)"):
            train(config(tmp_path))


def test_a_log_that_is_no_log_is_named(run: Path, tmp_path: Path):
    for content in (b"no json\n", b'{"samples": 3}\n', b"[1]\n", b"\xff\n"):
        file = copied(run, tmp_path, "log.jsonl", content)
        with pytest.raises(ValueError, match=rf"train scenes: {file} is damaged"):
            train(config(tmp_path))
        assert file.read_bytes() == content
