"""Max-sim of int8 codes: exact against plain loops on every instruction set, close to float32 in what it ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.ops.max_sim import MaxSimOutput, max_sim
from engine.ops.max_sim_int8 import max_sim_int8, max_sim_int8_op
from engine.ops.max_sim_topk import max_sim_topk, max_sim_topk_op
from engine.ops.native import instruction_sets
from engine.ops.quantize import QuantizedTokens, quantize
from tests.max_sim_oracle import INTERPRETED, forced
from tests.tolerances import assert_close

BACKENDS = ["triton"] if INTERPRETED else ["reference", *(f"cpp:{isa}" for isa in instruction_sets())]
per_backend = pytest.mark.parametrize("backend", BACKENDS)


def run(backend: str, q: QuantizedTokens, d: QuantizedTokens, **options: Any) -> MaxSimOutput:
    with forced(backend) as name:
        return max_sim_int8(q, d, return_alignment=True, backend=name, **options)


def codes(*shape: int, lowest: int = -127) -> QuantizedTokens:
    return QuantizedTokens(torch.randint(lowest, 128, shape, dtype=torch.int8), torch.rand(shape[:-1]) + 0.1)


def spans(x: QuantizedTokens, bounds: Tensor | None) -> list[tuple[int, int]]:
    """First and last row of each item, counted over all rows."""
    if bounds is not None:
        return list(pairwise(bounds.tolist()))
    n, length = x.scales.shape
    return [(i * length, (i + 1) * length) for i in range(n)]


def oracle(
    q: QuantizedTokens,
    d: QuantizedTokens,
    q_cu_seqlens: Tensor | None = None,
    d_cu_seqlens: Tensor | None = None,
    q_mask: Tensor | None = None,
    d_mask: Tensor | None = None,
    q_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores in float64 `(Nq, Nd)`, argmax and float32 values `(q_total, Nd)` by plain loops."""
    q_rows, d_rows = (x.codes.flatten(0, -2).tolist() for x in (q, d))
    q_scales, d_scales = (x.scales.flatten().numpy() for x in (q, d))
    q_keep = [True] * len(q_rows) if q_mask is None else q_mask.flatten().tolist()
    d_keep = [True] * len(d_rows) if d_mask is None else d_mask.flatten().tolist()
    weights = [1.0] * len(q_rows) if q_weights is None else q_weights.flatten().tolist()
    left, right = spans(q, q_cu_seqlens), spans(d, d_cu_seqlens)
    scores = torch.zeros(len(left), len(right), dtype=torch.float64)
    argmax = torch.full((len(q_rows), len(right)), -1)
    values = torch.zeros(len(q_rows), len(right))
    for i, (first, last) in enumerate(left):
        for j, (begin, end) in enumerate(right):
            for u in (u for u in range(first, last) if q_keep[u]):
                best, place = np.float32(0), -1
                for t in (t for t in range(begin, end) if d_keep[t]):
                    product = sum(a * b for a, b in zip(q_rows[u], d_rows[t], strict=True))
                    s = np.float32(product) * d_scales[t]
                    if place < 0 or (not isnan(best) and (isnan(s) or s > best)):
                        best, place = s, t - begin
                if place >= 0:
                    argmax[u, j], values[u, j] = place, float(q_scales[u] * best)
                    scores[i, j] += weights[u] * float(q_scales[u] * best)
    return scores, argmax, values


def check(backend: str, q: QuantizedTokens, d: QuantizedTokens, **options: Any) -> MaxSimOutput:
    """Places and values must be exact."""
    got = run(backend, q, d, **options)
    scores, argmax, values = oracle(q, d, **options)
    packed = options.get("q_cu_seqlens") is not None
    flat = [x if packed else x.transpose(1, 2).flatten(0, 1) for x in (got.argmax, got.values)]
    assert_close(got.scores, scores, dtype=torch.float32, scale=5)
    assert_close(flat[0], argmax)
    assert torch.equal(flat[1].nan_to_num(7e30), values.nan_to_num(7e30))
    with forced(backend) as name:
        plain = max_sim_int8(q, d, backend=name, **options)
    assert torch.equal(plain.nan_to_num(7e30), got.scores.nan_to_num(7e30))
    return got


