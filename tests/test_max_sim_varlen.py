"""Max-sim on packed tokens: every backend against plain loops over items, at the edges, and its laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from engine.ops.max_sim import max_sim
from engine.ops.max_sim_varlen import max_sim_varlen
from engine.reference import max_sim_varlen as reference
from tests.max_sim_oracle import BACKENDS, DTYPES, INF, INTERPRETED, NAN, assert_matches, forced
from tests.max_sim_varlen_oracle import bounds_of, check, random_case, run, spans
from tests.tolerances import assert_close

Case = dict[str, Any]
per_backend = pytest.mark.parametrize("backend", BACKENDS)
hard_and_soft = pytest.mark.parametrize("temperature", [None, 0.07])

SIDES = [
    ((2, 5), [3, 0, 7, 1]),
    ([4, 1, 0, 9], (3, 6)),
    ([2, 70, 1], [13, 0, 0, 66, 1]),
    ([1], [1]),
    ([0, 0], [0]),
    ((1, 3), [0, 2]),
]


@per_backend
@hard_and_soft
@pytest.mark.parametrize("q, d", SIDES, ids=str)
def test_ragged_items(backend: str, temperature: float | None, q: Any, d: Any) -> None:
    if INTERPRETED and q == [2, 70, 1]:
        q, d = [2, 17, 1], [3, 0, 0, 9]
    case = random_case(q, d, 9, beyond=2)
    for name in ("q", "d"):
        if f"{name}_cu_seqlens" in case:
            case[name][-2:] = NAN  # rows of no item
    got = check(backend, case, temperature)
    assert got.scores.isfinite().all()


@per_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(backend: str, dtype: torch.dtype) -> None:
    check(backend, random_case([3, 6, 0, 2], [5, 1, 8], 17, dtype))
    check(backend, random_case((2, 3), [5, 0, 8], 6, dtype), 0.1)


def test_float64_keeps_its_precision() -> None:
    case = random_case([3, 0, 2], [5, 1, 8], 7, torch.float64)
    case["q_weights"], case["d_weights"] = case["q_weights"].double(), case["d_weights"].double()
    for temperature in (None, 0.1):
        check("auto", case, temperature)


@per_backend
@pytest.mark.parametrize("q, d", [((0, 3), [2, 1]), ([], [2, 1]), ((2, 3), []), ([2], []), ([], [])], ids=str)
def test_no_items(backend: str, q: Any, d: Any) -> None:
    case = random_case(q, d, 4, beyond=1)
    got = run(backend, **case, symmetric=True, return_alignment=True)
    numbers = [len(x) if isinstance(x, list) else x[0] for x in (q, d)]
    assert got.scores.shape == got.reverse_scores.shape == tuple(numbers)
    if isinstance(d, list):
        assert got.reverse_argmax.shape == (numbers[0], sum(d) + 1) and (got.reverse_argmax == -1).all()
    if isinstance(q, list):
        assert got.argmax.shape == (sum(q) + 1, numbers[1]) and (got.values == 0).all()


@per_backend
@hard_and_soft
@pytest.mark.parametrize("q, d", [((0, 3), [2, 1]), ([], [2, 1]), ((2, 3), []), ([], [])], ids=str)
def test_no_items_pass_no_gradient(backend: str, temperature: float | None, q: Any, d: Any) -> None:
    case = random_case(q, d, 4, beyond=1)
    for grad in gradients(backend, case, upstream_of(case), temperature=temperature):
        assert (grad == 0).all()


@per_backend
@hard_and_soft
def test_special_values_stay_in_their_item(backend: str, temperature: float | None) -> None:
    q = torch.tensor([[[1.0], [0.5]]])
    d = torch.tensor([2, NAN, 4, -INF, -INF, -3, INF, 1, NAN])[:, None]
    bounds = torch.tensor([0, 1, 3, 5, 6, 8, 8])
    got = check(backend, {"q": q, "d": d, "d_cu_seqlens": bounds}, temperature)
    assert got.scores[0, 0].isfinite() and got.scores[0, 1].isnan() and got.scores[0, 2] == -INF
    assert got.scores[0, 4] == INF and got.scores[0, 5] == 0 and got.argmax[0, 5].tolist() == [-1, -1]
    if temperature is None:
        assert got.argmax[0, :5, 0].tolist() == [0, 0, 0, 0, 0]
    check(backend, {"q": d, "q_cu_seqlens": bounds, "d": q}, temperature)


@per_backend
@hard_and_soft
def test_an_item_of_masked_tokens_is_empty(backend: str, temperature: float | None) -> None:
    case = random_case([3, 2, 4], [2, 5, 3], 6)
    case["q_mask"][3:5], case["d_mask"][2:7] = False, False
    case["q"][3:5], case["d"][2:7] = INF, NAN
    case["q_weights"][3:5] = NAN
    got = check(backend, case, temperature)
    assert (got.scores[1] == 0).all() and (got.scores[:, 1] == 0).all() and got.scores.isfinite().all()
    assert (got.argmax[3:5] == -1).all() and (got.argmax[:, 1] == -1).all()


@per_backend
def test_boundaries_of_either_integer_type_and_any_stride(backend: str) -> None:
    case = random_case([3, 0, 2], [1, 4, 2], 12)
    wanted = check(backend, case).scores
    narrow = {name: case[name].int() for name in ("q_cu_seqlens", "d_cu_seqlens")}
    spaced = {name: torch.stack([case[name]] * 2, 1)[:, 0] for name in narrow}
    tokens = {"q": case["q"].T.contiguous().T, "d": torch.randn(14, 24)[::2, ::2].copy_(case["d"][:7])}
    weights = {"d_weights": torch.stack([case["d_weights"]] * 2, 1)[:, 1]}
    for change in (narrow, spaced, tokens, weights):
        assert torch.equal(run(backend, **{**case, **change}, symmetric=True).scores, wanted)


def test_more_than_one_block_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case([3, 0, 7, 2, 1], [5, 1, 0, 9, 2, 2], 6, beyond=1)
    case = {name: x.double() if x.is_floating_point() else x for name, x in case.items()}
    leaves = [case[name].requires_grad_() for name in ("q", "d", "q_weights", "d_weights")]
    results = []
    for rows in (2**16, 8, 1):
        monkeypatch.setattr(reference, "BLOCK_ROWS", rows)
        out = run("reference", **case, temperature=0.3, symmetric=True, return_alignment=True)
        total = out.scores.exp().sum() + out.reverse_scores.exp().sum() + out.values.sum() + out.reverse_values.sum()
        results.append((*out, *torch.autograd.grad(total, leaves)))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert_close(one, two)


@per_backend
def test_one_long_item_among_short_ones(backend: str) -> None:
    """Several chunks of rows, and queries that fill more than one panel, against the reference."""
    lengths = ([3, 40, 1, 9], [2, 130, 1]) if INTERPRETED else ([3, 140, 1, 90, 7], [2, 1500, 1, 0, 600])
    case = random_case(*lengths, 10)
    for temperature in (None, 0.2):
        options = {**case, "temperature": temperature, "symmetric": True, "return_alignment": True}
        got, wanted = run(backend, **options), run("reference", **options)
        assert_matches(got, wanted, torch.float32, scale=20)


def gradients(backend: str, case: Case, upstream: list[Tensor], **options: Any) -> list[Tensor]:
    """Gradients of tokens and weights for given gradients of scores, reverse scores, values and reverse values."""
    leaves = {name: case[name].detach().requires_grad_() for name in ("q", "d", "q_weights", "d_weights")}
    out = run(backend, **{**case, **leaves}, symmetric=True, return_alignment=True, **options)
    parts = (out.scores, out.reverse_scores, out.values, out.reverse_values)
    return list(torch.autograd.grad(parts, list(leaves.values()), upstream))


def upstream_of(case: Case) -> list[Tensor]:
    out = run("reference", **case, symmetric=True, return_alignment=True)
    return [torch.randn(x.shape) for x in (out.scores, out.reverse_scores, out.values, out.reverse_values)]


@pytest.mark.parametrize("q, d", [([3, 0, 2], [4, 1, 0, 2]), ((2, 3), [4, 0, 2]), ([2, 3], (2, 4))], ids=str)
@pytest.mark.parametrize("temperature", [None, 0.3])
def test_gradcheck(q: Any, d: Any, temperature: float | None) -> None:
    case = random_case(q, d, 5, torch.float64, beyond=1)
    case["q_weights"], case["d_weights"] = case["q_weights"].double() + 0.5, case["d_weights"].double() + 0.5
    names = ("q", "d", "q_weights", "d_weights")

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        given = {**case, **dict(zip(names, leaves, strict=True))}
        out = max_sim_varlen(**given, temperature=temperature, symmetric=True, return_alignment=True)
        return out.scores, out.reverse_scores, out.values, out.reverse_values

    leaves = tuple(case[name].requires_grad_() for name in names)
    assert torch.autograd.gradcheck(function, leaves, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@hard_and_soft
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_agree(backend: str, temperature: float | None, dtype: torch.dtype) -> None:
    for q, d in (([3, 0, 6, 2], [4, 1, 0, 9]), ((2, 3), [4, 0, 2]), ([2, 3], (2, 4))):
        case = random_case(q, d, 18, dtype, beyond=2)
        upstream = upstream_of(case)
        got = gradients(backend, case, upstream, temperature=temperature)
        wanted = gradients("reference", case, upstream, temperature=temperature)
        for k, (actual, expected) in enumerate(zip(got, wanted, strict=True)):
            assert_close(actual, expected, dtype=dtype if k < 2 else torch.float32, scale=5, what=f"leaf {k}")


@per_backend
@hard_and_soft
def test_masked_tokens_and_rows_of_no_item_get_exactly_zero(backend: str, temperature: float | None) -> None:
    case = random_case([3, 0, 2], [4, 1, 2], 5, beyond=2)
    upstream = upstream_of(case)
    kept = {}
    for name in ("q", "d"):
        kept[name] = case[f"{name}_mask"].clone()
        kept[name][-2:] = False
        case[name][~kept[name]] = NAN
    got = gradients(backend, case, upstream, temperature=temperature)
    for grad, name in zip(got, ("q", "d", "q", "d"), strict=True):
        assert grad.isfinite().all() and (grad[~kept[name]] == 0).all()
        assert grad[kept[name]].abs().sum() > 0


@per_backend
def test_scores_alone_have_gradients_and_reproduce(backend: str) -> None:
    case = random_case([3, 5, 1], [4, 7, 2, 6], 8)
    del case["d_weights"]

    def grads(name: str) -> tuple[Tensor, ...]:
        q, d, w = (case[x].clone().requires_grad_() for x in ("q", "d", "q_weights"))
        scores = run(name, **{**case, "q": q, "d": d, "q_weights": w}).scores
        return torch.autograd.grad(scores.logsumexp(1).sum(), (q, d, w))

    once, again, wanted = grads(backend), grads(backend), grads("reference")
    assert all(map(torch.equal, once, again))
    for actual, expected in zip(once, wanted, strict=True):
        assert_close(actual, expected, dtype=torch.float32, scale=5)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@hard_and_soft
def test_gradients_of_items_of_several_blocks(backend: str, temperature: float | None) -> None:
    """Items longer than a program's rows among shorter ones and empty ones, on both sides."""
    lengths = ([0, 35, 2], [1, 0, 40, 0]) if INTERPRETED else ([0, 150, 2, 65, 0], [1, 0, 170, 0, 64, 129])
    case = random_case(*lengths, 33, beyond=3)
    case["q"][-3:], case["d"][-3:] = NAN, INF
    upstream = upstream_of(case)
    got, wanted = (gradients(name, case, upstream, temperature=temperature) for name in (backend, "reference"))
    for k, (actual, expected) in enumerate(zip(got, wanted, strict=True)):
        assert_close(actual, expected, dtype=torch.float32, scale=20, what=f"leaf {k}")
        assert (actual[-3:] == 0).all()


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@hard_and_soft
@pytest.mark.parametrize("bad", [NAN, INF])
def test_gradients_that_are_not_finite_stay_in_their_items(backend: str, temperature: float | None, bad: float) -> None:
    case = random_case([2, 3, 0], [4, 1, 5], 6)
    case["q_mask"][:], case["d_mask"][:] = True, True
    for name in ("q", "d"):
        case[name] = case[name].abs() + 0.1
    case["d"][6, 2] = bad  # of the third document
    case["q"][1, 4] = bad  # of the first query
    upstream = upstream_of(case)
    upstream[2:] = [torch.zeros_like(x) for x in upstream[2:]]
    got, wanted = (gradients(name, case, upstream, temperature=temperature)[:2] for name in (backend, "reference"))
    for actual, expected in zip(got, wanted, strict=True):
        assert torch.equal(actual.isnan(), expected.isnan())
        assert_close(actual, expected, dtype=torch.float32, scale=20)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, list[int], list[int]]:
    lengths = st.lists(st.integers(0, 9), min_size=1, max_size=5)
    q, d, dim = draw(lengths), draw(lengths), draw(st.integers(1, 12))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    case = random_case(q, d, dim, beyond=draw(st.integers(0, 2)))
    del case["d_weights"]
    return {**case, "temperature": draw(st.sampled_from([None, 0.2]))}, q, d


