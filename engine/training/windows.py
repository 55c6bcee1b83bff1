"""Training of the window head: regression on the embeddings of regions that were cut out at their native scale.

The frozen encoder makes both sides: the states of one pass over each picture, which the head reads, and the target of
each window, which is what the encoder makes of the window alone on a canvas of its picture's background. Where on the
canvas a window lies is drawn anew for each: the head learns what does not depend on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from engine.choices import Fill, check_numbers
from engine.crops import CropGrid, crops
from engine.datasets.captioned import Problem
from engine.encoders.base import view
from engine.engine import Engine
from engine.features import ImageFeatures, Needs
from engine.heads.window_head import Activation, WindowHead, WindowHeadConfig
from engine.images import ImageError, ResizePolicy, decode
from engine.scenes.captions import phrase
from engine.scenes.render import render
from engine.scenes.settings import STANDARD
from engine.scenes.world import SHAPES, is_training_groups, pick, random_group, sample_scene
from engine.store import FeatureStore, Manifest

Told = Callable[[str, int, int], None]
# A picture, its windows and the places of their targets.
Drawn = tuple[Image.Image, np.ndarray, np.ndarray]
# What users ask of crop grids, at all their overlaps: windows of a half down to a seventh of the side.
_GRID = CropGrid(((2, 2), (3, 3), (4, 4), (5, 5), (6, 6)), include_full=False)
_SHARD_ROWS = 256
_WORDS = ("size", "color", "material")
# Passed to the encoder at once.
_BATCH = 256


@dataclass(frozen=True)
class WindowPictures:
    """Rendered scenes of combinations that training may show, with windows on each."""

    pictures: int = 4096
    """Scenes."""
    windows: int = 24
    """Windows on each; half of them of a crop grid, half of any place and size."""
    places: int = 1
    """Places on the canvas that the target of a window is the mean of."""
    data_seed: int = 401
    """Of scenes, windows and places."""

    def __post_init__(self) -> None:
        check_numbers(self, integers={"pictures": 1, "windows": 2, "places": 1, "data_seed": 0})

    def __len__(self) -> int:
        return self.pictures

    @property
    def source(self) -> str:
        """What decides the rows."""
        return f"windows {json.dumps(asdict(self))}"

    def draw(self, row: int) -> Drawn:
        """Picture `row`, its windows `(W, 4)` in pixels, and the free share `(places, W, 2)` before each, in 0..1."""
        rng = np.random.default_rng((self.data_seed, row))
        # Whole scenes and close views as the encoder's own training has them.
        scene = sample_scene(rng, split="train")
        picture = Image.fromarray(render(scene, rng, STANDARD))
        boxes = draw_windows(rng, self.windows, picture.height, picture.width)
        return picture, boxes, rng.random((self.places, self.windows, 2))


@dataclass(frozen=True)
class OwnPictures:
    """Pictures of your own in place of scenes, each with windows on what the encoder sees of it.

    Attributes:
        files: the pictures.
        drawing: how many windows and places, and their seed; its number of scenes is not looked at.
        resize: how the encoder makes its input of a picture (`EncoderSpec.resize`).
    """

    files: tuple[str, ...]
    drawing: WindowPictures
    resize: ResizePolicy

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("OwnPictures: there must be at least one file, got none")

    def __len__(self) -> int:
        return len(self.files)

    @property
    def source(self) -> str:
        """What decides the rows: the files as they are, and the settings of the windows."""
        held = [(file, Path(file).stat().st_size, Path(file).stat().st_mtime_ns) for file in self.files]
        return f"files {hashlib.sha256(json.dumps(held).encode()).hexdigest()[:16]} {self.drawing.source}"

    def draw(self, row: int) -> Drawn:
        """Picture `row` as `WindowPictures.draw` has it. Raises ImageError for a file that cannot be read."""
        rng = np.random.default_rng((self.drawing.data_seed, row))
        picture = decode(self.files[row])
        left, top, right, bottom = view(self.resize, picture.height, picture.width)
        left, top = max(left, 0), max(top, 0)
        right, bottom = min(right, picture.width), min(bottom, picture.height)
        boxes = draw_windows(rng, self.drawing.windows, bottom - top, right - left) + np.array([left, top, left, top])
        return picture, boxes, rng.random((self.drawing.places, self.drawing.windows, 2))


def readable_files(files: Sequence[str]) -> tuple[tuple[str, ...], tuple[Problem, ...]]:
    """The pictures that can be read, and what is wrong with the others; each is opened once.

    Raises ValueError when none is left.
    """
    kept, problems = [], []
    for file in files:
        try:
            decode(file)
        except ImageError as error:
            problems.append(Problem(file, error.reason))
        else:
            kept.append(file)
    if files and not kept:
        raise ValueError(f"train: window_head needs a picture that can be read, got none; the first: {problems[0]}")
    return tuple(kept), tuple(problems)


def draw_windows(rng: np.random.Generator, count: int, height: int, width: int) -> np.ndarray:
    """Windows `(count, 4)` of a picture in pixels: half of a crop grid, half of any place and size; int64."""
    grid = _GRID.boxes(height, width)
    own = grid[rng.choice(len(grid), count // 2, replace=count // 2 > len(grid))]
    sides = np.array([width, height])
    # Sides of a quarter to four fifths of the picture's, not far from square.
    side = rng.uniform(0.25, 0.8, (count - len(own), 1)) * rng.uniform(0.8, 1.25, (count - len(own), 2))
    extent = np.maximum(1, (np.minimum(side, 1) * sides).round().astype(np.int64))
    corner = (rng.random((len(extent), 2)) * (sides - extent + 1)).astype(np.int64)
    return np.concatenate([own, np.concatenate([corner, corner + extent], axis=1)])


class WindowData:
    """Stored features of pictures whose regions are the targets of their windows."""

    def __init__(self, store: FeatureStore[ImageFeatures]) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    @property
    def source(self) -> str:
        """What a run of this data must find again to go on."""
        return self.store.manifest.source

    def batch(self, items: Tensor) -> tuple[ImageFeatures, Tensor]:
        """Features of these pictures with their windows as `boxes`, and the targets `(B, W, D)`."""
        images = self.store[items]
        assert images.regions is not None
        return replace(images, regions=None), images.regions


def window_data(
    engine: Engine,
    layers: Sequence[int],
    pictures: WindowPictures | OwnPictures,
    folder: Path,
    *,
    told: Told | None = None,
) -> WindowData:
    """States of the pictures' image `layers` and targets of their windows, computed once into a store below `folder`.

    The name follows from encoder, layers and pictures, so that seeds share it. `told` is called with (what is being
    encoded, rows done, rows in all). Raises what `FeatureStore` raises.
    """
    source = f"{pictures.source}, image layers {tuple(layers)}"
    name = hashlib.sha256(f"{engine.spec.fingerprint} {source}".encode()).hexdigest()[:16]
    manifest = Manifest("images", len(pictures), engine.spec.fingerprint, source, shard_rows=_SHARD_ROWS)
    store = FeatureStore.create(folder / f"windows-{name}", manifest)

    def encode(start: int, stop: int) -> ImageFeatures:
        drawn = [pictures.draw(row) for row in range(start, stop)]
        found = engine.encode_images([picture for picture, _, _ in drawn], scorer=Needs(image_layers=tuple(layers)))
        targets = [targets_of(engine, picture, boxes, shares) for picture, boxes, shares in drawn]
        boxes = torch.from_numpy(np.stack([boxes for _, boxes, _ in drawn])).to(torch.int32)
        return replace(found, regions=torch.stack(targets), boxes=boxes, ids=None)

    store.fill(encode, progress=None if told is None else lambda done, total: told("windows", done, total))
    return WindowData(store)


def targets_of(
    engine: Engine, picture: Image.Image, boxes: np.ndarray, shares: np.ndarray, *, fill: Fill = "border"
) -> Tensor:
    """What the encoder makes of each window alone, at its native scale: `(W, D)`, unit norm.

    Args:
        boxes: windows `(W, 4)`, inside the picture.
        shares: `(places, W, 2)`, in 0..1: of the room beside (left) and above the window on the canvas.
    """
    room = np.array([picture.width, picture.height]) - (boxes[:, 2:] - boxes[:, :2])
    sheets = []
    for place in shares:
        corners = [(left, top) for left, top in (place * (room + 1)).astype(np.int64).tolist()]
        sheets += crops(picture, boxes, mode="native", fill=fill, place=corners)
    made = engine.encoder.encode_crops(sheets, batch_size=_BATCH)
    return functional.normalize(made.view(len(shares), len(boxes), -1).mean(dim=0), dim=-1)


def begun(engine: Engine, data: WindowData, config: WindowHeadConfig, *, seed: int = 0) -> WindowHead:
    """A head that is not trained yet, begun as `config.start` says.

    A copy has the sizes of what it copies. Raises what `WindowHead.build` and, for other sizes, `take_path` raise.
    """
    given, config = config, config.fitted(engine.spec)
    path = engine.encoder.class_path(config.layers) if config.start == "copy" else None
    if path is None:
        return WindowHead.build(engine.spec, config, seed=seed).to(engine.encoder.device)
    # The configuration refuses an activation that the head does not have.
    known = replace(
        config,
        heads=given.heads or path.heads,
        hidden=given.hidden or path.hidden,
        activation=cast(Activation, path.activation),
    )
    head = WindowHead.build(engine.spec, known, seed=seed).to(engine.encoder.device)
    some = data.store[: min(_SHARD_ROWS, len(data))].hidden[config.layers[0]]
    head.take_path(path, some[:, 0].mean(dim=0).to(engine.encoder.device))
    return head


@dataclass(frozen=True)
class WindowObjective:
    """How a head is held to its targets: `mean(1 - ⟨h, t⟩) + wording · D / 2 · mean_c ⟨h - t, c⟩²`.

    The first term is plain regression. The second weighs what captions can ask: c are unit vectors `(C, D)`, each the
    difference of two phrases that differ in one word (`wordings_of`). An error that is the same in all directions
    counts alike in both terms; one that takes a large thing for a small one counts for more in the second.
    """

    wording: float = 3.0
    """Weight of the second term; 0 leaves it out, as pictures of your own do."""
    wordings: int = 512
    """Pairs of phrases C."""

    def __post_init__(self) -> None:
        check_numbers(self, at_least_zero=("wording",), integers={"wordings": 1})


class WindowLoss:
    """The loss of one batch as `WindowData.batch` gives it.

    Args:
        objective: its terms and weights.
        wordings: `(C, D)` of the second term, where there is one.
    """

    def __init__(self, objective: WindowObjective, wordings: Tensor | None = None) -> None:
        if objective.wording and wordings is None:
            raise ValueError(f"WindowLoss: wording {objective.wording} needs wordings, got None")
        self.objective = objective
        self.wordings = wordings

    def __call__(self, head: WindowHead, images: ImageFeatures, targets: Tensor) -> Tensor:
        assert images.boxes is not None
        found = head.regions(images, images.boxes)  # (B, W, D)
        loss = (1 - (found * targets).sum(dim=2)).mean()
        if not self.objective.wording or self.wordings is None:
            return loss
        wrong = (found - targets) @ self.wordings.T  # (B, W, C)
        return loss + self.objective.wording * targets.shape[2] / 2 * wrong.square().mean()


def wordings_of(engine: Engine, count: int, *, seed: int = 401) -> Tensor:
    """Unit differences `(count, D)` of phrases for things that training may show, alike but for one word."""
    rng = np.random.default_rng(seed)
    pairs: list[str] = []
    while len(pairs) < 2 * count:
        word = ("shape", *_WORDS)[pick(rng, 4)]
        one = random_group(rng, SHAPES[pick(rng, len(SHAPES))], 1)
        other = replace(one, **{word: getattr(random_group(rng, SHAPES[pick(rng, len(SHAPES))], 1), word)})
        said = tuple(each for each in _WORDS if each == word or rng.random() < 0.3)
        if one != other and is_training_groups((other,)):
            pairs += [phrase(one, said), phrase(other, said)]
    embedding = engine.encode_texts(pairs).embedding.view(count, 2, -1)
    return functional.normalize(embedding[:, 0] - embedding[:, 1], dim=-1)
