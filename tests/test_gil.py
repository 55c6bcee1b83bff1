"""The GIL is released while CPU kernels run: a Python thread counts during a long call of each op."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops.centroid import centroid
from engine.ops.crop_batch import crop_batch
from engine.ops.max_sim import max_sim
from engine.ops.max_sim_int8 import max_sim_int8
from engine.ops.max_sim_topk import max_sim_topk
from engine.ops.max_sim_varlen import max_sim_varlen
from engine.ops.peak_patch import AttentionPool, peak_patch_features
from engine.ops.peak_patch_correct import peak_patch_correct, peak_patch_pairs
from engine.ops.quantize import quantize
from engine.ops.window_attention import window_attention

CALLS: dict[str, Callable[[], Callable[[], Any]]] = {}


def call(prepare: Callable[[], Callable[[], Any]]) -> Callable[[], Callable[[], Any]]:
    CALLS[prepare.__name__] = prepare
    return prepare


def sides(n: int, leaf: bool = False) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 32, 128, requires_grad=leaf), torch.randn(n, 50, 128, requires_grad=leaf)


@call
def scores_alone() -> Callable[[], Any]:
    q, d = sides(800)
    return lambda: max_sim(q, d)


@call
def scores_of_the_op() -> Callable[[], Any]:
    q, d = sides(800)
    return lambda: max_sim(q, d, return_alignment=True)


@call
def backward() -> Callable[[], Any]:
    q, d = sides(400, leaf=True)
    loss = max_sim(q, d, temperature=0.1).sum()
    return lambda: torch.autograd.grad(loss, (q, d))


@call
def packed() -> Callable[[], Any]:
    q, d = sides(800)
    rows, bounds = d.flatten(0, 1), torch.arange(801) * 50
    return lambda: max_sim_varlen(q, rows, d_cu_seqlens=bounds)


@call
def best() -> Callable[[], Any]:
    q, d = sides(800)
    return lambda: max_sim_topk(q, d, 5)


@call
def codes() -> Callable[[], Any]:
    q, d = map(quantize, sides(1600))
    return lambda: max_sim_int8(q, d)


@call
def windows() -> Callable[[], Any]:
    q, k = torch.randn(8, 200, 12, 64), torch.randn(8, 196, 12, 64)
    boxes = torch.tensor([[0, 0, 14, 14]], dtype=torch.int32).expand(200, 4)
    return lambda: window_attention(q, k, k, boxes, grid=(14, 14))


@call
def crops() -> Callable[[], Any]:
    images = [torch.randint(0, 256, (900, 900, 3), dtype=torch.uint8)]
    boxes = torch.tensor([[0, 0, 0, 900, 900]] * 12)
    return lambda: crop_batch(images, boxes, 336, mean=(0.5,) * 3, std=(0.5,) * 3, fill=(0, 0, 0))


@call
def pooled() -> Callable[[], Any]:
    attention = torch.nn.MultiheadAttention(512, 8, batch_first=True)
    pool = AttentionPool.of(torch.randn(1, 512), attention, torch.nn.LayerNorm(512))
    tokens = torch.randn(100, 77, 512)
    return lambda: peak_patch_features(tokens, tokens, pool)


@call
def corrected() -> Callable[[], Any]:
    f = torch.randn(20_000, 512)
    return lambda: peak_patch_correct(f, f, 0.5)


@call
def pairs() -> Callable[[], Any]:
    image, text = torch.randn(10_000, 512), torch.randn(10_000, 2, 512)
    return lambda: peak_patch_pairs(image, text, text)


@call
def means() -> Callable[[], Any]:
    tokens, bounds = torch.randn(100_000, 256), torch.arange(0, 100_001, 1000)
    return lambda: centroid(tokens[:10], tokens, bounds)


@pytest.mark.parametrize("name", CALLS)
def test_other_threads_run_meanwhile(name: str) -> None:
    run = CALLS[name]()
    counted, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    interval, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-4)
    torch.set_num_threads(1)
    thread.start()
    try:
        before = counted[0]
        run()
        during = counted[0] - before
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
        torch.set_num_threads(threads)
    # Handing the GIL back and forth at the call's ends alone would leave a few switch intervals' worth.
    assert during > 10_000
