"""The examples in the docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests import layering

ROOT = Path(__file__).resolve().parent.parent
WITH_EXAMPLES = [
    module.name
    for module in layering.modules(ROOT)
    if ">>> " in module.path.read_text(encoding="utf-8") and not module.name.startswith("engine.kernels")
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
