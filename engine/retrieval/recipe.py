"""How an index makes the vectors it keeps: what must be encoded, and features as rows of a segment."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor

from engine.choices import check_choice
from engine.engine import Engine
from engine.features import ImageFeatures, Needs, RegionPlan
from engine.heads.base import Head
from engine.heads.max_sim_head import MaxSimHead
from engine.ops.quantize import quantize
from engine.retrieval.manifest import KINDS, Manifest, VectorKind
from engine.retrieval.segment import PackedVectors
from engine.retrieval.segment_writer import RowBlock
from engine.scorers.base import Scorer
from engine.scorers.max_sim import MaxSim
from engine.scorers.max_sim_head import MaxSimHeadScorer
from engine.scorers.registry import get_scorer
from engine.scorers.sgi import SGI

# The scorer that each kind of vectors is for, and what it is by default: windows cost one pass of the encoder.
_DEFAULTS: dict[str, Scorer] = {
    "windows": SGI(crops="windows"), "patches": MaxSim(), "head": MaxSimHeadScorer(maximum="hard"),
}  # fmt: skip


def described(vectors: Sequence[str | Scorer], engine: Engine) -> tuple[VectorKind, ...]:
    """The kinds of vectors to keep, of names or of the scorers they are for.

    Raises:
        ValueError: an unknown name, a scorer that no stored vectors serve, one kind twice, a tower without patches,
            or a head that is no file.
        TypeError: what is neither.
    """
    if isinstance(vectors, str | Scorer):
        raise TypeError(f"Index: vectors must be a list of kinds or scorers, got {type(vectors).__name__}")
    found: dict[str, VectorKind] = {}
    for wanted in vectors:
        if isinstance(wanted, str):
            check_choice("Index", "vectors", wanted, KINDS)
            wanted = _DEFAULTS[wanted]
        kind = _kind_for(wanted, engine)
        if kind.name in found:
            raise ValueError(f"Index: vectors must name each kind once, got {kind.name!r} twice")
        found[kind.name] = kind
    return tuple(found.values())


def _kind_for(scorer: object, engine: Engine) -> VectorKind:
    spec = engine.spec
    if isinstance(scorer, SGI):
        plan = scorer.needs().regions
        assert plan is not None
        return VectorKind("windows", spec.embed_dim, plan=asdict(plan))
    if isinstance(scorer, MaxSim):
        tap = scorer.tap or spec.default_tap
        if tap is None or not spec.taps.get(tap, False):
            raise ValueError(f"Index: patches must be of a tap in the text's space, {spec.name} gives {tap!r}")
        return VectorKind("patches", spec.embed_dim, tap=tap)
    if isinstance(scorer, MaxSimHeadScorer):
        if isinstance(scorer.head, Head):
            raise ValueError("Index: a head must be given by its file, which the index names, got an object")
        head = scorer.module
        assert isinstance(head, MaxSimHead)
        if head.fingerprint and head.fingerprint != spec.fingerprint:
            raise ValueError(
                f"Index: the head must belong to {spec.fingerprint}, got one of {head.fingerprint}; train one for it"
            )
        path = str(Path(scorer.head).resolve()) if scorer.head else ""
        return VectorKind("head", head.config.dim, head=path, digest=_digest(head))
    name = scorer.name if isinstance(scorer, Scorer) else type(scorer).__name__
    raise ValueError(
        f"Index: vectors must be of {', '.join(map(repr, KINDS))} or the scorers sgi, max_sim, max_sim_head, "
        f"got {name!r}"
    )


def check_gives(manifest: Manifest, engine: Engine) -> None:
    """See that an encoder gives what an index wants to keep, by one small picture.

    Raises ValueError where it does not, as an exported model that has no windows or lacks a layer, saying what to do.
    """
    recipe = Recipe(manifest)
    needs, plan = recipe.needs(), recipe.plan
    if plan is not None:
        # One region shows whether there are any.
        needs = replace(needs, regions=replace(plan, grid="none", full_image=True))
    try:
        engine.encode_images(Image.new("RGB", (32, 32)), scorer=needs)
    except ValueError as error:
        way = ""
        if plan is not None and plan.mode == "windows":
            way = "; or keep every crop: vectors=[SGI(crops='native')], for the command --vectors 'sgi?crops=native'"
        kinds = " and ".join(recipe.kinds) or "a global embedding"
        raise ValueError(f"Index: the model must give {kinds}, got: {error}{way}") from error


def _digest(head: Head) -> str:
    """BLAKE2b of the head's weights."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(head.state_dict().items()):
        found.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@dataclass(frozen=True)
