"""Gradients of window attention against those of a dense product with a mask, and what torch asks of an op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops.window_attention import window_attention, window_attention_backward_op, window_attention_op
from tests.max_sim_oracle import forced
from tests.tolerances import assert_close
from tests.window_attention_oracle import BACKENDS, DTYPES, NAN, boxes, dense, random_case, run

per_backend = pytest.mark.parametrize("backend", BACKENDS)
with_and_without_own = pytest.mark.parametrize("own", [True, False], ids=["own", "no own"])


def floating(case: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in case.items() if name in ("q", "k", "v", "own_k", "own_v")}


def gradients(attention: Any, case: dict[str, Any], upstream: Tensor) -> dict[str, Tensor]:
    """Gradients of ⟨upstream, attention(case)⟩ by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in floating(case).items()}
    out = attention({**case, **leaves})
    found = torch.autograd.grad(out, list(leaves.values()), upstream)
    return dict(zip(leaves, found, strict=True))


@per_backend
@with_and_without_own
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "single"])
def test_gradients(backend: str, own: bool, dtype: torch.dtype, shared: bool) -> None:
    case = random_case(2, 5, 2, 17, (4, 7), dtype=dtype, own=own, shared=shared)
    upstream = torch.randn(case["q"].shape).to(dtype)
    wide = {name: x.double() if name in floating(case) else x for name, x in case.items()}
    got = gradients(lambda c: run(backend, c), case, upstream)
    wanted = gradients(lambda c: dense(**c), wide, upstream.double())
    for name, expected in wanted.items():
        assert got[name].dtype == dtype
        assert_close(got[name], expected, dtype=dtype, scale=5, what=name)


@per_backend
def test_gradients_of_long_heads(backend: str) -> None:
    case = random_case(1, 3, 1, 136, (2, 5))
    upstream = torch.randn(case["q"].shape)
    wide = {name: x.double() if name in floating(case) else x for name, x in case.items()}
    got = gradients(lambda c: run(backend, c), case, upstream)
    wanted = gradients(lambda c: dense(**c), wide, upstream.double())
    for name, expected in wanted.items():
        assert_close(got[name], expected, dtype=torch.float32, scale=10, what=name)


@per_backend
@with_and_without_own
def test_cells_that_no_window_sees_get_exactly_zero(backend: str, own: bool) -> None:
    case = random_case(2, 3, 2, 6, (3, 5), own=own)
    case["windows"] = boxes((1, 0, 3, 2), (0, 0, 0, 3), (2, 1, 4, 3))
    seen = torch.zeros(3, 5, dtype=torch.bool)
    seen[0:2, 1:3] = seen[1:3, 2:4] = True
    for name in ("k", "v"):
        case[name][:, ~seen.flatten()] = NAN
    found = gradients(lambda c: run(backend, c), case, torch.randn(case["q"].shape))
    for name in ("k", "v"):
        assert (found[name][:, ~seen.flatten()] == 0).all() and (found[name][:, seen.flatten()] != 0).all()
    assert all(x.isfinite().all() for x in found.values())
    # Where its own is all that a window sees, its weight is 1 whatever the query.
    assert found["q"][:, 1].abs().max() < 1e-6


@per_backend
def test_a_windows_nan_stays_off_the_cells_of_others(backend: str) -> None:
    case = random_case(1, 2, 1, 4, (2, 4))
    case["windows"] = boxes((0, 0, 2, 2), (1, 0, 4, 2))
    case["q"][:, 0] = NAN
    found = gradients(lambda c: run(backend, c), case, torch.randn(case["q"].shape))
    first = torch.tensor([[True, True, False, False]] * 2).flatten()
    for name in ("k", "v"):
        assert found[name][:, first].isnan().all() and found[name][:, ~first].isfinite().all()
    assert found["q"][:, 1].isfinite().all() and found["own_k"][:, 1].isfinite().all()


@per_backend
def test_reproducible_whatever_the_threads(backend: str) -> None:
    case = random_case(2, 5, 2, 6, (3, 4)) if backend == "triton" else random_case(8, 40, 4, 32, (8, 8))
    upstream = torch.randn(case["q"].shape)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3, 3):
        torch.set_num_threads(threads)
        try:
            results.append((run(backend, case), *gradients(lambda c: run(backend, c), case, upstream).values()))
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, results[1], results[2]))
    if backend.startswith("cpp"):
        assert all(map(torch.equal, results[0], results[1]))


@per_backend
def test_a_shared_query_learns(backend: str) -> None:
    """A pooling head: one query for all images and windows, no own key; a few steps lower the loss."""
    case = random_case(3, 4, 2, 5, (3, 3), own=False)
    del case["q"]
    query = torch.zeros(1, 1, 2, 5, requires_grad=True)
    wanted = torch.randn(3, 4, 2, 5)
    losses = []
    for _ in range(3):
        with forced(backend) as name:
            out = window_attention(query.expand(3, 4, -1, -1), **case, backend=name)
        losses.append((out - wanted).square().mean())
        (grad,) = torch.autograd.grad(losses[-1], query)
        query = (query - 0.5 * grad).detach().requires_grad_()
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("own", [True, False], ids=["own", "no own"])
def test_gradcheck(own: bool) -> None:
    case = random_case(2, 3, 2, 3, (2, 3), dtype=torch.float64, own=own)
    leaves = [x.requires_grad_() for x in floating(case).values()]

    def attention(*tensors: Tensor) -> Tensor:
        return window_attention(**{**case, **dict(zip(floating(case), tensors, strict=True))})

    assert torch.autograd.gradcheck(attention, leaves)


# The check itself looks at gradients of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("own, backend", [(True, "cpp"), (False, "cpp"), (True, "reference")])
def test_opcheck(own: bool, backend: str) -> None:
    case = random_case(1, 2, 2, 3, (2, 2), own=own)
    tensors = [case.get(name) for name in ("q", "k", "v", "own_k", "own_v")]
    for x in tensors:
        if x is not None:
            x.requires_grad_()
    rest = (case["windows"], 2, 2, 0.5, backend)
    torch.library.opcheck(window_attention_op, (*tensors, *rest))
    plain = [None if x is None else x.detach() for x in tensors]
    torch.library.opcheck(window_attention_backward_op, (torch.randn(1, 2, 2, 3), *plain, *rest))


def test_compiles_without_a_break() -> None:
    case = random_case(2, 3, 2, 4, (3, 3))
    compiled = torch.compile(lambda c: 2 * window_attention(**c), fullgraph=True, backend="aot_eager")
    upstream = torch.randn(2, 3, 2, 4)
    got, wanted = gradients(compiled, case, upstream), gradients(lambda c: 2 * window_attention(**c), case, upstream)
    assert_close(compiled(case), 2 * window_attention(**case))
    for name, expected in wanted.items():
        assert_close(got[name], expected, what=name)


def test_double_backward_is_refused() -> None:
    case = random_case(1, 1, 1, 2, (1, 2), dtype=torch.float64)
    case["q"].requires_grad_()
    (grad,) = torch.autograd.grad(window_attention(**case).square().sum(), case["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grad.sum().backward()
