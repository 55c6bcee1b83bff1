"""The two data types every encoder makes and every scorer reads, and what a scorer may ask for.

Shapes use the names of the field: ``B`` rows, ``D`` the shared embedding width, ``P`` patches, ``T`` text
positions, ``R`` regions of an image, ``S`` segments of a caption, ``W`` a tower's hidden width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Features = TypeVar("Features", "ImageFeatures", "TextFeatures")

FORMAT_VERSION = 1


@dataclass(frozen=True)
class RegionPlan:
    """Which regions of an image are encoded, and how.

    Attributes
    ----------
    grid: name of a crop grid in ``engine.crops``.
    mode: ``"rescaled"`` (crops fill the encoder's input), ``"native"`` (crops keep their scale on a canvas of the
        image's size, and size words their meaning) or ``"windows"`` (one pass; see ``Encoder.encode_windows``).
    fill: colour of what a crop does not cover: ``"border"`` (median of the image's border), ``"mean"`` (of the
        encoder's pixels) or an RGB tuple of 0..255. Without effect on windows.
    full_image: the whole image is one of the regions (the first).
    """

    grid: str = "scenes"
    mode: str = "rescaled"
    fill: str | tuple[int, int, int] = "border"
    full_image: bool = True

    def __str__(self) -> str:
        fill = self.fill if isinstance(self.fill, str) else "rgb" + "-".join(map(str, self.fill))
        return f"{self.grid}/{self.mode}/{fill}/{'full' if self.full_image else 'parts'}"


@dataclass(frozen=True)
class Needs:
    """What a scorer must find in the features it is given.

    Attributes
    ----------
    patches: patch vectors of the image.
    aligned: the patch vectors must live in the text's space.
    tap: the patch tap to read; None takes the encoder's first aligned one, or its first.
    tokens: token vectors of the text, in the shared space.
    regions: the plan of the regions that must have an embedding each, or None.
    segments: one embedding for each segment of the caption.
    segment_template: the sentence a segment is put into before it is encoded; ``{}`` stands for the segment.
    image_layers, text_layers: 1-indexed layers whose hidden states are wanted.
    """

    patches: bool = False
    aligned: bool = False
    tap: str | None = None
    tokens: bool = False
    regions: RegionPlan | None = None
    segments: bool = False
    segment_template: str = "{}"
    image_layers: tuple[int, ...] = ()
    text_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ImageFeatures:
    """Features of ``B`` images.

    Attributes
    ----------
    embedding: global embeddings ``(B, D)``, float32, unit norm.
    patches: patch vectors ``(B, P, Dp)``, unit norm when ``aligned``, or None.
    patch_mask: bool ``(B, P)``, True = a real patch; None when every patch is real.
    grid: ``(rows, columns)`` of the patch grid, ``rows * columns == P``, or None.
    aligned: True when the patch vectors live in the text's space.
    tap: the feature tap the patches were read from, e.g. ``"projected"``.
    hidden: hidden states ``{layer: (B, P + prefix, W)}`` of the layers that were asked for.
    regions: embeddings ``(B, R, D)`` of the regions, unit norm, or None.
    region_mask: bool ``(B, R)``, True = a real region; None when every region is real.
    boxes: int32 ``(B, R, 4)``: half-open pixel rectangles x0, y0, x1, y1 of the upright image.
    region_plan: ``str(RegionPlan)`` the regions were made by, or empty for the user's own boxes.
    sizes: int32 ``(B, 2)``: height and width of the upright images in pixels, or None.
    views: int32 ``(B, 4)``: what the patch grid covers; reaches beyond the image where the encoder pads.
    ids: one string for each image, or None.
    fingerprint: identifies weights and preprocessing of the encoder that made them.
    """

    embedding: Tensor
    patches: Tensor | None = None
    patch_mask: Tensor | None = None
    grid: tuple[int, int] | None = None
    aligned: bool = False
    tap: str = ""
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    regions: Tensor | None = None
    region_mask: Tensor | None = None
    boxes: Tensor | None = None
    region_plan: str = ""
    sizes: Tensor | None = None
    views: Tensor | None = None
    ids: tuple[str, ...] | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        rows = _check_embedding("ImageFeatures", self.embedding)
        _check_rows("ImageFeatures", self, rows)
        if self.patches is not None and self.grid is not None:
            expected = self.grid[0] * self.grid[1]
            if self.patches.shape[1] != expected:
                raise ValueError(
                    f"ImageFeatures: patches must hold grid rows * columns = {expected} vectors an image, "
                    f"got {self.patches.shape[1]}"
                )

    def __len__(self) -> int:
        return self.embedding.shape[0]

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> ImageFeatures:
        """The chosen rows as features of their own (an int keeps one row)."""
        return _select(self, rows)

    def to(self, device: torch.device | str) -> ImageFeatures:
        """The same features with every tensor on ``device``."""
        return _to(self, device)

    def save(self, path: str | PathLike[str]) -> None:
        """Write one safetensors file; ``ImageFeatures.load`` reads it back."""
        _save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> ImageFeatures:
        """Read what ``save`` wrote. Raises ValueError when the file holds something else."""
        return _load(cls, path)

    @staticmethod
    def cat(parts: Sequence[ImageFeatures]) -> ImageFeatures:
        """Rows of all parts in order. Parts must come from one encoder and hold the same things."""
        return _cat(ImageFeatures, parts)


@dataclass(frozen=True)
class TextFeatures:
    """Features of ``B`` texts.

    Attributes
    ----------
    embedding: global embeddings ``(B, D)``, float32, unit norm.
    tokens: token vectors ``(B, T, D)`` in the shared space, unit norm, or None.
    token_mask: bool ``(B, T)``, True = a word piece of the caption. Start, end and padding positions are
        False: they carry no word and must not take part in patch–token similarity.
    attention_mask: bool ``(B, T)``, True = start, word pieces and end; what pooling over the caption uses.
    end: int64 ``(B,)``: the position whose hidden state becomes the global embedding.
    hidden: hidden states ``{layer: (B, T, W)}``, 1-indexed, before the final normalisation.
    truncated: bool ``(B,)``: the caption was longer than the model's context and was cut.
    segments: embeddings ``(B, S, D)`` of the caption's segments, unit norm, or None.
    segment_mask: bool ``(B, S)``, True = a real segment.
    segment_texts: the segments' words, one tuple for each caption.
    segment_negated: bool ``(B, S)``, True = the segment stands under a negation.
    segmenter: what split the captions, e.g. ``"rules"``; empty when the user gave the segments.
    segment_template: the sentence the segments were encoded in.
    token_texts: the word pieces at each position, one tuple for each caption.
    texts: the captions.
    fingerprint: identifies weights and text rules of the encoder that made them.
    """

    embedding: Tensor
    tokens: Tensor | None = None
    token_mask: Tensor | None = None
    attention_mask: Tensor | None = None
    end: Tensor | None = None
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    truncated: Tensor | None = None
    segments: Tensor | None = None
    segment_mask: Tensor | None = None
    segment_texts: tuple[tuple[str, ...], ...] | None = None
    segment_negated: Tensor | None = None
    segmenter: str = ""
    segment_template: str = "{}"
    token_texts: tuple[tuple[str, ...], ...] | None = None
    texts: tuple[str, ...] | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        rows = _check_embedding("TextFeatures", self.embedding)
        _check_rows("TextFeatures", self, rows)

    def __len__(self) -> int:
        return self.embedding.shape[0]

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> TextFeatures:
        """The chosen rows as features of their own (an int keeps one row)."""
        return _select(self, rows)

    def to(self, device: torch.device | str) -> TextFeatures:
        """The same features with every tensor on ``device``."""
        return _to(self, device)

    def save(self, path: str | PathLike[str]) -> None:
        """Write one safetensors file; ``TextFeatures.load`` reads it back."""
        _save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> TextFeatures:
        """Read what ``save`` wrote. Raises ValueError when the file holds something else."""
        return _load(cls, path)

    @staticmethod
    def cat(parts: Sequence[TextFeatures]) -> TextFeatures:
        """Rows of all parts in order. Ragged positions and segments are padded and masked."""
        return _cat(TextFeatures, parts)


def missing(needs: Needs, images: ImageFeatures, texts: TextFeatures) -> list[str]:
    """Names of the needed things that these features lack, in the order of ``Needs``."""
    absent = []
    if needs.patches and images.patches is None:
        absent.append("image patches")
    if needs.tokens and texts.tokens is None:
        absent.append("text tokens")
    if needs.regions is not None and images.regions is None:
        absent.append("image regions")
    if needs.segments and texts.segments is None:
        absent.append("text segments")
    absent += [f"image layer {layer}" for layer in needs.image_layers if layer not in images.hidden]
    absent += [f"text layer {layer}" for layer in needs.text_layers if layer not in texts.hidden]
    return absent


def _check_embedding(who: str, embedding: Tensor) -> int:
    if not isinstance(embedding, Tensor) or embedding.ndim != 2 or not embedding.is_floating_point():
        shown = tuple(embedding.shape) if isinstance(embedding, Tensor) else type(embedding).__name__
        raise ValueError(f"{who}: embedding must be a floating-point tensor of shape (B, D), got {shown}")
    return embedding.shape[0]


def _check_rows(who: str, features: Any, rows: int) -> None:
    for item in fields(features):
        value = getattr(features, item.name)
        if item.name == "hidden":
            sized = [(f"hidden[{layer}]", len(state)) for layer, state in value.items()]
        elif item.name == "grid" or isinstance(value, str | bool) or value is None:
            continue
        else:
            sized = [(item.name, len(value))]
        for name, length in sized:
            if length != rows:
                raise ValueError(f"{who}: {name} must have one row for each of {rows} embeddings, got {length}")


def _select(features: Features, rows: int | slice | Sequence[int] | Tensor) -> Features:
    if isinstance(rows, int):
        if not -len(features) <= rows < len(features):
            raise IndexError(f"{type(features).__name__}: row {rows} is out of range for {len(features)} rows")
        rows = [rows % len(features)]
    index = torch.arange(len(features))[rows] if isinstance(rows, slice) else torch.as_tensor(rows)
    if index.dtype == torch.bool:
        index = index.nonzero().flatten()
    index = index.to(torch.int64)
    picked = index.tolist()
    changes: dict[str, Any] = {}
    for item in fields(features):
        value = getattr(features, item.name)
        if isinstance(value, Tensor):
            changes[item.name] = value[index.to(value.device)]
        elif item.name == "hidden":
            changes[item.name] = {k: v[index.to(v.device)] for k, v in value.items()}
        elif isinstance(value, tuple) and item.name != "grid":
            changes[item.name] = tuple(value[i] for i in picked)
    return replace(features, **changes)


def _to(features: Features, device: torch.device | str) -> Features:
    changes: dict[str, Any] = {}
    for item in fields(features):
        value = getattr(features, item.name)
        if isinstance(value, Tensor):
            changes[item.name] = value.to(device)
        elif item.name == "hidden":
            changes[item.name] = {k: v.to(device) for k, v in value.items()}
    return replace(features, **changes)


# What padding along dimension 1 needs a mask to tell it from a value.
_PADDED = {
    "patches": "patch_mask",
    "regions": "region_mask",
    "boxes": "region_mask",
    "tokens": "token_mask",
    "segments": "segment_mask",
}


def _cat(cls: type[Features], parts: Sequence[Features]) -> Features:
    who = f"{cls.__name__}.cat"
    if not parts:
        raise ValueError(f"{who}: needs at least one part, got none")
    first = parts[0]
    for name in ("fingerprint", "aligned", "tap", "grid", "region_plan", "segmenter", "segment_template"):
        held = {getattr(part, name, None) for part in parts}
        if len(held) > 1 and not (name == "grid" and None not in held):
            raise ValueError(f"{who}: parts must agree on {name}, got {sorted(map(str, held))}")
    ragged = {
        mask
        for name, mask in _PADDED.items()
        if getattr(first, name, None) is not None
        and len({getattr(part, name).shape[1] for part in parts if getattr(part, name) is not None}) > 1
    }
    changes: dict[str, Any] = {}
    for item in fields(first):
        values = [getattr(part, item.name) for part in parts]
        if item.name == "hidden":
            layers = set(values[0])
            if any(set(value) != layers for value in values):
                raise ValueError(f"{who}: parts must hold hidden states of the same layers")
            changes["hidden"] = {k: _cat_padded([value[k] for value in values]) for k in sorted(layers)}
            continue
        if item.name in ragged:
            source = next(name for name, mask in _PADDED.items() if mask == item.name)
            rows = [getattr(part, source) for part in parts]
            real = [torch.ones_like(row[..., 0], dtype=torch.bool) for row in rows]
            values = [ones if v is None else v for v, ones in zip(values, real, strict=True)]
        if all(value is None for value in values):
            continue
        if any(value is None for value in values):
            raise ValueError(f"{who}: {item.name} is present in some parts and missing in others")
        if isinstance(values[0], Tensor):
            changes[item.name] = _cat_padded(values)
        elif isinstance(values[0], tuple) and item.name != "grid":
            changes[item.name] = tuple(entry for value in values for entry in value)
    if len({getattr(part, "grid", None) for part in parts}) > 1:
        changes["grid"] = None
    return replace(first, **changes)


def _cat_padded(values: Sequence[Tensor]) -> Tensor:
    if values[0].ndim < 2 or len({value.shape[1] for value in values}) == 1:
        return torch.cat(list(values))
    width = max(value.shape[1] for value in values)
    out = values[0].new_zeros((sum(len(value) for value in values), width, *values[0].shape[2:]))
    start = 0
    for value in values:
        out[start : start + len(value), : value.shape[1]] = value
        start += len(value)
    return out


def _save(features: ImageFeatures | TextFeatures, path: str | PathLike[str]) -> None:
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
    target = Path(path)
    unfinished = target.with_name(target.name + ".part")
    # Cloned above: safetensors refuses tensors that share memory. Written aside and renamed, so that a
    # reader never sees half a file and a full disk leaves the old one.
    save_file(tensors, unfinished, metadata={"peaksim": json.dumps(plain)})
    unfinished.replace(target)


def _load(cls: type[Features], path: str | PathLike[str]) -> Features:
    with safe_open(path, framework="pt") as file:
        header = (file.metadata() or {}).get("peaksim")
        if header is None:
            raise ValueError(f"{cls.__name__}.load: {path} was not written by peaksim (no header)")
        plain = json.loads(header)
        if plain.pop("kind") != cls.__name__:
            raise ValueError(f"{cls.__name__}.load: {path} holds other features than {cls.__name__}")
        version = plain.pop("format_version")
        if version > FORMAT_VERSION:
            raise ValueError(
                f"{cls.__name__}.load: {path} has format {version}, this version reads up to {FORMAT_VERSION}"
            )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    hidden = {int(name.split(".")[1]): tensors.pop(name) for name in list(tensors) if name.startswith("hidden.")}
    values = {name: _tuples(value) for name, value in plain.items()}
    return cls(**tensors, **values, hidden=hidden)


def _tuples(value: Any) -> Any:
    """JSON lists back to the tuples they were."""
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value
