"""The window head: which patches a box holds, the numbers against a plain loop, laws, storage, and SGI with it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

import engine
from engine.encoders.scenes import load_scenes
from engine.features import ImageFeatures, RegionPlan
from engine.heads.base import read_head
from engine.heads.max_sim_head import MaxSimHead
from engine.heads.registry import load_head, load_window_head
from engine.heads.window_head import WindowHead, WindowHeadConfig, box_cells, cells_within
from engine.scorers.sgi import SGI
from tests.head_cases import FACTS, make_images
from tests.tolerances import assert_close

CONFIG = WindowHeadConfig(layers=(1, 2), heads=2, hidden=24)
# Pixels of pictures of 30 x 20 with 2 x 3 patches of 10.
BOXES = torch.tensor([[0, 0, 30, 20], [0, 0, 10, 10], [4, 2, 29, 20], [10, 0, 30, 10], [12, 11, 13, 12]])


def built(seed: int = 0) -> WindowHead:
    head = WindowHead.build(FACTS, CONFIG, seed=seed).eval()
    # Attention that is far from uniform.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for block in head.blocks:
            torch.nn.init.normal_(block.qkv.weight, std=0.5)
            torch.nn.init.normal_(block.patches.weight, std=0.5)
    return head


def boxes(n: int) -> torch.Tensor:
    return BOXES.expand(n, -1, -1)


def plain_regions(head: WindowHead, images: ImageFeatures, box: torch.Tensor) -> torch.Tensor:
    """One box of one picture, patch by patch."""
    x0, y0, x1, y1 = (float(v) / 10 for v in box)
    held = [
        row * 3 + column
        for row in range(2)
        for column in range(3)
        if min(column + 1, x1) - max(column, x0) > 0.124 and min(row + 1, y1) - max(row, y0) > 0.124
    ] or [int((y0 + y1) / 2) * 3 + int((x0 + x1) / 2)]
    shares = [x0 / 3, y0 / 2, x1 / 3, y1 / 2, (x1 - x0) / 3, (y1 - y0) / 2]
    waves = [f(s * math.pi * 2.0**k) for f in (math.sin, math.cos) for s in shares for k in range(3)]
    x = head.seed + head.geometry(torch.tensor(shares + waves))
    for layer, block in zip(head.layers, head.blocks, strict=True):
        states = block.norm_patches(images.hidden[layer][0, -6:])
        q, own_k, own_v = block.qkv(block.norm_attention(x)).view(3, block.heads, -1)
        k, v = block.patches(states).view(6, 2, block.heads, -1).unbind(1)
        mixed = []
        for h in range(block.heads):
            keys, values = torch.stack([*k[held, h], own_k[h]]), torch.stack([*v[held, h], own_v[h]])
            weights = (keys @ q[h] / math.sqrt(q.shape[1])).softmax(dim=0)
            mixed.append(weights @ values)
        x = x + block.out(torch.cat(mixed))
        x = x + block.down(functional.gelu(block.up(block.norm_mlp(x))))
    return functional.normalize(head.outward(head.norm(x)), dim=0)


def test_regions_are_those_of_a_plain_loop():
    head, images = built(), make_images(3)
    found = head.regions(images, boxes(3))
    assert found.shape == (3, 5, FACTS.embed_dim) and found.dtype == torch.float32
    assert_close(found.norm(dim=2), torch.ones(3, 5))
    for i in range(3):
        for r in range(1, 5):
            assert_close(found[i, r], plain_regions(head, images[i], BOXES[r]), scale=10, what=f"{i} {r}")


def test_the_box_over_everything_has_the_global_embedding():
    head, images = built(), make_images(2)
    assert torch.equal(head.regions(images, boxes(2))[:, 0], images.embedding)
    beyond = torch.tensor([[-5, -5, 40, 25]]).expand(2, 1, 4)
    assert torch.equal(head.regions(images, beyond)[:, 0], images.embedding)
    assert (head.regions(images, torch.tensor([[0, 0, 30, 19]]).expand(2, 1, 4))[:, 0] - images.embedding).norm() > 0.1


def test_boxes_and_pictures_do_not_see_each_other():
    head, images = built(), make_images(3)
    found = head.regions(images, boxes(3))
    order = torch.tensor([3, 1, 4, 0, 2])
    assert_close(head.regions(images, boxes(3)[:, order]), found[:, order])
    assert_close(head.regions(images[1], BOXES[None, 2:3])[0, 0], found[1, 2])
    # Neither does a box see patches beside it.
    other = images.hidden | {1: images.hidden[1].clone()}
    other[1][:, -6:][:, [2, 4, 5]] += torch.linspace(-3, 3, 16)
    changed = head.regions(replace(images, hidden=other), boxes(3))
    assert torch.equal(changed[:, 1], found[:, 1]) and (changed[:, 2] - found[:, 2]).abs().amax() > 1e-3


def test_cells_agree_with_a_loop_over_them():
    rng = np.random.default_rng(0)
    corners = np.sort(rng.integers(-10, 80, (200, 2, 2)), axis=1)
    drawn = torch.from_numpy(np.concatenate([corners[:, 0], corners[:, 1] + 1], axis=1))[None]
    view, (rows, columns) = torch.tensor([[3, -2, 70, 61]]), (5, 7)
    places = box_cells(drawn, view, (rows, columns))
    for box, place, cells in zip(
        drawn[0].tolist(), places[0].tolist(), cells_within(places, (rows, columns))[0].tolist(), strict=True
    ):
        for axis, low, side, n in ((0, 3, 67, columns), (1, -2, 63, rows)):
            start, stop = ((box[axis + k] - low) * n / side for k in (0, 2))
            start, stop = min(max(start, 0), n), min(max(stop, 0), n)
            assert place[axis] == pytest.approx(start, abs=1e-5) and place[axis + 2] == pytest.approx(stop, abs=1e-5)
            inside = [i for i in range(n) if min(i + 1, stop) - max(i, start) >= 0.125 + 1e-5]
            first, end = cells[axis], cells[axis + 2]
            assert 0 <= first < end <= n
            assert set(inside) <= set(range(first, end)) <= set(range(min(int(start), n - 1), math.ceil(stop) + 1))


def test_every_weight_gets_a_gradient_and_the_features_none():
    head, images = built(), make_images(2)
    (head.regions(images, boxes(2)) * torch.linspace(0, 1, FACTS.embed_dim)).sum().backward()
    # A softmax does not see what is added to all of its keys, nor the bias of the keys of one query.
    assert not [key for key, weight in head.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not any(state.requires_grad for state in images.hidden.values())


def test_half_precision_states_are_read_in_the_precision_of_the_head():
    head, images = built(), make_images(2)
    narrow = replace(images, hidden={layer: state.half() for layer, state in images.hidden.items()})
    found = head.regions(narrow, boxes(2))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, head.regions(images, boxes(2)), rtol=0.02, atol=0.02)


def test_a_saved_head_comes_back_with_its_tag(tmp_path):
    head = built()
    path = head.save(tmp_path / "head.safetensors", facts={"seed": 3})
    again = load_window_head(path, fingerprint=FACTS.fingerprint)
    images = make_images(2)
    assert again.config == head.config and again.tag == head.tag != built(1).tag and not again.training
    assert torch.equal(again.regions(images, boxes(2)), head.regions(images, boxes(2)))
    assert read_head(path).facts == {"seed": 3}
    narrow = load_window_head(head.save(tmp_path / "half.safetensors", half=True))
    assert (tmp_path / "half.safetensors").stat().st_size < 0.7 * path.stat().st_size
    torch.testing.assert_close(narrow.regions(images, boxes(2)), head.regions(images, boxes(2)), rtol=0.02, atol=5e-3)
    with pytest.raises(ValueError, match=r"must come from the encoder the head was trained on, tiny \(tiny-1\), got"):
        load_window_head(path, fingerprint="other")
    with pytest.raises(ValueError, match=r"must hold one of .*max_sim_head.*, got 'window_head'"):
        load_head(path)
    with pytest.raises(ValueError, match="must hold one of window_head, got 'max_sim_head'"):
        load_window_head(MaxSimHead.build(FACTS).save(tmp_path / "other.safetensors"))


def test_features_that_do_not_fit_are_refused():
    head, images = built(), make_images(1)
    with pytest.raises(ValueError, match="window_head: the images must come from the encoder the head was trained on"):
        head.regions(replace(images, fingerprint="other"), boxes(1))
    with pytest.raises(ValueError, match="window_head: needs image layer 1, views, which the features do not hold"):
        head.regions(replace(images, hidden={2: images.hidden[2]}, views=None), boxes(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_width": 10, "heads": 4}, "image_width must be a multiple of heads, got 10 and 4"),
        ({"activation": "relu"}, "activation must be one of 'gelu', 'quick_gelu', 'hard_swish', got 'relu'"),
        ({"start": "zero"}, "start must be one of 'copy', 'random', got 'zero'"),
        ({"dropout": 1.0}, "dropout must be from 0 to below 1, got 1.0"),
    ],
)
def test_options_are_checked(options: dict, message: str):
    with pytest.raises(ValueError, match=f"WindowHeadConfig: {message}"):
        WindowHeadConfig(**options)


def test_layers_are_those_before_the_last_by_default():
    def layers(depth: int) -> tuple[int, ...]:
        return WindowHead.build(replace(FACTS, image_layers=depth)).layers

    assert [layers(depth) for depth in (1, 2, 4, 6, 12)] == [(1,), (1,), (1, 2, 3), (2, 3, 4, 5), (8, 9, 10, 11)]
    wide, odd = (WindowHeadConfig().fitted(replace(FACTS, image_width=width)) for width in (768, 70))
    assert (wide.heads, wide.hidden) == (12, 3072) and odd.heads == 1


def test_a_copy_of_the_class_tokens_way_begins_as_its_last_blocks_kept_to_a_window():
    encoder = load_scenes()
    tower = encoder._model.image
    head = WindowHead.build(encoder.spec, WindowHeadConfig(heads=4, activation="hard_swish")).eval()
    path = encoder.class_path(head.layers)
    assert path is not None
    picture = pictures()[:1]
    states = encoder.encode_images(picture, layers=head.layers)
    seed = states.hidden[2][0, 0]
    head.take_path(path, seed)
    windows = torch.tensor([[[1, 2, 4, 5], [0, 0, 3, 3], [2, 0, 6, 6]]], dtype=torch.int32)
    rows = seed.expand(1, 3, -1)
    for layer in head.layers:
        whole = torch.cat([states.hidden[layer], rows], dim=1)
        rows = tower.blocks[layer].with_windows(whole, windows, (6, 6), rows_alone=True)
    expected = functional.normalize(tower.projection(tower.norm(rows)), dim=-1)
    assert_close(head.regions(states, 16 * windows), expected, scale=5)
    assert encoder.class_path((6,)) is None and encoder.class_path(()) is None
    known = WindowHeadConfig(heads=4, activation="hard_swish")
    for other, message in (
        ({"layers": (4, 5)}, r"window_head: the path must have blocks, .* of \(2, 4, 512, .* got \(4, 4, 512,"),
        ({"hidden": 100}, r"hidden, .* of \(4, 4, 100, .* got \(4, 4, 512, .*start='random'\) may have other sizes"),
    ):
        with pytest.raises(ValueError, match=message):
            WindowHead.build(encoder.spec, replace(known, **other)).take_path(path, seed)


def test_an_encoder_without_a_grid_or_a_layer_is_refused():
    with pytest.raises(ValueError, match="window_head: needs an encoder with a fixed patch grid, got tiny without one"):
        WindowHead.build(replace(FACTS, grid=None))
    with pytest.raises(ValueError, match="window_head: image layers must be 1 to 2, got 3"):
        WindowHead.build(FACTS, WindowHeadConfig(layers=(3,)))


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(3)
    return [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in ((96, 96), (60, 130))]


def test_sgi_reads_regions_of_a_head_and_tells_them_from_others(tmp_path):
    peaksim = engine.load("scenes")
    head = WindowHead.build(peaksim.spec, WindowHeadConfig(hidden=32)).eval()
    scorer = SGI(crops="windows", head=head)
    images = peaksim.encode_images(pictures(), scorer=scorer)
    assert images.region_plan.endswith(f"/full/{head.tag}") and not images.hidden
    assert images.regions is not None and images.boxes is not None
    assert_close(images.regions[:, 0], images.embedding)
    states = peaksim.encode_images(pictures(), scorer=engine.Needs(image_layers=head.layers))
    assert_close(images.regions, head.regions(states, images.boxes))
    texts = peaksim.encode_texts(["a red circle and a blue ring"], scorer=scorer)
    expected = (texts.segments[0] @ images.regions.transpose(1, 2)).amax(dim=2).mean(dim=1)  # type: ignore[index]
    assert_close(peaksim.score(images, texts, scorer=scorer)[:, 0], expected)
    # A stored head is the same one; another, or none, is not.
    path = str(head.save(tmp_path / "head.safetensors"))
    assert_close(peaksim.score(images, texts, scorer=replace(scorer, head=path))[:, 0], expected)
    with pytest.raises(ValueError, match=rf"regions must follow the plan .*/full, got .*{head.tag}"):
        peaksim.score(images, texts, scorer=SGI(crops="windows"))
    own = peaksim.encode_images(pictures()[:1], scorer=scorer, regions=[[(0, 0, 96, 96), (9, 9, 40, 50)]])
    assert own.region_plan == f"own/windows/{head.tag}"
    assert_close(own.regions[0, 1], head.regions(states[0], torch.tensor([[[9, 9, 40, 50]]]))[0, 0])  # type: ignore[index]
    with pytest.raises(ValueError, match=f"own boxes must be encoded as own/windows, got own/windows/{head.tag}"):
        peaksim.score(own, texts, scorer=SGI(crops="windows"))
    shown = peaksim.explain(pictures()[0], "a red circle and a blue ring", scorer=scorer)
    assert shown.total == pytest.approx(float(expected[0]), abs=1e-5)


def test_heads_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="sgi: head must go with crops='windows', got crops='native'"):
        SGI(crops="native", head="scenes")
    with pytest.raises(TypeError, match="sgi: head must be a path, a WindowHead or None, got int"):
        SGI(crops="windows", head=3).needs()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="RegionPlan: head must go with mode 'windows', got it with 'native'"):
        RegionPlan(mode="native", head=built())
    with pytest.raises(FileNotFoundError, match="is missing; `peaksim train` writes it"):
        SGI(crops="windows", head=str(tmp_path / "none")).needs()
    other = SGI(crops="windows", head=str(built().save(tmp_path / "head.safetensors")))
    with pytest.raises(ValueError, match=f"trained on, tiny .tiny-1., got those of {load_scenes().spec.fingerprint}"):
        engine.score(pictures()[0], "a red circle", scorer=other)
