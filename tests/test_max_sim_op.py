"""Max-sim as an operation: what it refuses, how it fits torch, processes, threads and memory."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import engine
import engine.ops.checks
from engine.ops.max_sim import MaxSimOutput, max_sim, max_sim_backward_op, max_sim_op, max_sim_pairs
from engine.ops.native import INTERFACE, ISA_VARIABLE, extension, instruction_sets
from engine.reference import max_sim as reference
from tests.tolerances import assert_close

Q, D = torch.randn(2, 3, 4), torch.randn(5, 6, 4)


@pytest.mark.parametrize("change, error, message", [
    ({"q": [1.0]}, TypeError, r"max_sim: q must be a torch.Tensor, got list"),
    ({"q": torch.zeros(3, 4)}, ValueError, r"max_sim: q must have the shape \(Nq, Lq, D\), got \(3, 4\)"),
    ({"d": torch.zeros(3)}, ValueError, r"max_sim: d must have the shape \(Nd, Ld, D\), got \(3,\)"),
    ({"q": Q.long()}, TypeError, r"max_sim: q must be one of float32, float16, bfloat16, float64, got int64"),
    ({"d": D.half()}, TypeError, r"max_sim: q and d must have one dtype, got float32 and float16"),
    ({"d": D.to("meta")}, ValueError, r"max_sim: q and d must be on one device, got cpu and meta"),
    ({"d": D[..., :3]}, ValueError, r"max_sim: q and d must have one last dimension D, got 4 and 3"),
    ({"d_mask": torch.ones(6, 5, dtype=torch.long)}, TypeError,
     r"max_sim: d_mask must be bool of shape \(Nd, Ld\) = \(5, 6\), got int64 \(6, 5\)"),
    ({"q_mask": torch.ones(3, 2, dtype=torch.bool)}, ValueError,
     r"max_sim: q_mask must be bool of shape \(Nq, Lq\) = \(2, 3\), got bool \(3, 2\)"),
    ({"q_mask": torch.ones(2, 3, dtype=torch.bool, device="meta")}, ValueError,
     r"max_sim: q_mask must be on cpu as its tokens are, got meta"),
    ({"q_weights": torch.ones(2, 3, dtype=torch.int32)}, TypeError,
     r"max_sim: q_weights must be floating of shape \(Nq, Lq\) = \(2, 3\), got int32 \(2, 3\)"),
    ({"q_weights": [1.0]}, TypeError, r"max_sim: q_weights must be a torch.Tensor, got list"),
    ({"d_weights": torch.ones(5, 6)}, ValueError,
     r"max_sim: d_weights weigh the reverse direction and need symmetric=True, got False"),
    ({"q": Q.to_sparse()}, TypeError, r"max_sim: q must be a dense tensor, got a sparse one"),
    ({"d": torch.nested.nested_tensor([D[0], D[1]], layout=torch.jagged)}, TypeError,
     r"max_sim: d must be a dense tensor, got a nested one"),
    ({"symmetric": 1}, TypeError, r"max_sim: symmetric must be True or False, got 1"),
    ({"symmetric": None}, TypeError, r"max_sim: symmetric must be True or False, got None"),
    ({"return_alignment": "no"}, TypeError, r"max_sim: return_alignment must be True or False, got 'no'"),
    ({"return_alignment": 0}, TypeError, r"max_sim: return_alignment must be True or False, got 0"),
    ({"temperature": 0}, ValueError, r"max_sim: temperature must be between 1e-30 and 1e30, got 0"),
    ({"temperature": float("nan")}, ValueError, r"max_sim: temperature must be between 1e-30 and 1e30, got nan"),
    ({"temperature": True}, TypeError, r"max_sim: temperature must be a number or None, got bool"),
    ({"precision": "fp8"}, ValueError, r"max_sim: precision must be 'ieee' or 'tf32', got 'fp8'"),
    ({"precision": "tf32"}, ValueError,
     r"max_sim: precision='tf32' is for CUDA tensors or backend='reference', got backend 'cpp'"),
    ({"precision": "tf32", "q": Q.half(), "d": D.half(), "backend": "reference"}, ValueError,
     r"max_sim: precision='tf32' is for float32 inputs, got float16"),
    ({"backend": "cuda"}, ValueError,
     r"max_sim: backend must be one of auto, cpp, triton, reference or None, got 'cuda'"),
    ({"backend": "triton"}, ValueError, r"max_sim: backend 'triton' takes CUDA tensors, got cpu"),
    ({"backend": "cpp", "q": Q.to("meta"), "d": D.to("meta")}, ValueError,
     r"max_sim: backend 'cpp' takes CPU tensors, got meta"),
    ({"backend": "cpp", "q": Q.double(), "d": D.double()}, ValueError,
     r"max_sim: backend 'cpp' does not take float64; pass backend='reference'"),
])  # fmt: skip
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        max_sim(**{"q": Q, "d": D, **change})


def test_pairs_refuse_different_numbers() -> None:
    with pytest.raises(ValueError, match=r"^max_sim_pairs: q and d must be equal in number, got 2 and 5$"):
        max_sim_pairs(Q, D)


def test_a_missing_extension_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine._C", None)
    with pytest.raises(RuntimeError, match=r"max_sim: the C\+\+ CPU kernels are missing .* backend='reference'"):
        max_sim(Q, D)
    assert instruction_sets() == []
    assert max_sim(Q, D, backend="reference").shape == (2, 5)


@pytest.mark.parametrize("number", [None, INTERFACE - 1])
def test_an_extension_of_older_sources_is_refused(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    stale = SimpleNamespace() if number is None else SimpleNamespace(INTERFACE=number)
    monkeypatch.setitem(sys.modules, "engine._C", stale)
    monkeypatch.setattr(engine, "_C", stale, raising=False)
    with pytest.raises(RuntimeError, match=r"max_sim: the C\+\+ CPU kernels were built from other .* `make setup`"):
        max_sim(Q, D)
    assert max_sim(Q, D, backend="reference").shape == (2, 5)


def test_the_number_of_the_interface_goes_with_its_signatures() -> None:
    """What can be called changed: raise INTERFACE here, in engine/ops/native.py and in csrc/bindings.cpp."""
    native = extension("max_sim")
    functions = {name: str(x.__doc__).partition("->")[0] for name, x in sorted(vars(native).items()) if callable(x)}
    signatures = [(name, *re.findall(r"(\w+): ", text)) for name, text in functions.items()]
    assert (INTERFACE, zlib.crc32(repr(signatures).encode())) == (1, 3387793038)


def test_missing_triton_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match=r"max_sim: Triton is missing .* `pip install triton`"):
        engine.ops.checks.check_triton("max_sim", "cuda")


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "mmx")
    with pytest.raises(ValueError, match=r"max_sim: the instruction set must be one of .*generic, got mmx"):
        max_sim(Q, D)


def test_what_is_returned() -> None:
    assert isinstance(max_sim(Q, D), torch.Tensor)
    one = max_sim(Q, D, symmetric=True)
    two = max_sim(Q, D, return_alignment=True)
    assert isinstance(one, MaxSimOutput) and isinstance(two, MaxSimOutput)
    assert [x is None for x in one] == [False, False, True, True, True, True]
    assert [x is None for x in two] == [False, True, False, False, True, True]
    assert two.argmax.dtype == torch.int32 and two.argmax.shape == two.values.shape == (2, 5, 3)
    assert max_sim(Q.bfloat16(), D.bfloat16()).dtype == torch.float32
    assert max_sim(Q.double(), D.double()).dtype == torch.float64


def test_inference_writes_no_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = reference.empty_outputs

    def spy(*tensors: torch.Tensor, **options: bool) -> Any:
        asked.append(options["need_argmax"])
        return real(*tensors, **options)

    monkeypatch.setattr(reference, "empty_outputs", spy)
    q = Q.clone().requires_grad_()
    max_sim(q.detach(), D, symmetric=True)
    with torch.no_grad():
        max_sim(q, D, symmetric=True)
    max_sim(q, D, temperature=0.1)
    max_sim(q, D)
    assert asked == [False, False, False, True]


def test_tf32_rounds_the_products() -> None:
    q, d = torch.full((1, 1, 1), 1 + 2.0**-12), torch.full((1, 1, 1), 1.0)
    assert max_sim(q, d, backend="reference").item() == 1 + 2.0**-12
    assert max_sim(q, d, backend="reference", precision="tf32").item() == 1.0
    halfway = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-10, torch.inf, torch.nan])
    wanted = torch.tensor([1.0, 1 + 2.0**-9, -1 - 2.0**-10, torch.inf, torch.nan])
    assert_close(reference.round_to_tf32(halfway), wanted)


# opcheck itself looks at the .grad of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("temperature", [None, 0.1])
@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_opcheck(backend: str, temperature: float | None) -> None:
    q, d = Q.clone().requires_grad_(), D.clone().requires_grad_()
    weights = torch.rand(2, 3, requires_grad=True)
    for pairs in (False, True):
        documents = d.detach()[:2].requires_grad_() if pairs else d
        arguments = (q, documents, None, None, weights, None, temperature, True, pairs, True, True, "ieee", backend)
        torch.library.opcheck(max_sim_op, arguments)
    _, _, argmax, *_ = max_sim_op(Q, D, *(None,) * 5, False, False, True, False, "ieee", backend)
    incoming = (torch.randn(2, 5), None, argmax, None, None, None)
    torch.library.opcheck(
        max_sim_backward_op, (*incoming, Q, D, None, None, None, None, temperature, False, "ieee", backend)
    )


def test_the_op_alone_recomputes_what_its_backward_needs() -> None:
    wanted, got = [], []
    for need in (True, False):
        q, w = Q.clone().requires_grad_(), torch.ones(2, 3, requires_grad=True)
        out = max_sim_op(q, D, None, None, w, None, None, False, False, need, need, "ieee", "cpp")
        (got if need else wanted).extend(torch.autograd.grad(out[0].square().sum(), (q, w)))
    for actual, expected in zip(got, wanted, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("temperature", [None, 0.1])
def test_compiles_to_one_graph(temperature: float | None) -> None:
    def loss(q: torch.Tensor, d: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out = max_sim(q * 2, d, d_mask=mask, temperature=temperature, symmetric=True, return_alignment=True)
        return (out.scores + out.reverse_scores).exp().sum() + out.values.sum() + out.argmax.sum()

    q, d = Q.clone().requires_grad_(), D.clone().requires_grad_()
    mask = torch.rand(5, 6) < 0.8
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    wanted, got = loss(q, d, mask), compiled(q, d, mask)
    assert_close(got, wanted)
    for actual, expected in zip(torch.autograd.grad(got, (q, d)), torch.autograd.grad(wanted, (q, d)), strict=True):
        assert_close(actual, expected, scale=10)


def test_meta_tensors_have_the_right_shapes() -> None:
    out = max_sim(Q.to("meta"), D.to("meta"), symmetric=True, return_alignment=True)
    assert [tuple(x.shape) for x in out] == [(2, 5), (2, 5), (2, 5, 3), (2, 5, 3), (2, 5, 6), (2, 5, 6)]


def many(n_d: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Enough work for several threads."""
    return torch.randn(8, 32, 128), torch.randn(n_d, 50, 128)


