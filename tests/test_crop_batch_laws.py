"""Laws of crop_batch that hold byte for byte, whatever the numbers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.crop_batch_oracle import BACKENDS, noise, run

# The best instruction set and the reference have the edge tests in common; the laws need only what users get.
BACKEND = next((name for name in BACKENDS if name.startswith("cpp")), "reference")
few = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """Images, boxes on them or around, a size and options."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    sides = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3))
    mode = draw(st.sampled_from(["rescaled", "native"]))
    boxes = []
    for _ in range(draw(st.integers(1, 5))):
        k = draw(st.integers(0, len(sides) - 1))
        longest = [n if mode == "native" else n + 20 for n in sides[k]]
        height, width = draw(st.integers(1, longest[0])), draw(st.integers(1, longest[1]))
        y, x = draw(st.integers(-height - 1, sides[k][0] + 1)), draw(st.integers(-width - 1, sides[k][1] + 1))
        boxes.append([k, x, y, x + width, y + height])
    return {
        "images": [noise(*side) for side in sides],
        "boxes": torch.tensor(boxes),
        "size": draw(st.tuples(st.integers(1, 50), st.integers(1, 50))),
        "mode": mode,
        "interpolation": draw(st.sampled_from(["bicubic", "bilinear"])),
    }


@few
@given(cases())
def test_it_is_the_reference(case: dict) -> None:
    assert torch.equal(run(BACKEND, **case), run("reference", **case).to(torch.float32))


@few
@given(cases(), st.randoms())
def test_boxes_know_nothing_of_each_other(case: dict, random: Any) -> None:
    whole, boxes = run(BACKEND, **case), case.pop("boxes")
    order = list(range(len(boxes)))
    random.shuffle(order)
    assert torch.equal(run(BACKEND, boxes=boxes[order], **case), whole[order])
    for row, box in enumerate(boxes):
        assert torch.equal(run(BACKEND, boxes=box, **case)[0], whole[row])


@few
@given(cases())
def test_an_image_is_what_lies_under_the_box(case: dict) -> None:
    """Rescaled: moving the origin, or painting what lies outside the image, changes nothing."""
    case["mode"] = "rescaled"
    wanted, boxes = run(BACKEND, **case), case.pop("boxes")
    images = case.pop("images")
    padded = []
    for image in images:
        sheet = torch.tensor([10, 250, 99], dtype=torch.uint8).repeat(image.shape[0] + 130, image.shape[1] + 130, 1)
        sheet[65:-65, 65:-65] = image
        padded.append(sheet)
    moved = boxes + torch.tensor([0, 65, 65, 65, 65])
    assert torch.equal(run(BACKEND, padded, moved, **case), wanted)


@few
@given(cases())
def test_the_whole_image_is_native(case: dict) -> None:
    case.pop("mode")
    images = case["images"]
    case["boxes"] = torch.tensor([[k, 0, 0, image.shape[1], image.shape[0]] for k, image in enumerate(images)])
    assert torch.equal(run(BACKEND, mode="native", **case), run(BACKEND, mode="rescaled", **case))


@few
@given(cases(), st.tuples(*[st.integers(0, 255)] * 3))
def test_one_colour_stays(case: dict, colour: tuple[int, int, int]) -> None:
    case["images"] = [torch.tensor(colour, dtype=torch.uint8).expand_as(image) for image in case["images"]]
    got = run(BACKEND, fill=colour, **case)
    assert (got - torch.tensor(colour)[:, None, None]).abs().max() < 1e-3


@few
@given(cases(), st.sampled_from([torch.float16, torch.bfloat16]))
def test_narrow_results_are_rounded_wide_ones(case: dict, dtype: torch.dtype) -> None:
    options = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    assert torch.equal(run(BACKEND, dtype=dtype, **options, **case), run(BACKEND, **options, **case).to(dtype))
