"""Two processes train to the weights of one, on whichever loss; one writes. And TensorBoard's curves are the log's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.features import ImageFeatures
from engine.heads.base import Head
from engine.heads.registry import HEADS, load_head
from engine.store import FeatureStore, Manifest
from engine.training.heads import train_head
from engine.training.processes import Processes, processes
from tests import process_training
from tests.head_cases import FACTS, make_images, make_texts
from tests.test_training_heads import config, data, head_of, same_weights

__all__ = ["data"]
ROOT = Path(__file__).parent.parent
KEYS = ("head", "loss", "objective")
CASES = [
    dict(zip(KEYS, values, strict=True))
    for values in (
        ("max_sim_head", "quads", "config"),
        ("tfglobal", "pairs", "config"),
        ("linear", "captions", "config"),
        ("linear", "quads", "negatives"),
        ("linear", "quads", "own"),
    )
]


def launch(folder: Path, cases: list[dict[str, str]], *, count: int = 2) -> list[str]:
    """Run the cases in several processes with the environment of `accelerate launch --cpu`; what the first one says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared |= {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    call = [sys.executable, "-m", "tests.process_training", str(folder), json.dumps(cases)]
    running = [
        subprocess.Popen(
            call,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(count)
    ]
    said = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * count, said
    assert said[0][0] == said[1][0]
    return said[0][0].split()


def test_two_processes_train_to_the_weights_of_one(tmp_path):
    for kind, features in (("images", make_images(24)), ("texts", make_texts(24))):
        store = FeatureStore.create(tmp_path / kind, Manifest(kind, len(features), FACTS.fingerprint, shard_rows=8))
        store.fill(lambda start, stop, features=features: features[start:stop])
    cases = [case | {"output": f"two-{row}", "steps": "6"} for row, case in enumerate(CASES)]
    # The last one again: every process finds the checkpoint and has nothing left to do.
    paths = launch(tmp_path, [*cases, cases[-1]])
    assert paths[-1] == paths[-2]
    for row, case in enumerate(CASES):
        alone = process_training.train(tmp_path, case | {"output": f"one-{row}", "steps": "6"})
        # Of the way from the first weights. AdamW takes whole steps along gradients that are rounding alone, such as
        # those of the keys' biases in a transformer; without averaging the distance is near 1.
        start = weights(HEADS[case["head"]].build(FACTS, seed=1))
        one, two = weights(load_head(alone)), weights(load_head(paths[row]))
        assert float((one - two).norm() / (one - start).norm()) < 3e-2
        # Logged and written once; loss and gradient are those of the whole batch.
        logs = [(tmp_path / f"{name}-{row}" / "log.jsonl").read_text().splitlines() for name in ("one", "two")]
        assert len(logs[0]) == len(logs[1]) == 4
        for first, second in zip(logs[0][1:], logs[1][1:], strict=True):
            names = ("gradient",) if case["objective"] == "own" else ("gradient", "loss")
            for name in names:
                assert json.loads(first)[name] == pytest.approx(json.loads(second)[name], rel=1e-2)


def test_two_processes_fine_tune_against_the_whole_batch(tmp_path):
    case = {"head": "finetune", "loss": "pairs", "objective": "config", "steps": "4"}
    (two,) = launch(tmp_path, [case | {"output": "two"}])
    one = process_training.train(tmp_path, case | {"output": "one"})
    logs = [(folder / "log.jsonl").read_text().splitlines()[1:] for folder in (one, Path(two))]
    assert len(logs[0]) == len(logs[1]) == 2
    for first, second in zip(*logs, strict=True):
        for name in ("gradient", "loss", "scale"):
            assert json.loads(first)[name] == pytest.approx(json.loads(second)[name], rel=1e-2)


def weights(head: Head) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in head.parameters()])


def test_a_batch_is_shared_out_evenly():
    assert [list(Processes(rank, 3).share(6)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="a batch must be a multiple of the 4 processes, got 6 rows"):
        Processes(0, 4).share(6)
    alone = processes()
    assert alone == Processes() and alone.is_main and alone.from_main("x") == "x"
    with alone.main_first():
        alone.wait()


@pytest.mark.parametrize(("module", "name"), [("accelerate", "accelerate"), ("torch.utils.tensorboard", "tensorboard")])
def test_what_is_missing_is_named(module, name, monkeypatch, tmp_path, data):
    monkeypatch.setitem(sys.modules, module, None)
    settings = config(tmp_path / "run")
    if name == "accelerate":
        monkeypatch.setenv("WORLD_SIZE", "2")
    else:
        settings = replace(settings, tensorboard=True)
    with pytest.raises(ModuleNotFoundError, match=rf"need {name}, which is not installed; get it by `pip install"):
        train_head(head_of("linear"), data, settings)


@pytest.mark.filterwarnings("default")
def test_curves_are_the_log(tmp_path, data):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Stopped(Exception):
        pass

    def stop(head: object) -> dict[str, float]:
        raise Stopped

    settings = config(tmp_path / "run", tensorboard=True, log_every=2)
    with pytest.raises(Stopped):
        train_head(head_of("linear"), data, replace(settings, evaluate_every=5), evaluate=stop)
    path = train_head(head_of("linear"), data, settings, evaluate=lambda head: {"group": 0.25})
    curves = EventAccumulator(str(tmp_path / "run"))
    curves.Reload()
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()][1:]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10]
    for name in ("loss", "gradient", "rate"):
        found = {event.step: event.value for event in curves.Scalars(name)}
        assert found == pytest.approx({line["step"]: line[name] for line in lines}, rel=1e-5)
    assert [event.step for event in curves.Scalars("group")] == [10]
    # Curves decide nothing.
    plain = train_head(head_of("linear"), data, config(tmp_path / "plain"))
    assert same_weights(load_head(path), load_head(plain))
    assert isinstance(make_images(1), ImageFeatures)
