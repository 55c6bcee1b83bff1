"""Laws of max-sim that hold whatever the numbers: order, padding, scale, splitting, halves of the symmetric form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.max_sim_oracle import BACKENDS, INF, INTERPRETED, NAN, run
from tests.tolerances import assert_close

Case = dict[str, Any]
per_backend = pytest.mark.parametrize("backend", BACKENDS)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Random sizes, and the random numbers of a drawn seed; masks may keep everything or nothing."""
    n_q, n_d = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    l_q, l_d, dim = draw(st.integers(1, 9)), draw(st.integers(1, 15)), draw(st.integers(1, 20))
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kept = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return {
        "q": torch.randn(n_q, l_q, dim, generator=make),
        "d": torch.randn(n_d, l_d, dim, generator=make),
        "q_mask": torch.rand(n_q, l_q, generator=make) < max(kept, 0.3),
        "d_mask": torch.rand(n_d, l_d, generator=make) < kept,
        "q_weights": torch.rand(n_q, l_q, generator=make),
        "temperature": draw(st.sampled_from([None, 0.2])),
    }


def law(test: Callable[..., None]) -> Callable[..., None]:
    """Run for every backend on drawn cases; fewer under the interpreter, which is slow."""
    drawn = settings(max_examples=2 if INTERPRETED else 15, deadline=None, derandomize=True, database=None)
    return per_backend(drawn(given(case=cases())(test)))


def same(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, dtype=torch.float32, scale=10)


@law
def test_order_of_tokens_is_nothing(backend: str, case: Case) -> None:
    before = run(backend, **case, return_alignment=True)
    p, r = torch.randperm(case["q"].shape[1]), torch.randperm(case["d"].shape[1])
    moved = {name: case[name][:, p] for name in ("q", "q_mask", "q_weights")}
    moved |= {name: case[name][:, r] for name in ("d", "d_mask")}
    after = run(backend, **{**case, **moved}, return_alignment=True)
    same(after.scores, before.scores)
    won = after.argmax >= 0
    # Each token finds the same document token at its new place (there are no ties among random numbers).
    assert_close(torch.where(won, r[after.argmax.clamp(min=0)], -1), before.argmax[:, :, p].long())


@law
def test_order_of_items_is_the_order_of_scores(backend: str, case: Case) -> None:
    p, r = torch.randperm(case["q"].shape[0]), torch.randperm(case["d"].shape[0])
    moved = {name: case[name][p] for name in ("q", "q_mask", "q_weights")}
    moved |= {name: case[name][r] for name in ("d", "d_mask")}
    same(run(backend, **{**case, **moved}).scores, run(backend, **case).scores[p][:, r])


@law
def test_masked_padding_is_nothing(backend: str, case: Case) -> None:
    def padded(x: Tensor, fill: float | bool, n: int) -> Tensor:
        return torch.cat([x, x.new_full((x.shape[0], n, *x.shape[2:]), fill)], 1)

    longer = {
        "q": padded(case["q"], NAN, 2), "q_mask": padded(case["q_mask"], False, 2),
        "q_weights": padded(case["q_weights"], INF, 2),
        "d": padded(case["d"], INF, 3), "d_mask": padded(case["d_mask"], False, 3),
    }  # fmt: skip
    before, after = (run(backend, **{**case, **x}, return_alignment=True) for x in ({}, longer))
    same(after.scores, before.scores)
    assert_close(after.argmax[:, :, : case["q"].shape[1]], before.argmax)
    assert (after.argmax[:, :, case["q"].shape[1] :] == -1).all()


@law
def test_scale_of_queries_scales_scores(backend: str, case: Case) -> None:
    """Powers of two change no digit; the soft form's temperature scales along."""
    before = run(backend, **case).scores
    temperature = case["temperature"] and case["temperature"] * 4
    after = run(backend, **{**case, "q": case["q"] * 4, "temperature": temperature}).scores
    same(after / 4, before)


@law
def test_a_query_split_in_two_adds_up(backend: str, case: Case) -> None:
    cut = case["q"].shape[1] // 2
    whole = run(backend, **case).scores
    parts = []
    for span in (slice(0, cut), slice(cut, None)):
        piece = {name: case[name][:, span] for name in ("q", "q_mask", "q_weights")}
        parts.append(run(backend, **{**case, **piece}).scores)
    same(parts[0] + parts[1], whole)


@law
def test_a_document_split_in_two_is_their_maximum(backend: str, case: Case) -> None:
    cut, tau = case["d"].shape[1] // 2, case["temperature"]
    whole = run(backend, **case, return_alignment=True)
    pieces = []
    for span in (slice(0, cut), slice(cut, None)):
        piece = {name: case[name][:, span] for name in ("d", "d_mask")}
        out = run(backend, **{**case, **piece}, return_alignment=True)
        pieces.append(out.values.masked_fill(out.argmax < 0, -INF))
    both = torch.stack(pieces)
    joined = both.amax(0) if tau is None else tau * (both / tau).logsumexp(0)
    same(joined.masked_fill(whole.argmax < 0, 0), whole.values)


@law
def test_the_reverse_is_the_same_with_sides_exchanged(backend: str, case: Case) -> None:
    weights = torch.rand(case["d"].shape[:2])
    out = run(backend, **case, d_weights=weights, symmetric=True, return_alignment=True)
    turned = run(
        backend, case["d"], case["q"], q_mask=case["d_mask"], d_mask=case["q_mask"], q_weights=weights,
        temperature=case["temperature"], return_alignment=True,
    )  # fmt: skip
    same(out.reverse_scores, turned.scores.T)
    same(out.reverse_values, turned.values.transpose(0, 1))
    assert_close(out.reverse_argmax, turned.argmax.transpose(0, 1))


@law
def test_soft_lies_above_hard_and_tends_to_it(backend: str, case: Case) -> None:
    case = {**case, "q_weights": None}
    hard = run(backend, **{**case, "temperature": None}, return_alignment=True).values
    soft = run(backend, **{**case, "temperature": 0.5}, return_alignment=True).values
    cold = run(backend, **{**case, "temperature": 1e-6}, return_alignment=True).values
    assert (soft >= hard - 1e-4).all()
    assert (soft <= hard + 0.5 * torch.tensor(float(case["d"].shape[1])).log() + 1e-4).all()
    same(cold, hard)
