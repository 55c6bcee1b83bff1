"""The contract of max-sim at its edges: every backend against plain Python loops."""

from __future__ import annotations

import pytest
import torch

from tests.max_sim_oracle import BACKENDS, DTYPES, INF, NAN, assert_matches, check, oracle, run
from tests.tolerances import assert_close

TEMPERATURES = [None, 0.07]
per_backend = pytest.mark.parametrize("backend", BACKENDS)
hard_and_soft = pytest.mark.parametrize("temperature", TEMPERATURES)


def column(*numbers: float) -> torch.Tensor:
    """Tokens of one dimension, as (1, L, 1): against the query 1 they are their own similarities."""
    return torch.tensor(numbers, dtype=torch.float32).reshape(1, -1, 1)


def random_case(n_q: int, n_d: int, l_q: int, l_d: int, dim: int, dtype: torch.dtype = torch.float32) -> dict:
    """Unit-norm tokens, masks that keep about three quarters, positive weights."""

    def unit(*shape: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(shape), dim=-1).to(dtype)

    return {
        "q": unit(n_q, l_q, dim),
        "d": unit(n_d, l_d, dim),
        "q_mask": torch.rand(n_q, l_q) < 0.75,
        "d_mask": torch.rand(n_d, l_d) < 0.75,
        "q_weights": torch.rand(n_q, l_q),
        "d_weights": torch.rand(n_d, l_d),
    }


@per_backend
@pytest.mark.parametrize("tokens, score, place", [
    ((2, NAN, 4), NAN, 1),
    ((NAN, 4), NAN, 0),
    ((4, NAN, NAN), NAN, 1),
    ((-INF, -INF), -INF, 0),
    ((-INF, -3), -3, 1),
    ((-INF, INF, INF), INF, 1),
    ((1, 5, 5, 2), 5, 1),
    ((-1, -2), -1, 0),
    ((7,), 7, 0),
])  # fmt: skip
def test_what_one_token_finds(backend: str, tokens: tuple, score: float, place: int) -> None:
    got = check(backend, column(1), column(*tokens))
    assert_close(got.scores, torch.tensor([[score]]))
    assert got.argmax.tolist() == [[[place]]]


@per_backend
@pytest.mark.parametrize("tokens, keep, score, place", [
    ((NAN, 4, 2), (0, 1, 1), 4, 1),
    ((NAN, INF), (0, 0), 0, -1),
    ((9, -INF), (0, 1), -INF, 1),
    ((-INF, -INF, 3), (0, 1, 0), -INF, 1),
    ((INF, NAN, -5), (0, 0, 1), -5, 2),
    ((8, NAN), (0, 1), NAN, 1),
])  # fmt: skip
def test_masked_document_tokens(backend: str, tokens: tuple, keep: tuple, score: float, place: int) -> None:
    got = check(backend, column(1), column(*tokens), d_mask=torch.tensor([keep], dtype=torch.bool))
    assert_close(got.scores, torch.tensor([[score]]))
    assert got.argmax.tolist() == [[[place]]]


@per_backend
@hard_and_soft
@pytest.mark.parametrize("tokens", [(2, NAN, 4), (NAN, 4), (-INF, -INF), (-INF, 1), (INF, 1), (3, 3, 3)])
def test_special_values_in_both_directions(backend: str, temperature: float | None, tokens: tuple) -> None:
    q = column(1, 0.5)
    check(backend, q, column(*tokens), temperature=temperature)
    check(backend, column(*tokens), q, temperature=temperature)
    keep = torch.tensor([[True] * (len(tokens) - 1) + [False]])
    check(backend, column(*tokens), q, temperature=temperature, q_mask=keep)


@per_backend
@hard_and_soft
def test_masked_query_tokens_have_no_influence(backend: str, temperature: float | None) -> None:
    q = torch.tensor([[[1.0, 0.0], [NAN, INF], [0.0, 2.0]]])
    d = torch.tensor([[[1.0, 3.0], [2.0, -1.0]], [[NAN, 0.0], [0.5, 0.5]]])
    q_mask, d_mask = torch.tensor([[True, False, True]]), torch.tensor([[True, True], [False, True]])
    weights = torch.tensor([[2.0, NAN, 0.5]])
    got = check(backend, q, d, q_mask=q_mask, d_mask=d_mask, q_weights=weights, temperature=temperature)
    assert got.scores.isfinite().all() and got.reverse_scores.isfinite().all()
    assert got.argmax[:, :, 1].tolist() == [[-1, -1]] and got.values[:, :, 1].tolist() == [[0, 0]]