@per_backend
@pytest.mark.parametrize("dim", [0, 1, 2, 3, 4, 5, 31, 33, 64, 67, 130])
def test_every_number_of_codes(backend: str, dim: int) -> None:
    check(backend, codes(2, 3, dim), codes(3, 5, dim), q_weights=torch.rand(2, 3))


@per_backend
def test_one_below_and_above_the_blocks(backend: str) -> None:
    # Panels of up to 64 tokens, blocks of up to 12 rows.
    sides = [(7, 5), (8, 6), (9, 7), (15, 1), (16, 11), (17, 12), (33, 13), (48, 3), (63, 13), (64, 2), (65, 25)]
    for l_q, l_d in sides:
        check(backend, codes(1, l_q, 6), codes(2, l_d, 6))


@per_backend
def test_the_greatest_products_are_exact(backend: str) -> None:
    dim = 3001
    q, d = codes(1, 3, dim, lowest=-128), codes(2, 4, dim, lowest=-128)
    q.codes[0, 0], q.codes[0, 1] = 127, -128
    d.codes[0, 0], d.codes[0, 1], d.codes[1, 0] = 127, -128, -128
    check(backend, q, d)


@per_backend
def test_masks_weights_and_empty_items(backend: str) -> None:
    q, d = codes(4, 6, 9), codes(5, 7, 9)
    masks = {"q_mask": torch.rand(4, 6) < 0.7, "d_mask": torch.rand(5, 7) < 0.7}
    masks["q_mask"][1], masks["d_mask"][2] = False, False
    weights = torch.rand(4, 6)
    weights[~masks["q_mask"]] = nan
    q.scales[~masks["q_mask"]], d.scales[~masks["d_mask"]] = nan, nan
    got = check(backend, q, d, **masks, q_weights=weights)
    assert (got.scores[1] == 0).all() and (got.scores[:, 2] == 0).all() and got.scores.isfinite().all()


@per_backend
@pytest.mark.parametrize("sizes", [(2, 3, 0, 5), (2, 3, 4, 0), (0, 3, 4, 5), (2, 0, 4, 5)])
def test_empty_axes(backend: str, sizes: tuple) -> None:
    n_q, n_d, l_q, l_d = sizes
    got = run(backend, codes(n_q, l_q, 6), codes(n_d, l_d, 6))
    assert torch.equal(got.scores, torch.zeros(n_q, n_d)) and (got.argmax == -1).all() and (got.values == 0).all()


@per_backend
def test_nan_ties_and_zeros(backend: str) -> None:
    one = torch.ones(1, 1, 2, dtype=torch.int8)
    q = QuantizedTokens(one, torch.ones(1, 1))

    def documents(*scales: float) -> QuantizedTokens:
        return QuantizedTokens(one.expand(1, len(scales), 2), torch.tensor([scales]))

    for scales, place in (((1.0, nan, 2.0), 1), ((nan, 1.0), 0), ((1.0, 2.0, 2.0), 1), ((0.0, 0.0), 0)):
        got = check(backend, q, documents(*scales))
        assert got.argmax.item() == place
    vectors = torch.randn(3, 8)
    vectors[1, 2] = nan
    scores = run(backend, quantize(vectors[:, None]), quantize(torch.randn(2, 4, 8))).scores
    assert scores[1].isnan().all() and scores[[0, 2]].isfinite().all()


@per_backend
def test_packed_items(backend: str) -> None:
    q_bounds, d_bounds = torch.tensor([0, 3, 3, 10, 11]), torch.tensor([0, 4, 5, 5, 19], dtype=torch.int32)
    q, d = codes(12, 10), codes(21, 10)
    masks = {"q_mask": torch.rand(12) < 0.8, "d_mask": torch.rand(21) < 0.8, "q_weights": torch.rand(12)}
    got = check(backend, q, d, q_cu_seqlens=q_bounds, d_cu_seqlens=d_bounds, **masks)
    assert got.argmax.shape == (12, 4) and (got.argmax[11] == -1).all() and (got.values[11] == 0).all()
    check(backend, codes(2, 3, 10), d, d_cu_seqlens=d_bounds, d_mask=masks["d_mask"])
    check(backend, q, codes(2, 3, 10), q_cu_seqlens=q_bounds)


