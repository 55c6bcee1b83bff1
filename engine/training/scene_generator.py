"""Training of the small generator of scenes on frozen embeddings, and of the judge of what its pictures show.

Both learn from rendered scenes of one or two groups, seen whole and made small. The generator's captions are drawn as
the embedded model's own were, with the same small share of denials; it sees the frozen encoder's embeddings alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.atomic_files import written_whole
from engine.engine import Engine
from engine.features import Needs, TextFeatures
from engine.heads.base import Trainable
from engine.heads.scene_generator import SceneGenerator
from engine.heads.scene_judge import SceneJudge
from engine.scenes.captions import caption_of
from engine.scenes.render import presence_of, render
from engine.scenes.world import ATTRIBUTES, CANVAS, COLORS, SceneSpec, sample_scene
from engine.store import FeatureStore, Manifest
from engine.training.head_data import SHARD_ROWS, Told
from engine.training.heads import HeadTrainConfig

MAX_GROUPS = 2
# That of the embedded model's training.
NEGATED_SHARE = 0.06
FREE_SHARE = 0.1
JUDGE_NOISE = 0.1
GENERATOR_TRAINING = HeadTrainConfig(
    output=Path("runs/scene_generator"),
    steps=1500,
    batch_size=128,
    learning_rate=2e-3,
    warmup_steps=100,
    checkpoint_every=50,
    log_every=25,
    precision="bfloat16",
)
JUDGE_TRAINING = HeadTrainConfig(
    output=Path("runs/scene_judge"),
    steps=300,
    batch_size=128,
    learning_rate=3e-3,
    warmup_steps=50,
    checkpoint_every=100,
    log_every=50,
)
_COLOR_ROWS = tuple(ATTRIBUTES.index(color) for color in COLORS)


@dataclass(frozen=True)
class SmallScenes:
    """Scenes by number, each a pure function of the seed and its number.

    Attributes:
        items: how many.
        seed: of all of them.
        side: of the pictures in pixels; divides the renderer's.

    Raises ValueError for fewer than one item, or another side.
    """

    items: int = 20_000
    seed: int = 401
    side: int = 32

    def __post_init__(self) -> None:
        if self.items < 1 or self.side < 1 or CANVAS % self.side:
            raise ValueError(
                f"SmallScenes: items must be at least 1 and side divide {CANVAS}, got {self.items} and {self.side}"
            )

    def scene(self, item: int) -> tuple[SceneSpec, np.random.Generator]:
        """The scene of this number, and the random numbers that follow it."""
        rng = np.random.default_rng((self.seed, item))
        return sample_scene(rng, split="in_domain", max_groups=MAX_GROUPS), rng

    def picture(self, item: int) -> np.ndarray:
        """Pixels uint8 `(3, side, side)`."""
        return smaller(render(*self.scene(item)), self.side)

    def caption(self, item: int) -> str:
        """A true caption, of words of its own, not those of the picture."""
        spec, _ = self.scene(item)
        return caption_of(spec, np.random.default_rng((self.seed, item, 1)), negated_share=NEGATED_SHARE)

    def colors(self, item: int) -> np.ndarray:
        """float32 `(9,)`: which of `COLORS` are to be seen."""
        return presence_of(self.scene(item)[0])[list(_COLOR_ROWS)]


def smaller(picture: np.ndarray, side: int) -> np.ndarray:
    """A picture `(S, S, 3)`, uint8, as `(3, side, side)`: the mean of each block, rounded."""
    each = picture.shape[0] // side
    blocks = picture.reshape(side, each, side, each, 3).mean(axis=(1, 3))
    return np.ascontiguousarray(np.round(blocks).astype(np.uint8).transpose(2, 0, 1))


def as_floats(pictures: Tensor) -> Tensor:
    """uint8 pixels in [−1, 1]."""
    return pictures.float() / 127.5 - 1


class GeneratorData:
    """Pictures and the frozen embeddings of their captions, by number; pictures are held, embeddings are stored.

    Args:
        engine: whose encoder makes the embeddings.
        scenes: what is drawn.
        folder: below which store and pictures lie, so that a training that goes on finds them.
        told: called with (what is being encoded, rows done, rows in all).
    """

    def __init__(self, engine: Engine, scenes: SmallScenes, folder: Path, *, told: Told | None = None) -> None:
        captions = [scenes.caption(item) for item in range(scenes.items)]
        fingerprint = engine.spec.fingerprint
        source = hashlib.sha256("\n".join([fingerprint, str(scenes), *captions]).encode()).hexdigest()[:16]
        manifest = Manifest("texts", len(captions), fingerprint, source, shard_rows=SHARD_ROWS)
        store = FeatureStore.create(folder / source / "texts", manifest)

        def encode(start: int, stop: int) -> TextFeatures:
            found = engine.encode_texts(captions[start:stop], scorer=Needs())
            return TextFeatures(found.embedding, fingerprint=found.fingerprint)

        store.fill(encode, progress=None if told is None else lambda done, total: told("captions", done, total))
        self.source = source
        self.embeddings: Tensor = store[:].embedding
        self.pictures = torch.from_numpy(_pictures(scenes, folder / source / "pictures.npy"))

    def __len__(self) -> int:
        return len(self.pictures)

    def batch(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """Pictures `(B, 3, S, S)` in [−1, 1] and embeddings `(B, D)`."""
        return as_floats(self.pictures[items]), self.embeddings[items]


def _pictures(scenes: SmallScenes, path: Path) -> np.ndarray:
    """All pictures `(N, 3, side, side)`, uint8, drawn once and kept in a file: that takes a minute."""
    if path.exists():
        # What is damaged is drawn anew.
        with suppress(ValueError), path.open("rb") as file:
            held: np.ndarray = np.lib.format.read_array(file)
            if held.shape == (scenes.items, 3, scenes.side, scenes.side) and held.dtype == np.uint8:
                return held
    drawn = np.stack([scenes.picture(item) for item in range(scenes.items)])
    with written_whole(path) as unfinished, unfinished.open("wb") as file:
        np.save(file, drawn)
    return drawn


class JudgeData:
    """Pictures and what is to be seen in them, drawn when they are asked for."""

    def __init__(self, scenes: SmallScenes) -> None:
        self.scenes = scenes
        self.source = str(scenes)

    def __len__(self) -> int:
        return self.scenes.items

    def batch(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """Pictures `(B, 3, S, S)` in [−1, 1] and colors `(B, 9)`."""
        rows: Sequence[int] = items.tolist()
        pictures = torch.from_numpy(np.stack([self.scenes.picture(row) for row in rows]))
        return as_floats(pictures), torch.from_numpy(np.stack([self.scenes.colors(row) for row in rows]))


def flow_objective(generator: Trainable, pictures: Tensor, embeddings: Tensor) -> Tensor:
    """Mean square of what is missing of the straight line from noise to each picture.

    Times are drawn where they teach most, in the middle (Esser et al. 2024, arXiv 2403.03206).
    """
    assert isinstance(generator, SceneGenerator)
    noise = torch.randn_like(pictures)
    t = torch.randn(len(pictures), device=pictures.device).sigmoid()
    free = torch.rand(len(pictures), 1, device=pictures.device) < FREE_SHARE
    steering = torch.where(free, generator.nothing, embeddings)
    across = t[:, None, None, None]
    velocity = generator((1 - across) * noise + across * pictures, t, steering)
    return functional.mse_loss(velocity, pictures - noise)


def judge_objective(judge: Trainable, pictures: Tensor, colors: Tensor) -> Tensor:
    """Cross-entropy of each color, on pictures with a little noise, as generated ones have."""
    assert isinstance(judge, SceneJudge)
    strength = JUDGE_NOISE * torch.rand(len(pictures), 1, 1, 1, device=pictures.device)
    logits = judge(pictures + strength * torch.randn_like(pictures))
    return functional.binary_cross_entropy_with_logits(logits, colors)


def judge_scenes(config: HeadTrainConfig, side: int) -> SmallScenes:
    """Scenes enough for a judge that sees none of them twice."""
    return replace(SmallScenes(), items=config.steps * config.batch_size, seed=402, side=side)
