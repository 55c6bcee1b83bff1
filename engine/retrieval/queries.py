"""What is asked: texts, images or features, encoded for a scorer and turned into what scores stored vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TypeAlias, cast

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor

from engine.engine import Engine
from engine.features import ImageFeatures, TextFeatures
from engine.images import ImageSource
from engine.retrieval.recipe import Recipe
from engine.scorers.base import Scorer
from engine.scorers.global_cosine import GlobalCosine
from engine.scorers.late import LateQueries
from engine.scorers.max_sim import MaxSim
from engine.scorers.max_sim_head import MaxSimHeadScorer
from engine.scorers.sgi import SGI

Queries: TypeAlias = "str | Iterable[str] | TextFeatures | ImageFeatures | ImageSource | Sequence[ImageSource]"


@dataclass(frozen=True)
class Asked:
    """Queries of one kind for one scorer.

    Attributes:
        scorer: that scores.
        texts, images: features of the queries; one of the two.
        late: the same as vectors that a scan takes; None where the scorer must see both sides.
        embedding: global embeddings `(B, D)` of the queries, for finding candidates.
    """

    scorer: Scorer
    texts: TextFeatures | None
    images: ImageFeatures | None
    late: LateQueries | None

    def __len__(self) -> int:
        return len(self.embedding)

    @property
    def embedding(self) -> Tensor:
        features = self.texts if self.texts is not None else self.images
        assert features is not None
        return features.embedding


def asked(queries: Queries, scorer: Scorer, recipe: Recipe, engine: Callable[[], Engine]) -> Asked:
    """Queries made ready. A string is a text; a picture is given as a path object, PIL image, array or bytes.

    Raises:
        ValueError: nothing asked, features of another encoder or without what the scorer reads, or pictures for a
            scorer that compares images with texts alone.
        ImageError: a picture cannot be read.
    """
    if isinstance(queries, TextFeatures):
        return _of_texts(_own(queries, recipe), scorer)
    if isinstance(queries, ImageFeatures):
        return _of_images(_own(queries, recipe), scorer, recipe)
    listed = _listed(queries)
    if isinstance(listed, list):
        if not listed:
            raise ValueError("Index: there must be at least one query, got none")
        texts = [isinstance(query, str) for query in listed]
        if any(texts) and not all(texts):
            raise TypeError("Index: queries must be all texts or all pictures, got both")
        if all(texts):
            return _of_texts(engine().encode_texts(listed, scorer=scorer), scorer)
    images = engine().encode_images(cast(ImageSource, listed), scorer=recipe.needs())
    return _of_images(images, scorer, recipe)


def _listed(queries: object) -> object:
    """One string, an array, column or stream of strings or pictures as a list; a single picture as it is.

    Raises TypeError for what is none of them.
    """
    if isinstance(queries, str):
        return [queries]
    if isinstance(queries, np.ndarray) and queries.dtype.kind in "OTUS":
        if queries.ndim > 1:
            raise TypeError(f"Index: queries must be one list, got an array of shape {queries.shape}")
        return queries.reshape(-1).tolist()
    if isinstance(queries, np.ndarray | Tensor | Image.Image | PathLike | bytes | bytearray | memoryview):
        return queries
    if isinstance(queries, pa.Array | pa.ChunkedArray):
        return queries.to_pylist()
    if isinstance(queries, Mapping) or not isinstance(queries, Iterable):
        raise TypeError(
            f"Index: queries must be texts, pictures or features, one or a list of them, got {type(queries).__name__}"
        )
    return list(queries)


def _own(features: TextFeatures | ImageFeatures, recipe: Recipe) -> TextFeatures | ImageFeatures:
    wanted = recipe.manifest.fingerprint
    if features.fingerprint and features.fingerprint != wanted:
        raise ValueError(
            f"Index: queries must come from the encoder {wanted}, got those of {features.fingerprint}; encode them "
            "again"
        )
    if features.embedding.shape[1] != recipe.manifest.dim:
        raise ValueError(
            f"Index: queries must have {recipe.manifest.dim} numbers, got {features.embedding.shape[1]}"
        )
    if len(features) == 0:
        raise ValueError("Index: there must be at least one query, got none")
    bad = (~features.embedding.isfinite().all(dim=1)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"Index: query {bad[0]} must be finite, got NaN or an infinity in its embedding")
    return features.to("cpu")


def _of_texts(texts: TextFeatures | ImageFeatures, scorer: Scorer) -> Asked:
    assert isinstance(texts, TextFeatures)
    texts = texts.to("cpu")
    needs = scorer.needs()
    if needs.segments and texts.segments is not None and texts.segment_template != needs.segment_template:
        raise ValueError(
            f"{scorer.name}: segments must be encoded in the template {needs.segment_template!r}, got "
            f"{texts.segment_template!r}"
        )
    return Asked(scorer, texts, None, scorer.late_queries(texts))


def _of_images(images: TextFeatures | ImageFeatures, scorer: Scorer, recipe: Recipe) -> Asked:
    """Every part of the asking picture finds its best part of a stored one; the mean over the asking parts."""
    assert isinstance(images, ImageFeatures)
    images = images.to("cpu")
    vectors, mask = images.embedding[:, None], None
    kind = "global"
    if isinstance(scorer, SGI) and images.regions is not None:
        kind, vectors, mask = "windows", images.regions, images.region_mask
    elif isinstance(scorer, MaxSim) and images.patches is not None and images.aligned:
        kind, vectors, mask = "patches", images.patches, images.patch_mask
    elif isinstance(scorer, MaxSimHeadScorer):
        head = recipe.head()
        if head is None:
            raise ValueError(f"{scorer.name}: the index keeps no vectors of a head")
        with torch.no_grad():
            kind, vectors = "head", head.encode_images(images)
    elif not isinstance(scorer, GlobalCosine):
        raise ValueError(
            f"{scorer.name}: pictures can be asked with 'global', and with 'sgi', 'max_sim' and 'max_sim_head' where "
            "their features hold what is compared"
        )
    weights = torch.ones(vectors.shape[:2]) if mask is None else mask.float()
    late = LateQueries(kind, vectors, weights / weights.sum(dim=1, keepdim=True))  # type: ignore[arg-type]
    return Asked(scorer, None, images, late)
