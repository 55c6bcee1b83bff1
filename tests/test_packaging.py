"""What is installed, under which names, and that it lives with its neighbours; the wheel has `make check`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import is_local
from tests.tolerances import TOLERANCES, assert_close

ROOT = Path(__file__).resolve().parent.parent


def python(code: str, cwd: Path, **environment: str) -> str:
    """What a fresh interpreter prints; warnings are errors there too."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("order", ["import transformers, engine", "import engine, transformers"])
@pytest.mark.parametrize("place", ["repository root", "elsewhere"])
def test_engine_and_transformers_import_together(place, order, tmp_path):
    cwd = ROOT if place == "repository root" else tmp_path
    code = f"{order}\nimport engine.kernels\nprint(engine.__file__); print(engine.kernels.__file__)"
    assert python(code, cwd).split() == [str(ROOT / "engine/__init__.py"), str(ROOT / "kernels/__init__.py")]


def test_importing_changes_nothing_global(tmp_path):
    code = """
import json, os, torch
def state():
    return [dict(os.environ), torch.get_num_threads(), str(torch.get_default_dtype()),
            torch.is_grad_enabled(), torch.backends.cuda.matmul.allow_tf32,
            torch.get_float32_matmul_precision()]
before = state()
import engine
print(json.dumps(before == state()))
"""
    assert json.loads(python(code, tmp_path)) is True


def test_no_top_level_kernels_package_is_installed(tmp_path):
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)"
    assert str(ROOT) not in python(code, tmp_path)
    assert (importlib.metadata.distribution("peaksim").read_text("top_level.txt") or "").split() == ["engine"]


def test_the_kernels_folder_is_only_a_name():
    # transformers imports a top-level `kernels` to ask for its version, which from here finds our folder.
    spec = importlib.util.spec_from_file_location("kernels", ROOT / "kernels/__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert [name for name in vars(module) if not name.startswith("__")] == []


def test_the_command_is_an_entry_point():
    (script,) = (
        entry for entry in importlib.metadata.entry_points(group="console_scripts") if entry.name == "peaksim"
    )
    assert script.value == "engine.cli:main"
    assert callable(script.load())


def test_faiss_and_onnxruntime_are_extras_only():
    requirements = importlib.metadata.requires("peaksim") or []
    for name in ("faiss-cpu", "onnxruntime", "faiss-gpu", "onnxruntime-gpu"):
        rows = [row for row in requirements if row.startswith(f"{name}>")]
        assert len(rows) == 1
        assert f'extra == "{"gpu" if name.endswith("gpu") else "cpu"}"' in rows[0]


def test_triton_is_asked_for_only_where_it_exists():
    (row,) = (r for r in importlib.metadata.requires("peaksim") or [] if r.startswith("triton"))
    assert "platform_system" in row and "x86_64" in row


def test_the_readme_is_what_an_index_would_show():
    # Only the title: an editable installation keeps the text of the day it was made.
    shown = str(importlib.metadata.metadata("peaksim").get_payload()).strip()
    assert shown and shown.splitlines()[0] == (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[0]


def test_assets_fit_into_the_wheel():
    assets = [path for path in (ROOT / "engine/assets").rglob("*") if path.is_file()]
    assert assets
    assert sum(path.stat().st_size for path in assets) <= 16 * 2**20


def test_a_test_that_wants_the_network_fails():
    with pytest.raises(RuntimeError, match="no network"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    with pytest.raises(RuntimeError, match="no network"):
        socket.getaddrinfo("example.org", 443)


def test_a_local_server_may_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


@pytest.mark.parametrize("address", [("127.0.0.1", 1), ("::1", 1, 0, 0), ("localhost", 1), ("", 1), "/tmp/s"])
def test_local_addresses(address):
    assert is_local(address)


@pytest.mark.parametrize("address", [("192.168.1.1", 1), ("fe80::1%eth0", 1, 0, 0), ("localhost.example", 1)])
def test_addresses_of_others(address):
    assert not is_local(address)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_assert_close_accepts_rounding_and_raises_beyond(dtype):
    rtol, atol = TOLERANCES[dtype]
    one = torch.ones(3, dtype=torch.float64)
    assert_close(one + 0.5 * (rtol + atol), one, dtype=dtype)
    with pytest.raises(AssertionError, match="scores: "):
        assert_close(one + 1.5 * (rtol + atol), one, dtype=dtype, what="scores")
    assert_close(one + 1.5 * (rtol + atol), one, dtype=dtype, scale=2)


def test_assert_close_takes_the_tolerance_of_the_narrower_dtype():
    one = torch.ones(1)
    assert_close(one.bfloat16() * 1.008, one)
    with pytest.raises(AssertionError):
        assert_close(one * 1.008, one)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor([torch.nan]), torch.tensor([0.0])),
        (torch.tensor([torch.inf]), torch.tensor([-torch.inf])),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(1), torch.zeros(())),
        (torch.tensor([1]), torch.tensor([2])),
        (np.array([True]), np.array([False])),
    ],
)
def test_assert_close_raises(actual, expected):
    with pytest.raises(AssertionError):
        assert_close(actual, expected)
    assert_close(actual, actual.copy() if isinstance(actual, np.ndarray) else actual.clone())
