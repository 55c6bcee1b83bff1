"""crop_batch as an op: refusals, torch's own checks, threads, instruction sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.ops import crop_batch
from engine.ops.crop_batch import crop_batch_op
from engine.ops.native import ISA_VARIABLE
from tests.crop_batch_oracle import noise

BOX = [[0, 1, 1, 4, 3]]
GOOD: dict[str, Any] = {
    "images": [noise(5, 6)], "boxes": torch.tensor(BOX), "size": 4,
    "mean": [0.5] * 3, "std": [0.25] * 3, "fill": (1, 2, 3),
}  # fmt: skip


def call(**changes: Any) -> torch.Tensor:
    return crop_batch(**{**GOOD, **changes})


@pytest.mark.parametrize("changes, error, message", [
    ({"images": [1]}, TypeError, r"crop_batch: images\[0\] must be a torch.Tensor, got int"),
    ({"images": [noise(5, 6).float()]}, TypeError, r"crop_batch: images\[0\] must be uint8, got float32"),
    ({"images": [noise(5, 6), noise(3, 2)[0]]}, ValueError, r"images\[1\] must have the shape .*got \(2, 3\)"),
    ({"images": [noise(5, 6)[..., :1]]}, ValueError, r"the shape \(H, W, 3\) with pixels, got \(5, 6, 1\)"),
    ({"images": [noise(5, 0)]}, ValueError, r"with pixels, got \(5, 0, 3\)"),
    ({"images": [noise(5, 6), noise(5, 6).to("meta")]}, ValueError, "images must be on one device, got cpu and meta"),
    ({"images": []}, ValueError, "boxes must be of images that are there, got 1 boxes and no image"),
    ({"boxes": BOX}, TypeError, "boxes must be a torch.Tensor, got list"),
    ({"boxes": torch.tensor(BOX).float()}, TypeError, r"boxes must be int32 or int64 \(whole pixels\), got float32"),
    ({"boxes": torch.tensor(BOX)[:, :4]}, ValueError, r"boxes must have the shape \(n, 5\), got \(1, 4\)"),
    ({"boxes": torch.tensor([[1, 0, 0, 2, 2]])}, ValueError, r"boxes must name one of 1 images, got \[1, .*in row 0"),
    ({"boxes": torch.tensor([*BOX, [-1, 0, 0, 2, 2]])}, ValueError, r"got \[-1, 0, 0, 2, 2\] in row 1"),
    ({"boxes": torch.tensor([[0, 3, 0, 3, 2]])}, ValueError, r"must have x0 < x1.*got \[0, 3, 0, 3, 2\] in row 0"),
    ({"boxes": torch.tensor([[0, 0, 4, 2, 2]])}, ValueError, r"y0 < y1 likewise.*got \[0, 0, 4, 2, 2\]"),
    ({"boxes": torch.tensor([[0, 0, 0, 2**24 + 1, 2]])}, ValueError, r"x0 < x1 <= x0 \+ 16777216"),
    ({"boxes": torch.tensor([[0, -(2**62), 0, 2**62, 2]])}, ValueError, r"within 1099511627776 of the image"),
    ({"boxes": torch.tensor([[0, 0, 0, 7, 2]]), "mode": "native"}, ValueError,
     r"boxes of mode 'native' must fit on their image of 5 x 6, got \[0, 0, 0, 7, 2\] in row 0"),
    ({"size": 2.0}, TypeError, r"size must be a whole number or \(height, width\), got 2.0"),
    ({"size": (3, 0)}, ValueError, r"size must be 1 to 16777216 pixels, got \(3, 0\)"),
    ({"mean": [0.5]}, ValueError, r"mean must be three numbers, got \[0.5\]"),
    ({"mean": [0.5, float("nan"), 0]}, ValueError, "mean must be finite and at most 1e6"),
    ({"mean": None}, ValueError, "mean must be three numbers, got None"),
    ({"std": "abc"}, ValueError, "std must be three numbers, got 'abc'"),
    ({"std": ["a", 1, 1]}, TypeError, r"std\[0\] must be a number, got str"),
    ({"fill": 3}, ValueError, "fill must be three whole numbers 0..255, got 3"),
    ({"size": True}, TypeError, "size must be a whole number or .height, width., got True"),
    ({"interpolation": ["bicubic"]}, ValueError, "interpolation must be 'bicubic' or 'bilinear'"),
    ({"std": [0.5, 0.0, 0.5]}, ValueError, r"std must be between 1e-6 and 1e6, got \[0.5, 0.0, 0.5\]"),
    ({"fill": (1, 2)}, ValueError, r"fill must be three whole numbers 0..255, got \(1, 2\)"),
    ({"fill": (1, 2, 256)}, ValueError, r"fill must be three whole numbers 0..255, got \(1, 2, 256\)"),
    ({"fill": torch.zeros(1, 3)}, TypeError, "fill must be uint8, got float32"),
    ({"fill": torch.zeros(2, 3, dtype=torch.uint8)}, ValueError, r"one colour a box, shape \(1, 3\), got \(2, 3\)"),
    ({"interpolation": "lanczos"}, ValueError, "interpolation must be 'bicubic' or 'bilinear', got 'lanczos'"),
    ({"mode": "padded"}, ValueError, "mode must be 'rescaled' or 'native', got 'padded'"),
    ({"dtype": torch.float64}, TypeError, "dtype must be float32, float16, bfloat16, got torch.float64"),
    ({"backend": "cuda"}, ValueError, "backend must be one of auto, cpp, triton, reference or None, got 'cuda'"),
    ({"backend": "triton"}, ValueError, "backend 'triton' takes CUDA tensors, got cpu"),
])  # fmt: skip
def test_refusals(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changes)


def test_every_option_has_an_effect() -> None:
    base = {**GOOD, "boxes": torch.tensor([[0, -2, 1, 4, 5]])}
    plain = crop_batch(**base)
    for change in (
        {"mean": [0.1] * 3}, {"std": [0.3] * 3}, {"fill": (200, 2, 3)},
        {"interpolation": "bilinear"}, {"mode": "native"},
    ):  # fmt: skip
        assert not torch.equal(crop_batch(**{**base, **change}), plain), change
    assert crop_batch(**{**base, "dtype": torch.bfloat16}).dtype == torch.bfloat16
    fill = torch.tensor([[1, 2, 3]], dtype=torch.uint8)
    assert torch.equal(crop_batch(**{**base, "size": (4, 4), "fill": fill}), plain)


def test_threads_change_nothing() -> None:
    images, before = [noise(90, 70), noise(200, 40)], torch.get_num_threads()
    cases = [[[0, 5, 5, 60, 80]], [[1, 0, 0, 40, 200]], [[k % 2, k, -k, k + 30, 60 - k] for k in range(9)]]
    for boxes in cases:
        for mode, size in (("rescaled", (150, 200)), ("native", (33, 170))):
            results = []
            try:
                for threads in (1, 2, 3, 16):
                    torch.set_num_threads(threads)
                    results.append(call(images=images, boxes=torch.tensor(boxes), mode=mode, size=size))
            finally:
                torch.set_num_threads(before)
            assert all(torch.equal(result, results[0]) for result in results)
            wanted = call(images=images, boxes=torch.tensor(boxes), mode=mode, size=size, backend="reference")
            assert (results[0] - wanted).abs().max() < 1e-5


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "mmx")
    with pytest.raises(ValueError, match="the instruction set must be one that this processor has, got mmx"):
        call()


def test_torch_checks_the_op() -> None:
    for backend in ("cpp", "reference"):
        for n in (0, 2):
            boxes, fill = torch.tensor(BOX * n).reshape(-1, 5), torch.zeros(n, 3, dtype=torch.uint8)
            rest = [[4, 5], [0.5] * 3, [0.25] * 3, "bicubic", torch.float16, "rescaled", backend]
            torch.library.opcheck(crop_batch_op, ([noise(5, 6), noise(2, 3)], boxes, fill, *rest))


def test_it_compiles_into_one_graph() -> None:
    def crops(image: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        batch = crop_batch([image], boxes, (4, 3), mean=[0.5] * 3, std=[0.25] * 3, fill=(1, 2, 3))
        return batch.mean((2, 3))

    image, boxes = noise(5, 6), torch.tensor([[0, 1, 1, 4, 3], [0, -2, -2, 2, 2]])
    compiled = torch.compile(crops, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(image, boxes), crops(image, boxes))


def test_shapes_without_numbers() -> None:
    boxes = torch.zeros(7, 5, dtype=torch.int64, device="meta")
    assert call(images=[noise(5, 6).to("meta")], boxes=boxes, size=(2, 3)).shape == (7, 3, 2, 3)
