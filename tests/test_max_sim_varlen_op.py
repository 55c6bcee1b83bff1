"""Max-sim on packed tokens as an operation: what it refuses, how it fits torch, threads and memory."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from engine.ops.max_sim import MaxSimOutput
from engine.ops.max_sim_varlen import max_sim_varlen, max_sim_varlen_backward_op, max_sim_varlen_op
from tests.tolerances import assert_close

Q, D = torch.randn(6, 4), torch.randn(9, 4)
Q_ENDS, D_ENDS = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 4, 9])
PACKED: dict[str, Any] = {"q": Q, "d": D, "q_cu_seqlens": Q_ENDS, "d_cu_seqlens": D_ENDS}


def ends(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


@pytest.mark.parametrize("change, error, message", [
    ({"q_cu_seqlens": None, "d_cu_seqlens": None}, ValueError,
     "q_cu_seqlens or d_cu_seqlens must be given, got neither; max_sim takes dense tokens"),
    ({"q": Q[None]}, ValueError, r"q must have the shape \(q_total, D\), got \(1, 6, 4\)"),
    ({"d_cu_seqlens": None}, ValueError, r"d must have the shape \(Nd, Ld, D\), got \(9, 4\)"),
    ({"d": D.half()}, TypeError, "q and d must have one dtype, got float32 and float16"),
    ({"d": D[:, :3]}, ValueError, "q and d must have one last dimension D, got 4 and 3"),
    ({"d_cu_seqlens": [0, 9]}, TypeError, "d_cu_seqlens must be a torch.Tensor, got list"),
    ({"d_cu_seqlens": D_ENDS.float()}, ValueError,
     r"d_cu_seqlens must be int32 or int64 of shape \(Nd \+ 1,\), got float32 \(3,\)"),
    ({"q_cu_seqlens": Q_ENDS[:0]}, ValueError,
     r"q_cu_seqlens must be int32 or int64 of shape \(Nq \+ 1,\), got int64 \(0,\)"),
    ({"q_cu_seqlens": Q_ENDS.to("meta")}, ValueError, "q_cu_seqlens must be on cpu as its tokens are, got meta"),
    ({"d_cu_seqlens": ends(1, 4, 9)}, ValueError, "d_cu_seqlens must start at 0, got 1"),
    ({"q_cu_seqlens": ends(-1, 4)}, ValueError, "q_cu_seqlens must start at 0, got -1"),
    ({"d_cu_seqlens": ends(0, 5, 4, 9)}, ValueError, "d_cu_seqlens must not decrease, got 5 and then 4 at 2"),
    ({"q_cu_seqlens": ends(0, 3, 7)}, ValueError, "q_cu_seqlens must end at 6, the number of rows, or before, got 7"),
    ({"q_mask": torch.ones(5, dtype=torch.bool)}, ValueError,
     r"q_mask must be bool of shape \(q_total,\) = \(6,\), got bool \(5,\)"),
    ({"d_mask": torch.ones(9)}, TypeError, r"d_mask must be bool of shape \(d_total,\) = \(9,\), got float32 \(9,\)"),
    ({"q_weights": torch.ones(3, 2)}, ValueError,
     r"q_weights must be floating of shape \(q_total,\) = \(6,\), got float32 \(3, 2\)"),
    ({"d_weights": torch.ones(9)}, ValueError,
     "d_weights weigh the reverse direction and need symmetric=True, got False"),
    ({"symmetric": 1}, TypeError, "symmetric must be True or False, got 1"),
    ({"return_alignment": "no"}, TypeError, "return_alignment must be True or False, got 'no'"),
    ({"temperature": 0}, ValueError, "temperature must be between 1e-30 and 1e30, got 0"),
    ({"precision": "tf32"}, ValueError,
     "precision='tf32' is for CUDA tensors or backend='reference', got backend 'cpp'"),
    ({"backend": "triton"}, ValueError, "backend 'triton' takes CUDA tensors, got cpu"),
])  # fmt: skip
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^max_sim_varlen: {message}$"):
        max_sim_varlen(**{**PACKED, **change})


def test_a_missing_extension_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine._C", None)
    with pytest.raises(RuntimeError, match=r"max_sim_varlen: the C\+\+ CPU kernels are missing .* backend='reference'"):
        max_sim_varlen(**PACKED)
    assert max_sim_varlen(**PACKED, backend="reference").shape == (3, 2)


def test_the_extension_itself_reads_nothing_outside() -> None:
    """Boundaries are checked once more where memory is read."""
    from engine.ops.native import as_array, extension

    scores = torch.empty(1, 2)
    for bad in ([0, 5, 4], [0, 4, 10], [1, 4, 9]):
        with pytest.raises(ValueError, match="d must be given with offsets that ascend from 0"):
            extension("max_sim_varlen").max_sim(
                as_array(Q[None]), as_array(D), "float32", None, as_array(torch.tensor(bad)), *(None,) * 4, 0.0, False,
                as_array(scores), *(None,) * 5, "", 1,
            )  # fmt: skip


def test_what_is_returned() -> None:
    assert isinstance(max_sim_varlen(**PACKED), torch.Tensor)
    out = max_sim_varlen(**PACKED, symmetric=True, return_alignment=True)
    assert isinstance(out, MaxSimOutput)
    assert [tuple(x.shape) for x in out] == [(3, 2), (3, 2), (6, 2), (6, 2), (3, 9), (3, 9)]
    assert out.argmax.dtype == out.reverse_argmax.dtype == torch.int32
    one = max_sim_varlen(**PACKED, return_alignment=True)
    assert [x is None for x in one] == [False, True, False, False, True, True]
    meta = {name: x.to("meta") for name, x in PACKED.items()}
    shapes = [tuple(x.shape) for x in max_sim_varlen_op(*meta.values(), *(None,) * 5, True, True, True, "ieee", "cpp")]
    assert shapes == [(3, 2), (3, 2), (2, 6), (2, 6), (3, 9), (3, 9)]


# opcheck itself looks at the .grad of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("temperature", [None, 0.1])
@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_opcheck(backend: str, temperature: float | None) -> None:
    q, d = Q.clone().requires_grad_(), D.clone().requires_grad_()
    weights = torch.rand(6, requires_grad=True), torch.rand(9, requires_grad=True)
    options = (temperature, True, True, True, "ieee", backend)
    torch.library.opcheck(max_sim_varlen_op, (q, d, Q_ENDS, D_ENDS, None, None, *weights, *options))
    dense = torch.rand(2, 3, 4, requires_grad=True)
    torch.library.opcheck(max_sim_varlen_op, (dense, d, None, D_ENDS, None, None, None, None, *options))
    _, _, argmax, *_ = max_sim_varlen_op(Q, D, Q_ENDS, D_ENDS, *(None,) * 5, False, True, False, "ieee", backend)
    incoming = (torch.randn(3, 2), None, argmax, None, None, None)
    torch.library.opcheck(
        max_sim_varlen_backward_op,
        (*incoming, Q, D, Q_ENDS, D_ENDS, None, None, None, None, temperature, "ieee", backend),
    )


def test_the_op_alone_recomputes_what_its_backward_needs() -> None:
    wanted, got = [], []
    for need in (True, False):
        q, w = Q.clone().requires_grad_(), torch.ones(6, requires_grad=True)
        out = max_sim_varlen_op(q, D, Q_ENDS, D_ENDS, None, None, w, None, None, False, need, need, "ieee", "cpp")
        (got if need else wanted).extend(torch.autograd.grad(out[0].square().sum(), (q, w)))
    for actual, expected in zip(got, wanted, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("temperature", [None, 0.1])
def test_compiles_to_one_graph(temperature: float | None) -> None:
    def loss(q: torch.Tensor, d: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        out = max_sim_varlen(
            q * 2, d, q_cu_seqlens=bounds, d_cu_seqlens=D_ENDS, temperature=temperature, symmetric=True,
            return_alignment=True,
        )  # fmt: skip
        return (out.scores + out.reverse_scores).exp().sum() + out.values.sum() + out.argmax.sum()

    q, d = Q.clone().requires_grad_(), D.clone().requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    wanted, got = loss(q, d, Q_ENDS), compiled(q, d, Q_ENDS)
    assert_close(got, wanted)
    for actual, expected in zip(torch.autograd.grad(got, (q, d)), torch.autograd.grad(wanted, (q, d)), strict=True):
        assert_close(actual, expected, scale=10)


def test_threads_change_no_digit() -> None:
    lengths = torch.randint(1, 90, (200,))
    d = torch.randn(int(lengths.sum()), 128)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    q = torch.randn(8, 32, 128)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            results.append(max_sim_varlen(q, d, d_cu_seqlens=bounds, temperature=0.1, symmetric=True))
        finally:
            torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(results[0].scores, other.scores)
        assert torch.equal(results[0].reverse_scores, other.reverse_scores)


def test_memory_stays_within_results() -> None:
    """Forward and backward of 256 × 256 ragged pairs in a process of its own: far below 240 MB of similarities."""
    program = """
