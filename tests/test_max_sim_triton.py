"""The Triton kernels of max-sim: the contract under the interpreter. Plans and compilation have their own tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is a Linux package")

# Of the siblings' files, what goes by backend.
SIBLINGS = "triton and not refus"
REPEATED = {
    "tests/test_max_sim.py": "", "tests/test_max_sim_laws.py": "", "tests/test_max_sim_gradients.py": "",
    "tests/test_max_sim_backward.py": "triton", "tests/test_max_sim_varlen.py": SIBLINGS,
    "tests/test_max_sim_topk.py": SIBLINGS,
    "tests/test_max_sim_int8.py": SIBLINGS,
}  # fmt: skip


@pytest.mark.parametrize("file", REPEATED)
def test_the_contract_holds_under_the_interpreter(file: str) -> None:
    """The same tests, in a process where kernels run interpreted on CPU tensors (decided at their import)."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", file,
         "-k", REPEATED[file]],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and int(found.group(1)) >= 8, done.stdout[-2000:]


def test_packed_tokens_and_codes_under_the_interpreter() -> None:
    """What the ops of packed and of quantised tokens launch, against the reference item by item."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "tests.max_sim_sides"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "all agree\n", done.stdout + done.stderr[-5000:]