def test_threads_change_no_digit() -> None:
    q, d = many()
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            results.append(max_sim(q, d, temperature=0.1, symmetric=True))
        finally:
            torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(results[0].scores, other.scores)
        assert torch.equal(results[0].reverse_scores, other.reverse_scores)


def test_works_in_a_forked_child() -> None:
    program = """
import os, torch
from engine.ops.max_sim import max_sim
torch.set_num_threads(3)
q, d = torch.randn(8, 32, 128), torch.randn(200, 50, 128)
wanted = max_sim(q, d)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(max_sim(q, d), wanted) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", program], check=True, timeout=600)


def test_a_memory_map_is_scored(tmp_path: Any) -> None:
    path = tmp_path / "documents.npy"
    np.save(path, D.numpy())
    mapped = np.load(path, mmap_mode="c")
    assert_close(max_sim(Q, torch.from_numpy(mapped)), max_sim(Q, D))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_more_than_two_to_the_31_elements(tmp_path: Any, dtype: torch.dtype) -> None:
    """A sparse file of 2^31 + elements, with tokens where 32-bit addresses would wrap; nothing else is read."""
    dim, length, n = 64, 2**19, 70
    assert n * length * dim > 2**31
    size = {torch.bfloat16: 2, torch.float32: 4}[dtype]
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(n * length * dim * size)
    d = torch.from_file(str(path), shared=True, size=n * length * dim, dtype=dtype).view(n, length, dim)
    mask = torch.zeros(n, length, dtype=torch.bool)
    for j, t in ((0, 0), (64, 0), (69, length - 1)):
        d[j, t] = j + 1
        mask[j, t] = True
    q = torch.ones(1, 1, dim, dtype=dtype)
    out = max_sim(q, d, d_mask=mask, return_alignment=True)
    assert out.scores[0, [0, 64, 69, 5]].tolist() == [64, 64 * 65, 64 * 70, 0]
    assert out.argmax[0, [0, 64, 69, 5], 0].tolist() == [0, 0, length - 1, -1]


def test_memory_stays_within_tiles_and_results() -> None:
    """Forward and backward of 256 × 256 pairs in a process of its own: far below the 400 MB of similarities."""
    program = """
import resource, torch
from engine.ops.max_sim import max_sim
torch.set_num_threads(1)
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
q, d = (torch.randn(256, 40, 16, requires_grad=True) for _ in range(2))
small = max_sim(q[:2], d[:2]); small.sum().backward()
before = peak()
with torch.no_grad(): max_sim(q, d)
forward = peak() - before
max_sim(q, d).logsumexp(1).sum().backward()
print(forward, peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=600, capture_output=True, text=True)
    forward, both = map(float, done.stdout.split())
    assert forward < 20  # packed queries, scores
    assert both < 60  # the argmax is 10 MB, gradients 1 MB


def test_the_example_in_the_docstring_runs() -> None:
    import doctest

    module = sys.modules["engine.ops.max_sim"]
    result = doctest.testmod(module)
    assert result.failed == 0 and result.attempted >= 4
