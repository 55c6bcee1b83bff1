"""Scoring many against many holds the scores and little beside them."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import sys
import torch
import engine
from engine.features import ImageFeatures, TextFeatures
def peak():
    # Not ru_maxrss: that begins with what the parent had.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
torch.set_num_threads(1)
n, parts, d = int(sys.argv[2]), 4, 8
images = ImageFeatures(torch.randn(n, d), patches=torch.randn(n, parts, d), aligned=True)
texts = TextFeatures(torch.randn(n, d), tokens=torch.randn(n, parts, d))
peaksim = engine.load("scenes", device="cpu")
peaksim.score(images[:2], texts[:2], scorer=sys.argv[1])
before = peak()
peaksim.score(images, texts, scorer=sys.argv[1])
print(peak() - before)
"""


@pytest.mark.parametrize(("scorer", "n"), [("global", 10_000), ("max_sim", 4_000)])
def test_many_against_many_hold_their_scores_and_a_few_blocks(scorer: str, n: int):
    command = [sys.executable, "-c", CHILD, scorer, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    scores_kib, block_kib = n * n * 4 // 1024, 1024 * n * 4 // 1024
    # Blocks are 1,024 images. A second matrix of 10,000 would be 390 MB, all similarities of max-sim at once 1 GB.
    assert int(done.stdout) < scores_kib + 4 * block_kib + 40 * 1024
