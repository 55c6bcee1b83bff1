"""PeakPatch on encoders of other libraries: readouts of their towers, and a head trained, stored and served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.encoders.base import Encoder
from engine.encoders.open_clip import load_open_clip
from engine.encoders.transformers import load_transformers
from engine.engine import Engine
from engine.heads.peak_patch import PeakPatch, PeakPatchConfig
from engine.heads.registry import load_head
from engine.heads.scene_generator import SceneGenerator, SceneGeneratorConfig
from engine.results.peak_patch_arms import ENCODER, Budget, ItemSet, ablation_arms, run_arms, sweep_arms
from engine.scorers.peak_patch import PeakPatchScorer
from engine.training.heads import HeadTrainConfig
from engine.training.negation_data import NegationRow
from engine.training.peak_patch import negation_data, train_peak_patch
from engine.training.scene_generator import GeneratorData, SmallScenes, flow_objective
from tests import tiny_open_clip, tiny_transformers

FAMILIES = ("open_clip clip", "open_clip siglip", "open_clip pe", "open_clip coca", "hf clip", "hf siglip")
TEXTS = ("a cat", "a cat, no dog", "no cat", "a cat", "a dog", "no cat", "a dog, no cat")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Encoder]:
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, Encoder] = {}
    for name in FAMILIES:
        source, family = name.split()
        if source == "hf":
            folder = tiny_transformers.write_folder(root / name.replace(" ", "-"), family)
            made[name] = load_transformers(str(folder), device="cpu")
        else:
            folder = tiny_open_clip.write_folder(root / name.replace(" ", "-"), family)
            made[name] = load_open_clip(str(folder), device="cpu")
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_the_readout_of_the_last_layer_is_the_embedding(family, encoders):
    encoder = encoders[family]
    found = encoder.encode_texts(list(TEXTS), layers=(1, encoder.spec.text_layers))
    states = found.hidden[encoder.spec.text_layers][torch.arange(len(TEXTS)), found.end]
    torch.testing.assert_close(encoder.text_readout().embed(states), found.embedding, rtol=0, atol=1e-5)
    head = PeakPatch.build(encoder.spec)
    head.take_readout(encoder.text_readout())
    torch.testing.assert_close(head.readout.embed(states), found.embedding, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["open_clip clip", "hf siglip"])
def test_a_head_is_trained_stopped_stored_and_served(family, encoders, tmp_path):
    engine = Engine(encoders[family])
    rng = np.random.default_rng(0)
    rows = []
    for number in range(8):
        path = tmp_path / f"{number}.png"
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(path)
        rows.append(NegationRow(Path(path), tuple(f"{text} {number}" for text in TEXTS), number % 4, "positive"))

    def new_head() -> PeakPatch:
        head = PeakPatch.build(engine.spec, PeakPatchConfig(hidden=16))
        head.take_readout(engine.encoder.text_readout())
        return head

    def settings(name: str, steps: int) -> HeadTrainConfig:
        return HeadTrainConfig(output=tmp_path / name, steps=steps, batch_size=4, warmup_steps=1, checkpoint_every=5)

    def stop(words: str, step: int, steps: int) -> None:
        raise KeyboardInterrupt

    before = numbers(engine)
    data = negation_data(engine, new_head().needs(), rows, tmp_path / "features")
    first = settings("first", 3)
    whole = load_head(train_peak_patch(new_head(), data, settings("whole", 10), pretraining=first))
    with pytest.raises(KeyboardInterrupt):
        train_peak_patch(new_head(), data, settings("stopped", 10), pretraining=settings("again", 3), report=stop)
    path = train_peak_patch(new_head(), data, settings("stopped", 10), pretraining=settings("again", 3))
    again = load_head(path, fingerprint=engine.spec.fingerprint)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())
    scores = engine.score([rows[0].source()], list(TEXTS), scorer=PeakPatchScorer(str(path)))
    assert scores.shape == (1, len(TEXTS)) and bool(scores.isfinite().all())
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(engine), strict=True))


def numbers(engine: Engine) -> list[torch.Tensor]:
    """A copy of every parameter and buffer of the encoder."""
    modules = [value for value in vars(engine.encoder).values() if isinstance(value, torch.nn.Module)]
    assert modules
    return [tensor.clone() for module in modules for tensor in module.state_dict().values()]


# The tiny models' context is short.
@pytest.mark.filterwarnings("ignore:encode_texts. longer than the model's context:UserWarning")
@pytest.mark.parametrize("family", ["open_clip clip", "hf siglip"])
def test_heads_of_one_layer_and_without_parts_are_trained_and_measured(family, encoders, tmp_path):
    engine = Engine(encoders[family])
    training = HeadTrainConfig(steps=1, batch_size=4, warmup_steps=0)
    budget = Budget(tmp_path / "runs", tmp_path / "features", rows=4, training=training, pretraining_steps=1)
    arms = (ablation_arms(engine.spec)[-1], sweep_arms(engine.spec.text_layers)[0])
    found = run_arms(engine, arms, budget, seeds=1, sets=[ItemSet(items=6)])
    assert [entry["arm"] for entry in found] == [ENCODER, "no pool", "layer 1"]
    assert found[2]["head"]["peak"] == found[2]["head"]["low"] == 1
    assert {entry["fingerprint"] for entry in found} == {engine.spec.fingerprint}
    images, texts = GeneratorData(engine, SmallScenes(4), tmp_path / "pictures").batch(torch.arange(4))
    generator = SceneGenerator(SceneGeneratorConfig(engine.spec.embed_dim, width=32, depth=1, heads=2))
    assert bool(flow_objective(generator, images, texts).isfinite())


def test_a_tower_that_is_read_at_its_end_alone_has_no_readout(encoders):
    encoder = encoders["open_clip clip"]
    tower, encoder._text = encoder._text, type(encoder._text)()
    try:
        with pytest.raises(ValueError, match="this text tower's layers cannot be read in the shared space"):
            encoder.text_readout()
    finally:
        encoder._text = tower
