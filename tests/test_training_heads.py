"""Training of heads: it learns, resumes to the same weights, leaves encoders alone, refuses what does not fit."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from engine.encoders.scenes import load_scenes
from engine.engine import Engine
from engine.features import ImageFeatures, TextFeatures
from engine.heads.base import Head, read_head
from engine.heads.linear import LinearAlignmentConfig
from engine.heads.max_sim_head import MaxSimHead, MaxSimHeadConfig
from engine.heads.registry import HEADS, load_head
from engine.scenes.items import controlled_items
from engine.scenes.world import is_held_out, is_training_scene
from engine.store import FeatureStore, Manifest
from engine.training.head_data import CATEGORIES, HeadData, ScenesQuads, epochs, scenes_data
from engine.training.heads import WANTED, BatchLoss, HeadRun, HeadTrainConfig, train_head
from engine.training.losses import contrastive_loss
from tests.head_cases import FACTS, make_images, make_texts

ITEMS = 12
TRAINED = ("linear", "max_sim_head", "tfglobal", "tflocal")


@pytest.fixture
def data(tmp_path: Path) -> HeadData:
    """Random features of 12 quads."""
    return stored(tmp_path / "features", 2, 2)


def stored(folder: Path, images_per_item: int, texts_per_item: int) -> HeadData:
    stores = []
    for kind, features in (
        ("images", make_images(ITEMS * images_per_item)),
        ("texts", make_texts(ITEMS * texts_per_item)),
    ):
        store = FeatureStore.create(folder / kind, Manifest(kind, len(features), FACTS.fingerprint, shard_rows=8))
        store.fill(lambda start, stop, features=features: features[start:stop])
        stores.append(store)
    return HeadData(*stores, images_per_item, texts_per_item)


def config(folder: Path, **changes: object) -> HeadTrainConfig:
    base = HeadTrainConfig(
        output=folder, steps=10, batch_size=4, warmup_steps=2, checkpoint_every=3, log_every=5, learning_rate=2e-3
    )
    return replace(base, **changes)


def head_of(name: str = "max_sim_head", seed: int = 0) -> Head:
    return HEADS[name].build(FACTS, seed=seed)


def same_weights(a: Head, b: Head) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


class Stopped(Exception):
    pass


def stopping_at(step: int) -> Callable[[Head], dict[str, float]]:
    def evaluate(head: Head) -> dict[str, float]:
        raise Stopped

    return evaluate


@pytest.mark.parametrize(("name", "loss"), [*((name, "quads") for name in TRAINED), ("max_sim_head", "pairs")])
def test_a_stopped_run_goes_on_to_the_same_weights_and_log(tmp_path, data, name, loss):
    whole = train_head(head_of(name), data, config(tmp_path / "whole", loss=loss))
    # Stopped by the evaluation of step 5: the checkpoint is that of step 3.
    with pytest.raises(Stopped):
        train_head(head_of(name), data, config(tmp_path / "cut", loss=loss, evaluate_every=5), evaluate=stopping_at(5))
    assert not (tmp_path / "cut" / f"{name}.safetensors").exists()
    resumed = train_head(head_of(name, seed=9), data, config(tmp_path / "cut", loss=loss))
    assert same_weights(load_head(whole), load_head(resumed))
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut" / "log.jsonl").read_text().splitlines()]
    assert steps == [0, 5, 10]
    assert not same_weights(load_head(whole), head_of(name).eval())


@pytest.mark.parametrize("name", TRAINED)
def test_the_trained_head_scores_as_it_did_and_says_how_it_was_trained(tmp_path, data, name):
    head = head_of(name)
    path = train_head(head, data, config(tmp_path / "run"))
    images, texts = make_images(3), make_texts(3)
    assert not head.training
    assert torch.equal(load_head(path).matrix(images, texts), head.matrix(images, texts))
    facts = read_head(path).facts
    assert facts["steps"] == 10 and facts["training"]["batch_size"] == 4


@pytest.mark.parametrize(
    ("name", "loss"), [*((name, "quads") for name in TRAINED), *(("linear", loss) for loss in WANTED)]
)
def test_the_loss_falls(tmp_path, data, name, loss):
    rate = 5e-2 if name == "linear" else 2e-3
    settings = config(tmp_path, loss=loss, batch_size=ITEMS, steps=40, warmup_steps=4, learning_rate=rate)
    run = HeadRun(head_of(name), settings)
    batch = data.batch(torch.arange(ITEMS))
    losses = [run.advance(*batch)["loss"] for _ in range(40)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("name", TRAINED)
def test_autocast_trains_too_and_keeps_float32_weights(tmp_path, data, name):
    run = HeadRun(head_of(name), config(tmp_path, precision="bfloat16"))
    figures = run.advance(*data.batch(torch.arange(4)))
    assert figures["loss"] > 0
    assert all(weight.dtype == torch.float32 for weight in run.head.parameters())


def test_auto_takes_the_loss_that_uses_all_the_data(tmp_path):
    auto = config(tmp_path, loss="auto", batch_weight=0.5)
    found = {shape: auto.fitted(*shape) for shape in ((1, 1), (1, 2), (2, 1), (2, 2))}
    assert [each.loss for each in found.values()] == ["batch", "captions", "images", "quads"]
    assert [each.batch_weight for each in found.values()] == [0, 0, 0, 0.5]
    assert config(tmp_path, loss="pairs").fitted(2, 2).loss == "pairs"
    run = train_head(head_of("linear"), stored(tmp_path / "features", 1, 2), replace(auto, output=tmp_path / "run"))
    assert read_head(run).facts["training"]["loss"] == "captions"


def test_seeds_decide_weights_and_order_alone(tmp_path, data):
    state = torch.get_rng_state()
    a, b, c = (
        train_head(head_of(seed=seed), data, config(tmp_path / name, seed=seed, steps=4))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert same_weights(load_head(a), load_head(b)) and not same_weights(load_head(a), load_head(c))
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_are_set_for_the_run_and_given_back(tmp_path, data, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    train_head(head_of(), data, config(tmp_path, steps=1, threads=3))
    assert asked == [3, torch.get_num_threads()]


def test_figures_and_progress_are_reported(tmp_path, data):
    lines: list[tuple[str, int, int]] = []
    modes: list[bool] = []

    def evaluate(head: Head) -> dict[str, float]:
        modes.append(head.training or torch.is_grad_enabled())
        return {"group": 0.25}

    def told(words: str, step: int, steps: int) -> None:
        lines.append((words, step, steps))

    train_head(head_of(), data, config(tmp_path, evaluate_every=4), evaluate=evaluate, report=told)
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [0, 4, 5, 8, 10]
    assert [entry.get("group") for entry in entries] == [None, 0.25, None, 0.25, 0.25]
    assert entries[-1]["items"] == 40 and modes == [False] * 3
    assert lines[-1][0].startswith("loss ") and lines[-1][0].endswith("group 0.25") and lines[-1][1:] == (10, 10)


def test_an_objective_of_ones_own(tmp_path, data):
    seen: list[int] = []

    def objective(head: Head, images: ImageFeatures, texts: TextFeatures) -> torch.Tensor:
        seen.append(len(images))
        return contrastive_loss(head.matrix(images, texts))

    train_head(head_of(), data, config(tmp_path, steps=2, loss="captions"), objective=objective)
    assert seen == [8, 8]


def test_the_batch_loss_is_added_to_that_of_the_quads(tmp_path, data):
    images, texts = data.batch(torch.arange(4))
    head = head_of().eval()
    losses = [config(tmp_path, batch_weight=weight).objective(head, images, texts) for weight in (0.0, 0.5)]
    alone = config(tmp_path, loss="batch").objective(head, images, texts)
    torch.testing.assert_close(losses[1], losses[0] + 0.5 * alone)


def test_the_loss_of_the_batch_ends_where_it_is_told_to(tmp_path, data):
    seen: list[float] = []

    class Told(MaxSimHead):
        def contrastive(self, images: ImageFeatures, texts: TextFeatures) -> torch.Tensor:
            seen.append(float(self.temperature))
            return super().contrastive(images, texts)

    train_head(Told.build(FACTS), data, config(tmp_path, batch_weight=1.0, batch_until=0.3))
    assert len(seen) == 3


def test_epochs_count_passes_over_the_items(tmp_path, data):
    path = train_head(head_of("linear"), data, config(tmp_path, epochs=4, batch_size=5))
    # 12 items are two batches of five.
    last = (tmp_path / "log.jsonl").read_text().splitlines()[-1]
    assert path.exists() and json.loads(last)["step"] == 8


def test_parts_learn_at_rates_of_their_own(tmp_path, data):
    run = HeadRun(head_of(), config(tmp_path, part_rates=(("text_", 0.1),)))
    run.advance(*data.batch(torch.arange(4)))
    names = {id(weight): name for name, weight in run.head.named_parameters()}
    for group in run.optimizer.param_groups:
        assert group["lr"] == pytest.approx(run.config.learning_rate * (0.5 if group["share"] == 1 else 0.05))
        for weight in group["params"]:
            name = names.pop(id(weight))
            assert (group["share"] == 0.1) == name.startswith("text_")
            assert (group["weight_decay"] == 0) == (weight.ndim < 2)
    assert not names
    with pytest.raises(ValueError, match="part_rates name weights, and none begins with 'nobody'"):
        HeadRun(head_of(), config(tmp_path, part_rates=(("nobody", 0.1),)))
    with pytest.raises(ValueError, match=r"part_rates must be finite and above 0, got 0.0 for 'text_'"):
        HeadRun(head_of(), config(tmp_path, part_rates=(("text_", 0.0),)))


@pytest.mark.parametrize("texts", [6, 12])
def test_the_fused_loss_of_the_max_sim_head_is_that_of_its_scores(texts):
    images, captions = make_images(6), make_texts(texts)
    head = head_of().train()
    found = []
    plain = lambda: contrastive_loss(head.scale() * head.matrix(images, captions))  # noqa: E731
    for loss in (lambda: head.contrastive(images, captions), plain):
        head.zero_grad()
        value = loss()
        value.backward()
        found.append([value.detach(), *(weight.grad.clone() for weight in head.parameters())])
    for fused, plain in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-4)


def test_the_rate_warms_up_and_falls_to_zero(tmp_path):
    run = HeadRun(head_of(), config(tmp_path, steps=100, warmup_steps=10))
    rates = []
    for step in range(100):
        run.step = step
        rates.append(run.rate())
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] < 0.001


def test_what_does_not_fit_is_refused(tmp_path, data):
    train_head(head_of(), data, config(tmp_path / "run"))
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    with pytest.raises(ValueError, match="was written with other settings; choose another output folder"):
        train_head(head_of(), data, config(tmp_path / "run", learning_rate=0.5))
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before
    with pytest.raises(ValueError, match="train: loss 'quads' needs 2 images and 2 texts an item, got 1 and 2"):
        train_head(head_of(), stored(tmp_path / "captions", 1, 2), config(tmp_path / "other"))
    other = replace(data.texts.manifest, source="others")
    texts = FeatureStore.create(tmp_path / "others", other)
    texts.fill(lambda start, stop: data.texts[torch.arange(start, stop)])
    quads = config(tmp_path / "run").objective
    for changed in ({"objective": BatchLoss(quads, {"weight": 2.0})}, {"data": replace(data, texts=texts)}):
        with pytest.raises(ValueError, match="was written with other settings"):
            train_head(head_of(), **{"data": data, "config": config(tmp_path / "run"), **changed})
    with pytest.raises(ValueError, match=r"loss must be one of 'auto', 'quads', 'batch', .*'pairs', got 'x'"):
        config(tmp_path, loss="x")
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        config(tmp_path, batch_size=0)
    with pytest.raises(ValueError, match=r"batch_weight adds .* must be 0 with another one, got 1.0 with 'batch'"):
        config(tmp_path, batch_weight=1.0, loss="batch")
    for name in ("learning_rate", "clip_norm"):
        for value in (0.0, -1.0, math.nan, math.inf):
            with pytest.raises(ValueError, match=f"HeadTrainConfig: {name} must be finite and above 0, got {value}"):
                config(tmp_path, **{name: value})
    for name in ("weight_decay", "batch_weight"):
        with pytest.raises(ValueError, match=f"HeadTrainConfig: {name} must be finite, at least 0, got -0.1"):
            config(tmp_path, **{name: -0.1})
    for kind in (MaxSimHeadConfig, LinearAlignmentConfig):
        with pytest.raises(ValueError, match=f"{kind.__name__}: initial_scale must be finite and above 0, got 0"):
            kind(initial_scale=0.0)
    with pytest.raises(ValueError, match="a batch of 13 needs as many items, got 12"):
        train_head(head_of(), data, config(tmp_path / "large", batch_size=13))


def test_a_run_that_begins_again_writes_its_own_settings(tmp_path, data):
    path = train_head(head_of(), data, config(tmp_path, steps=4))
    (tmp_path / "checkpoint.pt").unlink()
    written = path.read_bytes()
    with pytest.raises(ValueError, match=r"holds max_sim_head.safetensors and no checkpoint.pt to go on from; choose"):
        train_head(head_of(), data, config(tmp_path, steps=6))
    assert path.read_bytes() == written
    path.unlink()
    train_head(head_of(), data, config(tmp_path, steps=6))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert json.loads(lines[0]["settings"])["steps"] == 6
    assert [line["step"] for line in lines].count(0) == 1 and lines[-1]["step"] == 6


def test_damaged_files_of_a_run_are_named(tmp_path, data):
    train_head(head_of(), data, config(tmp_path, steps=4))
    checkpoint, head = tmp_path / "checkpoint.pt", tmp_path / "max_sim_head.safetensors"
    whole, written = checkpoint.read_bytes(), head.read_bytes()
    # Weights that torch would read without a word.
    spoiled = whole[: len(whole) // 2] + bytes(64) + whole[len(whole) // 2 + 64 :]
    assert spoiled != whole
    torch_reads = {**torch.load(checkpoint, weights_only=True), "step": 99}
    for broken in (spoiled, torch_reads):
        if isinstance(broken, bytes):
            checkpoint.write_bytes(broken)
        else:
            torch.save(broken, checkpoint)
        with pytest.raises(ValueError, match=r"checkpoint.pt is damaged \(.{1,200}\); remove it, or choose another"):
            train_head(head_of(), data, config(tmp_path, steps=4))
        assert head.read_bytes() == written
    checkpoint.write_bytes(whole)
    log = tmp_path / "log.jsonl"
    log.write_text("x\n" + log.read_text())
    with pytest.raises(ValueError, match=r"train max_sim_head: \S+log.jsonl is damaged \(.*\); remove it, or choose"):
        train_head(head_of(), data, config(tmp_path, steps=4))
    (tmp_path / "checkpoint.pt").write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match=r"train max_sim_head: \S+checkpoint.pt is damaged \("):
        train_head(head_of(), data, config(tmp_path, steps=4))


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path, data):
    run = HeadRun(head_of(), config(tmp_path), lambda head, images, texts: head.log_scale * float("inf"))
    with pytest.raises(FloatingPointError, match="gradient is not finite at step 0; lower the learning rate"):
        run.advance(*data.batch(torch.arange(4)))


def test_batches_hold_pairs_first_then_hard_negatives(tmp_path, data):
    images, texts = data.batch(torch.tensor([3, 1]))
    assert texts.texts == ("caption 6", "caption 2", "caption 7", "caption 3")
    torch.testing.assert_close(images.embedding, make_images(24).embedding[[6, 2, 7, 3]], atol=1e-3, rtol=1e-3)
    uneven = stored(tmp_path / "uneven", 1, 2)
    images, texts = uneven.batch(torch.tensor([3, 1]))
    assert len(images) == 2 and texts.texts == ("caption 6", "caption 2", "caption 7", "caption 3")
    with pytest.raises(ValueError, match="as many items must have images as texts, got 12 and 24"):
        HeadData(uneven.images, uneven.texts, 1, 1)
    with pytest.raises(ValueError, match="texts must come 1 or 2 an item, got 24 rows, 3 an item"):
        HeadData(uneven.images, uneven.texts, 1, 3)


def test_epochs_show_every_item_once_and_can_be_entered_anywhere():
    first = list(itertools.islice(epochs(10, 3, seed=1), 7))
    assert len(torch.cat(first[:3]).unique()) == 9 and not torch.equal(first[0], first[3])
    for start in range(7):
        rest = list(itertools.islice(epochs(10, 3, seed=1, start=start), 7 - start))
        assert all(torch.equal(a, b) for a, b in zip(rest, first[start:], strict=True))


def test_scenes_quads_hold_training_combinations_alone():
    quads = ScenesQuads(items=150, described_share=0.5)
    items = quads.draw()
    assert len(items) == 600 and items == quads.draw() and items != replace(quads, seed=5).draw()
    plain = replace(quads, described_share=0.0).draw()
    assert plain == [item for c in CATEGORIES for item in controlled_items(c, 150, seed=101, split="in_domain")]
    longer = [len(item.captions[0]) > len(other.captions[0]) for item, other in zip(items, plain, strict=True)]
    assert 0.3 < sum(longer) / 600 < 0.55
    assert all(a.scenes == b.scenes and a.render_seed == b.render_seed for a, b in zip(items, plain, strict=True))
    with pytest.raises(ValueError, match="described_share must be from 0 to 1, got 2"):
        ScenesQuads(described_share=2)
    scenes = [scene for item in items for scene in item.scenes]
    assert all(is_training_scene(scene) and not is_held_out(scene) for scene in scenes)
    # That the check can tell: the items of the test are none of these.
    tested = [scene for item in controlled_items("color", 150, seed=2026) for scene in item.scenes]
    assert not any(is_training_scene(scene) for scene in tested)


def test_scenes_features_are_stored_once_and_the_encoder_stays_as_it_was(tmp_path):
    peaksim = Engine(load_scenes())
    before = {key: value.clone() for key, value in peaksim.encoder._model.state_dict().items()}
    head = HEADS["max_sim_head"].build(peaksim.spec)
    quads = ScenesQuads(items=4, categories=("color", "size"), described_share=0.5)
    told: list[tuple[str, int, int]] = []
    data = scenes_data(peaksim, head.needs(), quads, tmp_path / "features", told=lambda *done: told.append(done))
    assert len(data) == 8 and told == [("images", 16, 16), ("texts", 16, 16)]
    again = scenes_data(peaksim, head.needs(), quads, tmp_path / "features", told=lambda *done: told.append(done))
    assert len(told) == 2 and again.images.folder == data.images.folder
    other = scenes_data(peaksim, head.needs(), replace(quads, seed=7), tmp_path / "features")
    assert other.images.folder != data.images.folder
    # Other captions of the same pictures: these are not encoded again.
    terse = scenes_data(peaksim, head.needs(), replace(quads, described_share=0.0), tmp_path / "features")
    assert terse.images.folder == data.images.folder and terse.texts.folder != data.texts.folder
    (item,) = quads.draw()[5:6]
    expected = peaksim.encode_texts(item.captions, scorer=head.needs())
    found = data.texts[[10, 11]]
    assert found.texts == item.captions
    length = found.hidden[8].shape[1]
    similarity = functional.cosine_similarity(found.hidden[8], expected.hidden[8][:, :length], dim=-1)
    assert bool((similarity > 0.999).all())
    path = train_head(head, data, config(tmp_path / "run", steps=3))
    assert load_head(path, fingerprint=peaksim.spec.fingerprint).encoder == "scenes"
    after = peaksim.encoder._model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not any(weight.requires_grad or weight.grad is not None for weight in peaksim.encoder._model.parameters())
