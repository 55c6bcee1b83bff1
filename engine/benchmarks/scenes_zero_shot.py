"""Whether the embedded model knows the words of its world: zero-shot classification of single groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from PIL import Image

from engine.engine import Engine
from engine.metrics import Interval, bootstrap_interval
from engine.scenes.captions import with_article
from engine.scenes.render import render
from engine.scenes.world import COLORS, MATERIALS, SHAPES, SIZES, is_withheld, sample_scene, withheld_materials

COUNTS = ("one", "two", "three", "four")
LABELS: Mapping[str, tuple[str, ...]] = {
    "shape": SHAPES,
    "color": COLORS,
    "size": SIZES,
    "material": MATERIALS,
    "count": COUNTS,
}


def zero_shot_figures(engine: Engine, n: int, *, seed: int, withheld: bool = False) -> dict[str, Interval]:
    """Accuracy of the global cosine on ``n`` scenes of one group, for each attribute, with 95 % intervals.

    The labels are sentences such as "a star", "a red object", "two objects". ``withheld``: all groups wear a look
    (shape, color and material together) that training never shows. Raises ValueError for ``n`` below 1.
    """
    if n < 1:
        raise ValueError(f"zero_shot_figures: n must be at least 1, got {n}")
    rng = np.random.default_rng(seed)
    groups, pictures = [], []
    for _ in range(n):
        spec = sample_scene(rng, split="in_domain", max_groups=1)
        if withheld:
            (group,) = spec.groups
            materials = withheld_materials(group.shape, group.color)
            spec = replace(spec, groups=(replace(group, material=materials[int(rng.integers(len(materials)))]),))
        assert is_withheld(spec.groups[0].shape, spec.groups[0].color, spec.groups[0].material) == withheld
        groups.append(spec.groups[0])
        pictures.append(Image.fromarray(render(spec, rng)))
    images = engine.encode_images(pictures)
    figures = {}
    for attribute, labels in LABELS.items():
        picked = engine.score(images, [_sentence(attribute, label) for label in labels]).argmax(dim=1).tolist()
        truth = [COUNTS[g.count - 1] if attribute == "count" else getattr(g, attribute) for g in groups]
        right = [labels[choice] == wanted for choice, wanted in zip(picked, truth, strict=True)]
        figures[attribute] = bootstrap_interval(np.array(right, dtype=np.float64))
    return figures


def _sentence(attribute: str, label: str) -> str:
    if attribute == "shape":
        return with_article(label)
    if attribute == "count":
        return "an object" if label == "one" else f"{label} objects"
    return with_article(f"{label} object")
