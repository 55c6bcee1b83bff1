"""Small random features for tests of scorers, with masked patches, tokens, regions and segments."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.features import ImageFeatures, RegionPlan, TextFeatures

D = 8


def unit(*shape: int) -> torch.Tensor:
    return functional.normalize(torch.randn(*shape, D), dim=-1)


def make_images(n: int = 3, patches: int = 6, regions: int = 5, plan: RegionPlan | None = None) -> ImageFeatures:
    patch_mask, region_mask = torch.ones(n, patches).bool(), torch.ones(n, regions).bool()
    patch_mask[0, -2:] = False
    region_mask[-1, -1] = False
    boxes = torch.arange(n * regions * 2).reshape(n, regions, 2).int()
    return ImageFeatures(
        unit(n),
        patches=unit(n, patches),
        patch_mask=patch_mask,
        grid=(2, 3) if patches == 6 else None,
        aligned=True,
        tap="projected",
        regions=unit(n, regions),
        region_mask=region_mask,
        boxes=torch.cat([boxes, boxes + 7], dim=2),
        region_plan=str(plan or RegionPlan()),
        sizes=torch.tensor([[20, 30]] * n, dtype=torch.int32),
        views=torch.tensor([[0, 0, 30, 20]] * n, dtype=torch.int32),
    )


def make_texts(n: int = 4, tokens: int = 5, segments: int = 3) -> TextFeatures:
    token_mask, segment_mask = torch.ones(n, tokens).bool(), torch.ones(n, segments).bool()
    token_mask[:, 0] = token_mask[:, -1] = False
    token_mask[1, 2:] = False
    segment_mask[1, 1:] = False
    negated = torch.zeros(n, segments).bool()
    negated[2, 0] = True
    negated[3, :] = True
    return TextFeatures(
        unit(n),
        tokens=unit(n, tokens),
        token_mask=token_mask,
        segments=unit(n, segments),
        segment_mask=segment_mask,
        segment_texts=tuple(tuple(f"segment {i}{s}" for s in range(segments) if segment_mask[i, s]) for i in range(n)),
        segment_negated=negated,
        token_texts=tuple(tuple(f"word{i}{t}" for t in range(tokens)) for i in range(n)),
        texts=tuple(f"caption {i}" for i in range(n)),
    )