class Recipe:
    """What an index keeps of an image.

    Attributes:
        manifest: of the index; its kinds of vectors, dtype and fingerprint are used.
    """

    manifest: Manifest

    @property
    def kinds(self) -> list[str]:
        """Names of the kinds of vectors."""
        return [kind.name for kind in self.manifest.vectors]

    @property
    def plan(self) -> RegionPlan | None:
        """How windows are made; None without windows."""
        kind = self.manifest.kind("windows")
        if kind is None:
            return None
        values: dict[str, Any] = dict(kind.plan)
        fill = values["fill"]
        return RegionPlan(**{**values, "fill": fill if isinstance(fill, str) else tuple(fill)})

    def needs(self) -> Needs:
        """What images must be encoded with."""
        patches = self.manifest.kind("patches")
        head = self.head()
        return Needs(
            patches=patches is not None,
            aligned=patches is not None,
            tap=None if patches is None else patches.tap,
            regions=self.plan,
            image_layers=() if head is None else head.needs().image_layers,
        )

    def scorer(self, scorer: str | Scorer) -> Scorer:
        """A scorer by name, with the options that fit the vectors kept; a `Scorer` object as it is."""
        if isinstance(scorer, Scorer):
            return scorer
        plan, patches, head = self.plan, self.manifest.kind("patches"), self.manifest.kind("head")
        if scorer == SGI.name and plan is not None:
            return SGI(grid=plan.grid, crops=plan.mode, fill=plan.fill, full_image=plan.full_image)
        if scorer == MaxSim.name and patches is not None:
            return MaxSim(tap=patches.tap)
        if scorer == MaxSimHeadScorer.name:
            return MaxSimHeadScorer(head=(head.head if head else "") or None, maximum="hard")
        return get_scorer(scorer)

    def check_scorer(self, scorer: Scorer) -> None:
        """Raise ValueError where a scorer would read other vectors than those kept: other windows, taps or weights."""
        plan, patches, head = self.plan, self.manifest.kind("patches"), self.manifest.kind("head")
        needs = scorer.needs()
        if plan is not None and needs.regions is not None and needs.regions != plan:
            raise ValueError(f"{scorer.name}: the index keeps windows of the plan {plan}, got {needs.regions}")
        if patches is not None and needs.patches and needs.tap not in (None, patches.tap):
            raise ValueError(f"{scorer.name}: the index keeps patches of tap {patches.tap!r}, got {needs.tap!r}")
        if head is not None and isinstance(scorer, MaxSimHeadScorer) and _digest(scorer.module) != head.digest:
            raise ValueError(
                f"{scorer.name}: the index keeps vectors of the head {head.head or 'that was shipped'!r} as it was "
                "then, got other weights"
            )

    def head(self) -> MaxSimHead | None:
        """The head that projects patches. Raises ValueError when its weights are not those of the index."""
        kind = self.manifest.kind("head")
        if kind is None:
            return None
        scorer = MaxSimHeadScorer(head=kind.head or None, maximum="hard")
        self.check_scorer(scorer)
        head = scorer.module
        assert isinstance(head, MaxSimHead)
        return head

    def rows(self, features: ImageFeatures, ids: Sequence[str], metadata: pa.Table | None = None) -> RowBlock:
        """Features as rows of a segment.

        Raises:
            ValueError: features of another encoder, without what is kept, of another plan or tap, an image without
                a window or patch, or numbers that are not finite, naming the image.
        """
        manifest = self.manifest
        if features.fingerprint and features.fingerprint != manifest.fingerprint:
            raise ValueError(
                f"Index: features must come from the encoder {manifest.fingerprint}, got those of "
                f"{features.fingerprint}; encode them again"
            )
        if features.embedding.shape[1] != manifest.dim:
            raise ValueError(f"Index: embeddings must have {manifest.dim} numbers, got {features.embedding.shape[1]}")
        features = features.to("cpu")
        self._check_finite("the global embedding", features.embedding, None, ids)
        vectors = {kind.name: self._packed(kind, features, ids) for kind in manifest.vectors}
        arrays = {"sizes": _known(features.sizes, len(ids), 2), "views": _known(features.views, len(ids), 4)}
        grid = torch.zeros(2, dtype=torch.int32) if features.grid is None else torch.tensor(features.grid).int()
        arrays["grids"] = grid.expand(len(ids), 2)
        if "windows" in vectors:
            assert features.regions is not None
            mask = _mask(features.region_mask, features.regions)
            boxes = torch.zeros(*mask.shape, 4) if features.boxes is None else features.boxes
            arrays["boxes"] = boxes.int()[mask]
        return RowBlock(list(ids), features.embedding, vectors, arrays, metadata)

    def _packed(self, kind: VectorKind, features: ImageFeatures, ids: Sequence[str]) -> PackedVectors:
        values, mask = self._values(kind, features)
        if values.shape[2] != kind.dim:
            raise ValueError(f"Index: {kind.name} must have {kind.dim} numbers, got {values.shape[2]}")
        lengths = mask.sum(dim=1)
        empty = (lengths == 0).nonzero().flatten().tolist()
        if empty:
            raise ValueError(f"Index: every image needs {kind.name}, got none for {ids[empty[0]]!r}")
        self._check_finite(kind.name, values, mask, ids)
        rows = values[mask]
        bounds = torch.zeros(len(ids) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=bounds[1:])
        if self.manifest.store == "bf16":
            return PackedVectors(rows.to(torch.bfloat16), None, bounds)
        codes, scales = quantize(rows.float())
        return PackedVectors(codes, scales, bounds)

    def _values(self, kind: VectorKind, features: ImageFeatures) -> tuple[Tensor, Tensor]:
        """Vectors `(n, P, D)` of a kind with their mask `(n, P)`."""
        if kind.name == "head":
            head = self.head()
            assert head is not None
            absent = [layer for layer in head.config.image_layers if layer not in features.hidden]
            if absent:
                raise ValueError(f"Index: needs image layer {absent[0]} for the head, which the features do not hold")
            with torch.no_grad():
                projected = head.encode_images(features)
            return projected, torch.ones(projected.shape[:2], dtype=torch.bool)
        values = features.regions if kind.name == "windows" else features.patches
        if values is None:
            raise ValueError(
                f"Index: needs {kind.name}, which the features do not hold; encode them with "
                "encode_images(..., scorer=index.needs())"
            )
        if kind.name == "windows":
            plan = self.plan
            assert plan is not None
            if features.region_plan not in ("", str(plan), plan.of_own_boxes):
                raise ValueError(f"Index: windows must follow the plan {plan}, got {features.region_plan}")
            return values, _mask(features.region_mask, values)
        if features.tap not in ("", kind.tap):
            raise ValueError(f"Index: patches must come from tap {kind.tap!r}, got {features.tap!r}")
        return values, _mask(features.patch_mask, values)

    def _check_finite(self, what: str, values: Tensor, mask: Tensor | None, ids: Sequence[str]) -> None:
        bad = ~values.isfinite().all(dim=-1)
        if mask is not None:
            bad &= mask
        rows = bad.reshape(len(ids), -1).any(dim=1).nonzero().flatten().tolist()
        if rows:
            raise ValueError(
                f"Index: {what} of {ids[rows[0]]!r} must be finite, got NaN or an infinity; it was not added, check "
                "the picture and the dtype of the weights"
            )


def _mask(mask: Tensor | None, values: Tensor) -> Tensor:
    return torch.ones(values.shape[:2], dtype=torch.bool) if mask is None else mask


def _known(values: Tensor | None, rows: int, width: int) -> Tensor:
    return torch.zeros(rows, width, dtype=torch.int32) if values is None else values.int()
