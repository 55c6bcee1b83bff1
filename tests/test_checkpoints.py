"""Checkpoints by path: layouts of the compared methods, safe reading, and nothing guessed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

from engine.encoders import open_clip_sources
from engine.encoders.open_clip import build_model, load_open_clip
from engine.encoders.open_clip_checkpoints import read_checkpoint
from tests.tiny_open_clip import CONFIGS, random_model, register, small_tokenizer, write_folder

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))


@pytest.fixture(scope="module", autouse=True)
def tiny_architectures(tmp_path_factory: pytest.TempPathFactory) -> None:
    register(tmp_path_factory.mktemp("architectures"))


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in random_model("clip-quickgelu").state_dict().items()}


def load(path: Path, arch: str = "tiny-clip-quickgelu", **options: str) -> Any:
    return load_open_clip(f"{arch}/{path}", device="cpu", **{"preprocess": "clip", **options})


# NegCLIP, FSC-CLIP and FineCLIP save what open_clip's training does, TripletCLIP and others the bare weights.
LAYOUTS: dict[str, Callable[[dict], Any]] = {
    "plain": lambda state: state,
    "state_dict": lambda state: {"state_dict": state},
    "training, distributed": lambda state: {
        "epoch": 5,
        "name": "run",
        "state_dict": {f"module.{name}": value for name, value in state.items()},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 1e-6}]},
        "scaler": {"scale": 65536.0},
    },
    "compiled, distributed": lambda state: {
        "state_dict": {f"module._orig_mod.{name}": value for name, value in state.items()}
    },
    "wrapped model": lambda state: {"model": {f"model.{name}": value for name, value in state.items()}},
    "with constants": lambda state: {
        **state,
        "input_resolution": torch.tensor(32),
        "context_length": torch.tensor(20),
        "vocab_size": torch.tensor(49408),
    },
    "half precision": lambda state: {"state_dict": {name: value.half() for name, value in state.items()}},
    "scale with an axis": lambda state: {**state, "logit_scale": state["logit_scale"].reshape(1)},
    "text tower apart": lambda state: {
        name if name.startswith(("visual.", "logit_")) else f"text.{name}": value for name, value in state.items()
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_load_to_the_same_model(layout, weights, tmp_path):
    path = tmp_path / "epoch_5.pt"
    torch.save(LAYOUTS[layout](weights), path)
    encoder = load(path)
    reference = open_clip.CLIP(**CONFIGS["clip-quickgelu"]).eval()
    rounded = layout == "half precision"
    reference.load_state_dict({name: value.half() if rounded else value for name, value in weights.items()})
    with torch.no_grad():
        wanted = reference.encode_image(encoder.preprocess(PICTURE)[None], normalize=True)
    torch.testing.assert_close(encoder.encode_images([PICTURE]).embedding, wanted, rtol=0, atol=1e-5)
    assert encoder.spec.activation == "quick_gelu"


def test_old_layout_fits_a_text_tower_of_its_own(tmp_path):
    state = random_model("pe").state_dict()
    path = tmp_path / "old.pt"
    torch.save({name.removeprefix("text."): value for name, value in state.items()}, path)
    assert load(path, "tiny-pe", preprocess="pe").spec.family == "pe"


def test_safetensors_and_pickle_give_one_fingerprint(weights, tmp_path):
    torch.save({"state_dict": weights}, tmp_path / "a.pt")
    save_file(weights, tmp_path / "b.safetensors")
    assert load(tmp_path / "a.pt").spec.fingerprint == load(tmp_path / "b.safetensors").spec.fingerprint


def test_the_activation_is_asked_for_where_both_exist(weights, tmp_path):
    path = tmp_path / "negclip.pt"
    torch.save({"state_dict": weights}, path)
    message = r"nothing says which one .*negclip\.pt was trained with.*tiny-clip-quickgelu/.*\?activation=gelu"
    with pytest.raises(ValueError, match=message):
        load(path, "tiny-clip")
    plain, quick = (
        load(path, "tiny-clip", activation="gelu"),
        load(path, "tiny-clip", activation="quick_gelu"),
    )
    assert (plain.spec.activation, quick.spec.activation) == ("gelu", "quick_gelu")
    assert plain.spec.fingerprint != quick.spec.fingerprint
    assert quick.spec.fingerprint == load(path).spec.fingerprint
    assert not torch.allclose(
        plain.encode_images([PICTURE]).embedding, quick.encode_images([PICTURE]).embedding, atol=1e-4
    )


def test_the_file_or_its_sidecar_may_state_the_activation(weights, tmp_path):
    stated = {
        "in.pt": lambda path: torch.save({"state_dict": weights, "quick_gelu": True}, path),
        "word.pt": lambda path: torch.save({"state_dict": weights, "activation": "quick_gelu"}, path),
        "in.safetensors": lambda path: save_file(weights, path, metadata={"quick_gelu": "true"}),
        "word.safetensors": lambda path: save_file(weights, path, metadata={"activation": "quick_gelu"}),
    }
    for name, write in stated.items():
        write(tmp_path / name)
        assert load(tmp_path / name, "tiny-clip").spec.activation == "quick_gelu"
    torch.save(weights, tmp_path / "side.pt")
    (tmp_path / "side.pt.json").write_text(json.dumps({"activation": "gelu"}))
    assert load(tmp_path / "side.pt", "tiny-clip").spec.activation == "gelu"


def test_statements_that_disagree_are_refused(weights, tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"state_dict": weights, "quick_gelu": True}, path)
    with pytest.raises(ValueError, match=r"contradictory: activation=.* says gelu, the checkpoint's own"):
        load(path, "tiny-clip", activation="gelu")
    torch.save({"state_dict": weights}, path)
    with pytest.raises(ValueError, match="the architecture tiny-clip-quickgelu says quick_gelu"):
        load(path, activation="gelu")
    with pytest.raises(ValueError, match="activation must be 'gelu' or 'quick_gelu', got 'relu'"):
        load(path, "tiny-clip", activation="relu")


def test_an_architecture_of_one_activation_needs_no_statement(tmp_path):
    path = tmp_path / "pe.pt"
    torch.save(random_model("pe").state_dict(), path)
    assert load(path, "tiny-pe").spec.activation == "gelu"
    with pytest.raises(ValueError, match="the architecture tiny-pe says gelu"):
        load(path, "tiny-pe", activation="quick_gelu")


def test_the_preprocessing_is_asked_for_where_nothing_states_it(weights, tmp_path):
    path = tmp_path / "a.pt"
    torch.save(weights, path)
    name = f"tiny-clip-quickgelu/{path}"
    with pytest.raises(ValueError, match=r"nothing says how images were prepared .*\?preprocess=<one of clip"):
        load_open_clip(name, device="cpu")
    with pytest.raises(ValueError, match="preprocess must be one of clip, siglip, pe, got 'vit'"):
        load_open_clip(name, device="cpu", preprocess="vit")
    (tmp_path / "a.pt.json").write_text(json.dumps({"preprocess": "siglip"}))
    assert load_open_clip(name, device="cpu").spec.resize == "squash"
    (tmp_path / "a.pt.json").unlink()
    config = {
        "model_cfg": CONFIGS["clip-quickgelu"],
        "preprocess_cfg": {"mean": 0.25, "resize_mode": "longest"},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    spec = load_open_clip(name, device="cpu").spec
    assert spec.resize == "pad" and spec.mean == (0.25, 0.25, 0.25)


def test_known_architectures_bring_the_preprocessing_of_their_tags(tmp_path):
    """SigLIP weights in a bare file do not get CLIP's pixels; a model with two habits is asked about."""
    from engine.encoders.open_clip_checkpoints import Checkpoint
    from engine.encoders.open_clip_sources import _preprocess_of_path

    bare = Checkpoint(tmp_path / "x.pt", {})
    siglip = _preprocess_of_path("ViT-B-16-SigLIP", bare, None)
    assert siglip["mean"] == (0.5, 0.5, 0.5) and siglip["resize_mode"] == "squash"
    clip = _preprocess_of_path("ViT-B-32-quickgelu", bare, None)
    assert clip["mean"][0] == pytest.approx(0.48145466) and clip["resize_mode"] == "shortest"
    with pytest.raises(ValueError, match=r"its tags differ in theirs \(ViT-L-14\)"):
        _preprocess_of_path("ViT-L-14", bare, None)
    assert _preprocess_of_path("ViT-L-14", bare, "openai") == clip


