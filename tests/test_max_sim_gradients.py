"""Gradients of max-sim: against finite differences, between backends, at the edges, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops.max_sim import max_sim, max_sim_pairs
from tests.max_sim_oracle import BACKENDS, DTYPES, NAN, forced
from tests.tolerances import assert_close

COMPILED = [name for name in BACKENDS if name != "reference"]
LEAVES = ("q", "d", "q_weights", "d_weights")


def leaves(pairs: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    n_d = 3 if pairs else 2
    case = {
        "q": torch.randn(3, 4, 5), "d": torch.randn(n_d, 6, 5),
        "q_weights": torch.rand(3, 4) + 0.5, "d_weights": torch.rand(n_d, 6) + 0.5,
    }  # fmt: skip
    return {name: x.to(dtype).requires_grad_() for name, x in case.items()}


def masks(n_d: int) -> dict[str, Tensor]:
    q_mask, d_mask = torch.rand(3, 4) < 0.7, torch.rand(n_d, 6) < 0.7
    d_mask[1] = False  # an empty document among the others
    return {"q_mask": q_mask, "d_mask": d_mask}


def gradients(backend: str, case: dict[str, Tensor], upstream: list[Tensor], **options: Any) -> list[Tensor]:
    """Gradients of the leaves for the given gradients of scores, reverse scores, values, reverse values."""
    op = max_sim_pairs if options.pop("pairs", False) else max_sim
    inputs = [x.detach().requires_grad_() for x in case.values()]
    with forced(backend) as name:
        arguments = dict(zip(case, inputs, strict=True))
        out = op(**arguments, symmetric=True, return_alignment=True, backend=name, **options)
        parts = (out.scores, out.reverse_scores, out.values, out.reverse_values)
        return list(torch.autograd.grad(parts, inputs, upstream))


@pytest.mark.parametrize("temperature", [None, 0.3])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck(temperature: float | None, pairs: bool, masked: bool) -> None:
    case = leaves(pairs)
    op, options = (max_sim_pairs if pairs else max_sim), masks(case["d"].shape[0]) if masked else {}

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        out = op(**dict(zip(case, inputs, strict=True)), temperature=temperature, symmetric=True,
                 return_alignment=True, **options)  # fmt: skip
        return out.scores, out.reverse_scores, out.values, out.reverse_values

    assert torch.autograd.gradcheck(function, tuple(case.values()), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("temperature", [None, 0.3])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backends_agree(backend: str, temperature: float | None, pairs: bool, dtype: torch.dtype) -> None:
    case = leaves(pairs, torch.float32)
    case["q"], case["d"] = (case[name].detach().to(dtype) for name in ("q", "d"))
    n_d = case["d"].shape[0]
    options = {**masks(n_d), "temperature": temperature, "pairs": pairs}
    grid = (3,) if pairs else (3, n_d)
    upstream = [torch.randn(grid), torch.randn(grid), torch.randn(*grid, 4), torch.randn(*grid, 6)]
    got = gradients(backend, case, upstream, **options)
    wanted = gradients("reference", case, upstream, **options)
    for name, actual, expected in zip(case, got, wanted, strict=True):
        assert actual.dtype == expected.dtype, name
        narrow = dtype if name in ("q", "d") else torch.float32
        assert_close(actual, expected, dtype=narrow, scale=5, what=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [None, 0.3])
def test_masked_and_unmatched_tokens_get_exactly_zero(backend: str, temperature: float | None) -> None:
    case = leaves(dtype=torch.float32)
    options = masks(2)
    case["q"].data[~options["q_mask"]] = NAN
    case["d"].data[~options["d_mask"]] = NAN
    upstream = [torch.randn(3, 2), torch.randn(3, 2), torch.randn(3, 2, 4), torch.randn(3, 2, 6)]
    got = gradients(backend, case, upstream, temperature=temperature, **options)
    for name, grad in zip(case, got, strict=True):
        kept = options[f"{name[0]}_mask"]
        assert grad.isfinite().all(), name
        assert (grad[~kept] == 0).all(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_winner_gets_it_all(backend: str) -> None:
    q = torch.ones(1, 1, 2, requires_grad=True)
    d = torch.tensor([[[1.0, 2], [2, 1], [0, -torch.inf]]], requires_grad=True)
    with forced(backend) as name:
        max_sim(q, d, backend=name).sum().backward()
    assert d.grad.tolist() == [[[1, 1], [0, 0], [0, 0]]]  # a tie: the first one
    assert q.grad.tolist() == [[[1, 2]]]  # untouched by the infinity that lost


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [None, 0.3])
def test_reproducible_whatever_the_threads(backend: str, temperature: float | None) -> None:
    sizes = (4, 3, 5, 7, 6) if backend == "triton" else (24, 24, 16, 20, 64)
    q, d = torch.randn(sizes[0], sizes[2], sizes[4]), torch.randn(sizes[1], sizes[3], sizes[4])
    results = []
    before = torch.get_num_threads()
    for threads in (1, 3, 3):
        torch.set_num_threads(threads)
        try:
            q_leaf, d_leaf = q.clone().requires_grad_(), d.clone().requires_grad_()
            with forced(backend) as name:
                max_sim(q_leaf, d_leaf, temperature=temperature, backend=name).square().sum().backward()
        finally:
            torch.set_num_threads(before)
        results.append((q_leaf.grad, d_leaf.grad))
    assert torch.equal(results[1][0], results[2][0]) and torch.equal(results[1][1], results[2][1])
    if backend.startswith("cpp"):
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_is_asked_for(backend: str) -> None:
    case = leaves(dtype=torch.float32)
    with forced(backend) as name:
        alone = max_sim(case["q"], case["d"].detach(), backend=name)
        alone.sum().backward()
        assert case["q"].grad is not None and case["d"].grad is None
        weights = max_sim(case["q"].detach(), case["d"].detach(), q_weights=case["q_weights"], backend=name)
        weights.sum().backward()
        reverse = max_sim(case["q"], case["d"], symmetric=True, backend=name).reverse_scores
        (grad,) = torch.autograd.grad(reverse.sum(), case["d"])
        out = max_sim(case["q"].detach(), case["d"].detach(), return_alignment=True, backend=name)
    assert_close(case["q_weights"].grad, out.values.sum(1), dtype=torch.float32)
    assert grad.abs().sum() > 0 and not out.scores.requires_grad
    assert not out.argmax.requires_grad


def test_double_backward_is_refused() -> None:
    q, d = torch.randn(1, 2, 3, requires_grad=True, dtype=torch.float64), torch.randn(1, 2, 3, dtype=torch.float64)
    (grad,) = torch.autograd.grad(max_sim(q, d).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grad.sum().backward()
