"""Training of the window head: its pictures and targets, its loss, and the whole way on tiny encoders of every kind."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from engine.benchmarks.heads import WindowFigures
from engine.crops import crop_grid, crops
from engine.encoders.base import view
from engine.encoders.open_clip import load_open_clip
from engine.encoders.scenes import ScenesEncoder, load_scenes
from engine.encoders.scenes_model import ScenesModel, ScenesModelConfig
from engine.encoders.transformers import load_transformers
from engine.engine import Engine
from engine.features import TextFeatures
from engine.heads.base import read_head
from engine.heads.registry import load_window_head
from engine.heads.window_head import WindowHead, WindowHeadConfig
from engine.images import ResizePolicy
from engine.scenes.items import ControlledItem, controlled_items
from engine.scenes.world import COLORS, MATERIALS, SHAPES, is_training_scene, is_withheld, sample_scene
from engine.scorers.sgi import SGI
from engine.training.heads import HeadRun, HeadTrainConfig, train_head
from engine.training.windows import (
    OwnPictures,
    WindowData,
    WindowLoss,
    WindowObjective,
    WindowPictures,
    begun,
    draw_windows,
    readable_files,
    targets_of,
    window_data,
    wordings_of,
)
from tests import tiny_open_clip, tiny_transformers
from tests.tolerances import assert_close

ENCODERS = ("scenes", "open_clip:clip", "open_clip:siglip", "transformers:clip", "transformers:siglip2")
PICTURES = WindowPictures(pictures=8, windows=4)
CONFIG = WindowHeadConfig()
# The tiny tokenizers of transformers know letters alone: captions are longer than the context.
pytestmark = pytest.mark.filterwarnings("ignore:encode_texts. longer than the model's context")


@pytest.fixture(scope="module")
def scenes() -> Engine:
    return Engine(load_scenes())


@pytest.fixture(params=ENCODERS)
def peaksim(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    library, _, family = request.param.partition(":")
    if library == "scenes":
        return Engine(load_scenes())
    folder = tmp_path / family
    if library == "open_clip":
        return Engine(load_open_clip(str(tiny_open_clip.write_folder(folder, family)), device="cpu"))
    return Engine(load_transformers(str(tiny_transformers.write_folder(folder, family)), device="cpu"))


def numbers(peaksim: Engine) -> list[torch.Tensor]:
    """Every parameter and buffer of the encoder."""
    modules = [value for value in vars(peaksim.encoder).values() if isinstance(value, torch.nn.Module)]
    assert modules
    return [tensor for module in modules for tensor in module.state_dict().values()]


def test_a_head_is_trained_stopped_stored_and_used(peaksim: Engine, tmp_path: Path):
    before = [tensor.clone() for tensor in numbers(peaksim)]

    layers = CONFIG.fitted(peaksim.spec).layers
    told: list[tuple[str, int, int]] = []

    def stored() -> WindowData:
        return window_data(peaksim, layers, PICTURES, tmp_path / "features", told=lambda *done: told.append(done))

    data, again = stored(), stored()

    def new(seed: int = 0) -> WindowHead:
        return begun(peaksim, data, CONFIG, seed=seed)

    assert told == [("windows", 8, 8)] and again.store.folder == data.store.folder and len(data) == 8
    settings = HeadTrainConfig(tmp_path / "whole", steps=10, batch_size=4, warmup_steps=2, checkpoint_every=4)
    objective = WindowLoss(WindowObjective(wordings=8), wordings_of(peaksim, 8))

    class Stopped(Exception):
        pass

    def stop(head: object) -> dict[str, float]:
        raise Stopped

    whole = load_window_head(train_head(new(), data, settings, objective=objective))
    cut = replace(settings, output=tmp_path / "cut")
    with pytest.raises(Stopped):
        train_head(new(), data, replace(cut, evaluate_every=6), objective=objective, evaluate=stop)
    path = train_head(new(5), data, cut, objective=objective)
    resumed = load_window_head(path, fingerprint=peaksim.spec.fingerprint)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert resumed.tag == whole.tag != new().tag and read_head(path).facts["steps"] == 10

    picture, boxes, _ = PICTURES.draw(0)
    scorer = SGI(crops="windows", head=str(path))
    images = peaksim.encode_images([picture], scorer=scorer, regions=[boxes])
    features, _ = data.batch(torch.tensor([0]))
    assert images.regions is not None and features.boxes is not None
    assert torch.equal(images.boxes, features.boxes)  # type: ignore[arg-type]
    # The store holds states in float16.
    torch.testing.assert_close(images.regions, resumed.regions(features, features.boxes), rtol=0.05, atol=0.02)
    assert peaksim.score([picture], ["a red ring"], scorer=scorer).isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(peaksim), strict=True))


def test_a_head_begins_as_the_config_says(scenes: Engine, tmp_path: Path):
    data = window_data(scenes, (2, 3, 4, 5), PICTURES, tmp_path)
    copy, other = (begun(scenes, data, WindowHeadConfig(), seed=seed) for seed in (0, 1))
    assert copy.tag == other.tag and copy.config.activation == "hard_swish"
    assert torch.equal(copy.outward.weight, scenes.encoder.state_dict()["image.projection.weight"])  # type: ignore[attr-defined]
    assert_close(copy.seed, data.store[:8].hidden[2][:, 0].mean(dim=0))
    drawn = [begun(scenes, data, WindowHeadConfig(start="random"), seed=seed) for seed in (0, 1)]
    assert len({head.tag for head in (copy, *drawn)}) == 3 and drawn[0].config.activation == "gelu"
    # The encoder's own weights are not what is trained.
    with torch.no_grad():
        copy.outward.weight.zero_()
    assert scenes.encoder.state_dict()["image.projection.weight"].any()  # type: ignore[attr-defined]


def test_a_copy_has_the_sizes_of_what_it_copies(scenes: Engine, tmp_path: Path):
    torch.manual_seed(0)
    model = ScenesModel(ScenesModelConfig(width=32, heads=2, image_layers=2, text_layers=1, stem_width=8, embed_dim=16))
    # The width inside the MLPs of a checkpoint is its own affair.
    for block in model.image.blocks:
        block.up, block.down = torch.nn.Linear(32, 40), torch.nn.Linear(40, 32)
    narrow = Engine(ScenesEncoder(model, ("a",), name="narrow", device=torch.device("cpu")))
    head = begun(narrow, window_data(narrow, (1,), PICTURES, tmp_path / "narrow"), WindowHeadConfig())
    assert (head.config.heads, head.config.hidden) == (2, 40)
    assert torch.equal(head.blocks[0].up.weight, model.image.blocks[1].up.weight)  # type: ignore[union-attr]
    data = window_data(scenes, (2, 3, 4, 5), PICTURES, tmp_path / "scenes")
    for config in (WindowHeadConfig(hidden=100), WindowHeadConfig(heads=2)):
        with pytest.raises(ValueError, match="window_head: the path must have blocks, heads, hidden, activation and"):
            begun(scenes, data, config)
    assert begun(scenes, data, WindowHeadConfig(hidden=100, start="random")).config.hidden == 100


def test_pictures_that_cannot_be_read_are_left_out(tmp_path: Path):
    Image.new("RGB", (40, 90), "green").save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"broken")
    good, broken, gone = (str(tmp_path / name) for name in ("a.png", "b.png", "gone.png"))
    kept, problems = readable_files((good, broken, gone))
    assert kept == (good,) and [problem.path for problem in problems] == [broken, gone]
    with pytest.raises(ValueError, match=r"a picture that can be read, got none; the first: .*b\.png: this is not"):
        readable_files((broken, gone))


def test_pictures_are_those_that_training_may_show():
    drawn = [PICTURES.draw(row) for row in range(40)]
    again = PICTURES.draw(7)
    assert np.array_equal(np.asarray(again[0]), np.asarray(drawn[7][0])) and np.array_equal(again[1], drawn[7][1])
    assert not np.array_equal(np.asarray(replace(PICTURES, data_seed=1).draw(7)[0]), np.asarray(drawn[7][0]))
    for row, (picture, boxes, shares) in enumerate(drawn):
        scene = sample_scene(np.random.default_rng((PICTURES.data_seed, row)), split="train")
        assert is_training_scene(scene)
        assert boxes.shape == (4, 4) and shares.shape == (1, 4, 2)
        assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= (picture.width, picture.height)).all()
        assert (boxes[:, :2] < boxes[:, 2:]).all()


@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
def test_windows_of_own_pictures_lie_in_what_the_encoder_sees(tmp_path: Path, resize: ResizePolicy):
    sizes = [(40, 90), (90, 40), (64, 64)]
    for number, (width, height) in enumerate(sizes):
        Image.new("RGB", (width, height), "green").save(tmp_path / f"{number}.png")
    files = tuple(str(path) for path in sorted(tmp_path.iterdir()))
    own = OwnPictures(files, PICTURES, resize)
    assert len(own) == 3
    for row, (width, height) in enumerate(sizes):
        picture, boxes, shares = own.draw(row)
        assert picture.size == (width, height) and boxes.shape == (4, 4) and shares.shape == (1, 4, 2)
        left, top, right, bottom = view(resize, height, width)
        assert (boxes[:, 0] >= max(left, 0)).all() and (boxes[:, 1] >= max(top, 0)).all()
        assert (boxes[:, 2] <= min(right, width)).all() and (boxes[:, 3] <= min(bottom, height)).all()
    before = own.source
    Image.new("RGB", (40, 90), "blue").save(tmp_path / "0.png")
    assert own.source != before != replace(own, drawing=replace(PICTURES, places=2)).source
    with pytest.raises(ValueError, match="OwnPictures: there must be at least one file, got none"):
        OwnPictures((), PICTURES, resize)


def test_half_of_the_windows_are_of_a_grid():
    boxes = draw_windows(np.random.default_rng(0), 60, 96, 96)
    grid = {tuple(box) for name in ("scenes", "dense") for box in crop_grid(name).boxes(96, 96).tolist()}
    held = [tuple(box) in grid for box in boxes.tolist()]
    assert all(held[:30]) and sum(held[30:]) < 5 and len({tuple(box) for box in boxes[:30].tolist()}) == 30


def test_targets_are_what_the_encoder_makes_of_native_crops(scenes: Engine):
    picture, boxes, _ = PICTURES.draw(3)
    centred = crops(picture, boxes, mode="native")
    expected = scenes.encode_images(centred).embedding
    room = 96 - (boxes[:, 2:] - boxes[:, :2])
    # The corner is cut down to whole pixels: half the room is the middle.
    middle = ((room // 2 + 0.5) / (room + 1))[None]
    assert_close(targets_of(scenes, picture, boxes, middle), expected)
    places = np.concatenate([middle, np.zeros_like(middle), np.full_like(middle, 0.999)])
    found = targets_of(scenes, picture, boxes, places)
    each = torch.stack([targets_of(scenes, picture, boxes, place[None]) for place in places])
    assert_close(found, functional.normalize(each.mean(dim=0), dim=-1), scale=10)
    assert (each[1] - each[0]).norm(dim=1).min() > 0.01


def test_the_loss_is_its_formula_and_the_targets_have_the_least():
    torch.manual_seed(0)
    targets = functional.normalize(torch.randn(2, 3, 5), dim=-1)
    wordings = functional.normalize(torch.randn(4, 5), dim=-1)

    class Fixed:
        def __init__(self, found: torch.Tensor) -> None:
            self.found = found

        def regions(self, images: object, boxes: object) -> torch.Tensor:
            return self.found

    class Images:
        boxes = torch.zeros(2, 3, 4)

    def loss(found: torch.Tensor, wording: float) -> float:
        return float(WindowLoss(WindowObjective(wording=wording), wordings)(Fixed(found), Images(), targets))  # type: ignore[arg-type]

    other = functional.normalize(targets + 0.5 * torch.randn(2, 3, 5), dim=-1)
    pairs = list(zip(other.flatten(0, 1), targets.flatten(0, 1), strict=True))
    distance = sum(1 - float(h @ t) for h, t in pairs) / 6
    assert loss(other, 0.0) == pytest.approx(distance, abs=1e-6)
    asked = sum(float((h - t) @ c) ** 2 for h, t in pairs for c in wordings) / 24
    assert loss(other, 2.0) == pytest.approx(distance + 2 * 5 / 2 * asked, abs=1e-5)
    assert loss(targets, 2.0) == pytest.approx(0.0, abs=1e-6)
    # Over all directions alike the second term is the first.
    every = WindowLoss(WindowObjective(wording=1.0), torch.eye(5))
    assert float(every(Fixed(other), Images(), targets)) == pytest.approx(2 * distance, abs=1e-5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"WindowLoss: wording 3\.0 needs wordings, got None"):
        WindowLoss(WindowObjective())


def test_wordings_differ_in_one_word_of_things_that_training_may_show(scenes: Engine, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    encode = scenes.encode_texts

    def recorded(texts: list[str]) -> TextFeatures:
        asked.extend(texts)
        return encode(texts)

    monkeypatch.setattr(scenes, "encode_texts", recorded)
    found = wordings_of(scenes, 60)
    assert found.shape == (60, 128)
    assert_close(found.norm(dim=1), torch.ones(60))
    for one, other in zip(asked[::2], asked[1::2], strict=True):
        words = [set(text.split()) - {"a", "an"} for text in (one, other)]
        assert len(words[0] - words[1]) == len(words[1] - words[0]) == 1
        for held in words:
            look = [next(iter(held & set(kind)), None) for kind in (SHAPES, COLORS, MATERIALS)]
            assert None in look or not is_withheld(*look)
    embedding = encode(asked[:2]).embedding
    assert_close(found[0], functional.normalize(embedding[0] - embedding[1], dim=0))


def test_the_loss_falls(scenes: Engine, tmp_path: Path):
    head = WindowHead.build(scenes.spec, WindowHeadConfig(hidden=32))
    data = window_data(scenes, head.layers, PICTURES, tmp_path)
    settings = HeadTrainConfig(tmp_path / "run", steps=40, batch_size=8, warmup_steps=4, learning_rate=5e-3)
    run = HeadRun(head, settings, WindowLoss(WindowObjective(wording=0.0)))
    batch = data.batch(torch.arange(8))
    losses = [run.advance(*batch)["loss"] for _ in range(40)]
    found, targets = head.regions(batch[0], batch[0].boxes), batch[1]  # type: ignore[arg-type]
    assert losses[-1] < losses[0] - 0.5 and (found * targets).sum(dim=2).mean() > 0.5


def test_figures_of_a_head_read_it_anew(scenes: Engine):
    figures = WindowFigures(scenes, items=3, categories=("color",))
    heads = [WindowHead.build(scenes.spec, CONFIG, seed=seed).eval() for seed in (0, 1)]
    for head in heads:
        found = figures(head)
        assert set(found) == {"group_color"} and 0 <= found["group_color"] <= 1
    scorer = SGI(crops="windows", head=heads[1], full_image=False)
    images = figures._seen_by(heads[1], figures._encoded("color", scorer)[0])
    expected = scenes.encode_images(
        [Image.fromarray(pixels) for item in _items() for pixels in item.images()],
        scorer=scorer,
    )
    assert images.region_plan == expected.region_plan
    assert_close(images.regions, expected.regions)  # type: ignore[arg-type]


def _items() -> list[ControlledItem]:
    return controlled_items("color", 3, seed=7, split="in_domain")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WindowPictures(pictures=0), "WindowPictures: pictures must be at least 1, got 0"),
        (lambda: WindowPictures(windows=1), "WindowPictures: windows must be at least 2, got 1"),
        (lambda: WindowPictures(data_seed=-1), "WindowPictures: data_seed must be at least 0, got -1"),
        (lambda: WindowObjective(wording=-1), "WindowObjective: wording must be finite, at least 0, got -1"),
        (lambda: WindowObjective(wording=math.nan), "WindowObjective: wording must be finite, at least 0, got nan"),
        (lambda: WindowObjective(wordings=0), "WindowObjective: wordings must be at least 1, got 0"),
    ],
)
def test_settings_are_checked(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
