"""A map in two dimensions of captions, what is affirmed and what is denied, before and after a correction.

Captions of one family share a scene and something that is not in it: the caption, with the other thing, without it, and
two sentences that affirm and deny the other thing alone. t-SNE (van der Maaten and Hinton 2008) places both embeddings
of all captions in one map, so that before and after can be compared; beside the map stand cosines, for a map shows
neighbours and no distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.engine import Engine
from engine.heads.peak_patch import PeakPatch
from engine.metrics import Interval, bootstrap_interval
from engine.scenes.captions import phrase, with_article
from engine.scenes.negation import retrieval_items
from engine.scenes.wordings import WORDINGS

KINDS = ("X", "X and a Y", "X and no Y", "there is Y", "there is no Y")
# Pairs of kinds whose cosines are told.
COMPARED = ((0, 1), (0, 2), (1, 2), (3, 4))


@dataclass(frozen=True)
class CaptionMap:
    """Where captions lie.

    Attributes:
        model: name of the encoder.
        kinds: of each caption, of `KINDS`.
        texts: the captions.
        before, after: places `(n, 2)`, float32, in one map.
        cosines: of `"<kind> – <kind>, before"` or `", after"`, the mean over families with its 95 % interval.
    """

    model: str
    kinds: tuple[str, ...]
    texts: tuple[str, ...]
    before: np.ndarray
    after: np.ndarray
    cosines: dict[str, Interval]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON."""
        return {
            "model": self.model,
            "captions": [
                {"kind": kind, "text": text, "before": before, "after": after}
                for kind, text, before, after in zip(
                    self.kinds, self.texts, self.before.tolist(), self.after.tolist(), strict=True
                )
            ],
            "cosines": {
                name: {"value": found.value, "low": found.low, "high": found.high}
                for name, found in self.cosines.items()
            },
        }


def require_scikit_learn() -> None:
    """Raise ImportError saying how to get scikit-learn when it is absent: better before the work than after it."""
    try:
        import sklearn.manifold  # noqa: F401 (only whether it is there)
    except ImportError as error:
        raise ImportError("caption_map: needs scikit-learn, which is missing; pip install 'peaksim[plots]'") from error


def caption_map(
    engine: Engine, head: PeakPatch, *, families: int = 80, split: str = "in_domain", seed: int = 0
) -> CaptionMap:
    """The map of captions of `families` rendered scenes and what the head's embedding correction makes of them.

    `head`: of this engine's encoder and with an embedding correction, where the engine is. Raises ImportError saying
    how to get scikit-learn when it is absent, ValueError for fewer than ten families, a head of another encoder or one
    without an embedding correction.
    """
    require_scikit_learn()
    if families < 10:
        raise ValueError(f"caption_map: families must be at least 10, got {families}")
    if head.ecn is None:
        raise ValueError("caption_map: the head must have an embedding correction, got one of parts 'scn'")
    texts = [text for family in _families(families, split, seed) for text in family]
    features = engine.encode_texts(texts, scorer=head.needs())
    if head.fingerprint and features.fingerprint != head.fingerprint:
        raise ValueError(
            f"caption_map: the head must belong to {engine.spec.name} ({features.fingerprint}), got one of "
            f"{head.encoder} ({head.fingerprint})"
        )
    with torch.no_grad():
        sides = features.embedding.float().cpu(), head.corrected(features).embedding.float().cpu()
    places = _placed(torch.cat(sides), seed)
    cosines = {}
    for name, side in zip(("before", "after"), sides, strict=True):
        each = side.view(families, len(KINDS), -1)
        for a, b in COMPARED:
            values = (each[:, a] * each[:, b]).sum(-1).double().numpy()
            cosines[f"{KINDS[a]} – {KINDS[b]}, {name}"] = bootstrap_interval(values)
    return CaptionMap(
        engine.spec.name, KINDS * families, tuple(texts), places[: len(texts)], places[len(texts) :], cosines
    )


def _families(count: int, split: str, seed: int) -> list[tuple[str, ...]]:
    (wording,) = WORDINGS["benchmark"]
    found: list[tuple[str, ...]] = []
    for item in retrieval_items(count, seed=seed, split=split):
        first, other = phrase(item.scene.groups[0]), item.absent
        joined = f"{first} and {with_article(other)}", f"{first} and no {other}"
        found.append((first, *joined, wording.affirm(other), wording.deny(other)))
    return found


def _placed(vectors: Tensor, seed: int) -> np.ndarray:
    """Places `(n, 2)` of unit vectors `(n, D)`."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(vectors) - 1) / 4)
    made = TSNE(2, metric="cosine", init="random", perplexity=perplexity, random_state=seed)
    return made.fit_transform(vectors.numpy()).astype(np.float32)


def map_section(found: CaptionMap) -> str:
    """The map's section of the results: mean cosines before and after, and the picture."""
    families = len(found.texts) // len(KINDS)
    lines = [
        "## Captions before and after the correction\n",
        f"{families} scenes X, each with a thing Y that is not in it: t-SNE of the encoder's embeddings and of those "
        "that the shipped head's ECN leaves, in one map. A map shows neighbours and no distances, so beside it stand "
        "mean cosines ± half a 95 % bootstrap interval over scenes.\n",
        "| mean cosine of | before | after |",
        "|---|---|---|",
    ]
    for a, b in COMPARED:
        pair = f"{KINDS[a]} – {KINDS[b]}"
        sides = [found.cosines[f"{pair}, {side}"] for side in ("before", "after")]
        cells = [f"{side.value:.3f} ± {(side.high - side.low) / 2:.3f}" for side in sides]
        lines.append(f"| {pair} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "![captions before and after their correction](docs/caption_map.png)"])
