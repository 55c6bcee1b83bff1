"""What a scorer may ask for: the parts of the features it reads, and how they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, get_args

from torch import Tensor

from engine.choices import Fill, FillName, GridName, RegionMode, check_choice, check_fill, check_flag

if TYPE_CHECKING:
    from engine.features.types import ImageFeatures


class RegionHead(Protocol):
    """What makes embeddings of regions from the patch states of one pass, in place of class rows of the tower."""

    @property
    def tag(self) -> str:
        """Names it and its weights; regions of equal tags were made alike."""

    @property
    def layers(self) -> tuple[int, ...]:
        """1-indexed image layers it reads."""

    def regions(self, images: ImageFeatures, boxes: Tensor) -> Tensor:
        """Embeddings `(B, R, D)`, unit norm, of pixel boxes `(B, R, 4)` of pictures with `hidden` and `views`.

        Raises ValueError for features of an encoder it does not belong to.
        """


@dataclass(frozen=True)
class RegionPlan:
    """Which regions of an image are encoded, and how.

    Attributes:
        grid: name of a crop grid in `engine.crops`.
        mode: `"rescaled"` (each crop fills the encoder's input), `"native"` (each crop keeps its scale on a
            canvas of the image's size, so that size words keep their meaning) or `"windows"` (one pass for all, see
            `Encoder.encode_windows`).
        fill: colour of what a crop does not cover: `"border"` (median colour of the image's border), `"mean"`
            (the encoder's mean colour) or an RGB tuple of 0..255. Without effect on windows.
        full_image: the whole image is one of the regions (the first). Of the grid's alone: a user's own boxes in
            place of the grid are taken as they are, so whoever wants the whole image gives its box too.
        head: of mode `"windows"` alone: a trained head that makes the regions; None takes class rows of the tower.

    Raises:
        ValueError: an unknown grid, mode or fill, or a head in another mode than `"windows"`.
        TypeError: a `full_image` that is no truth value.
    """

    grid: GridName = "scenes"
    mode: RegionMode = "rescaled"
    fill: Fill = "border"
    full_image: bool = True
    head: RegionHead | None = None

    def __post_init__(self) -> None:
        check_choice("RegionPlan", "grid", self.grid, get_args(GridName))
        check_choice("RegionPlan", "mode", self.mode, get_args(RegionMode))
        check_fill("RegionPlan", self.fill, get_args(FillName))
        check_flag("RegionPlan", "full_image", self.full_image)
        if self.head is not None and self.mode != "windows":
            raise ValueError(f"RegionPlan: head must go with mode 'windows', got it with {self.mode!r}")

    def __str__(self) -> str:
        return f"{self.grid}/{self.mode}/{self._fill}/{'full' if self.full_image else 'parts'}{self._tag}"

    @property
    def of_own_boxes(self) -> str:
        """What `region_plan` says of a user's own boxes that were encoded under this plan: all of it but the grid.

        >>> RegionPlan(mode="native").of_own_boxes
        'own/native/border'
        """
        return f"own/windows{self._tag}" if self.mode == "windows" else f"own/{self.mode}/{self._fill}"

    @property
    def _tag(self) -> str:
        return "" if self.head is None else f"/{self.head.tag}"

    @property
    def _fill(self) -> str:
        return self.fill if isinstance(self.fill, str) else "rgb" + "-".join(map(str, self.fill))


@dataclass(frozen=True)
class Needs:
    """What a scorer must find in the features it is given.

    Attributes:
        patches: patch vectors of the image.
        aligned: the patch vectors must live in the text's space.
        tap: the patch tap to read; None takes the encoder's first aligned one, or its first.
        tokens: token vectors of the text, in the shared space.
        regions: the plan of the regions that must have an embedding each, or None.
        segments: one embedding for each segment of the caption.
        segment_template: the sentence a segment is put into before it is encoded; `{}` stands for the segment.
        image_layers, text_layers: 1-indexed layers whose hidden states are wanted.
    """

    patches: bool = False
    aligned: bool = False
    tap: str | None = None
    tokens: bool = False
    regions: RegionPlan | None = None
    segments: bool = False
    segment_template: str = "{}"
    image_layers: tuple[int, ...] = ()
    text_layers: tuple[int, ...] = ()
