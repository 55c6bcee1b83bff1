"""The contrastive loss on max-sim: against torch's own on the reference, its gradients, laws, edges, memory."""

from __future__ import annotations

import doctest
import math
import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from engine.ops.max_sim import max_sim
from engine.ops.max_sim_contrastive import (
    max_sim_contrastive,
    max_sim_contrastive_backward_op,
    max_sim_contrastive_op,
)
from engine.reference.max_sim_contrastive import argmax_dtype
from tests.max_sim_oracle import BACKENDS, DTYPES, INF, INTERPRETED, NAN, forced
from tests.tolerances import assert_close

# `engine.ops` hides the file behind the function of its name.
module = sys.modules["engine.ops.max_sim_contrastive"]
per_backend = pytest.mark.parametrize("backend", BACKENDS)
per_temperature = pytest.mark.parametrize("temperature", [None, 0.3])
per_form = pytest.mark.parametrize("symmetric", [False, True])
LEAVES = ("q", "d", "q_weights", "d_weights", "logit_scale")


def composed(
    q: Tensor, d: Tensor, *, logit_scale: Tensor | float, symmetric: bool = False, **options: Any
) -> Tensor:
    """The loss as one writes it in torch, on scores of the reference."""
    out = max_sim(q, d, symmetric=True, backend="reference", **options)
    z = logit_scale * out.scores
    reverse = logit_scale * out.reverse_scores if symmetric else z
    n = min(z.shape)
    target = torch.arange(n)
    cross_entropy = torch.nn.functional.cross_entropy
    return (cross_entropy(z[:n], target) + cross_entropy(reverse[:, :n].T, target)) / 2


def make(
    n_q: int = 4, n_d: int = 4, l_q: int = 5, l_d: int = 7, dim: int = 9, symmetric: bool = True
) -> dict[str, Tensor]:
    case = {
        "q": torch.randn(n_q, l_q, dim), "d": torch.randn(n_d, l_d, dim),
        "q_weights": torch.rand(n_q, l_q) + 0.5, "d_weights": torch.rand(n_d, l_d) + 0.5,
        "logit_scale": torch.tensor(0.3),
    }  # fmt: skip
    return case if symmetric else {name: x for name, x in case.items() if name != "d_weights"}


def masks(n_q: int, n_d: int, l_q: int = 5, l_d: int = 7) -> dict[str, Tensor]:
    return {"q_mask": torch.rand(n_q, l_q) < 0.8, "d_mask": torch.rand(n_d, l_d) < 0.8}


def loss_and_gradients(function: Any, case: dict[str, Tensor], **options: Any) -> tuple[Tensor, list[Tensor]]:
    inputs = {name: x.detach().clone().requires_grad_() for name, x in case.items()}
    loss = function(**inputs, **options)
    return loss, list(torch.autograd.grad(loss * 3, list(inputs.values())))


