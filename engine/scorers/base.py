"""The protocol of a scorer: what it needs, how it scores, and how it explains one score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from engine.features import ImageFeatures, Needs, RegionPlan, TextFeatures, missing
from engine.scorers.late import LateQueries


@dataclass(frozen=True)
class Match:
    """One part of a caption and the part of the image it found.

    Attributes:
        text: the words (a token, a segment, or the whole caption).
        box: half-open pixel rectangle x0, y0, x1, y1 of the upright image.
        score: similarity of the two, before any weighting.
        weight: share of this match in the total score (0 = shown, not counted).
    """

    text: str
    box: tuple[int, int, int, int]
    score: float
    weight: float


@dataclass(frozen=True)
class Scorer(ABC):
    """One way of scoring images against texts; its options are the fields of the dataclass."""

    name: ClassVar[str]

    @abstractmethod
    def needs(self) -> Needs:
        """What the features must hold."""

    @abstractmethod
    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Similarities `(n_images, n_texts)`, float32."""

    @abstractmethod
    def pairs(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Similarities `(n,)` of image i with text i, float32."""

    @abstractmethod
    def matches(self, images: ImageFeatures, texts: TextFeatures) -> list[Match]:
        """What found what, for one image and one text (features of one row each)."""

    def late_queries(self, texts: TextFeatures) -> LateQueries | None:
        """The text's side of the score, where it is a sum of maxima that an index can scan; else None, as here."""
        return None

    def check_encoder(self, fingerprint: str) -> None:  # noqa: B027 (most have nothing to check)
        """Raise ValueError when a trained part of the scorer belongs to another encoder; most have none."""

    def check(self, images: ImageFeatures, texts: TextFeatures, *, aligned_taps: Sequence[str] = ()) -> None:
        """Raise ValueError when the features lack what this scorer needs, or come from different encoders.

        `aligned_taps` are the encoder's taps in the text's space, named in the message about a wrong tap.
        """
        needs = self.needs()
        absent = missing(needs, images, texts)
        if absent:
            raise ValueError(
                f"{self.name}: needs {', '.join(absent)}, which the features do not hold; encode them with "
                f"encode_images/encode_texts(..., scorer={self.name!r})"
            )
        if images.fingerprint and texts.fingerprint and images.fingerprint != texts.fingerprint:
            raise ValueError(
                f"{self.name}: images were encoded by {images.fingerprint} and texts by {texts.fingerprint}; "
                "both must come from one encoder"
            )
        if needs.regions is not None:
            _check_plan(self.name, needs.regions, images.region_plan)
        if needs.segments and texts.segment_template != needs.segment_template:
            raise ValueError(
                f"{self.name}: segments must be encoded in the template {needs.segment_template!r}, got "
                f"{texts.segment_template!r}; encode the texts again for this scorer"
            )
        if needs.tap is not None and images.tap != needs.tap:
            raise ValueError(
                f"{self.name}: patches must come from tap {needs.tap!r}, got {images.tap!r}; encode the "
                "images again for this scorer"
            )
        if needs.aligned and not images.aligned:
            would_do = ", ".join(map(repr, aligned_taps)) or "one whose spec says aligned (see `peaksim models`)"
            raise ValueError(
                f"{self.name}: patches must live in the text's space, but those of tap {images.tap!r} do "
                f"not; use tap {would_do}"
            )

    def check_pairs(self, images: ImageFeatures, texts: TextFeatures) -> None:
        """`check`, and as many images as texts. Raises ValueError, as `check` does."""
        self.check(images, texts)
        if len(images) != len(texts):
            raise ValueError(
                f"{self.name}: pairs need as many images as texts, got {len(images)} images and {len(texts)} texts"
            )


def _check_plan(who: str, wanted: RegionPlan, found: str) -> None:
    """Raise ValueError for regions that were made in another way; those without a plan a user computed himself."""
    if found in ("", str(wanted), wanted.of_own_boxes):
        return
    if found.startswith("own/"):
        raise ValueError(
            f"{who}: regions of your own boxes must be encoded as {wanted.of_own_boxes}, got {found}; encode the "
            "images again with encode_images(..., regions=..., scorer=<this one>) or give the scorer the same options"
        )
    raise ValueError(
        f"{who}: regions must follow the plan {wanted}, got {found}; "
        "encode the images again for this scorer or give the scorer the same options"
    )


def check_finite(
    who: str, values: Tensor, texts: TextFeatures, image_names: Sequence[str] | None, start: int = 0
) -> None:
    """Raise ValueError that names image and text of the first score that is no finite number.

    `values` are scores `(rows, n_texts)`, or `(rows,)` of pairs, of the images from row `start` on.
    """
    bad = ~values.isfinite()
    if not bool(bad.any()):
        return
    place = bad.nonzero()[0].tolist()
    row = start + place[0]
    column = row if values.ndim == 1 else place[1]
    name = f" ({image_names[row]})" if image_names and image_names[row] != str(row) else ""
    words = f" ({texts.texts[column]!r})" if texts.texts else ""
    raise ValueError(
        f"{who}: the score of image {row}{name} and text {column}{words} must be finite, got "
        f"{float(values[tuple(place)])}; check the input and the dtype of the weights"
    )


def whole_image(images: ImageFeatures) -> tuple[int, int, int, int]:
    """The rectangle of the one image of these features; empty when its size is not known."""
    if images.sizes is None:
        return 0, 0, 0, 0
    height, width = images.sizes[0].tolist()
    return 0, 0, width, height


def caption(texts: TextFeatures) -> str:
    """The words of the one text of these features, or a name for it."""
    return texts.texts[0] if texts.texts else "caption"
