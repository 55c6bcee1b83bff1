"""Which part of a query found which part of a stored image."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.features import ImageFeatures
from engine.retrieval.queries import Asked
from engine.retrieval.snapshot import Snapshot
from engine.retrieval.stored import features_of, vectors_of
from engine.scorers.base import Match, whole_image
from engine.scorers.max_sim import patch_box


def alignment(snapshot: Snapshot, asked: Asked, row: int, images: ImageFeatures | None = None) -> tuple[Match, ...]:
    """The matches of one query with one image: `images` of one row, by default of the vectors that codes stand for."""
    if images is None:
        images = features_of(snapshot, [row])
    late = asked.late
    if asked.texts is not None and (late is None or late.kind != "head"):
        return tuple(asked.scorer.matches(images, asked.texts))
    assert late is not None  # pictures ask by vectors
    stored = images.embedding if late.kind == "global" else vectors_of(snapshot.gathered(late.kind, [row]))
    weights = late.weights[0]
    similarity = late.vectors[0].float() @ stored.T  # (L, stored)
    best = similarity.argmax(dim=1).tolist()
    words = asked.texts.token_texts[0] if asked.texts is not None and asked.texts.token_texts else ()
    grid = tuple(snapshot.array("grids", [row])[0].tolist())
    placed = replace(images, patches=None, patch_mask=None, grid=grid if grid[0] else None)
    return tuple(
        Match(
            words[u] if u < len(words) else f"{late.kind} {u}",
            _box(placed, late.kind, best[u]),
            float(similarity[u, best[u]]),
            float(weights[u]),
        )
        for u in (weights != 0).nonzero().flatten().tolist()
    )


def _box(images: ImageFeatures, kind: str, place: int) -> tuple[int, int, int, int]:
    if kind == "windows" and images.boxes is not None:
        left, top, right, bottom = images.boxes[0, place].tolist()
        return left, top, right, bottom
    if kind == "global":
        return whole_image(images)
    views = images.views
    if views is None or not bool(torch.any(views)):
        return 0, 0, 0, 0
    return patch_box(images, place)
