"""PeakPatch's caption features: the contract at its edges, gradients and laws, for every backend."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from engine.ops.peak_patch import peak_patch_pool_op
from tests.max_sim_oracle import BACKENDS, DTYPES, INF, INTERPRETED, NAN, forced
from tests.peak_patch_oracle import arguments, pool_case, pool_oracle
from tests.tolerances import assert_close

per_backend = pytest.mark.parametrize("backend", BACKENDS)
COMPILED = [name for name in BACKENDS if name != "reference"]


def pool(backend: str, case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    with forced(backend) as name:
        return peak_patch_pool_op(*arguments(case), True, name)


def check(backend: str, case: dict[str, Any], scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Run, compare with the loops, return the result; the plain call must give the very same pooled vectors."""
    got, wanted = pool(backend, case), pool_oracle(**case)
    dtype = case["peak"].dtype
    for name, actual, expected in zip(("pooled", "attention"), got, wanted, strict=True):
        assert actual.dtype == torch.float32
        assert_close(actual, expected, dtype=dtype, scale=scale, what=name)
    with forced(backend) as name:
        plain, nothing = peak_patch_pool_op(*arguments(case), False, name)
    assert nothing.shape == (0,)
    assert_close(plain, got[0], dtype=torch.float64, what="without the attention")
    return got


@per_backend
@pytest.mark.parametrize("sizes", [
    (1, 1, 1, 1), (2, 3, 5, 1), (3, 15, 33, 3), (2, 17, 64, 8), (2, 65, 40, 8), (1, 33, 130, 2), (2, 5, 16, 17),
])  # fmt: skip
@pytest.mark.parametrize("norm", [False, True])
def test_sizes(backend: str, sizes: tuple[int, int, int, int], norm: bool) -> None:
    check(backend, pool_case(*sizes, norm=norm), scale=4)


@per_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [
    {}, {"norm": True}, {"dropped": True}, {"single": True, "norm": True}, {"dropped": True, "norm": True},
])  # fmt: skip
def test_options(backend: str, dtype: torch.dtype, options: dict[str, bool]) -> None:
    check(backend, pool_case(3, 9, 24, 4, dtype, **options), scale=4)


@per_backend
def test_masked_tokens_have_no_influence(backend: str) -> None:
    for norm in (False, True):
        case = pool_case(3, 6, 10, 2, norm=norm, dropped=True)
        case["end"] = case["mask"].int().argmax(1)
        case["mask"][:, 3] = False
        before = check(backend, case, scale=4)
        masked = ~case["mask"]
        case["peak"][masked] = torch.tensor([NAN, INF, -INF, 1e38, 0, 1, 2, 3, 4, 5])
        case["factors"][masked[:, None].expand(3, 2, 6)] = NAN
        after = pool(backend, case)
        assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
        assert (after[1][masked[:, None].expand(3, 2, 6)] == 0).all()


@per_backend
@pytest.mark.parametrize("norm", [False, True])
def test_nothing_kept_and_no_end_are_zeros(backend: str, norm: bool) -> None:
    case = pool_case(4, 5, 6, 2, norm=norm)
    case["mask"][1] = False
    case["end"] = torch.tensor([-1, 2, 5, -7])
    case["peak"][1, 0] = NAN
    pooled, attention = check(backend, case, scale=4)
    assert (pooled[1, :3] == 0).all() and (attention[1] == 0).all()
    assert pooled[1, 3:].abs().sum(1).gt(0).all()  # the end is taken whether masked or not
    assert (pooled[[0, 2, 3], 3:] == 0).all()
    single = {**case, "anchor": torch.randn(4, 6)}
    check(backend, single, scale=4)


@per_backend
@pytest.mark.parametrize("norm", [False, True])
def test_nan_stays_in_its_caption(backend: str, norm: bool) -> None:
    case = pool_case(3, 4, 6, 2, norm=norm)
    case["mask"][:] = True
    case["end"][:] = 0
    case["peak"][1, 2, 3] = NAN
    pooled, attention = check(backend, case, scale=4)
    assert pooled[1, :2].isnan().all() and attention[1].isnan().all()
    assert pooled[1, 2].isnan().sum() == (6 if norm else 1)
    assert pooled[[0, 2]].isfinite().all() and pooled[1, 3:].isfinite().all()


@per_backend
@pytest.mark.parametrize("values", [(INF, 1), (-INF, -INF), (-INF, 1), (1, INF), (NAN, NAN), (INF, -INF)])
def test_infinities_follow_ieee(backend: str, values: tuple[float, float]) -> None:
    case = pool_case(1, 2, 1, 1)
    case["peak"] = torch.tensor(values).reshape(1, 2, 1)
    case["keys"], case["mask"] = torch.ones(1, 1), torch.ones(1, 2, dtype=torch.bool)
    check(backend, case)


@per_backend
def test_no_captions_no_tokens(backend: str) -> None:
    pooled, attention = pool(backend, pool_case(0, 4, 6, 2))
    assert pooled.shape == (0, 5, 6) and attention.shape == (0, 2, 4)
    case = pool_case(2, 0, 6, 2)
    case["end"] = torch.tensor([0, -1])
    pooled, attention = pool(backend, case)
    assert (pooled == 0).all() and pooled.shape == (2, 5, 6) and attention.shape == (2, 2, 0)


