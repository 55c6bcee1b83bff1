"""Features in files: one safetensors file each, what is no tensor as JSON in its header."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.atomic_files import written_whole
from engine.features.checks import check_embedding_finite

if TYPE_CHECKING:
    from engine.features.types import ImageFeatures, TextFeatures

Features = TypeVar("Features", "ImageFeatures", "TextFeatures")

FORMAT_VERSION = 1


def save(features: ImageFeatures | TextFeatures, path: str | PathLike[str]) -> None:
    """Write one safetensors file; `load` reads it back.

    Raises:
        OSError: naming a path that cannot be written.
        ValueError: no path.
    """
    if not os.fspath(path):
        raise ValueError(f"{type(features).__name__}.save: path must name a file, got {path!r}")
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {"kind": type(features).__name__, "format_version": FORMAT_VERSION}
    for item in fields(features):
        value = getattr(features, item.name)
        if isinstance(value, Tensor):
            tensors[item.name] = value.clone().contiguous()
        elif item.name == "hidden":
            tensors |= {f"hidden.{layer}": state.clone().contiguous() for layer, state in value.items()}
        elif value is not None:
            plain[item.name] = value
    try:
        with written_whole(path) as unfinished:
            # Cloned above: safetensors refuses tensors that share memory.
            save_file(tensors, unfinished, metadata={"peaksim": json.dumps(plain)})
    except (SafetensorError, OSError) as error:
        raise OSError(f"{type(features).__name__}.save: {path} could not be written ({error})") from error


def load(cls: type[Features], path: str | PathLike[str]) -> Features:
    """Read what `save` wrote.

    Raises:
        FileNotFoundError: no file.
        ValueError: it holds something else or is damaged, all by name.
    """
    who = f"{cls.__name__}.load"
    if os.path.isdir(path):
        raise ValueError(f"{who}: {path} is a folder, a file was wanted")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{who}: {path} does not exist")
    try:
        header, tensors = _read(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{who}: {path} is not a whole safetensors file ({error})") from error
    if header is None:
        raise ValueError(f"{who}: {path} was not written by peaksim (no header)")
    try:
        plain = dict(json.loads(header))
        kind, version = plain.pop("kind"), plain.pop("format_version")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{who}: {path} has a header that cannot be read ({error!r})") from error
    if kind != cls.__name__:
        raise ValueError(f"{who}: {path} holds other features than {cls.__name__}, got {kind!r}")
    if type(version) is not int or version < 1:
        raise ValueError(f"{who}: {path} must state format_version as a whole number from 1 on, got {version!r}")
    if version > FORMAT_VERSION:
        raise ValueError(f"{who}: {path} has format {version}, this version reads up to {FORMAT_VERSION}")
    hidden = {name: tensors.pop(name) for name in list(tensors) if name.startswith("hidden.")}
    known = {item.name: str(item.type).startswith("Tensor") for item in fields(cls)}
    strange = [name for name in tensors if not known.get(name, False)]
    strange += [name for name in plain if known.get(name, True)]
    if strange:
        raise ValueError(f"{who}: {path} holds what {cls.__name__} has no place for: {', '.join(sorted(strange))}")
    try:
        layers = dict(sorted((int(name.removeprefix("hidden.")), name) for name in hidden))
        parts: dict[str, Any] = {**tensors, **{name: _tuples(value) for name, value in plain.items()}}
        features = cls(**parts, hidden={k: hidden[name] for k, name in layers.items()})
        check_embedding_finite(features)
        return features
    except (TypeError, ValueError) as error:
        raise ValueError(f"{who}: {path} is damaged ({error})") from error


def _read(path: str | PathLike[str]) -> tuple[str | None, dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return (file.metadata() or {}).get("peaksim"), tensors


def _tuples(value: Any) -> Any:
    """JSON lists back to the tuples they were."""
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value
