"""The contract of window attention at its edges: every backend against plain Python loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.ops.window_attention import window_attention
from tests.peak_patch_oracle import far_apart
from tests.tolerances import assert_close
from tests.window_attention_oracle import (
    BACKENDS,
    DTYPES,
    INF,
    INTERPRETED,
    NAN,
    boxes,
    check,
    dense,
    random_case,
    run,
)

per_backend = pytest.mark.parametrize("backend", BACKENDS)
with_and_without_own = pytest.mark.parametrize("own", [True, False], ids=["own", "no own"])

EMPTY = [
    (0, 0, 0, 0), (1, 1, 1, 3), (2, 0, 1, 3), (0, 3, 4, 5), (-5, -5, 0, 9), (4, 0, 9, 3), (-(2**31), 2, 2**31 - 1, 1),
]  # fmt: skip


@per_backend
@with_and_without_own
@pytest.mark.parametrize("window", EMPTY)
def test_an_empty_window_gives_its_own_value_or_nothing(backend: str, own: bool, window: tuple) -> None:
    case = random_case(2, 3, 2, 5, (3, 4), own=own)
    case["windows"] = boxes((0, 0, 4, 3), window, (1, 1, 2, 2))
    case["k"][:] = NAN
    got = run(backend, case)
    assert_close(got[:, 1], case["own_v"][:, 1] if own else torch.zeros(2, 2, 5))
    assert got[:, 0].isnan().all() and got[:, 2].isnan().all()


@per_backend
def test_a_single_cell_gives_its_value(backend: str) -> None:
    case = random_case(2, 12, 2, 5, (3, 4), own=False)
    case["windows"] = boxes(*((x, y, x + 1, y + 1) for y in range(3) for x in range(4)))
    assert_close(run(backend, case), case["v"])


@per_backend
@with_and_without_own
def test_the_whole_grid_is_ordinary_attention(backend: str, own: bool) -> None:
    case = random_case(2, 3, 2, 8, (4, 5), own=own)
    case["windows"] = boxes((0, 0, 5, 4), (-1, -7, 99, 4), (0, 0, 2**31 - 1, 2**31 - 1))
    got = check(backend, case)
    for w in range(3):
        k, v = ([case[n], case["own_" + n][:, w : w + 1]] if own else [case[n]] for n in ("k", "v"))
        q, k, v = (x.transpose(1, 2) for x in (case["q"][:, w : w + 1], torch.cat(k, 1), torch.cat(v, 1)))
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        assert_close(got[:, w], wanted[:, :, 0])


@per_backend
@with_and_without_own
def test_what_a_window_does_not_see_has_no_influence(backend: str, own: bool) -> None:
    case = random_case(1, 3, 2, 6, (3, 5), own=own)
    case["windows"] = boxes((1, 0, 3, 2), (2, 1, 5, 3), (4, 2, 5, 3))
    wanted = run(backend, case)
    unseen = torch.ones(3, 5, dtype=torch.bool)
    unseen[0:2, 1:3] = False
    for poison in (NAN, INF, -INF):
        poisoned = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in case.items()}
        poisoned["k"][:, unseen.flatten()] = poison
        poisoned["v"][:, unseen.flatten()] = poison
        poisoned["q"][:, 1:] = poison
        if own:
            poisoned["own_k"][:, 1:] = poison
            poisoned["own_v"][:, 1:] = poison
        got = run(backend, poisoned)
        assert torch.equal(got[:, 0], wanted[:, 0])


@per_backend
@with_and_without_own
@pytest.mark.parametrize("name, place, value", [
    ("k", (0, 4, 1, 2), NAN), ("v", (0, 4, 1, 2), NAN), ("q", (0, 1, 1, 0), NAN),
    ("v", (0, 4, 1, 2), INF), ("v", (0, 4, 1, 2), -INF), ("q", (0, 0, 0, 0), INF),
])  # fmt: skip
def test_what_a_window_sees_follows_ieee(backend: str, own: bool, name: str, place: tuple, value: float) -> None:
    case = random_case(1, 4, 2, 3, (3, 3), own=own)
    case["windows"] = boxes((0, 0, 3, 3), (1, 1, 3, 3), (2, 0, 3, 3), (0, 0, 2, 1))
    case[name][place] = value
    got = check(backend, case)
    assert not got.isfinite().all() and got.isfinite().any()


@per_backend
@pytest.mark.parametrize("scores, wanted", [
    ((-INF, 0.0, 0.0), 1.5), ((0.0, -INF, -INF), 0.0), ((-INF, -INF, -INF), NAN), ((INF, 0.0, 0.0), NAN),
    ((0.0, INF, INF), NAN), ((-INF, -300.0, -INF), 1.0), ((-300.0, 300.0, -300.0), 1.0),
])  # fmt: skip
def test_infinite_scores(backend: str, scores: tuple, wanted: float) -> None:
    """One query of 1 against keys that are their own scores, then the same with the first one as the own key."""
    q, keys = torch.ones(1, 1, 1, 1), torch.tensor(scores).reshape(1, 3, 1, 1)
    values = torch.arange(3.0).reshape(1, 3, 1, 1)
    alone = {"q": q, "k": keys, "v": values, "windows": boxes((0, 0, 3, 1)), "grid": (1, 3)}
    apart = {"q": q, "k": keys[:, 1:], "v": values[:, 1:], "windows": boxes((0, 0, 2, 1)), "grid": (1, 2),
             "own_k": keys[:, :1], "own_v": values[:, :1]}  # fmt: skip
    for case in (alone, apart):
        assert_close(run(backend, case).flatten(), torch.tensor([wanted]))


@per_backend
@pytest.mark.parametrize("order", [1, -1])
def test_scores_far_apart_in_different_blocks(backend: str, order: int) -> None:
    """Maxima that rise and fall by hundreds from block to block neither overflow nor vanish."""
    case = random_case(1, 1, 1, 4, (10, 30), own=False)
    case["q"][:] = 1
    steps = torch.linspace(-200, 200, 300)[::order] if order > 0 else torch.linspace(-200, 200, 300).flip(0)
    case["k"][:] = steps[None, :, None, None]
    case["k"][0, 5 if order > 0 else 290] = -INF
    check(backend, case, scale=0.5, tolerance=5)


@per_backend
@with_and_without_own
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [
    (1, 1, 1, 1, (1, 1)), (2, 3, 2, 17, (2, 3)), (1, 5, 3, 33, (7, 5)), (2, 4, 1, 64, (3, 11)), (1, 2, 1, 150, (4, 4)),
])  # fmt: skip
def test_sizes_and_dtypes(backend: str, own: bool, dtype: torch.dtype, shape: tuple) -> None:
    check(backend, random_case(*shape, dtype=dtype, own=own), tolerance=2)


@per_backend
def test_one_below_and_above_the_blocks(backend: str) -> None:
    """Windows of every number of cells around the vectors' lengths, heads of every number of whole vectors."""
    for dim in (16, 65) if backend == "triton" else (8, 15, 16, 31, 48, 72, 80, 96, 112, 128, 136):
        case = random_case(1, 34, 1, dim, (1, 34), own=False)
        case["windows"] = boxes(*((0, 0, n, 1) for n in range(1, 35)))
        assert_close(run(backend, case), dense(**{n: x.double() if n in "qkv" else x for n, x in case.items()}),
                     dtype=torch.float32, scale=2)  # fmt: skip