def check(backend: str, case: dict[str, Tensor], scale: float = 10, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients agree with torch's on the reference in float64."""
    with forced(backend) as name:
        loss, grads = loss_and_gradients(max_sim_contrastive, case, backend=name, **options)
    exact = {name: x.double() for name, x in case.items()}
    wanted, wanted_grads = loss_and_gradients(composed, exact, **options)
    dtype = case["q"].dtype
    assert loss.shape == () and loss.dtype == torch.float32
    assert_close(loss, wanted, dtype=dtype, scale=scale, what="loss")
    for name, actual, expected in zip(case, grads, wanted_grads, strict=True):
        assert actual.dtype == case[name].dtype and actual.shape == case[name].shape, name
        assert_close(actual, expected, dtype=dtype, scale=scale, what=name)
    return loss, grads


@per_backend
@per_temperature
@per_form
@pytest.mark.parametrize("sizes", [(4, 4), (3, 6), (6, 3), (1, 5), (5, 1)], ids=str)
def test_agrees_with_torch(backend: str, temperature: float | None, symmetric: bool, sizes: tuple[int, int]) -> None:
    check(backend, make(*sizes, symmetric=symmetric), temperature=temperature, symmetric=symmetric, **masks(*sizes))


@per_backend
@per_temperature
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(backend: str, temperature: float | None, dtype: torch.dtype) -> None:
    case = make(5, 5)
    case["q"], case["d"] = case["q"].to(dtype), case["d"].to(dtype)
    check(backend, case, symmetric=True, temperature=temperature)


@pytest.mark.skipif(INTERPRETED, reason="float64 goes to the reference")
@per_temperature
@per_form
@pytest.mark.parametrize("sizes", [(3, 3), (2, 4), (4, 2)], ids=str)
def test_gradcheck(temperature: float | None, symmetric: bool, sizes: tuple[int, int]) -> None:
    case = make(*sizes, symmetric=symmetric)
    names, options = tuple(case), masks(*sizes)

    def function(*inputs: Tensor) -> Tensor:
        arguments = dict(zip(names, inputs, strict=True))
        return max_sim_contrastive(**arguments, temperature=temperature, symmetric=symmetric, **options)

    inputs = tuple(x.double().requires_grad_() for x in case.values())
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


# opcheck itself looks at the .grad of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.skipif(INTERPRETED, reason="no matter of kernels")
@per_temperature
@per_form
@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_opcheck(backend: str, temperature: float | None, symmetric: bool) -> None:
    leaves = {name: x.requires_grad_() for name, x in make().items()}
    q, d, q_weights, d_weights, scale = leaves.values()
    weights = (q_weights, d_weights if symmetric else None)
    rest = (temperature, symmetric, temperature is None, "ieee", backend)
    torch.library.opcheck(max_sim_contrastive_op, (q, d, None, None, *weights, scale, *rest))
    with torch.no_grad():
        _, *saved = max_sim_contrastive_op(q, d, None, None, *weights, scale, *rest)
        inputs = [x if x is None else x.detach() for x in (q, d, None, None, *weights, scale)]
    for needs in ((True, False), (False, True), (True, True)):
        arguments = (torch.tensor(2.0), *saved, *inputs, temperature, symmetric, *needs, "ieee", backend)
        torch.library.opcheck(max_sim_contrastive_backward_op, arguments)


@pytest.mark.skipif(INTERPRETED, reason="no matter of kernels")
@per_temperature
def test_compiles_to_one_graph(temperature: float | None) -> None:
    def step(q: Tensor, d: Tensor, log_scale: Tensor, mask: Tensor) -> Tensor:
        return max_sim_contrastive(
            q * 2, d, logit_scale=log_scale.exp(), d_mask=mask, temperature=temperature, symmetric=True
        )

    q, d, log_scale = torch.randn(3, 4, 5), torch.randn(6, 7, 5), torch.tensor(0.2)
    leaves = [x.requires_grad_() for x in (q, d, log_scale)]
    mask = torch.rand(6, 7) < 0.8
    wanted = step(*leaves, mask)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves, mask)
    assert_close(got, wanted)
    for actual, expected in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        assert_close(actual, expected, scale=10)


@pytest.mark.skipif(INTERPRETED, reason="no matter of kernels")
def test_the_op_alone_recomputes_what_its_backward_needs() -> None:
    q, d = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 6, 5)
    grads = []
    for need in (True, False):
        loss, *_ = max_sim_contrastive_op(
            q, d, None, None, None, None, torch.tensor(1.0), None, True, need, "ieee", "cpp"
        )
        grads.append(torch.autograd.grad(loss, q)[0])
    assert torch.equal(*grads) and grads[0].abs().sum() > 0


@per_backend
def test_only_what_is_asked_for(backend: str) -> None:
    case = make()
    with forced(backend) as name:
        for leaf in LEAVES:
            inputs = {**case, leaf: case[leaf].clone().requires_grad_()}
            loss = max_sim_contrastive(**inputs, symmetric=True, backend=name)
            (grad,) = torch.autograd.grad(loss, inputs[leaf])
            assert grad.abs().sum() > 0
        assert not max_sim_contrastive(**case, symmetric=True, backend=name).requires_grad
        number = max_sim_contrastive(**{**case, "logit_scale": 0.3}, symmetric=True, backend=name)
        assert_close(number, max_sim_contrastive(**case, symmetric=True, backend=name))


@per_backend
@per_temperature
@per_form
@settings(max_examples=2 if INTERPRETED else 8, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_laws(backend: str, temperature: float | None, symmetric: bool, data: st.DataObject) -> None:
    """Pairs in another order, a number added to all scores and extra negatives: what changes, and what does not."""
    n, extra, dim = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3)), data.draw(st.integers(1, 9))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    q, d, few = torch.randn(n, 3, dim), torch.randn(n + extra, 4, dim), torch.arange(n)
    options = {"logit_scale": 0.5, "temperature": temperature, "symmetric": symmetric}
    with forced(backend) as name:
        before = max_sim_contrastive(q, d, backend=name, **options)
        order = torch.randperm(n)
        moved = torch.cat([order, n + torch.randperm(extra)])
        same = max_sim_contrastive(q[order], d[moved], backend=name, **options)
        assert_close(same, before, scale=10, what="order")
        # Three more per token in every similarity: no softmax sees it.
        raised = [torch.cat([x, torch.full((*x.shape[:2], 1), 3.0**0.5)], 2) for x in (q, d)]
        assert_close(max_sim_contrastive(*raised, backend=name, **options), before, scale=30, what="shift")
        alone = max_sim_contrastive(q, d[few], backend=name, **options)
        assert alone <= before + 1e-5
        turned = max_sim_contrastive(d, q, backend=name, **options)
        if symmetric:
            assert_close(turned, before, scale=10, what="sides")


