"""Cosine to class centroids: the contract at its edges, gradients and laws, for every backend."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn import functional as F

from engine.ops.centroid import centroid
from tests.max_sim_oracle import BACKENDS, DTYPES, INF, INTERPRETED, NAN, forced
from tests.peak_patch_oracle import centroid_oracle
from tests.tolerances import assert_close

per_backend = pytest.mark.parametrize("backend", BACKENDS)
COMPILED = [name for name in BACKENDS if name != "reference"]


def run(backend: str, queries: Tensor, tokens: Tensor, cu_seqlens: Tensor, **options: Any) -> Tensor:
    with forced(backend) as name:
        return centroid(queries, tokens, cu_seqlens, backend=name, **options)


def check(backend: str, queries: Tensor, tokens: Tensor, cu: Tensor, classes: Tensor, n_classes: int) -> Tensor:
    got = run(backend, queries, tokens, cu, classes=classes, n_classes=n_classes)
    wanted = centroid_oracle(queries, tokens, cu, classes, n_classes)
    assert got.dtype == torch.float32
    assert_close(got, wanted, dtype=tokens.dtype, scale=4)
    return got


def ragged(lengths: list[int]) -> Tensor:
    return F.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0))


@per_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths, dim", [([1], 1), ([3, 0, 70, 1], 5), ([64, 65, 2, 63], 33), ([9, 8], 130)])
def test_sizes(backend: str, dtype: torch.dtype, lengths: list[int], dim: int) -> None:
    cu = ragged(lengths)
    tokens, queries = torch.randn(int(cu[-1]), dim).to(dtype), torch.randn(3, dim).to(dtype)
    for n_classes in (1, 3):
        check(backend, queries, tokens, cu, torch.randint(0, n_classes, (len(lengths),)), n_classes)
    each = torch.arange(len(lengths))
    assert torch.equal(run(backend, queries, tokens, cu), check(backend, queries, tokens, cu, each, len(lengths)))


@per_backend
def test_classes_without_tokens_have_cosine_zero(backend: str) -> None:
    queries, tokens = torch.randn(3, 4), torch.randn(6, 4)
    queries[1] = 0
    tokens[2] = -tokens[1]  # a class whose mean is zero
    cu, classes = torch.tensor([0, 1, 1, 3, 6]), torch.tensor([4, 0, 3, 1])
    got = check(backend, queries, tokens, cu, classes, 5)
    assert (got[:, [0, 2, 3]] == 0).all() and (got[1] == 0).all() and (got[0, [1, 4]] != 0).all()
    got = run(backend, tokens, tokens, cu, q_cu_seqlens=torch.tensor([0, 2, 2, 6]))
    assert (got[1] == 0).all() and got.shape == (3, 4)


@per_backend
def test_nan_and_infinity_stay_in_their_class(backend: str) -> None:
    queries, tokens = torch.randn(3, 4), torch.randn(8, 4)
    queries[2, 0], tokens[1, 2], tokens[4, 0] = NAN, NAN, INF
    cu, classes = torch.tensor([0, 2, 4, 5, 8]), torch.tensor([1, 0, 2, 0])
    got = run(backend, queries, tokens, cu, classes=classes, n_classes=3)
    assert got[:, [1, 2]].isnan().all() and got[2].isnan().all() and got[:2, 0].isfinite().all()
    tokens[4, 0] = 1
    check(backend, queries, tokens, cu, classes, 3)


@per_backend
def test_what_no_class_covers_has_no_influence(backend: str) -> None:
    queries, tokens = torch.randn(2, 4), torch.randn(9, 4)
    cu, classes = torch.tensor([1, 3, 5, 8]), torch.tensor([0, -1, 1])
    before = check(backend, queries, tokens, cu, classes, 2)
    tokens[[0, 3, 4, 8]] = torch.tensor([[NAN], [INF], [NAN], [1e38]])
    assert torch.equal(run(backend, queries, tokens, cu, classes=classes, n_classes=2), before)
    other = torch.tensor([0, 2, 1])  # no class below n_classes either
    assert torch.equal(run(backend, queries, tokens, cu, classes=other, n_classes=2), before)


@per_backend
def test_nothing_at_all(backend: str) -> None:
    queries, tokens, cu = torch.randn(2, 4), torch.randn(0, 4), torch.tensor([0])
    assert run(backend, queries, tokens, cu).shape == (2, 0)
    none = torch.zeros(0, dtype=torch.int64)
    assert run(backend, queries, tokens, cu, classes=none, n_classes=3).tolist() == [[0, 0, 0]] * 2
    assert run(backend, queries[:0], tokens, torch.tensor([0, 0])).shape == (0, 1)
    assert run(backend, queries, tokens, cu, q_cu_seqlens=torch.tensor([0])).shape == (0, 0)


@per_backend
def test_strided_views(backend: str) -> None:
    wide, cu = torch.randn(7, 20), torch.tensor([0, 3, 7])
    queries, classes = torch.randn(2, 12), torch.tensor([0, 1])
    tokens = wide[:, 4:16]
    wanted = check(backend, queries, tokens.contiguous(), cu, classes, 2)
    assert torch.equal(run(backend, queries, tokens, cu), wanted)
    assert torch.equal(run(backend, queries, tokens.T.contiguous().T, cu), wanted)
    spaced = torch.stack([cu, cu], 1)[:, 0]
    assert torch.equal(run(backend, queries, tokens, spaced), wanted)


@per_backend
def test_many_tokens_lose_no_digits(backend: str) -> None:
    n = 2_000 if INTERPRETED else 200_000
    tokens = torch.rand(n, 2) + torch.tensor([3.0, 1.0])
    got = run(backend, torch.tensor([[0.0, 1.0]]), tokens, torch.tensor([0, n]))
    mean = tokens.double().mean(0)
    assert abs(got.item() - float(mean[1] / mean.norm())) < 2e-7


def test_gradcheck() -> None:
    queries, tokens = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 8))
    cu, q_cu, classes = torch.tensor([1, 3, 3, 7]), torch.tensor([0, 2, 2, 4]), torch.tensor([1, 0, 1])
    for options in ({}, {"q_cu_seqlens": q_cu}, {"classes": classes, "n_classes": 3}):
        assert torch.autograd.gradcheck(lambda q, x, o=options: centroid(q, x, cu, **o), (queries, tokens))


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backends_agree_on_gradients(backend: str, dtype: torch.dtype) -> None:
    lengths = [3, 0, 70, 1, 5]
    cu, classes, q_cu = ragged(lengths), torch.tensor([1, 3, 0, -1, 1]), torch.tensor([0, 2, 3])
    tokens, queries, weight = torch.randn(81, 33), torch.randn(4, 33), torch.randn(2, 4)
    results = []
    for name in (backend, "reference"):
        leaves = [x.to(dtype).requires_grad_() for x in (queries, tokens)]
        got = run(name, *leaves, cu, classes=classes, n_classes=4, q_cu_seqlens=q_cu)
        results.append(torch.autograd.grad(got, leaves, weight))
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == dtype
        assert_close(actual, expected, dtype=dtype, scale=2)
    to_queries, to_tokens = results[0]
    assert (to_tokens[[73, 79, 80]] == 0).all() and (to_queries[3] == 0).all() and to_tokens[0].abs().sum() > 0


@per_backend
def test_no_direction_passes_no_gradient(backend: str) -> None:
    queries, tokens = torch.zeros(2, 3), torch.randn(3, 3)
    queries[1] = 1
    tokens[1] = -tokens[0]
    queries.requires_grad_()
    tokens.requires_grad_()
    run(backend, queries, tokens, torch.tensor([0, 2, 3])).sum().backward()
    assert (queries.grad[0] == 0).all() and (tokens.grad[:2] == 0).all()
    assert queries.grad[1].abs().sum() > 0 and tokens.grad[2].abs().sum() > 0


@per_backend
def test_the_similarity_loss_is_that_of_torch(backend: str) -> None:
    """Cross-entropy over two classes at temperature 0.07, tokens of six images concatenated, against plain torch."""
    test, positive, negative = torch.randn(7, 16), torch.randn(30, 16), torch.randn(41, 16)
    leaves = [x.requires_grad_() for x in (test, positive, negative)]
    q, *mu = (F.normalize(x.mean(0), dim=0) for x in leaves)
    wanted = F.cross_entropy(torch.stack([q @ m for m in mu])[None] / 0.07, torch.tensor([0]))
    images = torch.tensor([0, 4, 9, 15, 20, 26, 30, 37, 44, 51, 58, 65, 71])
    cosines = run(
        backend, test, torch.cat([positive, negative]), images, classes=torch.tensor([0] * 6 + [1] * 6), n_classes=2,
        q_cu_seqlens=torch.tensor([0, 7]),
    )  # fmt: skip
    got = F.cross_entropy(cosines / 0.07, torch.tensor([0]))
    assert_close(got, wanted, dtype=torch.float32, scale=10)
    for actual, expected in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        assert_close(actual, expected, dtype=torch.float32, scale=10)


@per_backend
def test_reproducible_whatever_the_threads(backend: str) -> None:
    sizes = (30, 8) if INTERPRETED else (20_000, 64)
    tokens, queries = torch.randn(sizes), torch.randn(5, sizes[1])
    cu, before, results = torch.tensor([0, 7, 20, sizes[0]]), torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            leaf = tokens.clone().requires_grad_()
            got = run(backend, queries, leaf, cu, classes=torch.tensor([1, 0, 1]), n_classes=2)
            got.square().sum().backward()
        finally:
            torch.set_num_threads(before)
        results.append((got.detach(), leaf.grad))
    # The library's product may add in another order with more threads.
    for one, other in zip(*results, strict=True):
        assert_close(one, other, dtype=torch.float32)


@per_backend
@settings(max_examples=3 if INTERPRETED else 15, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**31), dim=st.integers(1, 20),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), n_classes=st.integers(1, 3),
)  # fmt: skip
def test_laws(backend: str, seed: int, dim: int, lengths: list[int], n_classes: int) -> None:
    """Order of tokens, splitting of sets, scale, order of sets."""
    torch.manual_seed(seed)
    cu, total = ragged(lengths), sum(lengths)
    tokens, queries = torch.randn(total, dim), torch.randn(3, dim)
    classes = torch.randint(-1, n_classes, (len(lengths),))
    wanted = run(backend, queries, tokens, cu, classes=classes, n_classes=n_classes)

    def same(actual: Tensor) -> None:
        assert_close(actual, wanted, dtype=torch.float32, scale=50)

    p = torch.cat([cu[s] + torch.randperm(n) for s, n in enumerate(lengths)])
    same(run(backend, queries, tokens[p], cu, classes=classes, n_classes=n_classes))
    halves = [part for n in lengths for part in (n // 2, n - n // 2)]
    twice = classes.repeat_interleave(2)
    same(run(backend, queries, tokens, ragged(halves), classes=twice, n_classes=n_classes))
    same(run(backend, queries * 4, tokens * 0.25, cu, classes=classes, n_classes=n_classes))
    r = torch.randperm(len(lengths))
    moved = torch.cat([tokens[cu[s] : cu[s + 1]] for s in r.tolist()])
    again = ragged([lengths[s] for s in r.tolist()])
    same(run(backend, queries, moved, again, classes=classes[r], n_classes=n_classes))