def law(test: Any) -> Any:
    """Run for every backend on drawn cases; fewer under the interpreter, which is slow."""
    drawn = settings(max_examples=2 if INTERPRETED else 20, deadline=None, derandomize=True, database=None)
    return per_backend(drawn(given(drawn=cases())(test)))


def padded(x: Tensor, lengths: list[int], fill: float | bool) -> Tensor:
    to = x.new_full((len(lengths), max(lengths), *x.shape[1:]), fill)
    for i, part in enumerate(x[: sum(lengths)].split(lengths)):
        to[i, : lengths[i]] = part
    return to


@law
def test_packed_is_padded_with_masks(backend: str, drawn: Any) -> None:
    case, q, d = drawn
    got = run(backend, **case, return_alignment=True)
    with forced(backend) as name:
        wanted = max_sim(
            padded(case["q"], q, NAN), padded(case["d"], d, INF),
            q_mask=padded(case["q_mask"], q, False), d_mask=padded(case["d_mask"], d, False),
            q_weights=padded(case["q_weights"], q, NAN), temperature=case["temperature"], return_alignment=True,
            backend=name,
        )  # fmt: skip
    assert_close(got.scores, wanted.scores, dtype=torch.float32, scale=10)
    for i, (begin, end) in enumerate(spans(case["q_cu_seqlens"])):
        assert_close(got.argmax[begin:end].T, wanted.argmax[i, :, : end - begin])