@per_backend
@per_temperature
@per_form
def test_one_pair_has_no_loss(backend: str, temperature: float | None, symmetric: bool) -> None:
    case = make(1, 1, symmetric=symmetric)
    with forced(backend) as name:
        loss, grads = loss_and_gradients(
            max_sim_contrastive, case, temperature=temperature, symmetric=symmetric, backend=name
        )
    assert loss.item() == 0 and all((grad == 0).all() for grad in grads)


@per_backend
@per_temperature
def test_nothing_kept_is_a_draw(backend: str, temperature: float | None) -> None:
    case = make(3, 4)
    empty = {"q_mask": torch.zeros(3, 5, dtype=torch.bool)}
    loss, grads = check(backend, case, symmetric=True, temperature=temperature, **empty)
    assert_close(loss, torch.tensor((math.log(3) + math.log(4)) / 2))
    assert all((grad == 0).all() for grad in grads)


@per_backend
@per_temperature
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite(backend: str, temperature: float | None, bad: float) -> None:
    case = make(3, 5, symmetric=False)
    case["q"] = case["q"].abs()
    case["d"] = case["d"].abs()
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[4, 0] = False
    case["d"][4, 0] = bad  # masked: as if it were not there
    with forced(backend) as name:
        loss, grads = loss_and_gradients(
            max_sim_contrastive, case, d_mask=mask, temperature=temperature, backend=name
        )
        assert loss.isfinite() and all(grad.isfinite().all() for grad in grads)
        case["d"][4] = bad
        loss = max_sim_contrastive(**case, temperature=temperature, backend=name)
    if bad == -INF:  # a negative that scores nothing at all counts for nothing
        fewer = {**case, "d": case["d"][:4]}
        with forced(backend) as name:
            assert_close(loss, max_sim_contrastive(**fewer, temperature=temperature, backend=name))
    else:
        assert not loss.isfinite()


@per_backend
@per_temperature
@per_form
def test_spans_of_queries_change_nothing(
    backend: str, temperature: float | None, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, options = make(5, 4, symmetric=symmetric), {"temperature": temperature, "symmetric": symmetric}
    monkeypatch.setattr(module, "SPAN_BYTES", 200)
    assert len(list(module._spans(case["q"], case["d"], symmetric))) > 2
    check(backend, case, **options, **masks(5, 4))


@pytest.mark.parametrize("length, wanted", [
    (0, torch.int8), (128, torch.int8), (129, torch.int16), (2**15, torch.int16), (2**15 + 1, torch.int32),
])  # fmt: skip
def test_the_argmax_is_as_narrow_as_can_be(length: int, wanted: torch.dtype) -> None:
    assert argmax_dtype(length) == wanted
    assert length - 1 <= torch.iinfo(wanted).max


@per_backend
@pytest.mark.parametrize("long", ["q", "d"])
def test_long_sides(backend: str, long: str) -> None:
    """Places beyond 127, and tokens that find them."""
    lengths = {"l_q": 200, "l_d": 3} if long == "q" else {"l_q": 3, "l_d": 200}
    case = make(2, 2, dim=4, **lengths)
    case["logit_scale"] = torch.tensor(0.01)
    check(backend, case, symmetric=True)


@pytest.mark.skipif(INTERPRETED, reason="measures the CPU kernels")
@per_temperature
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name.startswith("cpp")])
def test_threads_and_repetition_change_no_bit(backend: str, temperature: float | None) -> None:
    case = make(20, 24, 16, 20, 64)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5, 2):
        torch.set_num_threads(threads)
        try:
            with forced(backend) as name:
                results.append(loss_and_gradients(
                    max_sim_contrastive, case, symmetric=True, temperature=temperature, backend=name
                ))  # fmt: skip
        finally:
            torch.set_num_threads(before)
    # The gradients of weights and scale are sums of torch's, whose order depends on its threads.
    for loss, grads in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(grads[0], results[0][1][0]) and torch.equal(grads[1], results[0][1][1])
    assert all(torch.equal(a, b) for a, b in zip(results[1][1], results[3][1], strict=True))


