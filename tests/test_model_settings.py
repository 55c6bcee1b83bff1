"""Settings beside a model's weights that cannot be: refused by file and name, whatever the source library raises."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.encoders.open_clip import load_open_clip
from engine.encoders.transformers import load_transformers
from tests import tiny_open_clip, tiny_transformers

GONE = object()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("saved")
    return {
        "open_clip": tiny_open_clip.write_folder(root / "open_clip", "clip"),
        "hf": tiny_transformers.write_folder(root / "hf", "clip"),
    }


def changed(folder: Path, file: str, path: str, value: object) -> None:
    """Set the entry at `path` (keys with a slash between) of a JSON file, or take it out."""
    content: Any = json.loads((folder / file).read_text())
    place, keys = content, path.split("/")
    for key in keys[:-1]:
        place = place[key]
    if value is GONE:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    (folder / file).write_text(json.dumps(content))


OPEN_CLIP = [
    ("model_cfg", 3, "must state 'model_cfg' as an object, got 3"),
    ("model_cfg/text_cfg", GONE, "model_cfg, must state 'text_cfg' as an object, got only 'embed_dim', 'vision_cfg'"),
    ("model_cfg/vision_cfg", "x", "model_cfg, must state 'vision_cfg' as an object, got 'x'"),
    ("model_cfg/embed_dim", "a", "model_cfg, must state 'embed_dim' as a positive integer, got 'a'"),
    ("model_cfg/text_cfg/width", "a", r"describes what open_clip cannot build \(\w+: "),
    ("model_cfg/vision_cfg/width", "a", r"describes what open_clip cannot build \(\w+: "),
    ("model_cfg/text_cfg/colour", 1, r"describes what open_clip cannot build \(TypeError: .*colour"),
    ("model_cfg/colour", 1, r"describes what open_clip cannot build \(TypeError: .*colour"),
    ("model_cfg/text_cfg/heads", 5, r"describes what open_clip cannot build \(AssertionError: .*divisible"),
    ("preprocess_cfg", [], r"must state 'preprocess_cfg' as an object, got \[\]"),
    ("preprocess_cfg/interpolation", "nearest", "preprocess_cfg: interpolation must be one of .*, got 'nearest'"),
    ("preprocess_cfg/std", "x", "preprocess_cfg: std must be three numbers above 0, got 'x'"),
    ("preprocess_cfg/std", 0, r"preprocess_cfg: std must be three numbers above 0, got \(0, 0, 0\)"),
    ("preprocess_cfg/std", [0.5, 0.5, 0.0], "preprocess_cfg: std must be three numbers above 0"),
    ("preprocess_cfg/mean", [0.5], r"preprocess_cfg: mean must be three numbers, got \[0.5\]"),
    ("preprocess_cfg/mean", [0.5, 0.5, "a"], "preprocess_cfg: mean must be three numbers, got"),
    ("preprocess_cfg/fill_color", -1, "preprocess_cfg: fill_color must be a whole number 0..255, got -1"),
]
HF = [
    ("config.json", "vision_config/hidden_size", "a", r"config.json describes what transformers cannot build \(\w+: "),
    ("config.json", "text_config/num_attention_heads", 5, r"config.json describes what transformers cannot build \("),
    ("preprocessor_config.json", "size", "x", "preprocessor_config.json"),
    ("preprocessor_config.json", "image_mean", "x", "preprocessor_config.json: image_mean must be three numbers, got"),
    ("preprocessor_config.json", "image_mean", [0.5], "preprocessor_config.json: image_mean must be three numbers"),
    ("preprocessor_config.json", "image_std", [0.5, 0, 0.5], "preprocessor_config.json: image_std must be .* above 0"),
    ("preprocessor_config.json", "resample", "x", "preprocessor_config.json"),
]


@pytest.mark.parametrize(("path", "value", "message"), OPEN_CLIP)
def test_an_open_clip_folder_names_what_is_wrong(saved, tmp_path: Path, path: str, value: object, message: str):
    folder = shutil.copytree(saved["open_clip"], tmp_path / "model")
    changed(folder, "open_clip_config.json", path, value)
    with pytest.raises(ValueError, match=rf"^open_clip:{folder}: open_clip_config\.json[,:]? ?{message}"):
        load_open_clip(str(folder), device="cpu")


def test_one_number_is_one_for_all_colours(saved, tmp_path: Path):
    folder = shutil.copytree(saved["open_clip"], tmp_path / "model")
    changed(folder, "open_clip_config.json", "preprocess_cfg/mean", 0.5)
    assert load_open_clip(str(folder), device="cpu").spec.mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_file_that_is_no_json_object_is_named(saved, tmp_path: Path, content: str):
    folder = shutil.copytree(saved["open_clip"], tmp_path / "model")
    (folder / "open_clip_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"model/open_clip_config\.json (is damaged: it is no|must hold a) JSON"):
        load_open_clip(str(folder), device="cpu")


@pytest.mark.parametrize(("file", "path", "value", "message"), HF)
def test_a_folder_of_transformers_names_what_is_wrong(saved, tmp_path: Path, file: str, path: str, value, message: str):
    folder = shutil.copytree(saved["hf"], tmp_path / "model")
    changed(folder, file, path, value)
    with pytest.raises(ValueError, match=rf"^hf:{folder}: {message}"):
        load_transformers(str(folder), device="cpu")


@pytest.mark.parametrize("kind", ["open_clip", "hf"])
def test_a_file_in_the_place_of_a_folder_is_no_place_to_save(saved, tmp_path: Path, kind: str):
    load = load_open_clip if kind == "open_clip" else load_transformers
    encoder = load(str(saved[kind]), device="cpu")
    (tmp_path / "file").write_text("here")
    with pytest.raises(FileExistsError, match=rf"^{kind}:.*: save wants a folder, but .*file is a file"):
        encoder.save(tmp_path / "file")
    encoder.save(tmp_path / "folder")
    usual = (tmp_path / "file").stat().st_mode & 0o777
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "folder").iterdir()} == {usual}
