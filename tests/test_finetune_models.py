"""Fine-tuning of models of any family on captioned pictures: learns, goes on to the same weights, saves and loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.datasets.captioned import CaptionedImages
from engine.datasets.coco import read_coco
from engine.datasets.trohn import read_trohn
from engine.encoders.registry import load_encoder
from engine.engine import Engine, load
from engine.metrics import group_scores
from engine.training.finetune_models import (
    HeldOutItemFigures,
    PixelItems,
    WholeDualEncoder,
    finetune_model,
    held_out_items,
    quads_of_scenes,
    readable,
)
from engine.training.head_data import ScenesQuads
from engine.training.heads import HeadRun, HeadTrainConfig
from tests import tiny_open_clip, tiny_transformers
from tests.captioned_files import write_coco, write_trohn
from tests.command_line import Shell
from tests.fake_encoder import FakeEncoder

# The tiny tokenizer of transformers knows letters alone: captions are longer than the context.
pytestmark = pytest.mark.filterwarnings("ignore:encode_texts. longer than the model's context")
MODELS = ("open_clip:clip", "open_clip:siglip", "hf:clip", "hf:siglip2", "scenes:")


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    family, _, kind = request.param.partition(":")
    if family == "scenes":
        return "scenes"
    writer = tiny_open_clip if family == "open_clip" else tiny_transformers
    return f"{family}:{writer.write_folder(tmp_path_factory.mktemp('tiny') / kind, kind)}"


@pytest.fixture
def pairs(tmp_path: Path) -> CaptionedImages:
    return read_trohn(*write_trohn(tmp_path / "trohn"))


def config(folder: Path, **changes: object) -> HeadTrainConfig:
    base = HeadTrainConfig(
        folder, steps=4, batch_size=2, warmup_steps=1, checkpoint_every=2, learning_rate=1e-4, loss="auto"
    )
    return replace(base, **changes)


@pytest.mark.filterwarnings("ignore:.*the embedded model knows")
def test_a_stopped_run_goes_on_to_the_same_weights_and_loads(tmp_path, model, pairs):
    class Stopped(Exception):
        pass

    def stop(trained: object) -> dict[str, float]:
        raise Stopped

    seen: list[torch.Tensor] = []

    def score(trained: WholeDualEncoder) -> dict[str, float]:
        # The embedded model's files are float16: what is scored is what was written.
        seen.append(Engine(trained.encoder()).score([item.image.path for item in pairs.items], ["a red cube 1"]))
        return {"figure": 0.5}

    before = load_encoder(model, device="cpu")
    whole = finetune_model(model, pairs, config(tmp_path / "whole"), device="cpu", evaluate=score)
    with pytest.raises(Stopped):
        cut = config(tmp_path / "cut", evaluate_every=3)
        finetune_model(model, pairs, cut, device="cpu", evaluate=stop)
    resumed = finetune_model(model, pairs, config(tmp_path / "cut"), device="cpu")
    assert whole == f"{model.partition(':')[0]}:{tmp_path / 'whole'}"
    first, second = load(whole, device="cpu"), load(resumed, device="cpu")
    assert first.spec.fingerprint == second.spec.fingerprint != before.spec.fingerprint
    # The file that it began with is as it was.
    assert load_encoder(model, device="cpu").spec.fingerprint == before.spec.fingerprint
    found = first.score([item.image.path for item in pairs.items], ["a red cube 1"])
    torch.testing.assert_close(found, seen[-1], rtol=0, atol=1e-2 if model == "scenes" else 1e-5)


@pytest.mark.parametrize("family", ["open_clip:clip", "hf:clip"])
def test_every_weight_is_trained_and_the_loss_falls(tmp_path, family, pairs):
    from engine.training.finetune import objective

    library, _, kind = family.partition(":")
    writer = tiny_open_clip if library == "open_clip" else tiny_transformers
    encoder = load_encoder(f"{library}:{writer.write_folder(tmp_path / 'model', kind)}", device="cpu")
    settings = config(tmp_path, steps=30, batch_size=6, learning_rate=1e-3, warmup_steps=2, loss="captions")
    run = HeadRun(WholeDualEncoder(encoder), settings, objective(settings))
    start = {name: weight.clone() for name, weight in run.head.named_parameters()}
    batch = PixelItems(pairs, encoder).batch(torch.arange(6))
    losses = [run.advance(*batch)["loss"] for _ in range(30)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    still = [name for name, weight in run.head.named_parameters() if torch.equal(weight, start[name])]
    assert not still


def test_batches_are_what_the_encoder_sees(tmp_path, pairs):
    encoder = load_encoder(f"open_clip:{tiny_open_clip.write_folder(tmp_path / 'clip', 'clip')}", device="cpu")
    pixels, captions = PixelItems(pairs, encoder).batch(torch.tensor([4, 1]))
    with torch.no_grad():
        found = WholeDualEncoder(encoder)(pixels, captions)
    refs = [ref.path for k in range(2) for item in (pairs.items[4], pairs.items[1]) for ref in (item.images[k],)]
    texts = ["a red cube 4", "a red cube 1", "a blue cube 4", "a blue cube 1"]
    torch.testing.assert_close(found, Engine(encoder).score(refs, texts), rtol=1e-4, atol=1e-5)


def test_held_out_items_are_scored_as_the_engine_scores_them(tmp_path):
    data = read_trohn(*write_trohn(tmp_path / "trohn", 30))
    seen, unseen = held_out_items(data, 5)
    assert unseen is not None and len(unseen) == 3 and len(seen) == 27
    assert {item.id for item in seen.items}.isdisjoint(item.id for item in unseen.items)
    assert held_out_items(seen, 0) == (seen, None)
    encoder = load_encoder(f"open_clip:{tiny_open_clip.write_folder(tmp_path / 'clip', 'clip')}", device="cpu")
    with torch.no_grad():
        found = HeldOutItemFigures(unseen)(WholeDualEncoder(encoder))
    engine = Engine(encoder)
    first = engine.score([item.image.path for item in unseen.items], [item.captions[0] for item in unseen.items])
    own = first.diagonal()
    finds = [(first >= own.unsqueeze(axis)).sum(axis) == 1 for axis in (0, 1)]
    quads = torch.stack(
        [
            engine.score([ref.path for ref in item.images], [item.captions[0], item.negatives[0]])
            for item in unseen.items
        ]
    )
    assert found == pytest.approx(
        {
            "found": float(torch.cat(finds).float().mean()),
            "over_negative": float((quads[:, 0, 0] > quads[:, 0, 1]).float().mean()),
            "group": float(group_scores(quads).group.mean()),
        }
    )


def test_a_model_that_knows_finds_all(tmp_path):
    data = read_trohn(*write_trohn(tmp_path / "trohn", 20))
    encoder = load_encoder(f"open_clip:{tiny_open_clip.write_folder(tmp_path / 'clip', 'clip')}", device="cpu")

    class Knowing(WholeDualEncoder):
        def forward(self, pixels, captions):
            return torch.eye(len(pixels))

    assert HeldOutItemFigures(data)(Knowing(encoder)) == {"found": 1.0, "over_negative": 1.0, "group": 1.0}
    pairs = replace(data, items=tuple(replace(item, negatives=(), negative_image=None) for item in data.items))
    assert HeldOutItemFigures(pairs)(Knowing(encoder)) == {"found": 1.0}


def test_pictures_alone_and_broken_ones(tmp_path):
    captions, images, _ = write_coco(tmp_path)
    (images / "000000000003.png").write_bytes(b"broken")
    data = readable(read_coco(captions, images))
    assert len(data) == 5 and [problem.path for problem in data.problems] == [str(images / "000000000003.png")]
    encoder = load_encoder(f"open_clip:{tiny_open_clip.write_folder(tmp_path / 'clip', 'clip')}", device="cpu")
    pixels, text = PixelItems(data, encoder).batch(torch.tensor([3, 0]))
    assert pixels.shape[0] == 2 and len(text.ids) == 2


def test_quads_of_scenes_are_the_pictures_of_their_items():
    items = ScenesQuads(items=2, categories=("color",)).draw()
    data = quads_of_scenes(items)
    for item, made in zip(items, data.items, strict=True):
        assert made.captions + made.negatives == item.captions
        for k, ref in enumerate(made.images):
            assert (ref.load() == item.images()[k]).all()


def test_the_command_fine_tunes_and_refuses(tmp_path, capsys, monkeypatch):
    shell = Shell(capsys)
    captions, images, _ = write_coco(tmp_path, 12)
    folder = tiny_open_clip.write_folder(tmp_path / "clip", "clip")
    call = ("train", "finetune", "--data", f"coco:{captions}", "--images", images, "--output", tmp_path / "run")
    small = ("--steps", "2", "--batch-size", "2", "--negatives", "swaps", "--device", "cpu")
    told = shell.json(*call, *small, "--model", f"open_clip:{folder}")
    assert told == {"model": f"open_clip:{tmp_path / 'run'}"} and "loss: captions" in shell.err
    assert load(told["model"], device="cpu").spec.family == "clip"
    # One of twelve is held out.
    last = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])
    assert {"found", "over_negative"} <= set(last)
    monkeypatch.setattr("engine.training.finetune_models.load_encoder", lambda *_, **__: FakeEncoder())
    assert shell(*call, *small, "--model", "fake") == 2
    assert "the weights of fake cannot be trained; take scenes, open_clip: or hf:" in shell.err
