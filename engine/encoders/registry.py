"""Encoders by name, and the table of families that `peaksim models` shows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from urllib.parse import parse_qsl

import torch

from engine.choices import Probability
from engine.encoders.base import Encoder
from engine.encoders.export_manifest import is_export
from engine.encoders.text_rules import CLIP_RULES, HF_CLIP_RULES, SIGLIP2_RULES, SIGLIP_RULES, WORD_RULES
from engine.encoders.towers import TAPS

# The options that the loader of each kind of name takes.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "scenes": (),
    "open_clip": ("resize", "activation", "preprocess", "tokenizer"),
    "hf": ("resize", "tokenizer"),
    "export": ("provider", "precision"),
}
_FAMILY_NAMES = frozenset({"scenes", "open_clip", "hf"})


@dataclass(frozen=True)
class Family:
    """One family of encoders.

    Attributes:
        family: as in `EncoderSpec.family`.
        example: a name that `load_encoder` takes.
        architectures: what is read, in words.
        taps: patch taps, and whether each lies in the text's space; empty for global embeddings only.
        text_rules: case, padding and end token in one sentence.
        context_length: text positions, start and end included.
        probability: `"softmax"` over the texts of an image, or `"sigmoid"` for each pair.
    """

    family: str
    example: str
    architectures: str
    taps: Mapping[str, bool]
    text_rules: str
    context_length: str
    probability: Probability


_FAMILIES = (
    Family(
        "scenes",
        "scenes",
        "the embedded model, trained on rendered scenes",
        {"projected": True, "value": True},
        WORD_RULES,
        "40",
        "softmax",
    ),
    Family("clip", "open_clip:ViT-B-32/openai", "CLIP ViT, GELU or QuickGELU", TAPS, CLIP_RULES, "77", "softmax"),
    Family("clip", "open_clip:RN50/openai", "CLIP ResNet and other towers", {}, CLIP_RULES, "77", "softmax"),
    Family("siglip", "open_clip:ViT-B-16-SigLIP/webli", "SigLIP", TAPS, SIGLIP_RULES, "64", "sigmoid"),
    Family("siglip2", "open_clip:ViT-B-16-SigLIP2/webli", "SigLIP 2", TAPS, SIGLIP_RULES, "64", "sigmoid"),
    Family("pe", "open_clip:PE-Core-B-16/meta", "Perception Encoder", TAPS, CLIP_RULES, "32 or 72", "softmax"),
    Family("clip", "hf:openai/clip-vit-base-patch32", "CLIP of transformers", TAPS, HF_CLIP_RULES, "77", "softmax"),
    Family(
        "siglip",
        "hf:google/siglip-base-patch16-224",
        "SigLIP of transformers",
        TAPS,
        SIGLIP_RULES,
        "64",
        "sigmoid",
    ),
    Family(
        "siglip2",
        "hf:google/siglip2-base-patch16-224",
        "SigLIP 2 of transformers, fixed resolution and native aspect ratio (…-naflex)",
        TAPS,
        SIGLIP2_RULES,
        "64",
        "sigmoid",
    ),
)


def families() -> tuple[Family, ...]:
    """The families of encoders, in the order they are shown. Nothing is loaded or fetched."""
    return _FAMILIES


def load_encoder(
    name: str,
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
    resize: str | None = None,
    activation: str | None = None,
    preprocess: str | None = None,
    tokenizer: str | PathLike[str] | None = None,
) -> Encoder:
    """Load an encoder by name.

    Args:
        name: `"scenes"` or `"scenes:<folder>"`; `"open_clip:<arch>/<tag or checkpoint path>"`,
            `"open_clip:hf-hub:<owner>/<name>"`, `"open_clip:<folder>"`; `"hf:<hub name or folder>"`. The
            options below may be appended: `"open_clip:ViT-B-32/model.pt?activation=quick_gelu"`. Or a folder that
            `peaksim export` wrote, with `provider` (`cpu`, `cuda`, `tensorrt`) and `precision` as options.
        device, dtype: see `engine.encoders.placement.place`.
        resize: `"model"` (default), `"source"` (the source library's own code), `"crop"`, `"squash"`,
            `"pad"`.
        activation, preprocess: what a bare open_clip checkpoint leaves open; see `load_open_clip`.
        tokenizer: folder of the tokenizer, where the model's own place has none.

    Raises:
        TypeError: a name that is no string.
        ValueError: an unknown name or option, or an option that the family has no use for; and what the family's loader
            raises.
    """
    if not isinstance(name, str):
        raise TypeError(f"load: name must be a string, got {type(name).__name__}")
    _check_name(name)
    given = {"resize": resize, "activation": activation, "preprocess": preprocess, "tokenizer": tokenizer}
    plain, options = _split_options(name, {key: str(value) for key, value in given.items() if value is not None})
    family, _, reference = plain.partition(":")
    if _names_export(plain):
        from engine.encoders.exported import load_exported

        _refuse(name, options, allowed=_OPTIONS["export"])
        chosen = (options.get("provider"), options.get("precision"))
        return load_exported(
            Path(plain).expanduser(), device=device, dtype=dtype, provider=chosen[0], precision=chosen[1]
        )
    # Imported here: open_clip and transformers take seconds, and a user of one does not need the other.
    if family in _FAMILY_NAMES:
        _refuse(name, options, allowed=_OPTIONS[family])
    if family == "scenes":
        return _load_scenes(reference, device, dtype)
    if family == "open_clip" and reference:
        from engine.encoders.open_clip import load_open_clip

        return load_open_clip(reference, device=device, dtype=dtype, **options)
    if family == "hf" and reference:
        from engine.encoders.transformers import load_transformers

        return load_transformers(reference, device=device, dtype=dtype, **options)
    raise _unknown(name)


def _check_name(name: str) -> None:
    """See that a name without its options is of a family or of an exported model. Raises ValueError otherwise."""
    plain = name.partition("?")[0]
    if _names_export(plain) or plain.partition(":")[0] in _FAMILY_NAMES:
        return
    place = os.path.expanduser(plain)
    # Unlike `Path.is_dir` it says no to what cannot be a path.
    if os.path.isdir(place):
        raise ValueError(
            f"load: {place} must hold the manifest.json that `peaksim export` writes, got a folder where it is missing "
            "or damaged; other folders are named 'scenes:<folder>', 'open_clip:<folder>' or 'hf:<folder>'"
        )
    raise _unknown(name)


def _unknown(name: str) -> ValueError:
    return ValueError(
        "load: name must be 'scenes', 'open_clip:<arch>/<tag or path>', 'open_clip:hf-hub:<owner>/<name>', "
        f"'hf:<hub name or folder>' or a folder that `peaksim export` wrote, got {name!r}"
    )


def _load_scenes(reference: str, device: torch.device | str, dtype: torch.dtype | str) -> Encoder:
    from engine.encoders.placement import place
    from engine.encoders.scenes import load_scenes

    if dtype not in ("auto", "float32", torch.float32):
        raise ValueError(f"load: 'scenes' runs in float32, got dtype={dtype!r}")
    return load_scenes(reference or None, device=place(device, "float32")[0])


def _split_options(name: str, given: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    plain, mark, query = name.partition("?")
    options = dict(given)
    for key, value in parse_qsl(query, keep_blank_values=True) if mark else ():
        known = _OPTIONS["export" if _names_export(plain) else "open_clip"]
        if key not in known:
            raise ValueError(f"load: option must be one of {', '.join(known)}, got {key!r} in {name!r}")
        if key in options and options[key] != value:
            raise ValueError(f"load: {key} is {value!r} in {name!r} and {options[key]!r} in the call")
        options[key] = value
    return plain, options


def _names_export(plain: str) -> bool:
    """Whether a name without its options is the path of an exported model."""
    family = plain.partition(":")[0]
    # An empty path would be the working directory.
    return bool(plain) and family not in _FAMILY_NAMES and is_export(Path(plain).expanduser())


def _refuse(name: str, options: Mapping[str, object], *, allowed: tuple[str, ...]) -> None:
    for key in options:
        if key not in allowed:
            raise ValueError(f"load: {name!r} has no use for {key}, got {options[key]!r}")
