"""Training of the embedded model: it learns, resumes to the same weights, refuses what does not fit."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.encoders.scenes import WordTokenizer, load_scenes
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.training.scenes import VOCABULARY, Run, ScenesTrainConfig, _batch, train

TINY = ScenesModelConfig(width=16, heads=2, image_layers=1, text_layers=2, stem_width=8, embed_dim=8)


def config(folder: Path, **changes: object) -> ScenesTrainConfig:
    base = ScenesTrainConfig(
        output=folder, steps=6, batch_size=8, warmup_steps=2, checkpoint_every=2, evaluate_every=3, model=TINY
    )
    return replace(base, **changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_equal_seeds_give_equal_weights_and_other_seeds_do_not(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(config(tmp_path / name, seed=seed))
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert any(not torch.equal(a[key], c[key]) for key in a)


def test_a_stopped_run_goes_on_to_the_same_weights_and_log(tmp_path):
    train(config(tmp_path / "whole"))

    class Stopped(Exception):
        pass

    def stop(model: ScenesModel, tokenizer: object) -> dict[str, float]:
        raise Stopped

    # The evaluation at step 3 stops it: the checkpoint is that of step 2.
    with pytest.raises(Stopped):
        train(config(tmp_path / "stopped"), evaluate=stop)
    assert not (tmp_path / "stopped" / "model.safetensors").exists()
    train(config(tmp_path / "stopped"))
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    steps = [json.loads(line)["step"] for line in (tmp_path / "stopped" / "log.jsonl").read_text().splitlines()]
    assert steps == [3, 6]


KILLED = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from engine.encoders.scenes_model import ScenesModelConfig
from engine.training.scenes import ScenesTrainConfig, train

model = ScenesModelConfig(width=16, heads=2, image_layers=1, text_layers=2, stem_width=8, embed_dim=8)
steps = dict(steps=6, batch_size=8, warmup_steps=2, checkpoint_every=int(sys.argv[2]), evaluate_every=3)
train(
    ScenesTrainConfig(output=Path(sys.argv[1]), threads=1, model=model, **steps),
    evaluate=lambda model, tokenizer: os.kill(os.getpid(), signal.SIGKILL),
)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal on this system")
@pytest.mark.parametrize(("checkpoint_every", "kept"), [(2, 2), (5, 0)])
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path, checkpoint_every, kept):
    killed = tmp_path / "killed"
    call = [sys.executable, "-c", KILLED, str(killed), str(checkpoint_every)]
    assert subprocess.run(call, check=False).returncode == -signal.SIGKILL
    assert torch.load(killed / "checkpoint.pt", weights_only=True)["step"] == kept
    assert not (killed / "model.safetensors").exists()
    train(config(killed, threads=1))
    train(config(tmp_path / "whole", threads=1))
    whole, resumed = weights(tmp_path / "whole"), weights(killed)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "log.jsonl"])
def test_a_folder_of_another_run_is_left_as_it_is(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(ValueError, match=rf"{tmp_path} holds {name} and no checkpoint\.pt to go on from; choose"):
        train(config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "precious"


def test_a_finished_model_is_not_trained_over(tmp_path):
    train(config(tmp_path))
    (tmp_path / "checkpoint.pt").unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"holds log\.jsonl, model\.json, model\.safetensors and no checkpoint\.pt"):
        train(config(tmp_path, seed=1))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_line_torn_by_a_crash_is_dropped(tmp_path):
    train(config(tmp_path))
    log = tmp_path / "log.jsonl"
    whole = log.read_text()
    log.write_text(whole + '{"step": 6, "lo')
    train(config(tmp_path))
    assert log.read_text() == whole


def test_the_callers_random_numbers_and_threads_are_left_alone(tmp_path):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    train(config(tmp_path, threads=2 if threads == 1 else 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_a_checkpoint_of_other_settings_is_refused_and_kept(tmp_path):
    train(config(tmp_path))
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(ValueError, match="was written with other settings; choose another output folder"):
        train(config(tmp_path, learning_rate=0.5))
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_figures_of_the_evaluation_are_logged_and_lines_reported(tmp_path):
    lines: list[tuple[str, int, int]] = []
    seen: list[int] = []

    def count_words(model: ScenesModel, tokenizer: object) -> dict[str, float]:
        seen.append(sum(parameter.requires_grad for parameter in model.parameters()))
        return {"figure": 0.25}

    train(config(tmp_path), evaluate=count_words, report=lambda *told: lines.append(told))
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["figure"] for entry in entries] == [0.25, 0.25]
    assert [entry["samples"] for entry in entries] == [24, 48]
    assert seen == [0, 0]
    assert len(lines) == 2 and lines[-1][0].startswith("loss ") and lines[-1][1:] == (6, 6)


def test_the_folder_loads_as_an_encoder(tmp_path):
    encoder = load_scenes(train(config(tmp_path)))
    features = encoder.encode_texts(["a red circle", "two blue stars"])
    assert tuple(features.embedding.shape) == (2, 8)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_the_loss_falls(tmp_path, precision):
    run = Run(config(tmp_path, precision=precision, steps=40, warmup_steps=4), 26)
    batch = _batch(run.config, 0, 1, WordTokenizer(VOCABULARY, TINY.context_length))
    losses = [run.advance(batch)["loss"] for _ in range(40)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_the_learning_rate_warms_up_and_falls_to_zero(tmp_path):
    run = Run(config(tmp_path, steps=100, warmup_steps=10), 26)
    rates = []
    for step in range(100):
        run.step = step
        rates.append(run.rate())
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] < 0.001


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "float16"}, "precision must be one of 'bfloat16', 'float32', got 'float16'"),
        ({"steps": 0}, "steps must be at least 1 and batch_size at least 2, got 0 and 8"),
        ({"batch_size": 1}, "batch_size at least 2, got 6 and 1"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1, got 0"),
        ({"evaluate_every": 0}, "evaluate_every must be at least 1, got 0"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"threads": -3}, "threads must be at least 0, got -3"),
        ({"presence_until": 0.0}, r"presence_until must be in \(0, 1\], got 0.0"),
        ({"presence_until": math.nan}, r"presence_until must be in \(0, 1\], got nan"),
        ({"threads": 100_000}, "ScenesTrainConfig: threads must be at most 1024, got 100000"),
        ({"seed": -1}, r"ScenesTrainConfig: seed must be from 0 to below 2\*\*63, got -1"),
        ({"seed": 1 << 63}, r"seed must be from 0 to below 2\*\*63, got 9223372036854775808"),
        ({"learning_rate": 1e38}, r"learning_rate must be at most 1000, got 1e\+38"),
        ({"block_learning_rate": 1e38}, r"block_learning_rate must be at most 1000, got 1e\+38"),
        ({"clip_norm": 1e39}, r"clip_norm must be at most 1e\+30, got 1e\+39"),
        ({"learning_rate": math.nan}, "ScenesTrainConfig: learning_rate must be finite and above 0, got nan"),
        ({"learning_rate": 0.0}, "ScenesTrainConfig: learning_rate must be finite and above 0, got 0.0"),
        ({"block_learning_rate": math.inf}, "block_learning_rate must be finite and above 0, got inf"),
        ({"clip_norm": -1.0}, "clip_norm must be finite and above 0, got -1.0"),
        ({"max_scale": 0.0}, "max_scale must be finite and above 0, got 0.0"),
        ({"weight_decay": -0.1}, "weight_decay must be finite, at least 0, got -0.1"),
        ({"presence_weight": math.nan}, "presence_weight must be finite, at least 0, got nan"),
        ({"count_weight": math.inf}, "count_weight must be finite, at least 0, got inf"),
        ({"one_group_until": 1.5}, r"one_group_until must be in \[0, 1\], got 1.5"),
        ({"two_groups_until": math.nan}, r"two_groups_until must be in \[0, 1\], got nan"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)


def test_a_vocabulary_too_small_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"vocabulary must hold \d+ words, got 20"):
        train(config(tmp_path, model=replace(TINY, vocabulary=20)))
