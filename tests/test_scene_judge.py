"""The pictures the small generator learns from, and the judge of what it draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.heads.scene_generator import SceneGeneratorConfig
from engine.heads.scene_judge import SceneJudge, SceneJudgeConfig, load_judge
from engine.results.generator import judged
from engine.scenes.world import COLORS
from engine.training.heads import HeadTrainConfig, train_head
from engine.training.scene_generator import JudgeData, SmallScenes, judge_objective, smaller


def settings(folder: Path, steps: int = 10) -> HeadTrainConfig:
    return HeadTrainConfig(output=folder, steps=steps, batch_size=16, learning_rate=5e-3, warmup_steps=2, log_every=1)


def test_configurations_refuse_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        SceneGeneratorConfig(16, depth=0)
    with pytest.raises(ValueError, match=r"patch must divide side and heads width, got 32 / 5 and 128 / 4"):
        SceneGeneratorConfig(16, patch=5)
    with pytest.raises(ValueError, match=r"widths must be three numbers of at least 1, got \(8, 8\)"):
        SceneJudgeConfig((8, 8))
    with pytest.raises(ValueError, match="items must be at least 1 and side divide 96, got 3 and 31"):
        SmallScenes(3, side=31)


def test_scenes_are_functions_of_their_number_and_colors_tell_what_is_there():
    scenes = SmallScenes(4, seed=9)
    assert np.array_equal(scenes.picture(2), SmallScenes(9, seed=9).picture(2))
    assert scenes.caption(1) == scenes.caption(1) and scenes.picture(0).shape == (3, 32, 32)
    for item in range(4):
        groups = scenes.scene(item)[0].groups
        seen = {COLORS[k] for k in scenes.colors(item).nonzero()[0]}
        assert seen == {group.color for group in groups} and len(groups) <= 2
    picture = np.zeros((96, 96, 3), np.uint8)
    picture[:3, 3:6] = 90
    assert smaller(picture, 32)[:, 0, :3].tolist() == [[0, 90, 0]] * 3


def test_a_judge_learns_and_comes_back(tmp_path):
    torch.manual_seed(0)
    judge, data = SceneJudge(SceneJudgeConfig((8, 16, 16))), JudgeData(SmallScenes(640, seed=3))
    batch = data.batch(torch.arange(64))
    before = float(judge_objective(judge, *batch).detach())
    path = train_head(judge, data, settings(tmp_path, steps=30), objective=judge_objective)
    assert float(judge_objective(judge, *batch).detach()) < 0.8 * before
    seen = load_judge(path).seen(batch[0])
    assert seen.shape == (64, 9) and seen.dtype == torch.bool
    assert float((seen == judge.eval().seen(batch[0])).float().mean()) > 0.99
    with pytest.raises(FileNotFoundError, match="`peaksim train generator` writes it"):
        load_judge(tmp_path / "no.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"load_judge: .* is not a whole safetensors file"):
        load_judge(tmp_path / "bad.safetensors")


def test_a_judge_that_sees_everything_is_sensitive_and_not_specific():
    class Seer(SceneJudge):
        def forward(self, pictures: torch.Tensor) -> torch.Tensor:
            return torch.ones(len(pictures), len(COLORS))

    found = judged(Seer(), 20)
    assert found["sensitivity"]["value"] == 1 and found["specificity"]["value"] == 0


def test_a_judge_sees_pictures_where_it_is():
    moved: list[str] = []

    class Answer(torch.Tensor):
        """On a device whose numbers numpy cannot read until they are brought to the CPU."""

        def cpu(self) -> torch.Tensor:  # type: ignore[override]
            return torch.ones(self.shape, dtype=torch.bool)

    class Elsewhere(SceneJudge):
        def seen(self, pictures: torch.Tensor) -> torch.Tensor:
            moved.append(pictures.device.type)
            return torch.empty(len(pictures), len(COLORS), device="meta").as_subclass(Answer)

    found = judged(Elsewhere().to("meta"), 20)
    assert moved == ["meta"] and found["sensitivity"]["value"] == 1