@per_backend
@with_and_without_own
def test_each_image_its_windows(backend: str, own: bool) -> None:
    case = random_case(3, 4, 2, 6, (4, 3), own=own, shared=False)
    got = check(backend, case)
    for image in range(3):
        alone = {n: x[image : image + 1] if isinstance(x, torch.Tensor) else x for n, x in case.items()}
        assert_close(got[image : image + 1], run(backend, alone | {"windows": case["windows"][image]}))


@per_backend
def test_the_scale(backend: str) -> None:
    case = random_case(1, 3, 2, 4, (3, 3))
    assert not torch.equal(check(backend, case, scale=3), check(backend, case))
    mean = check(backend, case | {"own_k": None, "own_v": None}, scale=0.0)
    assert_close(mean[:, 0], case["v"].mean(1))


@per_backend
@with_and_without_own
@pytest.mark.parametrize("shape", [
    (0, 2, 2, 4, (2, 2)), (2, 0, 2, 4, (2, 2)), (2, 2, 0, 4, (2, 2)), (2, 2, 2, 0, (2, 2)), (2, 2, 2, 4, (0, 3)),
    (1, 2, 2, 4, (3, 0)),
])  # fmt: skip
def test_empty_axes(backend: str, own: bool, shape: tuple) -> None:
    case = random_case(2, 2, 2, 4, (2, 2))
    of_windows, of_cells = shape[:4], (shape[0], shape[4][0] * shape[4][1], *shape[2:4])
    case = {"q": torch.randn(of_windows), "k": torch.randn(of_cells), "v": torch.randn(of_cells), "grid": shape[4],
            "windows": torch.zeros(shape[1], 4, dtype=torch.int32)}  # fmt: skip
    case |= {"own_k": torch.randn(of_windows), "own_v": torch.randn(of_windows)} if own else {}
    for x in (case["q"], case["k"], case["v"]):
        x.requires_grad_()
    got = run(backend, case)
    assert_close(got, case["own_v"] if own else torch.zeros(of_windows))
    got.sum().backward()
    assert case["k"].grad.shape == of_cells and (case["k"].grad == 0).all() and (case["q"].grad == 0).all()


