"""Stored vectors as features again: for scorers that must see both sides, and for explanations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.features import ImageFeatures, Needs
from engine.ops.quantize import dequantize
from engine.reference.quantize import QuantizedTokens
from engine.retrieval.recipe import Recipe
from engine.retrieval.segment import PackedVectors
from engine.retrieval.snapshot import Snapshot


def vectors_of(packed: PackedVectors) -> Tensor:
    """The vectors `(total, D)` float32 that are kept, codes turned back."""
    if packed.scales is None:
        return packed.vectors.float()
    return dequantize(QuantizedTokens(packed.vectors, packed.scales))


def features_of(
    snapshot: Snapshot, rows: Sequence[int] | np.ndarray, needs: Needs | None = None
) -> ImageFeatures:
    """What the index keeps of rows as image features: embeddings, windows and patches, with boxes and sizes.

    `needs` leaves out windows or patches that it does not ask for.

    Windows and patches are those that codes stand for. Vectors of a head are no part of features.
    """
    manifest, recipe = snapshot.manifest, Recipe(snapshot.manifest)
    parts: dict[str, object] = {
        "embedding": snapshot.embedding(rows),
        "sizes": snapshot.array("sizes", rows),
        "views": snapshot.array("views", rows),
        "ids": tuple(snapshot.ids(rows)),
        "fingerprint": manifest.fingerprint,
    }
    if manifest.kind("windows") is not None and (needs is None or needs.regions is not None):
        parts["regions"], parts["region_mask"] = _padded(snapshot.gathered("windows", rows))
        boxes = torch.zeros(*parts["region_mask"].shape, 4, dtype=torch.int32)  # type: ignore[attr-defined]
        for row, own in enumerate(snapshot.boxes(rows)):
            boxes[row, : len(own)] = own
        parts["boxes"] = boxes
        parts["region_plan"] = str(recipe.plan)
    patches = manifest.kind("patches")
    if patches is not None and (needs is None or needs.patches):
        parts["patches"], parts["patch_mask"] = _padded(snapshot.gathered("patches", rows))
        grids = {tuple(grid) for grid in snapshot.array("grids", rows).tolist()}
        grid = next(iter(grids)) if len(grids) == 1 else (0, 0)
        fits = grid[0] * grid[1] == parts["patches"].shape[1]  # type: ignore[attr-defined]
        parts |= {"grid": grid if fits and grid[0] else None, "aligned": True, "tap": patches.tap}
    return ImageFeatures(**parts)  # type: ignore[arg-type]


def _padded(packed: PackedVectors) -> tuple[Tensor, Tensor]:
    """Vectors `(n, longest, D)` and their mask."""
    lengths = packed.cu_seqlens.diff()
    mask = torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]
    values = torch.zeros(*mask.shape, packed.vectors.shape[1])
    values[mask] = vectors_of(packed)
    return values, mask
