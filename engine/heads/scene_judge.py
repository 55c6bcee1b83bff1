"""A small classifier of rendered scenes: which colors are to be seen in a picture of 32 pixels a side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.heads.base import Trainable
from engine.heads.picture_files import built_from_header, read_float16, save_float16, with_weights
from engine.scenes.world import COLORS


@dataclass(frozen=True)
class SceneJudgeConfig:
    """Widths of the three convolutions of a `SceneJudge`. Raises ValueError for other than three, or one below 1."""

    widths: tuple[int, ...] = (32, 64, 96)

    def __post_init__(self) -> None:
        if len(self.widths) != 3 or min(self.widths) < 1:
            raise ValueError(f"SceneJudgeConfig: widths must be three numbers of at least 1, got {self.widths}")


class SceneJudge(Trainable):
    """Logits of `COLORS`; it reads pixels alone and belongs to no encoder."""

    name: ClassVar[str] = "scene_judge"
    config: SceneJudgeConfig

    def __init__(self, config: SceneJudgeConfig | None = None) -> None:
        super().__init__()
        self.config, self.fingerprint = config or SceneJudgeConfig(), ""
        first, second, third = self.config.widths
        self.convolutions = nn.ModuleList(
            [nn.Conv2d(3, first, 3, padding=1), nn.Conv2d(first, second, 3, padding=1, stride=2),
             nn.Conv2d(second, third, 3, padding=1), nn.Conv2d(third, third, 3, padding=1)]
        )  # fmt: skip
        self.out = nn.Linear(third, len(COLORS))

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits `(B, 9)` of pictures `(B, 3, S, S)` in [−1, 1]: what is seen anywhere is seen."""
        first, second, third, fourth = self.convolutions
        x = functional.max_pool2d(functional.relu(first(pictures)), 2)
        x = functional.relu(second(x))
        x = functional.relu(third(x))
        x = functional.relu(fourth(x))
        return self.out(x.amax(dim=(2, 3)))

    @torch.no_grad()
    def seen(self, pictures: Tensor) -> Tensor:
        """Bool `(B, 9)`: more likely there than not."""
        return torch.cat([self(part) for part in pictures.split(256)]) > 0

    def save(self, path: str | PathLike[str], *, facts: Mapping[str, object] | None = None) -> Path:
        """Write one safetensors file of float16 weights, which `load_judge` reads."""
        return save_float16(self, path, facts=facts)


def load_judge(path: str | PathLike[str]) -> SceneJudge:
    """The judge of a file in evaluation mode. Raises FileNotFoundError, ValueError for a file of something else."""
    header, state = read_float16("load_judge", path, SceneJudge.name)
    with built_from_header("load_judge", path):
        judge = SceneJudge(SceneJudgeConfig(tuple(header["config"]["widths"])))
    with_weights("load_judge", path, judge, state)
    return judge
