"""Tokens as int8 codes: the rotation against its definition, what codes keep, and the edges."""

from __future__ import annotations

from math import inf, nan, sqrt
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from engine.ops.quantize import QuantizedTokens, dequantize, dequantize_op, quantize, quantize_op
from engine.reference import quantize as reference
from tests.max_sim_oracle import DTYPES
from tests.tolerances import assert_close

DIMS = [1, 2, 3, 7, 64, 77, 768]


def rotation(dim: int) -> Tensor:
    """R written out from its definition, in float64: rows of the result, columns of the vector."""
    hadamard, first = torch.zeros(dim, dim, dtype=torch.float64), 0
    for n in (2**b for b in reversed(range(20))):
        if dim & n:
            block = [[(-1) ** (i & j).bit_count() / sqrt(n) for j in range(n)] for i in range(n)]
            hadamard[first : first + n, first : first + n] = torch.tensor(block)
            first += n
    one, two, order = reference.pattern(dim)
    moved = torch.eye(dim, dtype=torch.float64)[list(order)]
    signs = (torch.tensor(x, dtype=torch.float64).diag() for x in (two, one))
    return hadamard @ next(signs) @ moved @ hadamard @ next(signs)


@pytest.mark.parametrize("dim", DIMS)
def test_the_rotation_is_its_definition_and_orthogonal(dim: int) -> None:
    wanted = rotation(dim)
    eye = torch.eye(dim)
    assert_close(reference.rotate(eye).T, wanted, dtype=torch.float32)
    assert_close(reference.rotate_back(eye), wanted, dtype=torch.float32)
    assert_close(wanted @ wanted.T, torch.eye(dim))


def test_the_pattern_never_changes() -> None:
    """Stored codes depend on it."""
    assert reference.split_mix(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    one, two, order = reference.pattern(10)
    assert "".join("+-"[x < 0] for x in one + two) == "+++--+++-+++++--++-+"
    assert order == (3, 0, 6, 4, 8, 2, 5, 1, 9, 7)
    assert quantize(torch.arange(12.0)).codes.tolist() == [30, 2, -10, -117, -30, -2, 10, -41, 127, 112, -80, -111]


@pytest.mark.parametrize("dim", [64, 77, 512, 768, 1152])
def test_a_huge_dimension_is_spread(dim: int) -> None:
    """No dimension keeps more than a small part of its size anywhere."""
    assert reference.rotate(torch.eye(dim)).abs().max() < 5.5 / sqrt(dim)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_codes_are_rounded_levels(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 20).to(dtype)
    got = quantize(x)
    assert got.codes.dtype == torch.int8 and got.scales.dtype == torch.float32
    assert got.codes.shape == (5, 3, 20) and got.scales.shape == (5, 3)
    rotated = x.double() @ rotation(20).T
    assert_close(got.scales, rotated.abs().amax(-1) / 127, dtype=torch.float32)
    assert got.codes.abs().amax(-1).eq(127).all()
    off = got.codes.double() - rotated / got.scales[..., None].double()
    assert off.abs().max() < 0.501
    assert_close(dequantize(got), x, dtype=torch.float32, scale=2000)  # within 2 % of the greatest


def test_zeros_and_what_is_not_finite() -> None:
    x = torch.randn(5, 9)
    x[1], x[2, 3], x[3, 0] = 0, nan, -inf
    got = quantize(x)
    assert got.scales[1] == 0 and got.scales[[2, 3]].isnan().all() and got.scales[[0, 4]].isfinite().all()
    assert (got.codes[1:4] == 0).all()
    back = dequantize(got)
    assert (back[1] == 0).all() and back[[2, 3]].isnan().all()
    tiny = quantize(torch.full((1, 4), 1e-42))
    assert (tiny.codes.abs() <= 127).all() and tiny.scales.isfinite().all()
    huge = quantize(torch.full((1, 4), 3e38))  # the rotated vector is infinite
    assert huge.scales.isnan().all() and (huge.codes == 0).all()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 5), (0,), (7,)])
