"""The best documents under max-sim: order, ties, NaN, blocks, and laws; on every backend."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cmp_to_key
from math import isnan
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from engine.ops.max_sim import max_sim
from engine.ops.max_sim_topk import TopKOutput, max_sim_topk, max_sim_topk_op
from tests.max_sim_oracle import BACKENDS, DTYPES, INF, INTERPRETED, NAN, forced
from tests.max_sim_varlen_oracle import bounds_of, random_case, run, varlen_oracle
from tests.tolerances import assert_close

per_backend = pytest.mark.parametrize("backend", BACKENDS)


def best(backend: str, q: Tensor, d: Tensor, k: int, **options: Any) -> TopKOutput:
    with forced(backend) as name:
        return max_sim_topk(q, d, k, backend=name, **options)


def sorted_rows(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row by a comparison written out, filled up with −inf and −1."""

    def compare(a: tuple[int, float], b: tuple[int, float]) -> int:
        if isnan(a[1]) != isnan(b[1]):
            return -1 if isnan(a[1]) else 1
        if a[1] != b[1] and not isnan(a[1]):
            return -1 if a[1] > b[1] else 1
        return a[0] - b[0]

    values, indices = [], []
    for row in scores.tolist():
        found = sorted(enumerate(row), key=cmp_to_key(compare))[:k]
        found += [(-1, -INF)] * (k - len(found))
        indices.append([j for j, _ in found])
        values.append([s for _, s in found])
    shape = (scores.shape[0], k)
    return torch.tensor(values, dtype=scores.dtype).reshape(shape), torch.tensor(indices).reshape(shape)


def column(*numbers: float) -> Tensor:
    """Documents of one token of one dimension."""
    return torch.tensor(numbers, dtype=torch.float32).reshape(-1, 1, 1)


@per_backend
@pytest.mark.parametrize("tokens, order", [
    ((1, 3, 2), [1, 2, 0]),
    ((2, 5, 2, 5, 2), [1, 3, 0, 2, 4]),
    ((1, NAN, 7, NAN, INF), [1, 3, 4, 2, 0]),
    ((-INF, -1, -INF, 0), [3, 1, 0, 2]),
    ((0.0, -0.0, 0.0), [0, 1, 2]),
    ((4,), [0]),
])  # fmt: skip
def test_order(backend: str, tokens: tuple, order: list[int]) -> None:
    for k in range(1, len(tokens) + 3):
        got = best(backend, column(1), column(*tokens), k)
        missing = max(0, k - len(tokens))
        assert got.indices.tolist() == [order[:k] + [-1] * missing]
        assert_close(got.scores, torch.tensor([[tokens[j] for j in order[:k]] + [-INF] * missing]))
        assert got.scores.dtype == torch.float32 and got.indices.dtype == torch.int64


@per_backend
@pytest.mark.parametrize("q, d", [((3, 4), (7, 5)), ([2, 0, 3], [4, 1, 0, 2, 5]), ((2, 3), [4, 0, 3])], ids=str)
@pytest.mark.parametrize("temperature", [None, 0.1])
def test_dense_and_packed_with_masks_and_weights(backend: str, q: Any, d: Any, temperature: float | None) -> None:
    case = random_case(q, d, 6, beyond=1)
    del case["d_weights"]
    wanted = varlen_oracle({**case, "d_weights": torch.ones_like(case["d_mask"], dtype=torch.float32)}, temperature)
    for k in (1, 3, 9):
        got = best(backend, **case, k=k, temperature=temperature)
        scores, indices = sorted_rows(wanted.scores, k)
        assert_close(got.scores, scores, dtype=torch.float32, scale=10)
        assert_close(got.indices, indices)


@per_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_are_those_of_max_sim(backend: str, dtype: torch.dtype) -> None:
    q, d = torch.randn(3, 4, 20).to(dtype), torch.randn(30, 5, 20).to(dtype)
    got = best(backend, q, d, 8)
    with forced(backend) as name:
        scores, indices = max_sim(q, d, backend=name).sort(dim=1, descending=True, stable=True)
    assert torch.equal(got.scores, scores[:, :8]) and torch.equal(got.indices, indices[:, :8])


def test_float64_keeps_its_precision() -> None:
    q, d = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(6, 2, 4, dtype=torch.float64)
    got = max_sim_topk(q, d, 2)
    assert got.scores.dtype == torch.float64
    assert torch.equal(got.scores, max_sim(q, d).topk(2).values)