@law
def test_order_of_items_is_the_order_of_scores(backend: str, drawn: Any) -> None:
    case, q, d = drawn
    p, r = torch.randperm(len(q)), torch.randperm(len(d))
    moved = dict(case)
    for name, lengths, order in (("q", q, p), ("d", d, r)):
        for field in (x for x in (name, f"{name}_mask", f"{name}_weights") if x in case):
            parts = case[field][: sum(lengths)].split(lengths)
            moved[field] = torch.cat([parts[k] for k in order.tolist()])
        moved[f"{name}_cu_seqlens"] = bounds_of([lengths[k] for k in order.tolist()])
    assert_close(run(backend, **moved).scores, run(backend, **case).scores[p][:, r], dtype=torch.float32, scale=10)


@law
def test_queries_cut_in_two_add_up(backend: str, drawn: Any) -> None:
    case, q, _ = drawn
    halves = {**case, "q_cu_seqlens": bounds_of([part for n in q for part in (n // 2, n - n // 2)])}
    parts = run(backend, **halves).scores
    assert_close(parts[::2] + parts[1::2], run(backend, **case).scores, dtype=torch.float32, scale=10)


@law
def test_documents_cut_in_two_are_their_maximum(backend: str, drawn: Any) -> None:
    case, _, d = drawn
    tau = case["temperature"]
    halves = {**case, "d_cu_seqlens": bounds_of([part for n in d for part in (n // 2, n - n // 2)])}
    whole, parts = (run(backend, **x, return_alignment=True) for x in (case, halves))
    values = parts.values.masked_fill(parts.argmax < 0, -INF).unflatten(1, (-1, 2))
    joined = values.amax(-1) if tau is None else tau * (values / tau).logsumexp(-1)
    joined = joined.masked_fill(whole.argmax < 0, 0)
    assert_close(joined, whole.values, dtype=torch.float32, scale=10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what it reads")
def test_more_than_two_to_the_31_elements(tmp_path: Path, dtype: torch.dtype) -> None:
    """A sparse file of 2^31 + elements scored in place: tokens where 32-bit addresses would wrap, all else masked."""
    dim, rows = 1024, 2**21 + 2**10
    assert rows * dim > 2**31
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(rows * dim * dtype.itemsize)
    d = torch.from_file(str(path), shared=True, size=rows * dim, dtype=dtype).view(rows, dim)
    mask = torch.zeros(rows, dtype=torch.bool)
    for t in (0, 2**21, rows - 1):
        d[t], mask[t] = 1 + t % 1024, True
    bounds = torch.tensor([0, 1, 2**21 - 3, rows - 1, rows])
    q = torch.full((1, 1, dim), 1 / 1024).to(dtype)
    out = max_sim_varlen(q, d, d_cu_seqlens=bounds, d_mask=mask, symmetric=True, return_alignment=True)
    assert out.scores.tolist() == [[1, 0, 1, 1024]]
    assert out.argmax.flatten().tolist() == [0, -1, 3, 0]
    assert out.reverse_scores.tolist() == [[1, 0, 1, 1024]]
    assert out.reverse_argmax[0, [0, 1, 2**21, rows - 1]].tolist() == [0, -1, 0, 0]