def test_empty_axes_and_single_vectors(shape: tuple) -> None:
    got = quantize(torch.ones(shape))
    assert got.codes.shape == shape and got.scales.shape == shape[:-1]
    assert dequantize(got).shape == shape


def test_views_and_chunks_change_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 5, 24)
    wanted = quantize(x)
    assert all(map(torch.equal, quantize(x.transpose(0, 1)), (y.transpose(0, 1) for y in wanted)))
    assert all(map(torch.equal, quantize(x[::2, :, :]), (y[::2] for y in wanted)))
    monkeypatch.setattr(reference, "CHUNK", 50)
    assert all(map(torch.equal, quantize(x), wanted))


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 6), dim=st.integers(1, 40))
def test_laws(seed: int, n: int, dim: int) -> None:
    """Neighbours, order and powers of two as factors change no code; products are kept."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=make)
    got = quantize(x)
    for i in range(n):
        assert all(map(torch.equal, quantize(x[i]), (y[i] for y in got)))
    p = torch.randperm(n, generator=make)
    assert all(map(torch.equal, quantize(x[p]), (y[p] for y in got)))
    scaled = quantize(x * 8)
    assert torch.equal(scaled.codes, got.codes) and torch.equal(scaled.scales, got.scales * 8)
    levels = got.codes.float() * got.scales[:, None]
    assert_close(levels @ levels.T, dequantize(got) @ dequantize(got).T, dtype=torch.float32, scale=20)


def test_no_gradient_flows() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    got = quantize(x)
    assert not got.scales.requires_grad and not dequantize(got).requires_grad


@pytest.mark.parametrize("shape", [(3, 12), (2, 3, 4), (0, 5), (7,)])
def test_opcheck(shape: tuple) -> None:
    torch.library.opcheck(quantize_op, (torch.randn(shape),))
    torch.library.opcheck(dequantize_op, tuple(quantize(torch.randn(shape))))


def test_compiles_to_one_graph() -> None:
    x = torch.randn(3, 12)
    compiled = torch.compile(lambda x: dequantize(quantize(x)), fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), dequantize(quantize(x)))


CODES, SCALES = torch.zeros(3, 4, dtype=torch.int8), torch.zeros(3)


@pytest.mark.parametrize("x, error, message", [
    ([1.0], TypeError, "quantize: x must be a torch.Tensor, got list"),
    (torch.tensor(1.0), ValueError, r"quantize: x must have the shape \(..., D\) with D <= 65536, got \(\)"),
    (torch.zeros(1, 65537), ValueError, r"quantize: x must have the shape .* got \(1, 65537\)"),
    (torch.zeros(2, 3, dtype=torch.int8), TypeError,
     "quantize: x must be one of float32, float16, bfloat16, float64, got int8"),
])  # fmt: skip
def test_quantize_refuses(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        quantize(x)


@pytest.mark.parametrize("x, error, message", [
    (CODES, TypeError, "x must be QuantizedTokens as quantize returns, got Tensor"),
    (QuantizedTokens(CODES, [1.0]), TypeError, "x.scales must be a torch.Tensor, got list"),
    (QuantizedTokens(CODES.float(), SCALES), TypeError,
     "x must hold int8 codes and float32 scales, got float32 and float32"),
    (QuantizedTokens(CODES, SCALES.double()), TypeError,
     "x must hold int8 codes and float32 scales, got int8 and float64"),
    (QuantizedTokens(CODES, SCALES[:2]), ValueError,
     r"x must hold codes of shape \(..., D\) and scales of shape \(...\), got \(3, 4\) and \(2,\)"),
    (QuantizedTokens(CODES[:0, :1].expand(0, 65537), SCALES[:0]), ValueError,
     "x must hold at most 65536 codes a vector, got 65537"),
    (QuantizedTokens(CODES, SCALES.to("meta")), ValueError,
     "x's codes and scales must be on one device, got cpu, meta"),
])  # fmt: skip
def test_dequantize_refuses(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^dequantize: {message}$"):
        dequantize(x)