def test_weights_that_do_not_fit_are_named(weights, tmp_path):
    path = tmp_path / "a.pt"

    def fails(state: dict, match: str) -> None:
        torch.save(state, path)
        with pytest.raises(ValueError, match=match):
            load(path)

    lacking = {name: value for name, value in weights.items() if name != "visual.proj"}
    fails(lacking, r"does not fit architecture tiny-clip-quickgelu: missing 1 \(visual\.proj\)$")
    fails({**weights, "extra.weight": torch.zeros(1)}, r"unexpected 1 \(extra\.weight\)$")
    longer = torch.zeros(40, 32)
    fails({**weights, "positional_embedding": longer}, r"positional_embedding wanted \(20, 32\), got \(40, 32\)")
    few = {name: value for name, value in weights.items() if not name.startswith("transformer.")}
    fails(few, r"missing 36 \(transformer\.resblocks\.0\.ln_1\.weight, .*, .*, …\)")


class Opens:
    """Unpickling an object of this class runs a function of its choice."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_pickled_code_is_refused_and_not_run(weights, tmp_path):
    trace = tmp_path / "ran"
    path = tmp_path / "a.pt"
    torch.save({"state_dict": weights, "extra": Opens(trace)}, path)
    with pytest.raises(ValueError, match=r"cannot be read as tensors alone.*unpickling runs code"):
        read_checkpoint(path)
    path.write_bytes(pickle.dumps({"state_dict": Opens(trace)}, protocol=2))
    with pytest.raises(ValueError, match="cannot be read as tensors alone"):
        read_checkpoint(path)
    assert not trace.exists()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_torchscript_archive_is_refused_with_a_sentence(tmp_path):
    path = tmp_path / "ViT-B-32.pt"
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), path)
    with pytest.raises(ValueError, match=r"is a TorchScript archive \(OpenAI's original files are\).*ViT-B-32/openai"):
        read_checkpoint(path)


def test_files_that_hold_no_weights_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.pt does not exist"):
        read_checkpoint(tmp_path / "missing.pt")
    (tmp_path / "a.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        read_checkpoint(tmp_path / "a.safetensors")
    (tmp_path / "a.pt").write_bytes(b"\x80\x02no")
    with pytest.raises(ValueError, match="cannot be read as tensors alone"):
        read_checkpoint(tmp_path / "a.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be read as tensors alone"):
        read_checkpoint(tmp_path / "empty.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="must hold a state dict, got list"):
        read_checkpoint(tmp_path / "list.pt")
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    with pytest.raises(ValueError, match="holds no weights"):
        read_checkpoint(tmp_path / "none.pt")


def test_vit_b_32_by_tag_runs_with_the_activation_of_its_weights(tmp_path, monkeypatch):
    """The true size, once. The tag is QuickGELU although the architecture's name says GELU."""
    model = build_model({**open_clip.get_model_config("ViT-B-32"), "quick_gelu": True}).eval()
    weights = tmp_path / "openai.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, weights)
    monkeypatch.setattr(open_clip_sources, "why_unreachable", lambda: None)
    monkeypatch.setattr(open_clip, "download_pretrained", lambda facts: str(weights))
    encoder = load_open_clip("ViT-B-32/openai", device="cpu", resize="source")
    assert encoder.spec.activation == "quick_gelu" and encoder.spec.grid == (7, 7)
    transform = open_clip.transform.image_transform_v2(open_clip.transform.PreprocessCfg(), is_train=False)
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (240, 320, 3), dtype=np.uint8))
    texts = ["a photo of a cat", "two dogs " * 60]
    with torch.no_grad():
        image = model.encode_image(transform(picture)[None], normalize=True)
        text = model.encode_text(open_clip.get_tokenizer("ViT-B-32")(texts), normalize=True)
    features = encoder.encode_images([picture], tap="value")
    torch.testing.assert_close(features.embedding, image, rtol=0, atol=1e-5)
    torch.testing.assert_close(encoder.encode_texts(texts).embedding, text, rtol=0, atol=1e-5)
    assert features.patches.shape == (1, 49, 512)


