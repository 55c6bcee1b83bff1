"""Heads on tiny random encoders of open_clip and transformers, end to end: store, train, go on, save, load, score."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from engine.encoders.open_clip import load_open_clip
from engine.encoders.transformers import load_transformers
from engine.engine import Engine
from engine.features import Needs
from engine.heads.registry import HEADS, load_head
from engine.scorers.registry import SCORERS
from engine.training.head_data import HeadData, ScenesQuads, scenes_data
from engine.training.heads import HeadTrainConfig, train_head
from tests import tiny_open_clip, tiny_transformers

ENCODERS = ("open_clip:clip", "open_clip:siglip", "transformers:clip", "transformers:siglip2")
KINDS = ("linear", "max_sim_head", "tfglobal", "tflocal")
# The tiny tokenizers of transformers know letters alone: captions are longer than the context.
pytestmark = pytest.mark.filterwarnings("ignore:encode_texts. longer than the model's context")
QUADS = ScenesQuads(items=8, categories=("color",))


@pytest.fixture(scope="module", params=ENCODERS)
def peaksim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    library, _, family = request.param.partition(":")
    folder = tmp_path_factory.mktemp("tiny") / family
    if library == "open_clip":
        return Engine(load_open_clip(str(tiny_open_clip.write_folder(folder, family)), device="cpu"))
    return Engine(load_transformers(str(tiny_transformers.write_folder(folder, family)), device="cpu"))


@pytest.fixture(scope="module")
def data(peaksim: Engine, tmp_path_factory: pytest.TempPathFactory) -> HeadData:
    """One store for all heads: the layers that any of them reads by default."""
    layers = [HEADS[kind].build(peaksim.spec).needs() for kind in KINDS]
    needs = Needs(
        image_layers=tuple(sorted({layer for held in layers for layer in held.image_layers})),
        text_layers=tuple(sorted({layer for held in layers for layer in held.text_layers})),
    )
    return scenes_data(peaksim, needs, QUADS, tmp_path_factory.mktemp("features"))


def numbers(peaksim: Engine) -> list[torch.Tensor]:
    """Every parameter and buffer of the encoder."""
    modules = [value for value in vars(peaksim.encoder).values() if isinstance(value, torch.nn.Module)]
    assert modules
    return [tensor for module in modules for tensor in module.state_dict().values()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_trained_stopped_stored_and_scores(peaksim, data, kind, tmp_path: Path):
    before = [tensor.clone() for tensor in numbers(peaksim)]
    settings = HeadTrainConfig(tmp_path / "whole", steps=10, batch_size=4, warmup_steps=2, checkpoint_every=4)

    class Stopped(Exception):
        pass

    def stop(head: object) -> dict[str, float]:
        raise Stopped

    def new(seed: int = 0) -> torch.nn.Module:
        return HEADS[kind].build(peaksim.spec, seed=seed)

    whole = load_head(train_head(new(), data, settings))
    cut = replace(settings, output=tmp_path / "cut")
    with pytest.raises(Stopped):
        train_head(new(), data, replace(cut, evaluate_every=6), evaluate=stop)
    path = train_head(new(5), data, cut)
    resumed = load_head(path, fingerprint=peaksim.spec.fingerprint)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))

    (item,) = QUADS.draw()[:1]
    pictures = [Image.fromarray(pixels) for pixels in item.images()]
    scores = peaksim.score(pictures, item.captions, scorer=SCORERS[kind](str(path)))
    with torch.no_grad():
        expected = resumed.matrix(
            peaksim.encode_images(pictures, scorer=resumed.needs()),
            peaksim.encode_texts(item.captions, scorer=resumed.needs()),
        )
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    shown = peaksim.explain(pictures[0], item.captions[0], scorer=SCORERS[kind](str(path)))
    assert shown.matches and shown.total == pytest.approx(float(scores[0, 0]), abs=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(peaksim), strict=True))