@pytest.mark.skipif(INTERPRETED, reason="measures the CPU kernels")
def test_memory_stays_within_gradients_and_winners() -> None:
    """A step on 256 pairs of 40 × 40 tokens in a process of its own: similarities would be 400 MB, values 10 MB."""
    program = """
import torch
from engine.ops.max_sim_contrastive import max_sim_contrastive
torch.set_num_threads(1)
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
q, d = (torch.randn(256, 40, 64, requires_grad=True) for _ in range(2))
scale = torch.tensor(1.0, requires_grad=True)
max_sim_contrastive(q[:2], d[:2], logit_scale=scale, temperature=0.1).backward()
for temperature in (0.1, None):
    q.grad = d.grad = None
    before = peak()
    max_sim_contrastive(q, d, logit_scale=scale, temperature=temperature).backward()
    print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=600, capture_output=True, text=True)
    soft, hard = map(float, done.stdout.split())
    assert soft < 25  # gradients are 5 MB
    assert hard < 35  # the narrow argmax is 2.5 MB, a span of it in int32 10 MB


Q = torch.randn(2, 3, 4)
D = torch.randn(2, 5, 4)


@pytest.mark.parametrize("change, error, message", [
    ({"q": [1.0]}, TypeError, r"max_sim_contrastive: q must be a torch.Tensor, got list"),
    ({"q": Q[:0]}, ValueError,
     r"max_sim_contrastive: q and d must make at least one pair, got Nq = 0 and Nd = 2"),
    ({"d": D[:0]}, ValueError,
     r"max_sim_contrastive: q and d must make at least one pair, got Nq = 2 and Nd = 0"),
    ({"d_mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError,
     r"max_sim_contrastive: d_mask must be bool of shape \(Nd, Ld\) = \(2, 5\), got bool \(2, 4\)"),
    ({"d_weights": torch.ones(2, 5)}, ValueError,
     r"max_sim_contrastive: d_weights weigh the reverse direction and need symmetric=True, got False"),
    ({"symmetric": "yes"}, TypeError, r"max_sim_contrastive: symmetric must be True or False, got 'yes'"),
    ({"logit_scale": torch.ones(1)}, ValueError,
     r"max_sim_contrastive: logit_scale must be a number or a floating tensor of shape \(\), got float32 \(1,\)"),
    ({"logit_scale": torch.tensor(1)}, ValueError,
     r"max_sim_contrastive: logit_scale must be a number or a floating tensor of shape \(\), got int64 \(\)"),
    ({"logit_scale": torch.ones((), device="meta")}, ValueError,
     r"max_sim_contrastive: logit_scale must be on cpu as the tokens are, got meta"),
    ({"logit_scale": "100"}, TypeError,
     r"max_sim_contrastive: logit_scale must be a number or a torch.Tensor, got str"),
    ({"temperature": 0}, ValueError, r"max_sim_contrastive: temperature must be between 1e-30 and 1e30, got 0"),
    ({"precision": "fp8"}, ValueError, r"max_sim_contrastive: precision must be 'ieee' or 'tf32', got 'fp8'"),
    ({"backend": "cuda"}, ValueError,
     r"max_sim_contrastive: backend must be one of auto, cpp, triton, reference or None, got 'cuda'"),
])  # fmt: skip
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        max_sim_contrastive(**{"q": Q, "d": D, "logit_scale": 1.0, **change})


def test_tf32_rounds_the_products() -> None:
    q, d = torch.full((1, 1, 1), 1 + 2.0**-12), torch.tensor([1.0, -1.0]).view(2, 1, 1)
    losses = [
        max_sim_contrastive(q, d, logit_scale=1.0, backend="reference", precision=precision).item()
        for precision in ("ieee", "tf32")
    ]
    assert losses[1] == pytest.approx(math.log1p(math.exp(-2)) / 2, rel=1e-6)
    assert losses[0] != losses[1]


def test_double_backward_is_refused() -> None:
    q, d = torch.randn(2, 2, 3, requires_grad=True), torch.randn(2, 2, 3)
    loss = max_sim_contrastive(q, d, logit_scale=1.0)
    (grad,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grad.square().sum().backward()


def test_meta_tensors() -> None:
    assert max_sim_contrastive(Q.to("meta"), D.to("meta"), logit_scale=1.0).shape == ()


def test_the_example_in_the_docstring_runs() -> None:
    result = doctest.testmod(module)
    assert result.failed == 0 and result.attempted >= 3