@per_backend
def test_more_than_two_to_the_31_elements(backend: str, tmp_path: Path) -> None:
    case = random_case(2, 3, 2, 8, (3, 3), dtype=torch.float16 if INTERPRETED else torch.bfloat16)
    wanted = run(backend, case)
    for name in ("k", "v"):
        (tmp_path / name).mkdir()
        far = far_apart(tmp_path / name, tuple(case[name].shape), 2**31 + 64).view(case[name].dtype)
        far.copy_(case[name])
        case[name] = far
        assert torch.equal(run(backend, case), wanted)


@per_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_any_strides(backend: str, dtype: torch.dtype) -> None:
    case = random_case(2, 3, 2, 10, (3, 3), dtype=dtype)
    wanted = run(backend, case)

    def twisted(x: torch.Tensor, way: str) -> torch.Tensor:
        if way == "transposed":
            return x.mT.contiguous().mT
        if way == "heads first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        padded = x.new_full(tuple(2 * n + 1 for n in x.shape), NAN if x.is_floating_point() else -7)
        view = padded[tuple(slice(1, 2 * n + 1, 2) for n in x.shape)]
        return view.copy_(x)

    for way in ("transposed", "heads first", "every second"):
        views = {n: twisted(x, way) if isinstance(x, torch.Tensor) and (x.ndim == 4 or way == "every second") else x
                 for n, x in case.items()}  # fmt: skip
        assert torch.equal(run(backend, views), wanted), way
    shared = case | {"q": case["q"][:, :1].expand(-1, 3, -1, -1), "own_k": case["own_k"][:1].expand(2, -1, -1, -1)}
    assert torch.equal(run(backend, shared), run(backend, {n: x.clone() if isinstance(x, torch.Tensor) else x
                                                           for n, x in shared.items()}))  # fmt: skip


def refused(error: type[Exception], match: str, **changes: Any) -> None:
    case = random_case(2, 3, 2, 4, (2, 5)) | changes
    with pytest.raises(error, match=match):
        window_attention(**case)


def test_wrong_arguments_are_refused() -> None:
    x = torch.randn(2, 3, 2, 4)
    refused(TypeError, r"q must be a torch.Tensor, got list", q=[1])
    refused(ValueError, r"q must have the shape \(B, W, H, hd\), got \(2, 3, 2\)", q=x[..., 0])
    refused(TypeError, r"q must be one of float32, .* got int64", q=x.long())
    refused(ValueError,
            r"k must have the shape \(B, rows \* columns, H, hd\) = \(2, 10, 2, 4\), got \(2, 3, 2, 4\)",
            k=x)  # fmt: skip
    refused(TypeError, r"v must have q's dtype float32, got float64", v=torch.randn(2, 10, 2, 4).double())
    refused(ValueError, r"v must be on cpu as q is, got meta", v=torch.randn(2, 10, 2, 4, device="meta"))
    refused(ValueError, r"own_k and own_v go together, got own_k without own_v", own_v=None)
    refused(ValueError, r"own_k and own_v go together, got own_v without own_k", own_k=None)
    refused(ValueError, r"own_k must have the shape \(B, W, H, hd\) = \(2, 3, 2, 4\), got \(2, 10, 2, 4\)",
            own_k=torch.randn(2, 10, 2, 4))  # fmt: skip
    refused(TypeError, r"windows must be a torch.Tensor, got list", windows=[[0, 0, 1, 1]])
    refused(TypeError, r"windows must be int32, got int64", windows=torch.zeros(3, 4, dtype=torch.int64))
    refused(ValueError, r"windows must have the shape \(W, 4\) = \(3, 4\) or \(B, W, 4\) = \(2, 3, 4\), got \(4, 4\)",
            windows=boxes(*[(0, 0, 1, 1)] * 4))  # fmt: skip
    refused(ValueError, r"windows must be on cpu as q is, got meta",
            windows=torch.zeros(3, 4, dtype=torch.int32, device="meta"))  # fmt: skip
    refused(ValueError, r"grid must be \(rows, columns\), two whole numbers of at least 0, got \(2, -5\)", grid=(2, -5))
    refused(ValueError, r"grid must be \(rows, columns\), .* got 10", grid=10)
    refused(ValueError, r"grid must have fewer than 2\^31 - 1 cells, got 65536 x 65536", grid=(65536, 65536))
    refused(TypeError, r"scale must be a number or None, got str", scale="1")
    refused(ValueError, r"scale must be finite, got inf", scale=INF)
    refused(ValueError, r"backend must be one of auto, cpp, triton, reference or None, got 'cuda'", backend="cuda")


def test_float64_goes_to_the_reference() -> None:
    case = random_case(1, 3, 2, 4, (2, 2), dtype=torch.float64)
    assert_close(window_attention(**case), dense(**case))
    with pytest.raises(ValueError, match="backend 'cpp' does not take float64"):
        window_attention(**case, backend="cpp")


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAKSIM_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match=r"window_attention: the instruction set must be one of .*, got sse9"):
        window_attention(**random_case(1, 1, 1, 4, (2, 2)), backend="cpp")