@per_backend
@hard_and_soft
@pytest.mark.parametrize("masked", ["q", "d", "both"])
def test_nothing_kept_adds_nothing(backend: str, temperature: float | None, masked: str) -> None:
    case = random_case(2, 3, 4, 5, 6)
    case["q_weights"][:] = INF
    if masked in ("q", "both"):
        case["q_mask"][0] = False
    if masked in ("d", "both"):
        case["d_mask"][1] = False
        case["d"][1] = NAN
    got = check(backend, **case, temperature=temperature)
    if masked != "d":
        assert got.scores[0].tolist() == [0, 0, 0] and got.reverse_scores[0].tolist() == [0, 0, 0]
        assert (got.argmax[0] == -1).all() and (got.reverse_argmax[0] == -1).all()
    if masked != "q":
        assert got.scores[:, 1].tolist() == [0, 0] and (got.values[:, 1] == 0).all()


@per_backend
@hard_and_soft
@pytest.mark.parametrize("sizes", [
    (2, 3, 0, 5, 4), (2, 3, 4, 0, 4), (2, 3, 0, 0, 4),
    (0, 3, 4, 5, 4), (2, 0, 4, 5, 4), (0, 0, 0, 0, 0), (2, 3, 4, 5, 0),
])  # fmt: skip
def test_empty_axes(backend: str, temperature: float | None, sizes: tuple) -> None:
    case = random_case(*sizes)
    case["q_mask"], case["d_mask"] = torch.ones_like(case["q_mask"]), torch.ones_like(case["d_mask"])
    got = check(backend, **case, temperature=temperature)
    assert got.scores.shape == sizes[:2] and got.argmax.shape == (*sizes[:2], sizes[2])
    if temperature is None or sizes[4]:
        assert_close(got.scores, torch.zeros(sizes[:2]))


@per_backend
@hard_and_soft
def test_tokens_of_no_width_of_which_none_is_kept(backend: str, temperature: float | None) -> None:
    case = random_case(2, 3, 4, 5, 0)
    case["q_mask"][:] = False
    got = check(backend, **case, temperature=temperature)
    assert got.scores.tolist() == got.reverse_scores.tolist() == [[0, 0, 0]] * 2


@per_backend
def test_weights_follow_ieee(backend: str) -> None:
    q, d = column(1, 1), column(-INF)
    assert run(backend, q, d, q_weights=torch.tensor([[0.0, 1.0]])).scores.isnan().all()
    assert run(backend, q, d, q_weights=torch.tensor([[2.0, 1.0]])).scores.item() == -INF
    assert run(backend, q, column(3), q_weights=torch.tensor([[0.0, -2.0]])).scores.item() == -6
    masked = torch.tensor([[False, True]])
    assert run(backend, q, d, q_weights=torch.tensor([[0.0, 1.0]]), q_mask=masked).scores.item() == -INF


@per_backend
@hard_and_soft
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (3, 2, 7, 5, 17), (2, 3, 33, 50, 96), (5, 2, 17, 26, 65)])
def test_sizes_and_dtypes(backend: str, temperature: float | None, dtype: torch.dtype, sizes: tuple) -> None:
    case = random_case(*sizes, dtype)
    got = run(backend, **case, temperature=temperature, symmetric=True, return_alignment=True)
    # Results are float32 whatever the inputs, whose rounding is no error of ours: float32's tolerance holds.
    wanted = oracle(**case, temperature=temperature)
    for name, actual, expected in zip(got._fields, got, wanted, strict=True):
        assert_close(actual, expected, dtype=None if "argmax" in name else torch.float32, scale=5, what=name)


