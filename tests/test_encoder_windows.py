"""Regions as windows: cells of a box, class rows against masked attention, and the laws, for every kind of tower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from engine.encoders.base import Encoder
from engine.encoders.open_clip import load_open_clip
from engine.encoders.scenes import ScenesEncoder
from engine.encoders.scenes_model import Block, ScenesModel, ScenesModelConfig
from engine.encoders.windows import window_cells
from engine.features import RegionPlan
from engine.scorers.sgi import SGI
from tests.tiny_open_clip import write_folder
from tests.tolerances import assert_close

FAMILIES = ["scenes", "clip", "clip-quickgelu", "siglip", "pe"]
SCENES_WORDS = ("red", "cube", "and", "blue", "ball", "a")


def scenes_encoder() -> ScenesEncoder:
    torch.manual_seed(0)
    config = ScenesModelConfig(
        image_size=32, patch_size=8, width=32, heads=4, image_layers=3, text_layers=1, stem_width=16, embed_dim=12,
        context_length=8, vocabulary=16,
    )  # fmt: skip
    model = ScenesModel(config)
    for block in model.image.blocks:
        # Attention that is far from uniform, and that moves the class token.
        torch.nn.init.normal_(block.qkv.weight, std=0.5)
        torch.nn.init.normal_(block.out.weight, std=0.3)
    return ScenesEncoder(model, SCENES_WORDS, name="tiny scenes", device=torch.device("cpu"))


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Encoder]:
    root: Path = tmp_path_factory.mktemp("tiny")
    names = [*FAMILIES[1:], "clip-average", "resnet"]
    loaded: dict[str, Encoder] = {n: load_open_clip(str(write_folder(root / n, n)), device="cpu") for n in names}
    return {"scenes": scenes_encoder(), **loaded}


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(3)
    return [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in ((40, 40), (40, 64), (64, 48))]


def pixels_for(encoder: Encoder) -> Tensor:
    return torch.stack([encoder.preprocess(picture) for picture in pictures()])


def some_windows(grid: tuple[int, int]) -> Tensor:
    rows, columns = grid
    found = [(0, 0, columns, rows), (0, 0, 1, 1), (1, 1, 3, 2), (0, 1, columns, 3), (2, 0, 3, rows), (1, 2, 4, 4)]
    return torch.tensor(found, dtype=torch.int32).expand(3, -1, -1).contiguous()


@pytest.mark.parametrize("box, wanted", [
    ((0, 0, 96, 96), (0, 0, 6, 6)), ((0, 0, 48, 48), (0, 0, 3, 3)), ((16, 32, 64, 80), (1, 2, 4, 5)),
    ((8, 0, 40, 96), (0, 0, 3, 6)),  # exactly half of columns 0 and 2
    ((9, 7, 39, 41), (1, 0, 2, 3)), ((30, 30, 33, 34), (1, 2, 2, 3)), ((0, 0, 1, 1), (0, 0, 1, 1)),
    ((95, 95, 96, 96), (5, 5, 6, 6)), ((0, 50, 96, 52), (0, 3, 6, 4)), ((-40, 0, -20, 96), (0, 0, 1, 6)),
    ((200, 10, 300, 20), (5, 0, 6, 1)), ((-50, -50, 500, 500), (0, 0, 6, 6)),
])  # fmt: skip
def test_the_cells_of_a_box(box: tuple, wanted: tuple) -> None:
    assert window_cells(np.array([box]), (0, 0, 96, 96), (6, 6)).tolist() == [list(wanted)]


def test_cells_of_a_view_that_is_not_the_image() -> None:
    boxes = np.array([[0, 0, 200, 100], [50, 0, 150, 50], [0, 0, 40, 100], [70, 30, 130, 80]])
    cells = window_cells(boxes, (50, 0, 150, 100), (4, 5))
    assert cells.tolist() == [[0, 0, 5, 4], [0, 0, 5, 2], [0, 0, 1, 4], [1, 1, 4, 3]]
    assert cells.dtype == np.int32


def test_cells_agree_with_a_loop_over_them() -> None:
    rng = np.random.default_rng(0)
    corners = np.sort(rng.integers(-10, 80, (200, 2, 2)), axis=1)
    boxes = np.concatenate([corners[:, 0], corners[:, 1] + 1], axis=1)
    cells = window_cells(boxes, (3, -2, 70, 61), (5, 7))
    for box, (x0, y0, x1, y1) in zip(boxes.tolist(), cells.tolist(), strict=True):
        for first, last, start, stop, low, side, n in (
            (x0, x1, box[0], box[2], 3, 67, 7), (y0, y1, box[1], box[3], -2, 63, 5),
        ):  # fmt: skip
            assert 0 <= first < last <= n
            edges = [(low + i * side / n, low + (i + 1) * side / n) for i in range(n)]
            inside = [i for i, (a, b) in enumerate(edges) if min(b, stop) - max(a, start) >= side / n / 2 - 1e-9]
            if stop - start >= side / n and inside:
                assert list(range(first, last)) == inside
            else:
                assert last - first == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_window_over_the_whole_image_is_the_global_embedding(encoders: dict[str, Encoder], family: str) -> None:
    encoder = encoders[family]
    assert encoder.spec.grid is not None
    pixels, windows = pixels_for(encoder), some_windows(encoder.spec.grid)
    found = encoder.encode_windows(pixels, windows)
    assert found.shape == (3, 6, encoder.spec.embed_dim) and found.dtype == torch.float32
    assert_close(found.norm(dim=-1), torch.ones(3, 6))
    assert_close(found[:, 0], encoder.encode_pixels(pixels).embedding)
    for w in range(1, 6):
        assert (found[:, w] - found[:, 0]).abs().max() > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_do_not_see_each_other(encoders: dict[str, Encoder], family: str) -> None:
    encoder = encoders[family]
    assert encoder.spec.grid is not None
    pixels, windows = pixels_for(encoder), some_windows(encoder.spec.grid)
    found = encoder.encode_windows(pixels, windows)
    for w in range(6):
        assert_close(encoder.encode_windows(pixels, windows[:, w : w + 1])[:, 0], found[:, w])


def masked_states(block: Block, x: Tensor, mask: Tensor) -> Tensor:
    """A block of the scenes model on a sequence under a mask ``(B, 1, T, T)``, by torch's own attention."""
    batch, length, width = x.shape
    qkv = block.qkv(block.norm_attention(x)).view(batch, length, 3, block.heads, width // block.heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    x = x + block.out(mixed.reshape(batch, length, width))
    return x + block.down(functional.hardswish(block.up(block.norm_mlp(x))))


@torch.no_grad()
def test_class_rows_equal_masked_attention(encoders: dict[str, Encoder]) -> None:
    encoder: Any = encoders["scenes"]
    rows, columns = encoder.spec.grid
    pixels, windows = pixels_for(encoder), some_windows(encoder.spec.grid)
    tower = encoder._model.image
    n_rows, n_patches = windows.shape[1], rows * columns
    y, x = torch.arange(n_patches) // columns, torch.arange(n_patches) % columns
    x0, y0, x1, y1 = windows[0, :, :, None].unbind(1)
    mask = torch.zeros(1 + n_patches + n_rows, 1 + n_patches + n_rows, dtype=torch.bool)
    mask[: 1 + n_patches, : 1 + n_patches] = True
    mask[1 + n_patches :, 1 : 1 + n_patches] = (x0 <= x) & (x < x1) & (y0 <= y) & (y < y1)
    mask.diagonal()[:] = True
    states = tower.embed(pixels)
    states = torch.cat([states, states[:, :1].expand(-1, n_rows, -1)], 1)
    for block in tower.blocks:
        states = masked_states(block, states, mask)
    assert_close(tower.window_states(pixels, windows), states[:, 1 + n_patches :], scale=5)
    assert_close(states[:, : 1 + n_patches], tower(pixels)[0], scale=5)


@pytest.mark.parametrize("family", FAMILIES)
def test_regions_of_a_plan(encoders: dict[str, Encoder], family: str) -> None:
    encoder = encoders[family]
    assert encoder.spec.grid is not None
    plan = RegionPlan(mode="windows")
    found = encoder.encode_images(pictures(), regions=plan, batch_size=2)
    plain = encoder.encode_images(pictures())
    assert found.regions is not None and found.boxes is not None and found.views is not None
    assert found.region_plan == str(plan) and "windows" in found.region_plan
    assert_close(found.embedding, plain.embedding)
    assert torch.equal(found.boxes, encoder.encode_images(pictures(), regions=RegionPlan()).boxes)  # type: ignore[arg-type]
    pixels = pixels_for(encoder)
    for row in range(3):
        cells = window_cells(found.boxes[row].numpy(), tuple(found.views[row].tolist()), encoder.spec.grid)
        wanted = encoder.encode_windows(pixels[row : row + 1], torch.from_numpy(cells)[None])
        assert_close(found.regions[row], wanted[0])
    with_patches = encoder.encode_images(pictures(), regions=plan, tap=encoder.spec.default_tap)
    assert with_patches.patches is not None
    assert_close(with_patches.regions, found.regions)  # type: ignore[arg-type]
    assert_close(with_patches.embedding, plain.embedding)


def test_boxes_of_ones_own(encoders: dict[str, Encoder]) -> None:
    encoder = encoders["scenes"]
    boxes = [np.array([[0, 0, 40, 40], [0, 0, 20, 20], [20, 20, 40, 40]]), np.array([[0, 0, 64, 40]]),
             np.array([[0, 0, 24, 64], [0, 0, 48, 64]])]  # fmt: skip
    found = encoder.encode_images(pictures(), regions=RegionPlan(mode="windows"), boxes=boxes)
    assert found.regions is not None and found.region_mask is not None
    assert found.region_mask.tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    assert (found.regions[1, 1:] == 0).all()
    for row, region in ((0, 0), (1, 0), (2, 1)):
        assert_close(found.regions[row, region], found.embedding[row])


@pytest.mark.parametrize("family, kind", [("resnet", "clip"), ("clip-average", "clip")])
def test_towers_without_windows_say_so(encoders: dict[str, Encoder], family: str, kind: str) -> None:
    wanted = rf"needs a tower with a class token or an attention-pooling head; got {kind} in OpenClipEncoder"
    with pytest.raises(ValueError, match=wanted):
        encoders[family].encode_images(pictures(), regions=RegionPlan(mode="windows"))


def test_sgi_scores_windows(encoders: dict[str, Encoder]) -> None:
    encoder = encoders["scenes"]
    scorer = SGI(crops="windows")
    plan = scorer.needs().regions
    assert plan is not None and plan.mode == "windows"
    images = encoder.encode_images(pictures(), regions=plan)
    texts = encoder.encode_texts(["red cube", "blue ball"])
    segments = texts.embedding[:, None].repeat(1, 2, 1)
    scores = scorer.matrix(images, replace(texts, segments=segments))
    assert images.regions is not None
    wanted = torch.einsum("ird,td->itr", images.regions, texts.embedding).amax(2)
    assert_close(scores, wanted)
