"""Checkpoint files in open_clip layouts: read safely, told apart, and loaded completely or not at all."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.encoders.settings import part_of, read_object

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
ACTIVATIONS = ("gelu", "quick_gelu")
_WRAPPERS = ("state_dict", "model_state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.", "model.", "clip.")
# Constants and buffers that other versions kept among the weights.
_LEFTOVERS = (
    "input_resolution",
    "context_length",
    "vocab_size",
    "attn_mask",
    "text.attn_mask",
    "text.transformer.embeddings.position_ids",
)
_OLD_TEXT = ("text_projection", "positional_embedding", "token_embedding.", "transformer.", "ln_final.")


@dataclass(frozen=True)
class Checkpoint:
    """Weights of a file, and the facts about the model that the file or its sidecar states.

    `facts` may hold `activation`, `preprocess_cfg`, `resize` and `fingerprint`.
    """

    path: Path
    state: dict[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint: a state dict, plain or under `state_dict`, with or without `module.` prefixes.

    Only tensors are read (safetensors, or `torch.load(weights_only=True)`); nothing of the file is
    executed. The sidecar `<file name>.json` and `open_clip_config.json` beside the file are read for
    facts.

    Raises:
        FileNotFoundError: a missing file.
        ValueError: a TorchScript archive (OpenAI's original files), for pickled objects other than tensors, and for a
            file without weights.
    """
    if not path.is_file():
        raise FileNotFoundError(f"open_clip: checkpoint {path} does not exist")
    if path.suffix == ".safetensors":
        content, facts = _read_safetensors(path)
    else:
        content, facts = _read_pickle(path)
    state = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    while prefix := next((p for p in _PREFIXES if state and all(name.startswith(p) for name in state)), ""):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    state = {name: value for name, value in state.items() if name not in _LEFTOVERS}
    if not state:
        raise ValueError(f"open_clip: checkpoint {path} holds no weights (no tensor by name)")
    return Checkpoint(path, state, {**_read_sidecars(path), **facts})


def load_weights(model: nn.Module, checkpoint: Checkpoint, architecture: str) -> None:
    """Put all weights of a checkpoint into a model.

    Raises:
        ValueError: naming the first keys that are missing, left over, or of another shape: position embeddings of
            another size are refused, not interpolated.
    """
    wanted = model.state_dict()
    state = _match_layout(checkpoint.state, wanted)
    missing = [name for name in wanted if name not in state]
    surplus = [name for name in state if name not in wanted]
    shapes = [
        f"{name} wanted {tuple(wanted[name].shape)}, got {tuple(state[name].shape)}"
        for name in wanted
        if name in state and wanted[name].shape != state[name].shape
    ]
    faults = [
        f"{kind} {len(names)} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for kind, names in (("missing", missing), ("unexpected", surplus), ("wrong shape", shapes))
        if names
    ]
    if faults:
        raise ValueError(f"open_clip: {checkpoint.path} does not fit architecture {architecture}: {'; '.join(faults)}")
    model.load_state_dict(state)


def choose_activation(
    architecture: str, config: Mapping[str, Any], checkpoint: Checkpoint, stated: str | None, *, twin: bool
) -> str:
    """The activation of a checkpoint given by path, from what is stated about it; never guessed.

    Args:
        architecture: open_clip's name.
        config: its model configuration.
        checkpoint: whose facts may state the activation.
        stated: what the user said, or None.
        twin: the architecture exists with either activation, so that its plain name says nothing.

    Raises:
        ValueError: where nothing states it, or two statements disagree.
    """
    said = {}
    if stated is not None:
        said["activation=... of the call"] = stated
    if "activation" in checkpoint.facts:
        said["the checkpoint's own facts"] = checkpoint.facts["activation"]
    if architecture.endswith("-quickgelu") or config.get("quick_gelu"):
        said[f"the architecture {architecture}"] = "quick_gelu"
    elif not twin:
        said[f"the architecture {architecture}"] = "gelu"
    for who, activation in said.items():
        if activation not in ACTIVATIONS:
            raise ValueError(f"open_clip: activation must be 'gelu' or 'quick_gelu', got {activation!r} from {who}")
    if not said:
        raise ValueError(
            f"open_clip: {architecture} exists with GELU and with QuickGELU, and nothing says which one "
            f"{checkpoint.path} was trained with (weights of OpenAI and models tuned from them: QuickGELU). "
            f"Say 'open_clip:{architecture}-quickgelu/{checkpoint.path}', or append '?activation=gelu' or "
            "'?activation=quick_gelu'"
        )
    if len(set(said.values())) > 1:
        shown = ", ".join(f"{who} says {activation}" for who, activation in said.items())
        raise ValueError(f"open_clip: the activation of {checkpoint.path} is contradictory: {shown}")
    return next(iter(said.values()))


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"open_clip: {path} is not a safetensors file ({error})") from error
    facts: dict[str, Any] = {}
    if "quick_gelu" in metadata:
        facts["activation"] = "quick_gelu" if metadata["quick_gelu"].lower() in ("true", "1") else "gelu"
    if "activation" in metadata:
        facts["activation"] = metadata["activation"]
    return tensors, facts


def _read_pickle(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise ValueError(
                    f"open_clip: {path} is a TorchScript archive (OpenAI's original files are): it holds a "
                    "program, which is not run. Use the same weights as a tag, such as "
                    "'open_clip:ViT-B-32/openai', or save the state dict as safetensors with the library it "
                    "came from"
                )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"open_clip: {path} cannot be read as tensors alone ({reason}); files that need other objects "
            "unpickled are refused, because unpickling runs code. Save the state dict as safetensors"
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(f"open_clip: {path} must hold a state dict, got {type(content).__name__}")
    facts: dict[str, Any] = {}
    if isinstance(content.get("quick_gelu"), bool):
        facts["activation"] = "quick_gelu" if content["quick_gelu"] else "gelu"
    if isinstance(content.get("activation"), str):
        facts["activation"] = content["activation"]
    inner = next((content[name] for name in _WRAPPERS if isinstance(content.get(name), Mapping)), content)
    return dict(inner), facts


def _read_sidecars(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    config = path.parent / "open_clip_config.json"
    if config.is_file():
        content = read_object("open_clip", config)
        # What is no object there is told of where the model is built.
        if isinstance(content.get("model_cfg"), dict):
            facts["activation"] = "quick_gelu" if content["model_cfg"].get("quick_gelu") else "gelu"
        if "preprocess_cfg" in content:
            facts["preprocess_cfg"] = content["preprocess_cfg"]
        if "peaksim" in content:
            facts.update(part_of(f"open_clip: {config}", content, "peaksim"))
    sidecar = path.with_name(path.name + ".json")
    if sidecar.is_file():
        facts.update(read_object("open_clip", sidecar))
    return facts


def _match_layout(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the text tower's keys between open_clip's two layouts, and shape the two scalars alike."""
    if "text.positional_embedding" in wanted and "positional_embedding" in state:
        state = {f"text.{name}" if name.startswith(_OLD_TEXT) else name: value for name, value in state.items()}
    elif "positional_embedding" in wanted and "text.positional_embedding" in state:
        state = {name.removeprefix("text."): value for name, value in state.items()}
    scalars = {
        name: state[name].reshape(wanted[name].shape)
        for name in ("logit_scale", "logit_bias")
        if name in state and name in wanted and state[name].numel() == wanted[name].numel()
    }
    return {**state, **scalars}
