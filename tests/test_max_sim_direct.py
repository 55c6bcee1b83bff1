"""Plain calls go past torch's dispatcher and give the same; all that torch watches or transforms goes through it."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import engine.ops.direct as direct
from engine.ops.max_sim import max_sim, max_sim_op, max_sim_pairs
from engine.ops.native import ISA_VARIABLE, instruction_sets

# The module: in the package, the name is the function's.
MODULE = sys.modules["engine.ops.max_sim"]
Q, D = torch.randn(3, 5, 12), torch.randn(4, 7, 12)
MASKS = torch.rand(3, 5) < 0.7, torch.rand(4, 7) < 0.7


class Functions(TorchFunctionMode):
    """Lets everything through."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    """Notes what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each call that goes through the registered op."""
    calls: list[int] = []

    def spy(*arguments: Any) -> Any:
        calls.append(1)
        return max_sim_op(*arguments)

    max_sim(Q, D, symmetric=True)  # loads the kernels
    monkeypatch.setattr(MODULE, "max_sim_op", spy)
    return calls


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pairs", [False, True])
def test_the_same_bits(
    isa: str, dtype: torch.dtype, pairs: bool, dispatched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    op, number = (max_sim_pairs, 3) if pairs else (max_sim, 4)
    wide = torch.randn(7, 4, 24).to(dtype)
    sides = (Q.to(dtype), D.to(dtype)), (wide[:5, :3, 3:15].transpose(0, 1), wide[..., 5:17].transpose(0, 1))
    for (q, d), masked, weighed, temperature in itertools.product(sides, (False, True), (False, True), (None, 0.1)):
        options: dict[str, Any] = {"temperature": temperature}
        if masked:
            options |= {"q_mask": MASKS[0], "d_mask": MASKS[1][:number]}
        if weighed:
            options["q_weights"] = torch.rand(3, 5)
        dispatched.clear()
        got = op(q, d[:number], **options)
        assert not dispatched
        with Functions():
            wanted = op(q, d[:number], **options)
        assert len(dispatched) == 1 and got.shape == wanted.shape and torch.equal(got, wanted)


def test_numbers_that_are_not_finite(dispatched: list[int]) -> None:
    q, d = Q.clone(), D.clone()
    q[1, 2, 3], d[2, 1, 0], d[3] = torch.nan, -torch.inf, torch.inf
    got = max_sim(q, d)
    assert not dispatched
    with Functions():
        assert torch.equal(got.nan_to_num(7e30), max_sim(q, d).nan_to_num(7e30))


@pytest.mark.parametrize("options", [
    {"symmetric": True}, {"return_alignment": True}, {"backend": "reference"},
    {"precision": "tf32", "backend": "reference"},
    {"q_weights": torch.rand(3, 5).double()}, {"q_weights": torch.rand(3, 5, requires_grad=True)},
    {"d_mask": torch.ones(7, 4, dtype=torch.bool).T}, {"symmetric": True, "d_weights": torch.rand(4, 7)},
], ids=str)  # fmt: skip
def test_other_options_go_through_the_op(options: dict[str, Any], dispatched: list[int]) -> None:
    max_sim(Q, D, **options)
    assert len(dispatched) == 1


class Subclass(Tensor):
    pass


@pytest.mark.parametrize("q, d", [
    (Q.clone().requires_grad_(), D), (Q, D.clone().requires_grad_()), (Q.double(), D.double()), (Q[:0], D), (Q, D[:0]),
    (Q[:, :0], D), (Q[..., :0], D[..., :0]), (Q.to("meta"), D.to("meta")), (Q.as_subclass(Subclass), D),
    (Q, D.transpose(1, 2).contiguous().transpose(1, 2)), (torch._efficientzerotensor(3, 5, 12), D),
    (torch.complex(Q, Q).conj().imag, D),
])  # fmt: skip
def test_other_tensors_go_through_the_op(q: Tensor, d: Tensor, dispatched: list[int]) -> None:
    scores = max_sim(q, d)
    assert len(dispatched) == 1
    if not scores.is_meta:
        wanted = max_sim(q + 0.0, d + 0.0, backend="reference")
        torch.testing.assert_close(torch.Tensor(scores.detach().float()), torch.Tensor(wanted.detach().float()))


def test_no_gradient_wanted_is_plain(dispatched: list[int]) -> None:
    q = Q.clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(max_sim(q, D), max_sim(Q, D)) and not dispatched
    with torch.inference_mode():
        assert max_sim(Q, D).is_inference() and not dispatched
    assert max_sim(q, D).requires_grad and len(dispatched) == 1


def test_what_watches_sees_the_op(dispatched: list[int]) -> None:
    mode = Dispatches()
    with mode:
        max_sim(Q, D)
    assert "peaksim.max_sim.default" in mode.seen
    with torch.profiler.profile() as profile:
        max_sim(Q, D)
    assert any(event.name == "peaksim::max_sim" for event in profile.events())
    graph = make_fx(lambda q: max_sim(q, D))(Q)
    assert any("peaksim.max_sim" in str(node.target) for node in graph.graph.nodes)
    with FakeTensorMode() as fake:
        assert max_sim(fake.from_tensor(Q), fake.from_tensor(D)).shape == (3, 4)
    assert len(dispatched) == 4


# torch.func itself compiles something when it is first used.
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_transforms_reach_the_op(dispatched: list[int]) -> None:
    # torch.func has no way through an op's registered gradient, and says so.
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda q: max_sim(q, D).sum())(Q)
    assert len(dispatched) == 1
    with forward_ad.dual_level():
        max_sim(forward_ad.make_dual(Q, torch.ones_like(Q)), D)
    assert len(dispatched) == 2


def test_one_graph_with_the_op_in_it() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        got = torch.compile(lambda q: max_sim(q, D) + 1, fullgraph=True, backend=backend)(Q)
        assert torch.equal(got, max_sim(Q, D) + 1)
    assert any("max_sim" in name for name in seen)


def test_a_torch_without_the_means_to_tell_leaves_all_to_the_op(
    monkeypatch: pytest.MonkeyPatch, dispatched: list[int]
) -> None:
    monkeypatch.setattr(direct, "_KNOWN", False)
    max_sim(Q, D)
    assert len(dispatched) == 1


def test_a_missing_extension_is_an_error_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine._C", None)
    with pytest.raises(RuntimeError, match=r"max_sim: the C\+\+ CPU kernels are missing"):
        max_sim(Q, D)


def test_an_unknown_instruction_set_is_an_error_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    with pytest.raises(ValueError, match=r"the instruction set must be one of .+, got sse9"):
        max_sim(Q, D)
