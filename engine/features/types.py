"""The two data types every encoder makes and every scorer reads.

Shapes use the names of the field: `B` rows, `D` the shared embedding width, `P` patches, `T` text
positions, `R` regions of an image, `S` segments of a caption, `W` a tower's hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import TypeVar

import torch
from torch import Tensor

from engine.features.checks import check_parts
from engine.features.files import load, save
from engine.features.needs import Needs
from engine.features.rows import Rows, joined, moved, select

Features = TypeVar("Features", "ImageFeatures", "TextFeatures")


@dataclass(frozen=True)
class ImageFeatures:
    """Features of `B` images.

    Attributes:
        embedding: global embeddings `(B, D)`, float32, unit norm.
        patches: patch vectors `(B, P, Dp)` of a floating-point type, unit norm when `aligned`, or None.
        patch_mask: bool `(B, P)`, True = a real patch; None when every patch is real.
        grid: `(rows, columns)` of the patch grid, `rows * columns == P`, or None.
        aligned: True when the patch vectors live in the text's space.
        tap: the feature tap the patches were read from, e.g. `"projected"`.
        hidden: hidden states `{layer: (B, P + prefix, W)}` of the layers that were asked for.
        regions: embeddings `(B, R, D)` of the regions, unit norm, or None.
        region_mask: bool `(B, R)`, True = a real region; None when every region is real.
        boxes: int32 `(B, R, 4)`: half-open pixel rectangles x0, y0, x1, y1 of the upright image.
        region_plan: `str(RegionPlan)` the regions were made by; of a user's own boxes `RegionPlan.of_own_boxes`;
            empty where the user computed the regions, and fit every plan then.
        sizes: int32 `(B, 2)`: height and width of the upright images in pixels, or None.
        views: int32 `(B, 4)`: what the patch grid covers; reaches beyond the image where the encoder pads.
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
        check_parts(self)
        if self.patches is not None and self.grid is not None:
            expected = math.prod(self.grid)
            if self.patches.shape[1] != expected:
                raise ValueError(
                    f"ImageFeatures: patches must hold grid rows * columns = {expected} vectors an image, "
                    f"got {self.patches.shape[1]}"
                )

    def __repr__(self) -> str:
        """Kind, number and shapes on one line: no numbers."""
        return summary(self)

    def __len__(self) -> int:
        return self.embedding.shape[0]

    def __getitem__(self, rows: Rows) -> ImageFeatures:
        """The chosen rows as features of their own (an integer keeps one row).

        Raises:
            IndexError: rows that are not there and for a bool mask of another length than these features.
        """
        return select(self, rows)

    def to(self, device: torch.device | str) -> ImageFeatures:
        """The same features with every tensor on `device`."""
        return moved(self, device)

    def save(self, path: str | PathLike[str]) -> None:
        """Write one safetensors file; `ImageFeatures.load` reads it back."""
        save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> ImageFeatures:
        """Read what `save` wrote. Raises ValueError when the file holds something else or is damaged."""
        return load(cls, path)

    @staticmethod
    def cat(parts: Sequence[ImageFeatures]) -> ImageFeatures:
        """Rows of all parts in order. Parts must come from one encoder and hold the same things.

        Ragged patches and regions are padded and masked; parts of different patch grids have no grid together.

        Raises:
            ValueError: parts that disagree.
            TypeError: parts that are no ImageFeatures.
        """
        return joined(ImageFeatures, parts)


@dataclass(frozen=True)
class TextFeatures:
    """Features of `B` texts.

    Attributes:
        embedding: global embeddings `(B, D)`, float32, unit norm.
        tokens: token vectors `(B, T, D)` in the shared space, unit norm, or None.
        token_mask: bool `(B, T)`, True = a word piece of the caption. Start, end and padding positions are
            False: they carry no word and must not take part in patch–token similarity.
        attention_mask: bool `(B, T)`, True = start, word pieces and end; what pooling over the caption uses.
        end: int64 `(B,)`: the position whose hidden state becomes the global embedding.
        hidden: hidden states `{layer: (B, T, W)}`, 1-indexed, before the final normalisation.
        truncated: bool `(B,)`: the caption was longer than the model's context and was cut.
        segments: embeddings `(B, S, D)` of the caption's segments, unit norm, or None.
        segment_mask: bool `(B, S)`, True = a real segment.
        segment_texts: the segments' words, one tuple for each caption, with a string for every segment that counts.
        segment_negated: bool `(B, S)`, True = the segment stands under a negation.
        segmenter: what split the captions, e.g. `"rules"`; empty when the user gave the segments.
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
        check_parts(self)

    def __repr__(self) -> str:
        """Kind, number and shapes on one line: no numbers."""
        return summary(self)

    def __len__(self) -> int:
        return self.embedding.shape[0]

    def __getitem__(self, rows: Rows) -> TextFeatures:
        """The chosen rows as features of their own (an integer keeps one row).

        Raises:
            IndexError: rows that are not there and for a bool mask of another length than these features.
        """
        return select(self, rows)

    def to(self, device: torch.device | str) -> TextFeatures:
        """The same features with every tensor on `device`."""
        return moved(self, device)

    def save(self, path: str | PathLike[str]) -> None:
        """Write one safetensors file; `TextFeatures.load` reads it back."""
        save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> TextFeatures:
        """Read what `save` wrote. Raises ValueError when the file holds something else or is damaged."""
        return load(cls, path)

    @staticmethod
    def cat(parts: Sequence[TextFeatures]) -> TextFeatures:
        """Rows of all parts in order. Ragged positions and segments are padded and masked.

        Raises:
            ValueError: parts that disagree.
            TypeError: parts that are no TextFeatures.
        """
        return joined(TextFeatures, parts)


def summary(features: ImageFeatures | TextFeatures) -> str:
    """What the features hold, on one line: each tensor's shape, each word's value, tuples by their number."""
    parts = []
    for part in fields(features):
        value = getattr(features, part.name)
        if isinstance(value, Tensor):
            parts.append(f"{part.name} {tuple(value.shape)}")
        elif part.name == "hidden" and value:
            parts.append(f"hidden layers {sorted(value)}")
        elif isinstance(value, tuple) and part.name != "grid":
            parts.append(f"{len(value)} {part.name}")
        elif value not in (None, "", {}, "{}"):
            parts.append(f"{part.name} {value}")
    return f"{type(features).__name__}({len(features)} rows: {', '.join(parts)})"


def missing(needs: Needs, images: ImageFeatures, texts: TextFeatures) -> list[str]:
    """Names of the needed things that these features lack, in the order of `Needs`."""
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
