"""Candidates encoded again from their pictures, for scorers that read what an index does not keep.

A trained transformer over patches and words (`tflocal`) reads hidden states of the image tower, which take a hundred
times the space of an embedding. So the index keeps the column `path` (see `engine.retrieval.sources`) in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.engine import Engine
from engine.features import ImageFeatures, Needs
from engine.images import ImageError, ImageSource
from engine.retrieval.recipe import Recipe
from engine.retrieval.snapshot import Snapshot
from engine.retrieval.sources import PATH, picture_at
from engine.scorers.base import Scorer

# Candidates of a search that must encode them again, unless it is told otherwise: about a second of work.
CANDIDATES = 100
# The embedding of the picture must be the stored one, up to rounding in batches of another size.
SAME_COSINE = 0.995


def must_encode_again(scorer: Scorer, recipe: Recipe) -> bool:
    """Whether a scorer reads of images what the index does not keep as features."""
    needs, kinds = scorer.needs(), recipe.kinds
    of_head = scorer.name == "max_sim_head"
    return (
        (bool(needs.image_layers) and not of_head)
        or (needs.patches and "patches" not in kinds)
        or (needs.regions is not None and "windows" not in kinds)
    )


def pictures(snapshot: Snapshot, rows: Sequence[int] | np.ndarray) -> list[ImageSource | None]:
    """Where the picture of each row can be read: its column `path`, else its id; None where nothing is there."""
    ids = snapshot.ids(rows)
    places: list[str | None] = [None] * len(ids)
    if PATH in snapshot.schema.names:
        places = [None if place is None else str(place) for place in snapshot.metadata_of(rows)[PATH].to_pylist()]
    found: list[ImageSource | None] = []
    for name, place in zip(ids, places, strict=True):
        try:
            found.append(picture_at(name if place is None else place))
        except (OSError, ValueError):
            found.append(None)
    return found


def encoded_again(
    snapshot: Snapshot, rows: np.ndarray, scorer: Scorer, engine: Callable[[], Engine]
) -> ImageFeatures:
    """Features of rows with all that the scorer reads, in their order.

    Raises:
        ValueError: a picture that is not there, cannot be read, or is not the one that was added; naming it.
    """
    ids = snapshot.ids(rows)
    sources = pictures(snapshot, rows)
    what = f"{scorer.name}: reads {_in_words(scorer.needs())} of the images, which the index does not keep"
    for name, source in zip(ids, sources, strict=True):
        if source is None:
            raise ValueError(
                f"{what}, and the picture of {name!r} is not where its column {PATH!r} or its id says; add images "
                f"with a column {PATH!r}, or rank with a scorer of vectors that are kept"
            )
    try:
        found = engine().encode_images(sources, scorer=scorer, ids=ids)  # type: ignore[arg-type]
    except ImageError as error:
        raise ValueError(f"{what}, and a picture cannot be read any more ({error})") from error
    cosine = (found.embedding.cpu() * torch.nn.functional.normalize(snapshot.embedding(rows), dim=1)).sum(dim=1)
    changed = (cosine < SAME_COSINE).nonzero().flatten().tolist()
    if changed:
        raise ValueError(
            f"{what}, and the picture of {ids[changed[0]]!r} is another than the one that was added (cosine "
            f"{float(cosine[changed[0]]):.3f}); update it"
        )
    return found.to("cpu")


def _in_words(needs: Needs) -> str:
    parts = [f"layer {layer}" for layer in needs.image_layers]
    parts += ["patches"] if needs.patches else []
    parts += ["regions"] if needs.regions is not None else []
    return ", ".join(parts)
