"""Full fine-tuning: every weight moves in a copy, the loss falls, it goes on to the same weights, and it loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.encoders.scenes import load_scenes, save_scenes
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.engine import Engine
from engine.training.finetune import PixelQuads, WholeEncoder, finetune, objective
from engine.training.head_data import ScenesQuads
from engine.training.heads import HeadRun, HeadTrainConfig
from engine.training.losses import contrastive_loss, quad_loss
from engine.training.scenes import VOCABULARY

TINY = ScenesModelConfig(width=16, heads=2, image_layers=1, text_layers=2, stem_width=8, embed_dim=8)
ITEMS = ScenesQuads(items=6, categories=("color", "size")).draw()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    save_scenes(tmp_path / "start", ScenesModel(TINY), VOCABULARY)
    return tmp_path / "start"


def config(folder: Path, **changes: object) -> HeadTrainConfig:
    base = HeadTrainConfig(folder, steps=6, batch_size=4, warmup_steps=1, checkpoint_every=2, learning_rate=1e-3)
    return replace(base, **changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_every_weight_is_trained_in_a_copy(tmp_path, model):
    start = load_scenes(model)
    before = {key: value.clone() for key, value in start.state_dict().items()}
    encoder = WholeEncoder(start)
    run = HeadRun(encoder, config(tmp_path), objective(config(tmp_path)))
    data = PixelQuads(tuple(ITEMS), start.tokenizer)
    run.advance(*data.batch(torch.arange(4)))
    run.advance(*data.batch(torch.arange(4)))
    still = [key for key, value in encoder.model.state_dict().items() if torch.equal(value, before[key])]
    assert not still
    assert all(torch.equal(value, before[key]) for key, value in start.state_dict().items())
    assert not any(weight.requires_grad for weight in start._model.parameters())


def test_a_stopped_run_goes_on_to_the_same_weights_and_loads(tmp_path, model):
    class Stopped(Exception):
        pass

    def stop(encoder: WholeEncoder) -> dict[str, float]:
        raise Stopped

    whole = finetune(ITEMS, config(tmp_path / "whole"), model=model)
    cut = config(tmp_path / "cut")
    with pytest.raises(Stopped):
        finetune(ITEMS, replace(cut, evaluate_every=3), model=model, evaluate=stop)
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    resumed = finetune(ITEMS, cut, model=model)
    a, b = weights(whole), weights(resumed)
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert any(not torch.equal(a[key], value) for key, value in weights(model).items())
    assert load_scenes(whole).spec.fingerprint != load_scenes(model).spec.fingerprint


def test_the_loss_falls_and_the_evaluation_gets_an_encoder(tmp_path, model):
    start = load_scenes(model)
    settings = config(tmp_path, loss="batch", steps=40, batch_size=12, learning_rate=5e-3)
    run = HeadRun(WholeEncoder(start), settings, objective(settings))
    batch = PixelQuads(tuple(ITEMS), start.tokenizer).batch(torch.arange(12))
    losses = [run.advance(*batch)["loss"] for _ in range(40)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])

    seen: list[tuple[int, ...]] = []

    def evaluate(encoder: WholeEncoder) -> dict[str, float]:
        peaksim = Engine(encoder.encoder())
        seen.append(tuple(peaksim.score(list(ITEMS[0].images()), list(ITEMS[0].captions)).shape))
        return {"figure": 0.5}

    finetune(ITEMS, config(tmp_path / "run", steps=1), model=model, evaluate=evaluate)
    assert seen == [(2, 2)]


def test_losses_are_blocks_of_the_full_matrix(tmp_path, model):
    start = load_scenes(model)
    encoder = WholeEncoder(start).eval()
    pixels, captions = PixelQuads(tuple(ITEMS), start.tokenizer).batch(torch.tensor([5, 0, 7]))
    with torch.no_grad():
        logits = encoder.scale() * encoder(pixels, captions)
        quads = torch.stack([logits[[k, k + 3]][:, [k, k + 3]] for k in range(3)])
        expected = {
            "quads": quad_loss(quads),
            "batch": contrastive_loss(logits[:3, :3]),
            "captions": contrastive_loss(logits[:3]),
            "images": contrastive_loss(logits[:, :3]),
            "pairs": contrastive_loss(logits),
        }
        for loss, value in expected.items():
            found = objective(config(tmp_path, loss=loss))(encoder, pixels, captions)
            torch.testing.assert_close(found, value)
        both = objective(config(tmp_path, batch_weight=0.5))(encoder, pixels, captions)
        torch.testing.assert_close(both, expected["quads"] + 0.5 * expected["batch"])


def test_batches_are_what_the_encoder_sees(model):
    start = load_scenes(model)
    pixels, captions = PixelQuads(tuple(ITEMS), start.tokenizer).batch(torch.tensor([2, 1]))
    item = ITEMS[1]
    encoder = WholeEncoder(start).eval()
    with torch.no_grad():
        scores = encoder(pixels, captions)[[1, 3]][:, [1, 3]]
    expected = Engine(start).score(list(item.images()), list(item.captions))
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