@per_backend
def test_nothing_to_choose_from_or_for(backend: str) -> None:
    got = best(backend, torch.randn(2, 3, 4), torch.randn(0, 3, 4), 2)
    assert got.scores.tolist() == [[-INF] * 2] * 2 and got.indices.tolist() == [[-1] * 2] * 2
    assert best(backend, torch.randn(0, 3, 4), torch.randn(5, 3, 4), 2).indices.shape == (0, 2)
    # Empty queries and documents score 0: lower indices first.
    assert best(backend, torch.randn(1, 0, 4), torch.randn(5, 3, 4), 2).indices.tolist() == [[0, 1]]
    q, d = column(1), column(-1, -2)
    got = best(backend, q, d[:, 0], 2, d_cu_seqlens=bounds_of([1, 0, 1]))
    assert got.indices.tolist() == [[1, 0]] and got.scores.tolist() == [[0, -1]]


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape).float()


@per_backend
@pytest.mark.parametrize("packed", [False, True])
def test_many_blocks(backend: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More scores than are held at a time, full of ties and with some NaN, against sorting all."""
    monkeypatch.setattr(sys.modules["engine.ops.max_sim_topk"], "BLOCK_SCORES", 16)
    n_q, n_d = (3, 13) if backend == "triton" else (60, 40_000)
    q, d = whole_numbers(n_q, 1, 2), whole_numbers(n_d, 1, 2)
    d[n_d // 2], d[-1] = NAN, NAN
    scores = q[:, 0] @ d[:, 0].T
    if packed:
        lengths = [1, 0] * (n_d // 2) + [1] * (n_d % 2) + [1] * (n_d // 2)
        scores = torch.zeros(n_q, len(lengths)).index_copy_(1, torch.tensor(lengths).nonzero()[:, 0], scores)
        options = {"d_cu_seqlens": bounds_of(lengths)}
        d = d[:, 0]
    else:
        options = {}
    for k in (1, 50):
        got = best(backend, q, d, k, **options)
        values, indices = scores.sort(dim=1, descending=True, stable=True)
        missing = max(0, k - scores.shape[1])
        assert_close(got.scores, torch.nn.functional.pad(values[:, :k], (0, missing), value=-INF))
        assert_close(got.indices, torch.nn.functional.pad(indices[:, :k], (0, missing), value=-1))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    lengths = st.lists(st.integers(0, 6), min_size=1, max_size=6)
    q, d, dim = draw(lengths), draw(lengths), draw(st.integers(1, 9))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    case = random_case(q, d, dim)
    del case["d_weights"]
    return {**case, "temperature": draw(st.sampled_from([None, 0.2]))}


def law(test: Any) -> Any:
    """Run for every backend on drawn cases; fewer under the interpreter, which is slow."""
    drawn = settings(max_examples=2 if INTERPRETED else 20, deadline=None, derandomize=True, database=None)
    return per_backend(drawn(given(case=cases(), k=st.integers(1, 8))(test)))


@law
def test_the_best_are_the_head_of_all(backend: str, case: dict[str, Any], k: int) -> None:
    got = best(backend, **case, k=k)
    values, indices = sorted_rows(run(backend, **case).scores, k)
    assert torch.equal(got.scores, values) and torch.equal(got.indices, indices)


@law
def test_the_best_of_the_best_of_parts_are_the_best(backend: str, case: dict[str, Any], k: int) -> None:
    n = case["d_cu_seqlens"].shape[0] - 1
    cut = n // 2
    rows = int(case["d_cu_seqlens"][cut])
    bounds = case["d_cu_seqlens"]
    head = {"d": case["d"][:rows], "d_mask": case["d_mask"][:rows], "d_cu_seqlens": bounds[: cut + 1]}
    tail = {"d": case["d"][rows:], "d_mask": case["d_mask"][rows:], "d_cu_seqlens": bounds[cut:] - rows}
    one, two = (best(backend, **{**case, **part}, k=k) for part in (head, tail))
    scores = torch.cat([one.scores, two.scores], 1)
    indices = torch.cat([one.indices, torch.where(two.indices < 0, -1, two.indices + cut)], 1)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    got = best(backend, **case, k=k)
    # Scores of other shapes may be rounded otherwise.
    assert_close(got.scores, scores.gather(1, order), dtype=torch.float32, scale=5)
    assert_close(got.indices, indices.gather(1, order))


Q, D = torch.randn(2, 3, 4), torch.randn(5, 6, 4)


@pytest.mark.parametrize("change, error, message", [
    ({"k": 0}, ValueError, r"k must be 1 or more and below 2\*\*31, got 0"),
    ({"k": 2**62}, ValueError, rf"k must be 1 or more and below 2\*\*31, got {2**62}"),
    ({"k": 2.0}, TypeError, "k must be an int, got float"),
    ({"k": True}, TypeError, "k must be an int, got bool"),
    ({"d": D[0]}, ValueError, r"d must have the shape \(Nd, Ld, D\), got \(6, 4\)"),
    ({"d": D[0], "d_cu_seqlens": torch.tensor([0, 7])}, ValueError,
     "d_cu_seqlens must end at 6, the number of rows, or before, got 7"),
    ({"d_cu_seqlens": torch.tensor([0, 5])}, ValueError, r"d must have the shape \(d_total, D\), got \(5, 6, 4\)"),
    ({"q_mask": torch.ones(2, 3)}, TypeError,
     r"q_mask must be bool of shape \(Nq, Lq\) = \(2, 3\), got float32 \(2, 3\)"),
    ({"d_mask": torch.ones(5, 5).bool()}, ValueError,
     r"d_mask must be bool of shape \(Nd, Ld\) = \(5, 6\), got bool \(5, 5\)"),
    ({"temperature": 0}, ValueError, "temperature must be between 1e-30 and 1e30, got 0"),
    ({"precision": "tf32"}, ValueError,
     "precision='tf32' is for CUDA tensors or backend='reference', got backend 'cpp'"),
    ({"backend": "triton"}, ValueError, "backend 'triton' takes CUDA tensors, got cpu"),
])  # fmt: skip
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^max_sim_topk: {message}$"):
        max_sim_topk(**{"q": Q, "d": D, "k": 2, **change})


def test_there_is_no_gradient() -> None:
    scores = max_sim_topk(Q.clone().requires_grad_(), D, 2).scores
    with pytest.raises(RuntimeError, match="autograd"):
        scores.sum().backward()


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_opcheck(backend: str) -> None:
    torch.library.opcheck(max_sim_topk_op, (Q, D, *(None,) * 6, torch.rand(2, 3), 3, None, "ieee", backend))
    bounds = torch.tensor([0, 4, 6])
    torch.library.opcheck(max_sim_topk_op, (Q, D[0], *(None,) * 3, bounds, *(None,) * 3, 3, 0.1, "ieee", backend))


def test_compiles_to_one_graph() -> None:
    def found(q: Tensor, d: Tensor) -> Tensor:
        out = max_sim_topk(q * 2, d, 3)
        return out.scores.sum(1) + out.indices.sum(1)

    assert_close(torch.compile(found, fullgraph=True, backend="aot_eager")(Q, D), found(Q, D))


def test_threads_change_nothing() -> None:
    q, d = torch.randn(8, 16, 64), torch.randn(500, 20, 64)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            results.append(max_sim_topk(q, d, 20))
        finally:
            torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_a_memory_map_is_searched_in_place(tmp_path: Path) -> None:
    path = tmp_path / "documents.npy"
    np.save(path, D.numpy())
    mapped = np.load(path, mmap_mode="c")
    assert all(map(torch.equal, max_sim_topk(Q, torch.from_numpy(mapped), 3), max_sim_topk(Q, D, 3)))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what it reads")
def test_more_than_two_to_the_31_elements(tmp_path: Path) -> None:
    """A sparse file of 2^31 + elements, of which only documents' first tokens are kept and read."""
    dim, length, n = 64, 2**19, 70
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(n * length * dim * 2)
    d = torch.from_file(str(path), shared=True, size=n * length * dim, dtype=torch.bfloat16).view(n, length, dim)
    mask = torch.zeros(n, length, dtype=torch.bool)
    for j in (0, 64, 69):
        d[j, 0], mask[j, 0] = j + 1, True
    got = max_sim_topk(torch.ones(1, 1, dim, dtype=torch.bfloat16), d, 4, d_mask=mask)
    assert got.indices.tolist() == [[69, 64, 0, 1]] and got.scores.tolist() == [[64 * 70, 64 * 65, 64, 0]]
    inside = torch.arange(n + 1) * length
    again = max_sim_topk(
        torch.ones(1, 1, dim, dtype=torch.bfloat16), d.flatten(0, 1), 4, d_cu_seqlens=inside, d_mask=mask.flatten()
    )
    assert all(map(torch.equal, got, again))


def test_memory_stays_within_a_block() -> None:
    """512 queries over 65536 documents: all scores would be 128 MB."""
    program = """
import torch
from engine.ops.max_sim_topk import max_sim_topk
torch.set_num_threads(1)
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
q, d = torch.randn(512, 2, 4), torch.randn(65536, 1, 4)
max_sim_topk(q[:2], d[:8], 10)
before = peak()
max_sim_topk(q, d, 10)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=600, capture_output=True, text=True)
    assert float(done.stdout) < 20


def test_blocks_under_the_interpreter() -> None:
    """The form for GPUs, in a process where Triton's kernels run interpreted on CPU tensors."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-W",
         "ignore::RuntimeWarning", "tests/test_max_sim_topk.py", "-k", "many_blocks or dense and None"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout[-5000:]
