"""Scorers that know everything, nothing, or the text alone: what a benchmark's figures must be read against.

All are ``Subject`` objects that never open an image, so that an evaluation can be checked without one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from engine.benchmarks.subject import Subject
from engine.datasets.base import Dataset, ImageRef, RetrievalDataset
from engine.metrics import Floats

NEGATION = re.compile(
    r"\b(no|not|without|neither|nor|none|never|nothing|nobody|nowhere|absent|absence|lacks?|lacking|missing"
    r"|devoid|excludes?|excluding|cannot)\b|n['’]t\b",
    re.IGNORECASE,
)

# What a text is worth to a scorer that sees no image.
BLIND: dict[str, Callable[[str], float]] = {
    "blind: longest text": lambda text: float(len(text)),
    "blind: shortest text": lambda text: -float(len(text)),
    "blind: no negation word": lambda text: 0.0 if NEGATION.search(text) else 1.0,
}


def constant() -> Subject:
    """Gives every pair 0."""

    def score(images: Sequence[ImageRef], texts: Sequence[str], *, pairs: bool) -> Floats:
        return np.zeros(len(images) if pairs else (len(images), len(texts)))

    return Subject("constant", "constant", score, reads_images=False)


def random(seed: int = 0) -> Subject:
    """Gives every (image, text) pair a number of its own in [0, 1), the same whenever it is asked."""

    def score(images: Sequence[ImageRef], texts: Sequence[str], *, pairs: bool) -> Floats:
        left = _hashes(f"{ref.name}|{ref.box}" for ref in images)
        right = _hashes(f"{seed}|{text}" for text in texts)
        mixed = _mix(_mix(left) ^ right) if pairs else _mix(_mix(left)[:, None] ^ right[None, :])
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53

    return Subject("random", f"random {seed}", score, reads_images=False)


def oracle(dataset: Dataset | RetrievalDataset) -> Subject:
    """Gives the right pairs of this dataset 1 and all others 0.

    It answers pair by pair, as every scorer does: where one pair is right in one item and wrong in another,
    or two options are the same text, no scorer can reach 100 %, and neither does it: the benchmark's ceiling.
    """
    rights: dict[ImageRef, set[str]] = {}
    if isinstance(dataset, RetrievalDataset):
        for text, owner in zip(dataset.texts, dataset.owner, strict=True):
            rights.setdefault(dataset.images[owner], set()).add(text)
    else:
        for item in dataset.items:
            for index, ref in enumerate(item.images):
                own = index if item.right is None else item.right
                rights.setdefault(ref, set()).add(item.texts[own])

    def score(images: Sequence[ImageRef], texts: Sequence[str], *, pairs: bool) -> Floats:
        if pairs:
            known = (text in rights[ref] for ref, text in zip(images, texts, strict=True))
            return np.fromiter(known, dtype=np.float64, count=len(images))
        return np.array([[text in rights[ref] for text in texts] for ref in images], dtype=np.float64)

    return Subject("oracle", f"oracle {dataset.fingerprint}", score, reads_images=False)


def blind(name: str) -> Subject:
    """One of the text-only scorers in ``BLIND``. Raises ValueError for another name."""
    if name not in BLIND:
        raise ValueError(f"blind: name must be one of {', '.join(map(repr, BLIND))}, got {name!r}")
    return Subject(name, name, partial(_blind_score, BLIND[name]), reads_images=False)


def baseline(name: str, dataset: Dataset | RetrievalDataset) -> Subject:
    """A baseline by its name in ``BASELINES``; the oracle is that of this dataset. ValueError for another name."""
    if name not in BASELINES:
        raise ValueError(f"baseline: must be one of {', '.join(BASELINES)}, got {name!r}")
    return BASELINES[name](dataset)


def blind_scores(dataset: Dataset) -> dict[str, Floats]:
    """Scores ``(n, k)`` of every text-only scorer on a choice dataset."""
    return {
        name: np.array([[worth(text) for text in item.texts] for item in dataset.items], dtype=np.float64)
        for name, worth in BLIND.items()
    }


BASELINES: Mapping[str, Callable[[Dataset | RetrievalDataset], Subject]] = {
    "oracle": oracle,
    "constant": lambda dataset: constant(),
    "random": lambda dataset: random(),
    "blind_longest": lambda dataset: blind("blind: longest text"),
    "blind_shortest": lambda dataset: blind("blind: shortest text"),
    "blind_no_negation": lambda dataset: blind("blind: no negation word"),
}
"""Scorers that need no picture, by the names the command line gives them."""


def _blind_score(
    worth: Callable[[str], float], images: Sequence[ImageRef], texts: Sequence[str], *, pairs: bool
) -> Floats:
    values = np.array([worth(text) for text in texts], dtype=np.float64)
    return values if pairs else np.broadcast_to(values, (len(images), len(texts)))


def _hashes(texts: object) -> np.ndarray:
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)  # type: ignore[attr-defined]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: every input bit reaches every output bit (Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