import torch
from engine.ops.max_sim_varlen import max_sim_varlen
torch.set_num_threads(1)
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
lengths = torch.arange(256) % 61
bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
q, d = (torch.randn(int(bounds[-1]), 16, requires_grad=True) for _ in range(2))
few = bounds[:3]
max_sim_varlen(q, d, q_cu_seqlens=few, d_cu_seqlens=few).sum().backward()
before = peak()
with torch.no_grad(): max_sim_varlen(q, d, q_cu_seqlens=bounds, d_cu_seqlens=bounds)
forward = peak() - before
max_sim_varlen(q, d, q_cu_seqlens=bounds, d_cu_seqlens=bounds).logsumexp(1).sum().backward()
print(forward, peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=600, capture_output=True, text=True)
    forward, both = map(float, done.stdout.split())
    assert forward < 20  # packed queries, scores
    assert both < 60  # the argmax is 8 MB, gradients 1 MB


def test_the_contract_holds_under_the_interpreter() -> None:
    """What the padded blocks decide, in a process where Triton's kernels run interpreted on CPU tensors."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-W",
         "ignore::RuntimeWarning", "tests/test_max_sim_varlen.py",
         "-k", "ragged and None or special and None or padded or no_items"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "21 passed" in done.stdout, done.stdout[-5000:]