@per_backend
@pytest.mark.parametrize("n", [0, 1, 5, 40])
def test_pairs_are_the_diagonal(backend: str, n: int) -> None:
    if INTERPRETED:
        n = min(n, 5)
    q, d = codes(n, 3, 21), codes(n, 6, 21)
    if n:
        d.scales[0, 4] = nan
    for options in (
        {},
        {"q_mask": torch.rand(n, 3) < 0.6, "d_mask": torch.rand(n, 6) < 0.4, "q_weights": torch.rand(n, 3)},
    ):
        whole, got = run(backend, q, d, **options), run(backend, q, d, pairs=True, **options)
        with forced(backend) as name:
            plain = max_sim_int8(q, d, pairs=True, backend=name, **options)
        assert got.scores.shape == (n,) and got.argmax.shape == got.values.shape == (n, 3)
        assert torch.equal(plain.nan_to_num(7e30), got.scores.nan_to_num(7e30))
        for name, x in got._asdict().items():
            if x is not None:
                wanted = torch.stack([getattr(whole, name)[i, i] for i in range(n)]) if n else x
                assert_close(x, wanted, what=name)


@per_backend
def test_strided_codes(backend: str) -> None:
    q, d = codes(3, 4, 10), codes(5, 6, 10)
    wanted = run(backend, q, d)
    wide = QuantizedTokens(
        torch.zeros(6, 5, 23, dtype=torch.int8).transpose(0, 1)[..., 3:13].copy_(d.codes),
        torch.zeros(5, 12)[:, ::2].copy_(d.scales),
    )
    twisted = QuantizedTokens(q.codes.mT.contiguous().mT, q.scales.T.contiguous().T)
    for left, right in ((q, wide), (twisted, d)):
        got = run(backend, left, right)
        assert torch.equal(got.values, wanted.values) and torch.equal(got.argmax, wanted.argmax)


@per_backend
def test_many_queries_and_long_documents(backend: str) -> None:
    """Several blocks of queries and chunks of rows, against the reference."""
    for sizes in ((60, 3, 30, 40, 300), (2, 3, 5, 700, 20)):
        n_q, n_d, l_q, l_d, dim = sizes
        q, d = codes(n_q, l_q, dim), codes(n_d, l_d, dim)
        got, wanted = run(backend, q, d), run("reference", q, d)
        assert torch.equal(got.values, wanted.values) and torch.equal(got.argmax, wanted.argmax)


@per_backend
def test_the_best_are_the_head_of_all(backend: str) -> None:
    n = 15 if INTERPRETED else 40
    q, d = codes(3, 4, 12), codes(n, 6, 12)
    masks = {"d_mask": torch.rand(n, 6) < 0.7, "q_mask": torch.rand(3, 4) < 0.9, "q_weights": torch.rand(3, 4)}
    bounds = torch.tensor([0, 5, 5, 30, 31, 90])
    packed = QuantizedTokens(d.codes.flatten(0, 1), d.scales.flatten())
    with forced(backend) as name:
        for k in (7, 50) if INTERPRETED else (1, 7, 50):
            got = max_sim_topk(q, d, k, **masks, backend=name)
            order = max_sim_int8(q, d, **masks, backend=name).sort(dim=1, descending=True, stable=True)
            assert torch.equal(got.scores[:, :n], order.values[:, :k])
            assert torch.equal(got.indices[:, :n], order.indices[:, :k]) and (got.indices[:, n:] == -1).all()
            got = max_sim_topk(q, packed, k, d_cu_seqlens=bounds, backend=name)
            order = max_sim_int8(q, packed, d_cu_seqlens=bounds, backend=name).sort(dim=1, descending=True, stable=True)
            assert torch.equal(got.scores[:, :5], order.values[:, :k])
            assert torch.equal(got.indices[:, :5], order.indices[:, :k])