def test_a_hub_name_brings_configuration_and_weights(tmp_path, monkeypatch):
    folder = write_folder(tmp_path, "clip-quickgelu")
    asked = []

    def fetch(name: str, filename: str = "open_clip_model.safetensors") -> str:
        asked.append((name, filename))
        return str(folder / filename)

    monkeypatch.setattr(open_clip_sources, "why_unreachable", lambda: None)
    monkeypatch.setattr(open_clip.pretrained, "download_pretrained_from_hf", fetch)
    spec = load_open_clip("hf-hub:owner/name", device="cpu").spec
    assert asked == [("owner/name", "open_clip_config.json"), ("owner/name", "open_clip_model.safetensors")]
    assert spec.activation == "quick_gelu"
    assert spec.fingerprint == load_open_clip(str(folder), device="cpu").spec.fingerprint


def test_a_text_tower_of_hugging_face_gives_global_embeddings_alone(tmp_path):
    """roberta-ViT-B-32 and its kin: the tower is built from its own configuration and filled from the checkpoint."""
    words = small_tokenizer()
    tower = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    tower.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    text = {"hf_model_name": str(tmp_path), "hf_tokenizer_name": str(tmp_path), "context_length": 12}
    config = {**CONFIGS["clip"], "text_cfg": {**text, "hf_pooler_type": "mean_pooler"}}
    model = build_model(config).eval()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "open_clip_model.safetensors")
    content = {"model_cfg": config, "preprocess_cfg": {"mean": 0.5, "std": 0.5}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    encoder = load_open_clip(str(tmp_path), device="cpu")
    texts = ["a red dog", "two small cube"]
    with torch.no_grad():
        wanted = model.encode_text(encoder.tokenize(texts).ids, normalize=True)
    torch.testing.assert_close(encoder.encode_texts(texts).embedding, wanted, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="this text tower can only be read at its end"):
        encoder.encode_texts(texts, token_vectors=True)
    with pytest.raises(ValueError, match="text layers are none"):
        encoder.encode_texts(texts, layers=[1])
