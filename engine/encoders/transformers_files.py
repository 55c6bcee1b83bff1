"""Files of a transformers model: read from a folder or the hub, with what is missing named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.encoders.hub import not_there, why_unreachable
from engine.encoders.hub_tokenizer import read_tokenizer
from engine.encoders.settings import built_from, read_object

STATED_FILE = "peaksim.json"
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
PROCESSOR_FILE = "preprocessor_config.json"
_PROCESSORS = (PROCESSOR_FILE, "processor_config.json")
_MODELS = {"clip": "CLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model"}


@dataclass(frozen=True)
class Files:
    """A transformers model, its tokenizer and image processor, and what its folder states about itself."""

    model: Any
    tokenizer: Any
    processor: Any
    stated: Mapping[str, Any]


def read_files(who: str, reference: str, *, tokenizer: Path | None) -> Files:
    """Read a model by hub name or from a local folder, which never touches the network.

    Raises:
        FileNotFoundError: naming the missing file.
        ValueError: a model of another kind or with weights missing.
        OSError: the network is needed and cannot be reached.
    """
    folder = Path(reference).expanduser()
    local = folder.is_dir() or reference.startswith(("/", "./", "../", "~"))
    if local:
        _check_folder(who, folder)
    own = None if tokenizer is None else read_tokenizer(who, tokenizer, local=True)
    if local:
        return _read(who, folder, own, local=True)
    reason = why_unreachable()
    try:
        return _read(who, reference, own, local=reason is not None)
    except OSError as error:
        if reason is None:
            raise
        raise not_there(who, f"files of {reference}", reason, "'hf:<folder>'") from error


def _read(who: str, place: Path | str, tokenizer: Any, *, local: bool) -> Files:
    """The files of a folder (a `Path`) or of the hub; `local` keeps to those that are on this machine.

    `tokenizer` stands in for that of the place.
    """
    source = str(place)
    import transformers

    # No code of a repository is run, and nobody is asked whether it may.
    options = {"local_files_only": local, "trust_remote_code": False}
    with built_from(f"{who}: config.json", "transformers"):
        config = transformers.AutoConfig.from_pretrained(source, **options)
    if config.model_type not in _MODELS:
        raise ValueError(f"{who}: model_type must be one of {', '.join(_MODELS)}, got {config.model_type!r}")
    kind = getattr(transformers, _MODELS[config.model_type])
    # A model is made with random numbers first; the user's generator must not notice.
    with torch.random.fork_rng(devices=[]), built_from(f"{who}: config.json", "transformers"):
        model, report = kind.from_pretrained(
            source, local_files_only=local, dtype=torch.float32, output_loading_info=True
        )
    _check_weights(who, report)
    with built_from(f"{who}: {PROCESSOR_FILE}", "transformers"):
        processor = transformers.AutoImageProcessor.from_pretrained(source, **options)
    words = read_tokenizer(who, place, local=local) if tokenizer is None else tokenizer
    stated = place / STATED_FILE if isinstance(place, Path) else None
    facts = {} if stated is None or not stated.is_file() else read_object(who, stated)
    return Files(model, words, processor, facts)


def _check_folder(who: str, folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"{who}: folder {folder} does not exist")
    for what, names in (
        ("configuration", ("config.json",)),
        ("weights", _WEIGHTS),
        ("image preprocessor", _PROCESSORS),
    ):
        if not any((folder / name).is_file() for name in names):
            raise FileNotFoundError(f"{who}: the {what} is missing: {folder} holds none of {', '.join(names)}")


def _check_weights(who: str, report: Mapping[str, Any]) -> None:
    """Refuse weights that transformers would have replaced by random numbers, or left out."""
    faults = []
    for kind, key in (
        ("missing", "missing_keys"),
        ("unexpected", "unexpected_keys"),
        ("wrong shape", "mismatched_keys"),
    ):
        names = sorted(name if isinstance(name, str) else str(name[0]) for name in report.get(key, ()))
        # Older checkpoints keep this constant among the weights.
        names = [name for name in names if not name.endswith("embeddings.position_ids")]
        if names:
            faults.append(f"{kind} {len(names)} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})")
    if faults:
        raise ValueError(f"{who}: the weights do not fit the configuration: {'; '.join(faults)}")
