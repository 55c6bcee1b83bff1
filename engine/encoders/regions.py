"""Regions of a batch of pictures: which boxes they are, and their embeddings as parts of the features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.crops import crop_grid
from engine.features import ImageFeatures, RegionHead, RegionPlan


def region_boxes(
    images: Sequence[Image.Image], plan: RegionPlan, own: Sequence[np.ndarray] | None
) -> list[np.ndarray]:
    """The boxes `(R, 4)` of each image: the user's own, or those of the plan's grid."""
    if own is not None:
        return list(own)
    grid = replace(crop_grid(plan.grid), include_full=plan.full_image)
    return [grid.boxes(image.height, image.width) for image in images]


def with_regions(part: ImageFeatures, flat: Tensor, boxes: Sequence[np.ndarray], plan: str) -> ImageFeatures:
    """`part` with the embeddings `flat (n, D)` of all boxes, padded to the same number for each image."""
    counts = [len(rectangles) for rectangles in boxes]
    width = max(counts)
    regions = flat.new_zeros(len(boxes), width, flat.shape[1])
    mask = torch.zeros(len(boxes), width, dtype=torch.bool, device=flat.device)
    padded = np.zeros((len(boxes), width, 4), dtype=np.int32)
    for row, vectors in enumerate(flat.split(counts)):
        regions[row, : counts[row]] = vectors
        mask[row, : counts[row]] = True
        padded[row, : counts[row]] = boxes[row]
    places = torch.from_numpy(padded).to(flat.device)
    return replace(part, regions=regions, region_mask=mask, boxes=places, region_plan=plan)


def by_head(head: RegionHead, part: ImageFeatures, boxes: Sequence[np.ndarray], plan: str) -> ImageFeatures:
    """`part` with the embeddings that a head makes of all boxes from the hidden states in it."""
    counts = [len(rectangles) for rectangles in boxes]
    padded = np.zeros((len(boxes), max(counts), 4), dtype=np.int32)
    for row, rectangles in enumerate(boxes):
        padded[row, : counts[row]] = rectangles
    with torch.no_grad():
        found = head.regions(part, torch.from_numpy(padded).to(part.embedding.device))
    flat = torch.cat([rows[:count] for rows, count in zip(found, counts, strict=True)])
    return with_regions(part, flat, boxes, plan)