@per_backend
def test_one_below_and_above_the_blocks(backend: str) -> None:
    # Kernels have panels of up to 64 tokens and blocks of up to 12 rows; Triton's blocks end at 128.
    sides = [(7, 5), (8, 6), (9, 7), (15, 1), (16, 11), (17, 12), (63, 13), (64, 2), (65, 3), (1, 25)]
    if backend == "triton":
        sides = [(15, 65), (16, 64), (17, 127), (127, 3), (128, 3), (129, 3)]
    for l_q, l_d in sides:
        check(backend, **random_case(1, 2, l_q, l_d, 3), scale=20)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name.startswith("cpp")])
@hard_and_soft
@pytest.mark.parametrize("sizes", [(2, 2, 3, 511, 8), (2, 2, 200, 1030, 8), (40, 3, 30, 40, 520)])
def test_more_than_one_chunk(backend: str, temperature: float | None, sizes: tuple) -> None:
    """Documents of several row chunks and queries of several blocks, against the reference."""
    options = {**random_case(*sizes), "temperature": temperature, "symmetric": True, "return_alignment": True}
    got, wanted = run(backend, **options), run("reference", **options)
    for name, actual, expected in zip(got._fields, got, wanted, strict=True):
        assert_close(actual, expected, dtype=None if "argmax" in name else torch.float32, scale=20, what=name)


@per_backend
def test_many_short_queries_share_a_panel(backend: str) -> None:
    case = random_case(5 if backend == "triton" else 40, 3, 3, 6, 8)
    check(backend, **case, scale=5)
    check(backend, **case, temperature=0.5, scale=5)


@per_backend
@hard_and_soft
def test_pairs(backend: str, temperature: float | None) -> None:
    case = random_case(5, 5, 4, 7, 9)
    got = check(backend, **case, pairs=True, temperature=temperature, scale=5)
    assert got.scores.shape == (5,) and got.argmax.shape == (5, 4) and got.reverse_argmax.shape == (5, 7)
    del case["d_weights"]
    square = run(backend, **case, temperature=temperature)
    assert_close(got.scores, square.scores.diagonal(), dtype=torch.float32)


@per_backend
def test_pairs_of_nothing(backend: str) -> None:
    assert run(backend, torch.zeros(0, 3, 4), torch.zeros(0, 2, 4), pairs=True).scores.shape == (0,)


@per_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_any_strides(backend: str, dtype: torch.dtype) -> None:
    case = random_case(3, 4, 6, 8, 10, dtype)
    wanted = run(backend, **case, symmetric=True, return_alignment=True)

    def twisted(x: torch.Tensor, way: str) -> torch.Tensor:
        if way == "transposed":
            return x.mT.contiguous().mT
        if way == "token-major":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        padded = x.new_full(tuple(2 * n + 1 for n in x.shape), NAN if x.is_floating_point() else 1)
        view = padded[tuple(slice(1, 2 * n + 1, 2) for n in x.shape)]
        return view.copy_(x)

    for way in ("transposed", "token-major", "every second"):
        views = {name: twisted(x, way) for name, x in case.items() if x.ndim == 3 or way != "transposed"}
        got = run(backend, **{**case, **views}, symmetric=True, return_alignment=True)
        for name, actual, expected in zip(got._fields, got, wanted, strict=True):
            kind = None if "argmax" in name else torch.float32
            assert_close(actual, expected, dtype=kind, what=f"{way}: {name}")


@per_backend
def test_expanded_documents(backend: str) -> None:
    q, d = torch.randn(2, 3, 8), torch.randn(1, 5, 8)
    got = run(backend, q, d.expand(4, 5, 8)).scores
    assert_close(got, run(backend, q, d).scores.expand(2, 4))


def test_float64_keeps_its_precision() -> None:
    case = random_case(3, 2, 4, 5, 6, torch.float64)
    case["q_weights"], case["d_weights"] = case["q_weights"].double(), case["d_weights"].double()
    for backend in ("reference", "auto"):
        for temperature in TEMPERATURES:
            got = run(backend, **case, temperature=temperature, symmetric=True, return_alignment=True)
            assert_matches(got, oracle(**case, temperature=temperature), torch.float64)
