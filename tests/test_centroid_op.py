"""Cosine to class centroids as an operation: what it refuses, how it fits torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops.centroid import centroid, centroids_backward_op, centroids_op
from tests.tolerances import assert_close

TOKENS, CU = torch.randn(6, 4), torch.tensor([0, 2, 6])


@pytest.mark.parametrize("change, error, message", [
    ({"queries": [1.0]}, TypeError, r"queries must be a torch.Tensor, got list"),
    ({"tokens": torch.zeros(4)}, ValueError, r"tokens must have the shape \(total, D\), got \(4,\)"),
    ({"tokens": TOKENS.long()}, TypeError, r"tokens must be one of float32, float16, bfloat16, float64, got int64"),
    ({"queries": TOKENS.half()}, TypeError, r"queries must be float32 on cpu as tokens are, got float16 on cpu"),
    ({"queries": TOKENS[:, :3]}, ValueError, r"queries and tokens must have one last dimension D, got 3 and 4"),
    ({"cu_seqlens": CU.int()}, ValueError,
     r"cu_seqlens must be int64 of shape \(n_sets \+ 1,\), got int32 \(3,\)"),
    ({"cu_seqlens": CU[:0]}, ValueError, r"cu_seqlens must be int64 of shape \(n_sets \+ 1,\), got int64 \(0,\)"),
    ({"cu_seqlens": torch.tensor([0, 7])}, ValueError,
     "cu_seqlens must end at 6, the number of rows, or before, got 7"),
    ({"cu_seqlens": torch.tensor([0, 3, 2])}, ValueError,
     "cu_seqlens must not decrease, got 3 and then 2 at 2"),
    ({"q_cu_seqlens": torch.tensor([-1, 2])}, ValueError,
     "cu_seqlens must start at 0 or after, got -1"),
    ({"cu_seqlens": CU.to("meta")}, ValueError, r"cu_seqlens must be on cpu as tokens are, got meta"),
    ({"classes": torch.zeros(3, dtype=torch.int64), "n_classes": 1}, ValueError,
     r"classes must be int64 of shape \(n_sets,\) = \(2,\), got int64 \(3,\)"),
    ({"classes": torch.zeros(2, dtype=torch.int64)}, ValueError,
     r"classes and n_classes must be given together, got classes alone"),
    ({"n_classes": 2}, ValueError, r"classes and n_classes must be given together, got n_classes alone"),
    ({"classes": torch.zeros(2, dtype=torch.int64), "n_classes": -1}, ValueError,
     r"n_classes must be a number of classes, got -1"),
    ({"backend": "triton"}, ValueError, r"backend 'triton' takes CUDA tensors, got cpu"),
])  # fmt: skip
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"queries": TOKENS, "tokens": TOKENS, "cu_seqlens": CU, **change}
    queries, tokens, cu_seqlens = (given.pop(name) for name in ("queries", "tokens", "cu_seqlens"))
    with pytest.raises(error, match=f"^centroid: {message}$"):
        centroid(queries, tokens, cu_seqlens, **given)


# opcheck itself looks at the .grad of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_opcheck(backend: str) -> None:
    tokens, classes = TOKENS.clone().requires_grad_(), torch.tensor([2, 0])
    torch.library.opcheck(centroids_op, (tokens, CU, classes, 3, backend))
    outputs = centroids_op(TOKENS, CU, classes, 3, backend)
    torch.library.opcheck(centroids_backward_op, (torch.randn(3, 4), *outputs, TOKENS, CU, classes, backend))


def test_compiles_to_one_graph() -> None:
    def loss(queries: Tensor, tokens: Tensor) -> Tensor:
        cosines = centroid(queries * 2, tokens, CU, classes=torch.tensor([1, 0]), n_classes=3)
        return (cosines / 0.07).logsumexp(1).sum()

    leaves = [torch.randn(2, 4, requires_grad=True), TOKENS.clone().requires_grad_()]
    got, wanted = torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), loss(*leaves)
    assert_close(got, wanted)
    for actual, expected in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        assert_close(actual, expected, scale=10)


def test_dtypes_and_meta_tensors() -> None:
    assert centroid(TOKENS.double(), TOKENS.double(), CU).dtype == torch.float64
    assert centroid(TOKENS.bfloat16(), TOKENS.bfloat16(), CU).dtype == torch.float32
    got = centroid(TOKENS.to("meta"), TOKENS.to("meta"), CU.to("meta"), q_cu_seqlens=CU.to("meta"))
    assert got.shape == (2, 2) and got.device.type == "meta"
