"""PeakPatch's corrections of embeddings and scores: the contract at its edges, gradients and laws."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from engine.ops.peak_patch_correct import PairFeatures, peak_patch_correct, peak_patch_pairs
from tests.max_sim_oracle import BACKENDS, DTYPES, INF, INTERPRETED, NAN, forced
from tests.peak_patch_oracle import correct_oracle, far_apart, pairs_oracle, scratch_is_nan
from tests.tolerances import assert_close

per_backend = pytest.mark.parametrize("backend", BACKENDS)
COMPILED = [name for name in BACKENDS if name != "reference"]


def correct(backend: str, f: Tensor, delta: Tensor, alpha: Tensor | float = 0.5) -> Tensor:
    with forced(backend) as name:
        return peak_patch_correct(f, delta, alpha, backend=name)


def pairs(backend: str, image: Tensor, text: Tensor, low: Tensor) -> PairFeatures:
    with forced(backend) as name:
        return peak_patch_pairs(image, text, low, backend=name)


def pair_case(n: int, count: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(n, dim).to(dtype), torch.randn(n, count, dim).to(dtype), torch.randn(n, count, dim).to(dtype)


def check_pairs(backend: str, image: Tensor, text: Tensor, low: Tensor) -> PairFeatures:
    got, wanted = pairs(backend, image, text, low), pairs_oracle(image, text, low)
    for name, actual, expected in zip(PairFeatures._fields, got, wanted, strict=True):
        assert actual.dtype == torch.float32
        assert_close(actual, expected, dtype=image.dtype, what=name)
    return got


@per_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (3, 33), (70, 17), (2, 515)])
def test_corrected_embeddings(backend: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    f, delta = torch.randn(sizes).to(dtype), torch.randn(sizes).to(dtype)
    for step in (delta, delta.float()):
        got = correct(backend, f, step, torch.tensor(0.7))
        assert got.dtype == torch.float32
        assert_close(got, correct_oracle(f, step, 0.7), dtype=dtype)


@per_backend
def test_corrections_at_the_edges(backend: str) -> None:
    f = torch.tensor([[3.0, 0], [1, 2], [NAN, 1], [INF, 1], [1e-13, 0], [0, 0]])
    delta = torch.tensor([[0.0, 4], [-2, -4], [0, 0], [0, 0], [0, 0], [0, -0.0]])
    wanted = torch.tensor([[3 / 13**0.5, 2 / 13**0.5], [0, 0], [NAN, NAN], [NAN, 0], [0, 0], [0, 0]])
    assert_close(correct(backend, f, delta), wanted, dtype=torch.float32)
    assert correct(backend, f[:0], delta[:0]).shape == (0, 2)
    assert correct(backend, f[:, :0], delta[:, :0]).shape == (6, 0)
    assert_close(correct(backend, f[:1], delta[:1], NAN), torch.full((1, 2), NAN))


@per_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 4, 33), (2, 1, 130), (5, 2, 16)])
def test_pairs(backend: str, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    check_pairs(backend, *pair_case(*sizes, dtype))


@per_backend
def test_pairs_at_the_edges(backend: str) -> None:
    image, text, low = pair_case(3, 3, 4)
    image[1] = 0
    text[0, 1, 2], text[2, 0], low[0, 0], low[2, 2, 0] = NAN, 0, 0, NAN
    sims, cross = check_pairs(backend, image, text, low)
    assert (sims[1] == 0).all() and (cross[1] == 0).all() and sims[0, 0, 0] == 0
    assert sims.isnan().sum() == 2 and cross.isnan().sum() == 4
    text[0, 1, 2] = INF
    with_infinity = pairs(backend, image, text, low)
    assert with_infinity.sims[0, 1, 1].isnan() and with_infinity.cross.isnan().sum() == 1
    for empty in ((0, 2, 4), (2, 0, 4), (2, 3, 0)):
        sims, cross = pairs(backend, *pair_case(*empty))
        assert sims.shape == (*empty[:2], 2) and cross.shape == empty and (sims == 0).all()


@per_backend
def test_strides_are_followed(backend: str) -> None:
    image, text, low = pair_case(3, 5, 12)
    every = text[:1].expand(3, 5, 12)
    assert every.stride(0) == 0
    check_pairs(backend, image, every, low.transpose(0, 1).contiguous().transpose(0, 1))
    wanted = pairs(backend, image, text, low)
    turned = pairs(backend, image.T.contiguous().T, text.transpose(1, 2).contiguous().transpose(1, 2), low)
    for one, other in zip(turned, wanted, strict=True):
        assert_close(one, other, dtype=torch.float32)
    wide = torch.randn(4, 30)
    assert_close(
        correct(backend, wide[:, 3:20], wide[:, 10:27]), correct_oracle(wide[:, 3:20], wide[:, 10:27], 0.5),
        dtype=torch.float32,
    )  # fmt: skip


def test_gradcheck() -> None:
    f, delta = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    alpha = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(peak_patch_correct, (f, delta, alpha))
    case = tuple(x.double().requires_grad_() for x in pair_case(3, 2, 4))
    assert torch.autograd.gradcheck(lambda *x: tuple(peak_patch_pairs(*x)), case)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backends_agree_on_gradients(backend: str, dtype: torch.dtype) -> None:
    f, delta, alpha, weight = torch.randn(70, 33), torch.randn(70, 33), torch.tensor(0.7), torch.randn(70, 33)
    f[3], delta[3] = 0, 0
    image, text, low = pair_case(4, 3, 33)
    image[1], text[2, 1], low[0, 0] = 0, 0, 0
    upstream = torch.randn(4, 3, 2), torch.randn(4, 3, 33)
    results = []
    for name in (backend, "reference"):
        leaves = [x.to(dtype).requires_grad_() for x in (f, delta, image, text, low)]
        scale = alpha.clone().requires_grad_()
        out = correct(name, *leaves[:2], scale)
        grads = list(torch.autograd.grad(out, (*leaves[:2], scale), weight))
        results.append(grads + list(torch.autograd.grad(pairs(name, *leaves[2:]), leaves[2:], upstream)))
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype and actual.isfinite().all()
        assert_close(actual, expected, dtype=dtype, scale=20 if dtype == torch.float32 else 2)
    assert (results[0][0][3] == 0).all() and (results[0][3][1] == 0).all() and (results[0][4][2, 1] == 0).all()


@per_backend
def test_only_what_is_asked_for(backend: str) -> None:
    f, delta, alpha = torch.randn(2, 3), torch.randn(2, 3, requires_grad=True), torch.tensor([0.5], requires_grad=True)
    correct(backend, f, delta, alpha).sum().backward()
    assert f.grad is None and delta.grad is not None and alpha.grad is not None and alpha.grad.shape == (1,)
    assert not correct(backend, f, delta.detach()).requires_grad
    image, text, low = pair_case(2, 3, 4)
    text.requires_grad_()
    pairs(backend, image, text, low).sims.sum().backward()
    assert image.grad is None and low.grad is None and text.grad.abs().sum() > 0


@per_backend
def test_every_output_is_written(backend: str) -> None:
    image, text, low = (x.requires_grad_() for x in pair_case(3, 2, 18))
    results = []
    for memory in (nullcontext(), scratch_is_nan()):
        with memory:
            moved = correct(backend, image, low[:, 0], torch.tensor(0.5))
            sims, cross = pairs(backend, image, text, low)
            loss = moved.exp().sum() + sims.exp().sum() + cross.exp().sum()
            results.append((moved, sims, cross, *torch.autograd.grad(loss, (image, text, low))))
            results[-1] += tuple(pairs(backend, *pair_case(2, 3, 0)))
    assert all(map(torch.equal, *results))


@per_backend
def test_more_than_two_to_the_31_elements(backend: str, tmp_path: Path) -> None:
    """Rows so far apart that 32 bits cannot tell where they are, forward and backward."""

    def results(image: Tensor, text: Tensor, low: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.requires_grad_() for x in (image, text, low)]
        moved = correct(backend, image, low[:, 0])
        sims, cross = pairs(backend, image, text, low)
        return moved, sims, cross, *torch.autograd.grad((moved.sin() + sims.sum() + cross.sum(1).sin()).sum(), leaves)

    case = pair_case(2, 3, 8, torch.float16 if INTERPRETED else torch.bfloat16)
    wanted = results(*(x.clone() for x in case))
    for place, near in enumerate(case):
        (tmp_path / str(place)).mkdir()
        far = far_apart(tmp_path / str(place), tuple(near.shape), 2**31 + 64).view(near.dtype)
        far.copy_(near)
        for got, expected in zip(results(*case[:place], far, *case[place + 1 :]), wanted, strict=True):
            assert torch.equal(got, expected)


@per_backend
def test_reproducible_whatever_the_threads(backend: str) -> None:
    n = 8 if INTERPRETED else 3000
    case, before, results = pair_case(n, 4, 96), torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            image, text, low = (x.clone().requires_grad_() for x in case)
            alpha = torch.tensor(0.3, requires_grad=True)
            moved = correct(backend, image, low[:, 0], alpha)
            sims, cross = pairs(backend, image, text, low)
            (moved.sum() + sims.square().sum() + cross.exp().sum()).backward()
        finally:
            torch.set_num_threads(before)
        results.append((moved, sims, cross, image.grad, text.grad, low.grad))
    if backend != "reference":
        assert all(map(torch.equal, *results))
    for one, other in zip(*results, strict=True):
        assert_close(one, other, dtype=torch.float32, scale=10)


@per_backend
@settings(max_examples=3 if INTERPRETED else 15, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 4), count=st.integers(1, 4), dim=st.integers(1, 40))
def test_laws(backend: str, seed: int, n: int, count: int, dim: int) -> None:
    """Lengths of the inputs change no pair; pairs do not see each other; corrected rows have length 1."""
    torch.manual_seed(seed)
    image, text, low = pair_case(n, count, dim)
    sims, cross = pairs(backend, image, text, low)
    scaled = pairs(backend, image * 4, text * 0.5, low * 8)
    assert_close(scaled.sims, sims, dtype=torch.float32)
    assert_close(cross.sum(-1), sims[..., 1], dtype=torch.float32)
    alone = pairs(backend, image[-1:], text[-1:, -1:], low[-1:, -1:])
    assert torch.equal(alone.sims[0, 0], sims[-1, -1]) and torch.equal(alone.cross[0, 0], cross[-1, -1])
    moved = correct(backend, image, low[:, 0], 0.5)
    assert_close(moved.norm(dim=-1), torch.ones(n), dtype=torch.float32)
    assert_close(correct(backend, image * 2, low[:, 0] * 2, 0.5), moved, dtype=torch.float32)
    assert_close(correct(backend, moved, low[:, 0], 0.0), moved, dtype=torch.float32)
