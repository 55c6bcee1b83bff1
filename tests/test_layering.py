"""The order of imports and the house style, read from the sources; and that the reader finds what it must."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import layering

ROOT = Path(__file__).resolve().parent.parent


def test_every_import_goes_to_a_lower_row():
    assert not layering.import_faults(ROOT)


def test_only_the_command_line_prints_or_exits():
    assert not layering.speech_faults(ROOT)


def test_files_and_functions_are_short():
    assert not layering.size_faults(ROOT)


def test_names_say_something_and_public_functions_take_no_kwargs():
    assert not layering.name_faults(ROOT)


def test_functions_take_few_parameters():
    assert not layering.parameter_faults(ROOT)


def test_nothing_happens_at_import_and_nothing_is_set_for_the_whole_process():
    assert not layering.global_faults(ROOT)


def test_the_reader_sees_the_whole_package():
    names = {module.name for module in layering.modules(ROOT)}
    assert {"engine", "engine.kernels", "engine.doctor"} <= names
    assert sum(name.startswith("engine.kernels") for name in names) == len(
        list((ROOT / "kernels").rglob("*.py"))
    )


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Writes the given files below an empty folder and returns it."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return write


ALLOWED = {
    "to a lower row": ("engine/scorers/a.py", "from engine.ops.max_sim import max_sim"),
    "to itself": ("engine/scorers/a.py", "from engine.scorers.base import Scorer"),
    "to itself, relative": ("engine/scorers/a.py", "from .base import Scorer"),
    "from the facade": ("engine/__init__.py", "from engine.engine import Engine"),
    "from the command line to the facade": ("engine/cli.py", "import engine\nfrom engine import load"),
    "inside the facade's folder, relative": ("engine/crops.py", "from . import reference"),
    "to the extension": ("engine/ops/max_sim.py", "from engine import _C"),
    "to third parties": ("kernels/max_sim.py", "import triton.language as tl\nimport torch"),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_allowed_imports_pass(tree, case):
    path, text = ALLOWED[case]
    assert layering.import_faults(tree({path: text})) == []


FORBIDDEN = {
    "upwards": (
        "engine/ops/max_sim.py",
        "import engine.features",
        r"engine\.ops \(row 2\) imports engine\.features",
    ),
    "sideways": ("engine/crops.py", "from engine.images import decode", r"engine\.crops \(row 3\)"),
    "sideways between folders": (
        "engine/encoders/a.py",
        "from engine.heads import b",
        r"engine\.heads\.b \(row 4\)",
    ),
    "from the package": ("engine/crops.py", "from engine import images", r"imports engine\.images \(row 3\)"),
    "relative": ("engine/crops.py", "from .images import decode", r"imports engine\.images"),
    "relative, two levels": (
        "engine/datasets/aro.py",
        "from ..scorers import base",
        r"imports engine\.scorers",
    ),
    "relative, bare": ("engine/crops.py", "from . import images", r"imports engine\.images"),
    "in a function": ("engine/crops.py", "def f():\n    from engine.engine import Engine", r"crops\.py:2: "),
    "for type checkers only": (
        "engine/crops.py",
        "if TYPE_CHECKING:\n    import engine.engine",
        r"crops\.py:2: ",
    ),
    "by its name": (
        "engine/crops.py",
        "import importlib\nimportlib.import_module('engine.cli')",
        r"engine\.cli",
    ),
    "to the facade": ("engine/training/loop.py", "from engine import load", r"imports engine \(row 8\.5\)"),
    "from the lowest row": (
        "kernels/max_sim.py",
        "from engine.ops.max_sim import f",
        r"kernels \(row 0\) imports",
    ),
    "kernels as a top-level package": (
        "engine/ops/a.py",
        "import kernels.max_sim",
        r"not part of the package",
    ),
    "tests": (
        "engine/metrics.py",
        "from tests.tolerances import x",
        r"imports tests\.tolerances, which is not",
    ),
    "bench": ("engine/cli.py", "import bench", r"imports bench, which is not part"),
    "a unit without a row": ("engine/extras.py", "", r"engine\.extras has no row"),
    "to a unit without a row": (
        "engine/cli.py",
        "import engine.extras.a",
        r"engine\.extras\.a, which has no row",
    ),
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_forbidden_imports_are_found(tree, case):
    path, text, message = FORBIDDEN[case]
    faults = layering.import_faults(tree({path: text}))
    assert len(faults) == 1
    assert re.search(message, faults[0])


@pytest.mark.parametrize(
    "text",
    [
        "print('x')",
        "import sys\nsys.exit(1)",
        "def f():\n    raise SystemExit(2)",
        "exit()",
        "import sys\nsys.stdout.write('x')",
        "import rich\nrich.print('x')",
    ],
)
def test_printing_and_exiting_are_found_below_the_command_line(tree, text):
    root = tree({"engine/training/loop.py": text, "engine/cli.py": text})
    assert [fault.partition(":")[0] for fault in layering.speech_faults(root)] == ["engine/training/loop.py"]


def test_long_files_are_found(tree):
    root = tree({"engine/a.py": "x = 1\n" * 400, "csrc/b.cpp": "\n" * 401, "tests/c.py": "x = 1\n" * 401})
    assert layering.size_faults(root) == [
        "csrc/b.cpp: 401 lines, at most 400",
        "tests/c.py: 401 lines, at most 400",
    ]


def test_long_functions_are_found(tree):
    def function(n_lines: int) -> str:
        return "def f():\n" + "    x = 1\n" * (n_lines - 1)

    root = tree(
        {
            "engine/a.py": function(60),
            "engine/b.py": "class A:\n    " + function(61).replace("\n", "\n    "),
            "kernels/a.py": function(120),
            "kernels/b.py": function(121),
        }
    )
    assert layering.size_faults(root) == [
        "engine/b.py:2: f has 61 lines, at most 60",
        "kernels/b.py:1: f has 121 lines, at most 120",
    ]


def test_many_parameters_are_found(tree):
    seven, eight = "a, /, b, c, d, *, e, f, g", "a, /, b, c, d, *, e, f, g, h"
    root = tree(
        {
            "engine/a.py": f"def f({seven}): ...\nclass A:\n    def f(self, {seven}): ...",
            "engine/b.py": f"class A:\n    def f(self, {eight}): ...",
            "engine/ops/c.py": f"def f({eight}): ...",
            "kernels/d.py": f"def f({eight}): ...",
        }
    )
    assert layering.parameter_faults(root) == ["engine/b.py:2: f takes 8 parameters, at most 7"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\nos.environ['A'] = '1'", "2: os.environ is set for the whole process"),
        ("import os\ndef f():\n    del os.environ['A']", "3: os.environ is set for the whole process"),
        ("import os\ndef f():\n    os.environ.setdefault('A', '1')", "3: os.environ.setdefault changes"),
        ("from PIL import Image\ndef f():\n    Image.MAX_IMAGE_PIXELS = None", "3: Image.MAX_IMAGE_PIXELS is set"),
        ("import torch\ndef f():\n    torch.backends.cudnn.benchmark = True", "3: torch.backends.cudnn.benchmark is"),
        ("import torch\ndef f():\n    torch.manual_seed(0)", "3: torch.manual_seed changes"),
        (
            "import torch, warnings\nwith_ = 1\ndef f():\n    with warnings.catch_warnings():\n"
            "        torch.manual_seed(0)",
            "5: torch.manual_seed changes",
        ),
        ("x = 1\ndef f():\n    global x\n    x = 2", "3: global x"),
        ("f()", "1: does something at import"),
        ("for x in y: pass", "1: does something at import"),
    ],
)
def test_side_effects_are_found(tree, text, message):
    faults = layering.global_faults(tree({"engine/a.py": text}))
    assert len(faults) == 1 and faults[0].startswith(f"engine/a.py:{message}")


def test_what_is_no_side_effect_passes(tree):
    text = """
import warnings
import torch
from torch import nn
x = dict(a=1)
x["b"] = 2
torch.library.register_autograd("a::b", f)
class A:
    def f(self):
        self.x = 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.showwarning = print
"""
    assert layering.global_faults(tree({"engine/a.py": text, "engine/cli/__main__.py": "f()"})) == []


def test_empty_names_and_kwargs_are_found(tree):
    root = tree(
        {
            "engine/ops/utils.py": "",
            "engine/crops.py": "def crop(**options): ...\ndef _inner(**options): ...",
        }
    )
    assert layering.name_faults(root) == [
        "engine/crops.py:1: public crop takes **options",
        "engine/ops/utils.py: a name that says nothing",
    ]
