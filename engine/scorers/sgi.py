"""Structure-guided inference: every segment of the caption finds its best region of the image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from engine.choices import Backend, Fill, FillName, GridName, RegionMode, check_choice, check_fill, check_flag
from engine.features import ImageFeatures, Needs, RegionPlan, TextFeatures
from engine.heads.window_head import WindowHead
from engine.ops.max_sim import max_sim, max_sim_pairs
from engine.scorers.base import Match, Scorer, caption
from engine.scorers.late import LateQueries
from engine.scorers.window_regions import window_head

Negation = Literal["ignore", "subtract", "keep"]

# Similarities held at once by exclusive assignment: 2^24 float32 numbers are 64 MiB.
ASSIGNMENT_BLOCK = 1 << 24


@dataclass(frozen=True)
class SGI(Scorer):
    """`score(I, T) = 1/|S| · Σ_{s ∈ S(T)} max_{c ∈ C(I)} cos(f(c), g(s))` over segments s and regions c.

    The maximum is taken for each segment on its own and the mean is uniform, after Miranda, Salaberria,
    Agirre and Azkune 2026 (arXiv 2604.11496). The paper does not say how crops and segments are made, whether the
    whole image and the whole caption are among them, nor what a negated segment does: those are options here.

    Attributes:
        grid: name of the crop grid.
        crops: `"rescaled"` (each crop fills the encoder's input), `"native"` (each keeps its scale on a
            filled canvas, so that size words keep their meaning) or `"windows"` (one pass of the encoder for all
            regions; many times as fast, see `RegionPlan`).
        head: what makes the vectors of `"windows"`, and goes with them alone. None: class tokens of the tower's own,
            each of which sees one window, untrained. A file that `peaksim train window_head` wrote, or a `WindowHead`;
            `"scenes"`: the one shipped for the embedded model.
        fill: colour of what a crop does not cover, see `RegionPlan`.
        full_image: the whole image is one of the regions. It adds none to boxes of your own
            (`encode_images(..., regions=...)`), which are taken as they are.
        full_caption: the whole caption is one more segment.
        exclusive: no two segments may take the same region (linear assignment of the largest total; a segment
            left without a region adds 0). One assignment a pair: slower.
        negation: what a segment under a negation does. `"ignore"`: it is left out, since finding it must not
            raise the score; a caption with no other segment is then scored by the caption as a whole.
            `"subtract"`: it counts with a minus sign. `"keep"`: it counts like any other, which is the
            paper's formula as it stands.
        template: the sentence a segment is put into before it is encoded, `{}` standing for the segment.
        backend: of the max-sim op, without effect on exclusive assignment; None chooses by device.

    Raises:
        ValueError: an option that is none of its choices, or a template without `{}`; from its methods an image
            without a region.
        TypeError: an option of another type.
    """

    name: ClassVar[str] = "sgi"
    grid: GridName = "scenes"
    crops: RegionMode = "rescaled"
    head: str | WindowHead | None = None
    fill: Fill = "border"
    full_image: bool = True
    full_caption: bool = False
    exclusive: bool = False
    negation: Negation = "ignore"
    template: str = "{}"
    backend: Backend | None = None

    def __post_init__(self) -> None:
        check_choice(self.name, "grid", self.grid, get_args(GridName))
        check_choice(self.name, "crops", self.crops, get_args(RegionMode))
        if self.head is not None and self.crops != "windows":
            raise ValueError(f"{self.name}: head must go with crops='windows', got crops={self.crops!r}")
        check_fill(self.name, self.fill, get_args(FillName))
        for flag in ("full_image", "full_caption", "exclusive"):
            check_flag(self.name, flag, getattr(self, flag))
        if self.backend is not None:
            check_choice(self.name, "backend", self.backend, get_args(Backend))
        check_choice(self.name, "negation", self.negation, get_args(Negation))
        if not isinstance(self.template, str):
            raise TypeError(f"{self.name}: template must be a string, got {type(self.template).__name__}")
        if self.template.count("{}") != 1:
            raise ValueError(
                f"{self.name}: template must hold {{}} once, where the segment goes, got {self.template!r}"
            )

    def needs(self) -> Needs:
        """Embeddings of the plan's regions and of the caption's segments in the template."""
        head = None if self.head is None else window_head(self.head)
        plan = RegionPlan(
            grid=self.grid, mode=self.crops, fill=self.fill, full_image=self.full_image, head=head
        )
        return Needs(regions=plan, segments=True, segment_template=self.template)

    def check_encoder(self, fingerprint: str) -> None:
        """Raise ValueError when the window head belongs to another encoder."""
        if self.head is not None:
            window_head(self.head).check_belongs(f"{self.name}: features", fingerprint)

    def check(self, images: ImageFeatures, texts: TextFeatures, *, aligned_taps: Sequence[str] = ()) -> None:
        """As every scorer's; ValueError too for an image without a region, since the maximum over none is no score."""
        super().check(images, texts, aligned_taps=aligned_taps)
        assert images.regions is not None  # the check above has seen to it
        mask = images.region_mask
        found = images.regions.new_ones(images.regions.shape[:2]).bool() if mask is None else mask
        empty = (~found.any(dim=1)).nonzero().flatten().tolist()
        if empty:
            name = f" ({images.ids[empty[0]]!r})" if images.ids else ""
            raise ValueError(f"{self.name}: every image needs a region, got none in image {empty[0]}{name}")

    def matrix(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Similarities `(n_images, n_texts)`, float32."""
        self.check(images, texts)
        assert images.regions is not None
        segments, weights = self._segments(texts)
        if self.exclusive:
            return self._exclusive_matrix(images, segments, weights)
        found = max_sim(
            segments,
            images.regions,
            q_mask=weights != 0,
            d_mask=images.region_mask,
            q_weights=weights,
            backend=self.backend,
        )
        assert isinstance(found, Tensor)  # no alignment was asked for
        return found.T

    def pairs(self, images: ImageFeatures, texts: TextFeatures) -> Tensor:
        """Similarities `(n,)` of image i with text i, float32."""
        self.check_pairs(images, texts)
        assert images.regions is not None
        segments, weights = self._segments(texts)
        if not self.exclusive:
            found = max_sim_pairs(
                segments,
                images.regions,
                q_mask=weights != 0,
                d_mask=images.region_mask,
                q_weights=weights,
                backend=self.backend,
            )
            assert isinstance(found, Tensor)  # no alignment was asked for
            return found
        scores = []
        for row in range(len(images)):
            similarity = segments[row].float() @ images.regions[row].float().T
            scores.append(_assigned(similarity, weights[row], _row(images.region_mask, row)))
        return torch.tensor(scores, dtype=torch.float32, device=segments.device)

    def late_queries(self, texts: TextFeatures) -> LateQueries | None:
        """The segments with their weights; None under exclusive assignment, which looks at all regions at once."""
        if self.exclusive:
            return None
        if texts.segments is None:
            raise ValueError(f"{self.name}: needs text segments; encode the texts with scorer={self.name!r}")
        return LateQueries("windows", *self._segments(texts))

    def matches(self, images: ImageFeatures, texts: TextFeatures) -> list[Match]:
        """Every segment with its region; segments that do not count have weight 0."""
        self.check_pairs(images, texts)
        assert images.regions is not None
        segments, weights = self._segments(texts)
        similarity = segments[0].float() @ images.regions[0].float().T  # (S + 1, R)
        mask = _row(images.region_mask, 0)
        if mask is not None:
            similarity = similarity.masked_fill(~mask, -torch.inf)
        chosen = similarity.argmax(dim=1).tolist()
        if self.exclusive and _has_assignment(similarity, weights[0], mask):
            assigned = dict(_assignment(similarity, weights[0], mask))
            chosen = [assigned.get(s, -1) if weights[0, s] != 0 else chosen[s] for s in range(len(chosen))]
        found = []
        for s, words in self._shown(texts, weights[0]):
            region = chosen[s]
            score = float(similarity[s, region]) if region >= 0 else 0.0
            found.append(Match(words, _region_box(images, region), score, float(weights[0, s])))
        return found

    def _segments(self, texts: TextFeatures) -> tuple[Tensor, Tensor]:
        """Segments `(B, S + 1, D)`, the whole caption last, and weights `(B, S + 1)`; 0 = not counted."""
        assert texts.segments is not None
        real = texts.segment_mask
        if real is None:
            real = torch.ones(texts.segments.shape[:2], dtype=torch.bool, device=texts.segments.device)
        negated = texts.segment_negated
        sign = real.float()
        if negated is not None and self.negation == "ignore":
            sign = sign.masked_fill(negated, 0.0)
        elif negated is not None and self.negation == "subtract":
            sign = torch.where(negated & real, -1.0, sign)
        # A caption of which no segment counts is scored as a whole: silence would rank above a low cosine.
        whole = (sign == 0).all(dim=1, keepdim=True) | self.full_caption
        sign = torch.cat([sign, whole.float()], dim=1)
        segments = torch.cat([texts.segments, texts.embedding[:, None].to(texts.segments.dtype)], dim=1)
        return segments, sign / sign.abs().sum(dim=1, keepdim=True)

    def _shown(self, texts: TextFeatures, weights: Tensor) -> Iterator[tuple[int, str]]:
        """Positions and words of one caption's segments that an explanation names."""
        assert texts.segments is not None
        names = texts.segment_texts[0] if texts.segment_texts else ()
        for s in range(texts.segments.shape[1]):
            if texts.segment_mask is not None and not texts.segment_mask[0, s]:
                continue
            words = names[s] if s < len(names) else f"segment {s}"
            under_negation = texts.segment_negated is not None and bool(texts.segment_negated[0, s])
            yield s, f"not: {words}" if under_negation else words
        if weights[-1] != 0:
            yield len(weights) - 1, caption(texts)

    def _exclusive_matrix(self, images: ImageFeatures, segments: Tensor, weights: Tensor) -> Tensor:
        assert images.regions is not None
        n_regions, n_segments = images.regions.shape[1], segments.shape[1]
        out = torch.empty(len(images), len(segments), dtype=torch.float32)
        block = max(1, ASSIGNMENT_BLOCK // max(1, n_regions * n_segments))
        for row in range(len(images)):
            mask = _row(images.region_mask, row)
            for start in range(0, len(segments), block):
                at = slice(start, start + block)
                similarity = (segments[at].float() @ images.regions[row].float().T).cpu()
                out[row, at] = torch.tensor(
                    [_assigned(s, w, mask) for s, w in zip(similarity, weights[at], strict=True)]
                )
        return out.to(segments.device)


def _assignment(similarity: Tensor, weights: Tensor, mask: Tensor | None) -> list[tuple[int, int]]:
    """Counted segments with the region each is given, so that the total similarity is largest."""
    # Imported here: only this option needs scipy, and importing it takes longer than scoring.
    from scipy.optimize import linear_sum_assignment

    counted = (weights != 0).nonzero().flatten().tolist()
    real = list(range(similarity.shape[1])) if mask is None else mask.nonzero().flatten().tolist()
    table = similarity.detach().cpu()[counted][:, real].numpy()
    rows, columns = linear_sum_assignment(table, maximize=True)
    return [(counted[r], real[c]) for r, c in zip(rows, columns, strict=True)]


def _has_assignment(similarity: Tensor, weights: Tensor, mask: Tensor | None) -> bool:
    """Whether all similarities that take part are finite: the largest total of others is no number."""
    counted = similarity[weights != 0]
    return bool((counted if mask is None else counted[:, mask]).isfinite().all())


def _assigned(similarity: Tensor, weights: Tensor, mask: Tensor | None) -> float:
    """Weighted score `Σ_s w_s · sim(s, region of s)` of one pair under exclusive assignment.

    NaN when a similarity that takes part is not finite, as the max-sim op has it.
    """
    if not _has_assignment(similarity, weights, mask):
        return float("nan")
    return sum(float(weights[s] * similarity[s, c]) for s, c in _assignment(similarity, weights, mask))


def _row(mask: Tensor | None, row: int) -> Tensor | None:
    return None if mask is None else mask[row]


def _region_box(images: ImageFeatures, region: int) -> tuple[int, int, int, int]:
    if images.boxes is None or region < 0:
        return 0, 0, 0, 0
    left, top, right, bottom = images.boxes[0, region].tolist()
    return left, top, right, bottom
