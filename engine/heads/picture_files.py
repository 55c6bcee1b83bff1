"""Files of the generator of scenes and of its judge: float16 weights with a header that says what they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.atomic_files import written_whole
from engine.heads.base import Trainable


def save_float16(
    module: Trainable, path: str | PathLike[str], *, encoder: str = "", facts: Mapping[str, object] | None = None
) -> Path:
    """Write one safetensors file with the module's kind, configuration and fingerprint, which `read_float16` reads."""
    header = {"kind": module.name, "config": asdict(module.config), "encoder": encoder,
              "fingerprint": module.fingerprint, "facts": dict(facts or {})}  # fmt: skip
    state = {name: tensor.detach().cpu().half().contiguous() for name, tensor in module.state_dict().items()}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(target) as unfinished:
        save_file(state, unfinished, metadata={"peaksim": json.dumps(header)})
    return target


def read_float16(who: str, path: str | PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and weights, float32, of a file of this kind.

    Raises FileNotFoundError, and ValueError for a file that is damaged or holds something else; both begin with `who`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{who}: {path} is missing; `peaksim train generator` writes it")
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 (not a dict)
            header = dict(json.loads((file.metadata() or {}).get("peaksim", "{}")))
    except (SafetensorError, TypeError, ValueError) as error:
        raise ValueError(f"{who}: {path} is not a whole safetensors file of peaksim's ({error})") from error
    if header.get("kind") != kind:
        raise ValueError(f"{who}: {path} must hold a {kind}, got {header.get('kind')!r}")
    for name in ("config", "encoder", "fingerprint"):
        if name not in header:
            raise ValueError(f"{who}: {path} has a header that cannot be read (no {name})")
    return header, state


def with_weights(who: str, path: str | PathLike[str], module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a new module these weights and put it into evaluation mode. Raises ValueError when they do not fit."""
    try:
        module.load_state_dict(dict(state))
    except RuntimeError as error:
        raise ValueError(f"{who}: {path} must hold the weights its header describes, got {error}") from error
    module.eval()


@contextmanager
def built_from_header(who: str, path: str | PathLike[str]) -> Iterator[None]:
    """A block that builds the module a header describes.

    The first weights it draws, which the file replaces, leave the caller's random numbers alone. Raises ValueError
    naming the file where the configuration is none of this module's.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{who}: {path} has a header that cannot be read ({error})") from error
