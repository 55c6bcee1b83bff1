"""PeakPatch's corrections as operations: what they refuse, how they fit torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops.peak_patch_correct import (
    PairFeatures,
    peak_patch_correct,
    peak_patch_correct_backward_op,
    peak_patch_correct_op,
    peak_patch_pairs,
    peak_patch_pairs_backward_op,
    peak_patch_pairs_op,
)
from tests.tolerances import assert_close

F, IMAGE, TEXT = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 2, 4)


@pytest.mark.parametrize("change, error, message", [
    ({"f": 1.0}, TypeError, r"f must be a torch.Tensor, got float"),
    ({"f": F[0]}, ValueError, r"f must have the shape \(B, D\), got \(4,\)"),
    ({"delta": F.int()}, TypeError, r"delta must be one of float32, float16, bfloat16, float64, got int32"),
    ({"delta": F[:2]}, ValueError, r"delta must have f's shape \(3, 4\), got \(2, 4\)"),
    ({"delta": F.double()}, TypeError, r"f and delta must both be float64 or neither, got float32 and float64"),
    ({"delta": F.to("meta")}, ValueError, r"delta must be on cpu as f is, got meta"),
    ({"alpha": None}, TypeError, "alpha must be a number, got NoneType"),
    ({"alpha": True}, TypeError, "alpha must be a number, got bool"),
    ({"alpha": torch.ones(2)}, ValueError, r"alpha must be one floating number, got float32 \(2,\)"),
    ({"alpha": torch.tensor(1)}, ValueError, r"alpha must be one floating number, got int64 \(\)"),
    ({"alpha": torch.ones(1, device="meta")}, ValueError, r"alpha must be on cpu as f is, got meta"),
    ({"backend": "mkl"}, ValueError, r"backend must be one of auto, cpp, triton, reference or None, got 'mkl'"),
])  # fmt: skip
def test_refused_corrections(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"f": F, "delta": F, **change}
    f, delta = given.pop("f"), given.pop("delta")
    with pytest.raises(error, match=f"^peak_patch_correct: {message}$"):
        peak_patch_correct(f, delta, **given)


@pytest.mark.parametrize("change, error, message", [
    ({"image": TEXT}, ValueError, r"image must have the shape \(N, D\), got \(3, 2, 4\)"),
    ({"text": F}, ValueError, r"text must have the shape \(N, K, D\), got \(3, 4\)"),
    ({"text": TEXT[:2]}, ValueError, r"text must have the shape \(N, K, D\) = \(3, 2, 4\), got \(2, 2, 4\)"),
    ({"low": TEXT[:, :1]}, ValueError, r"low must have the shape \(N, K, D\) = \(3, 2, 4\), got \(3, 1, 4\)"),
    ({"low": TEXT.half()}, TypeError, r"low must be float32 on cpu as image is, got float16 on cpu"),
    ({"low": TEXT.long()}, TypeError, r"low must be one of float32, float16, bfloat16, float64, got int64"),
])  # fmt: skip
def test_refused_pairs(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"image": IMAGE, "text": TEXT, "low": TEXT, **change}
    with pytest.raises(error, match=f"^peak_patch_pairs: {message}$"):
        peak_patch_pairs(given["image"], given["text"], given["low"])


# opcheck itself looks at the .grad of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_opcheck(backend: str) -> None:
    f, delta, image, text, low = (x.clone().requires_grad_() for x in (F, F, IMAGE, TEXT, TEXT))
    alpha = torch.tensor(0.5, requires_grad=True)
    torch.library.opcheck(peak_patch_correct_op, (f, delta, alpha, backend))
    torch.library.opcheck(peak_patch_correct_backward_op, (torch.randn(3, 4), F, F, alpha.detach(), backend))
    torch.library.opcheck(peak_patch_pairs_op, (image, text, low, backend))
    upstream = torch.randn(3, 2, 2), torch.randn(3, 2, 4)
    torch.library.opcheck(peak_patch_pairs_backward_op, (*upstream, IMAGE, TEXT, TEXT, backend))


def test_compiles_to_one_graph() -> None:
    def loss(image: Tensor, text: Tensor, low: Tensor, alpha: Tensor) -> Tensor:
        corrected = peak_patch_correct(text.flatten(0, 1), low.flatten(0, 1), alpha).view(text.shape)
        sims, cross = peak_patch_pairs(image, corrected, low)
        return (sims[..., 1] + 0.2 * torch.tanh(cross.sum(-1) + sims[..., 0])).exp().sum()

    leaves = [x.clone().requires_grad_() for x in (IMAGE, TEXT, torch.randn(3, 2, 4), torch.tensor(0.5))]
    got, wanted = torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), loss(*leaves)
    assert_close(got, wanted)
    for actual, expected in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        assert_close(actual, expected, scale=10)


def test_dtypes_and_meta_tensors() -> None:
    assert peak_patch_correct(F.double(), F.double()).dtype == torch.float64
    assert peak_patch_correct(F.half(), F.bfloat16()).dtype == torch.float32
    out = peak_patch_pairs(IMAGE.to("meta"), TEXT.to("meta"), TEXT.to("meta"))
    assert isinstance(out, PairFeatures)
    assert out.sims.shape == (3, 2, 2) and out.cross.shape == (3, 2, 4)