@per_backend
def test_strided_views(backend: str) -> None:
    case = pool_case(3, 5, 8, 2, norm=True)
    wanted = pool(backend, case)[0]
    wide = torch.full((5, 3, 20), NAN)
    wide[..., 4:12] = case["peak"].transpose(0, 1)
    case["peak"] = wide.transpose(0, 1)[..., 4:12]
    case["anchor"] = case["anchor"].transpose(1, 2).contiguous().transpose(1, 2)
    case["keys"] = case["keys"].T.contiguous().T
    case["mask"] = case["mask"].T.contiguous().T
    assert torch.equal(pool(backend, case)[0], wanted)
    case["peak"] = case["peak"][:1].expand(3, 5, 8)
    check(backend, case, scale=4)


def gradients(backend: str, case: dict[str, Any], upstream: tuple[Tensor, Tensor]) -> list[Tensor]:
    names = ("peak", "anchor", "keys")
    leaves = [case[name].detach().clone().requires_grad_() for name in names]
    outputs = pool(backend, {**case, **dict(zip(names, leaves, strict=True))})
    return list(torch.autograd.grad(outputs, leaves, upstream))


def upstream_of(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    n, length, width = case["peak"].shape
    heads = case["keys"].shape[0]
    return torch.randn(n, heads + 3, width), torch.randn(n, heads, length)


OPTIONS: list[dict[str, bool]] = [{}, {"norm": True}, {"norm": True, "dropped": True, "single": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck(options: dict[str, bool]) -> None:
    case = pool_case(3, 4, 5, 2, torch.float64, **options)
    case["mask"][1] = False
    case["end"][2] = -1
    leaves = tuple(case[name].double().requires_grad_() for name in ("peak", "anchor", "keys"))
    _, _, _, *rest = arguments(case)
    rest = [x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in rest]
    assert torch.autograd.gradcheck(
        lambda *x: peak_patch_pool_op(*x, *rest, True, "reference"), leaves, atol=1e-6, fast_mode=True
    )


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_backends_agree_on_gradients(backend: str, dtype: torch.dtype, options: dict[str, bool]) -> None:
    # More captions than one chunk, more elements than one block.
    for sizes in ((17, 2, 6, 2), (2, 20, 130, 4)) if INTERPRETED else ((35, 3, 10, 2), (2, 20, 130, 8), (2, 5, 24, 4)):
        case = pool_case(*sizes, dtype, **options)
        case["mask"][1] = False
        case["end"][0] = -1
        upstream = upstream_of(case)
        got, wanted = gradients(backend, case, upstream), gradients("reference", case, upstream)
        for name, actual, expected in zip(("peak", "anchor", "keys"), got, wanted, strict=True):
            assert actual.dtype == expected.dtype
            # Tokens' gradients are rounded to their dtype on both sides.
            assert_close(actual, expected, dtype=dtype, scale=20 if dtype == torch.float32 else 2, what=name)


@per_backend
def test_masked_tokens_get_exactly_zero(backend: str) -> None:
    case = pool_case(3, 6, 10, 2, norm=True, dropped=True)
    case["end"][:] = 0
    masked = ~case["mask"]
    case["peak"][masked] = NAN
    case["factors"][masked[:, None].expand(3, 2, 6)] = NAN
    pooled, attention = upstream_of(case)
    attention[masked[:, None].expand(3, 2, 6)] = NAN
    to_peak, to_anchor, to_keys = gradients(backend, case, (pooled, attention))
    assert (to_peak[masked] == 0).all() and to_peak.isfinite().all() and to_keys.isfinite().all()
    assert (to_anchor[:, 1:] == 0).all() and to_anchor[:, 0].abs().sum(1).gt(0).all()


@per_backend
def test_reproducible_whatever_the_threads(backend: str) -> None:
    case = pool_case(*((5, 6, 16, 2) if INTERPRETED else (100, 77, 64, 8)), norm=True)
    upstream = upstream_of(case)
    before, results = torch.get_num_threads(), []
    for threads in (1, 3, 3):
        torch.set_num_threads(threads)
        try:
            results.append([*pool(backend, case), *gradients(backend, case, upstream)])
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, results[1], results[2]))
    if backend != "reference":
        assert all(map(torch.equal, results[0], results[1]))


@per_backend
@settings(max_examples=3 if INTERPRETED else 12, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**31), norm=st.booleans(), length=st.integers(1, 12), width=st.integers(2, 20))
def test_laws(backend: str, seed: int, norm: bool, length: int, width: int) -> None:
    """Order of tokens, padding, order of captions, and a key that is the same for all."""
    torch.manual_seed(seed)
    case = pool_case(3, length, width, 2, norm=norm)
    wanted, attention = pool(backend, case)
    p = torch.randperm(length)
    moved = {**case, **{name: case[name][:, p] for name in ("peak", "anchor", "mask")}}
    moved["end"] = p.argsort()[case["end"]]
    got, other = pool(backend, moved)
    assert_close(got, wanted, dtype=torch.float32, scale=10)
    assert_close(other, attention[..., p], dtype=torch.float32, scale=10)

    longer = {**case, "mask": torch.cat([case["mask"], torch.zeros(3, 2, dtype=torch.bool)], 1)}
    for name in ("peak", "anchor"):
        longer[name] = torch.cat([case[name], torch.full((3, 2, width), NAN)], 1)
    assert_close(pool(backend, longer)[0], wanted, dtype=torch.float32, scale=10)

    r = torch.randperm(3)
    turned = {**case, **{name: case[name][r] for name in ("peak", "anchor", "mask", "end")}}
    assert_close(pool(backend, turned)[0], wanted[r], dtype=torch.float32, scale=10)

    even = pool(backend, {**case, "keys": torch.zeros(2, width)})[0]
    assert_close(even[:, 0], even[:, 2], dtype=torch.float32, scale=10)
    assert_close(attention.sum(-1), torch.ones(3, 2), dtype=torch.float32)
