"""Triton kernels start on the device of their tensors, which need not be the current one."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.ops.native import on_device_of

OPS = Path(__file__).resolve().parent.parent / "engine" / "ops"


def launches(tree: ast.AST) -> list[tuple[str, bool]]:
    """Calls of functions that come from `engine.kernels`, and whether each stands under `on_device_of`."""
    kernels = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("engine.kernels")
        for alias in node.names
        if alias.name[0].islower()
    }
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, guarded: bool) -> None:
        if isinstance(node, ast.With):
            guarded = guarded or any(ast.unparse(item).startswith("on_device_of(") for item in node.items)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kernels:
            found.append((node.func.id, guarded))
        for child in ast.iter_child_nodes(node):
            visit(child, guarded)

    visit(tree, False)
    return found


@pytest.mark.parametrize("path", sorted(OPS.glob("*.py")), ids=lambda path: path.stem)
def test_every_launch_names_its_device(path):
    assert [name for name, guarded in launches(ast.parse(path.read_text(encoding="utf-8"))) if not guarded] == []


def test_a_launch_without_a_device_is_seen():
    source = "from engine.kernels.a import go\ngo(x)\nwith on_device_of(x):\n    go(x)\n"
    assert launches(ast.parse(source)) == [("go", False), ("go", True)]


def test_the_ops_have_launches():
    assert sum(len(launches(ast.parse(path.read_text(encoding="utf-8")))) for path in OPS.glob("*.py")) >= 10


def test_the_device_is_that_of_the_tensor(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: f"on {device}")
    assert on_device_of(SimpleNamespace(is_cuda=True, device="cuda:1")) == "on cuda:1"
    with on_device_of(torch.zeros(1)):
        pass