def features(relevance: Tensor, topics: Tensor, length: int, make: torch.Generator) -> Tensor:
    """Unit tokens like those of vision encoders: three dimensions hold half of the length; images share topics."""
    dim = topics.shape[-1]
    tokens = topics * relevance + torch.randn(relevance.shape[0], length, dim, generator=make)
    for place, size in ((5, 30), (dim // 2, -18), (dim - 3, 12)):
        tokens[..., place] += size
    return torch.nn.functional.normalize(tokens, dim=-1)


@pytest.mark.parametrize("dim", [512, 768])
def test_what_is_found_is_what_float32_finds(dim: int) -> None:
    """The ten best of 400 images for 40 texts; and the rotation halves the errors of scores."""
    make = torch.Generator().manual_seed(3)
    topics = torch.randn(20, 1, dim, generator=make)
    relevance = 1.5 * torch.rand(400, 1, 1, generator=make)
    images = features(relevance, topics[torch.arange(400) % 20], 16, make)
    texts = features(torch.ones(40, 1, 1), topics.repeat(2, 1, 1), 8, make)
    assert 0.45 < images[..., [5, dim // 2, dim - 3]].square().sum(-1).mean() < 0.65
    exact = max_sim(texts, images)
    wanted = exact.topk(10).indices
    found = max_sim_topk(quantize(texts), quantize(images), 10).indices
    assert (found[:, :, None] == wanted[:, None, :]).any(-1).float().mean() >= 0.99

    def error(quantise: Callable[[Tensor], QuantizedTokens]) -> float:
        off = max_sim_int8(quantise(texts), quantise(images)) - exact
        return off.std().item()

    def unrotated(x: Tensor) -> QuantizedTokens:
        scales = x.abs().amax(-1) / 127
        return QuantizedTokens((x / scales[..., None]).round().to(torch.int8), scales)

    assert error(quantize) < 0.5 * error(unrotated)


Q, D = codes(2, 3, 4), codes(5, 6, 4)


@pytest.mark.parametrize("change, error, message", [
    ({"q": Q.codes}, TypeError, "q must be QuantizedTokens as quantize returns, got Tensor"),
    ({"d": QuantizedTokens(D.codes[0], D.scales[0])}, ValueError,
     r"d must hold codes of shape \(Nd, Ld, D\), got \(6, 4\)"),
    ({"d_cu_seqlens": torch.tensor([0, 6])}, ValueError,
     r"d must hold codes of shape \(d_total, D\), got \(5, 6, 4\)"),
    ({"d": codes(5, 6, 3)}, ValueError, "q and d must have one last dimension D, got 4 and 3"),
    ({"d": QuantizedTokens(D.codes.to("meta"), D.scales.to("meta"))}, ValueError,
     "q and d must be on one device, got cpu and meta"),
    ({"q_mask": torch.ones(2, 3)}, TypeError,
     r"q_mask must be bool of shape \(Nq, Lq\) = \(2, 3\), got float32 \(2, 3\)"),
    ({"q_weights": torch.ones(2, 2)}, ValueError,
     r"q_weights must be floating of shape \(Nq, Lq\) = \(2, 3\), got float32 \(2, 2\)"),
    ({"d": QuantizedTokens(D.codes[0], D.scales[0]), "d_cu_seqlens": torch.tensor([0, 7])}, ValueError,
     "d_cu_seqlens must end at 6, the number of rows, or before, got 7"),
    ({"backend": "triton"}, ValueError, "backend 'triton' takes CUDA tensors, got cpu"),
    ({"pairs": True}, ValueError, "q and d must be equal in number, got 2 and 5"),
    ({"pairs": True, "d": QuantizedTokens(D.codes[0], D.scales[0]), "d_cu_seqlens": torch.tensor([0, 6])}, ValueError,
     "pairs are of dense sides and need d_cu_seqlens=None, got boundaries"),
    ({"pairs": 1}, TypeError, "pairs must be True or False, got 1"),
    ({"return_alignment": None}, TypeError, "return_alignment must be True or False, got None"),
])  # fmt: skip
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^max_sim_int8: {message}$"):
        max_sim_int8(**{"q": Q, "d": D, **change})


def test_topk_refuses_what_codes_do_not_have() -> None:
    with pytest.raises(
        ValueError, match=r"^max_sim_topk: quantised tokens take no temperature or precision, got 0\.1 and 'ieee'$"
    ):
        max_sim_topk(Q, D, 2, temperature=0.1)
    with pytest.raises(TypeError, match=r"^max_sim_topk: d must be QuantizedTokens as quantize returns, got Tensor$"):
        max_sim_topk(Q, D.codes, 2)


def test_unknown_instruction_sets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAKSIM_CPU_ISA", "mmx")
    with pytest.raises(ValueError, match=r"max_sim_int8: the instruction set must be one of .*generic, got mmx"):
        max_sim_int8(Q, D)


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_opcheck(backend: str) -> None:
    tensors = (Q.codes, D.codes, Q.scales, D.scales)
    torch.library.opcheck(max_sim_int8_op, (*tensors, *(None,) * 4, torch.rand(2, 3), False, True, True, backend))
    pairs = (Q.codes, D.codes[:2], Q.scales, D.scales[:2])
    torch.library.opcheck(max_sim_int8_op, (*pairs, *(None,) * 5, True, True, True, backend))
    bounds = torch.tensor([0, 4, 6])
    packed = (Q.codes, D.codes[0], Q.scales, D.scales[0], None, bounds)
    torch.library.opcheck(max_sim_int8_op, (*packed, None, None, None, False, True, False, backend))
    torch.library.opcheck(max_sim_topk_op, (*packed, None, None, None, 3, None, "ieee", backend))


def test_compiles_to_one_graph() -> None:
    def scores(q: Tensor, d: Tensor) -> Tensor:
        return max_sim_int8(quantize(q), quantize(d)) * 2

    q, d = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
    assert_close(torch.compile(scores, fullgraph=True, backend="aot_eager")(q, d), scores(q, d))


def test_threads_change_no_digit() -> None:
    q, d = codes(8, 32, 128), codes(300, 50, 128)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            results.append(max_sim_int8(q, d))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_more_than_two_to_the_31_codes(tmp_path: Path) -> None:
    """A sparse file of codes scored in place: tokens where 32-bit addresses would wrap, all else masked."""
    dim, rows = 2048, 2**20 + 2**10
    assert rows * dim > 2**31
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(rows * dim)
    stored = torch.from_file(str(path), shared=True, size=rows * dim, dtype=torch.int8).view(rows, dim)
    mask = torch.zeros(rows, dtype=torch.bool)
    for t, code in ((0, 1), (2**20, 2), (rows - 1, 3)):
        stored[t], mask[t] = code, True
    bounds = torch.tensor([0, 1, 2**20 - 3, rows - 1, rows])
    q = QuantizedTokens(torch.ones(1, 1, dim, dtype=torch.int8), torch.ones(1, 1))
    d = QuantizedTokens(stored, torch.ones(rows))
    out = max_sim_int8(q, d, d_cu_seqlens=bounds, d_mask=mask, return_alignment=True)
    assert out.scores.tolist() == [[2048, 0, 4096, 6144]] and out.argmax.flatten().tolist() == [0, -1, 3, 0]
    best = max_sim_topk(q, d, 2, d_cu_seqlens=bounds, d_mask=mask)
    assert best.indices.tolist() == [[3, 2]]


def test_memory_stays_within_results() -> None:
    """256 × 256 pairs in a process of its own: far below 400 MB of similarities."""
    program = """
import torch
from engine.ops.max_sim_int8 import max_sim_int8
from engine.ops.quantize import QuantizedTokens
torch.set_num_threads(1)
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
q, d = (QuantizedTokens(torch.randint(-127, 128, (256, 40, 16), dtype=torch.int8), torch.rand(256, 40)) for _ in "qd")
max_sim_int8(QuantizedTokens(q.codes[:2], q.scales[:2]), d)
before = peak()
max_sim_int8(q, d)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=600, capture_output=True, text=True)
    assert float(done.stdout) < 20
