"""What the launchers of `engine.kernels` launch over a set of shapes, recorded without a GPU.

The launchers themselves run, on small CPU tensors of real widths, with Triton's launch replaced by a notebook. So
every configuration that a planner gives for these shapes is met with the arguments that a user's call would have,
and a new kernel needs no more here than a call of its launcher. Sizes (numbers of queries, tokens, ...) are
compiled in their general form; pointers, strides and widths keep their divisibility by 16, which decides how wide
loads are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Arguments whose divisibility by 16 (or being 1) is kept: strides, and the lengths of rows.
WIDTHS = ("dim", "width")


@dataclass(frozen=True)
class Launch:
    """One kernel with everything that its compilation depends on, the architecture apart.

    `signature` gives each argument's type, `constants` the values of those that are "constexpr", `aligned` the
    places of arguments divisible by 16, `options` warps and pipeline stages.
    """

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def dtype(self) -> str:
        """The narrowest type of number that the kernel reads."""
        types = [kind[1:] for _, kind in self.signature if kind.startswith("*")]
        return next((kind for kind in ("i8", "bf16", "fp16") if kind in types), "fp32")

    @property
    def configuration(self) -> str:
        """Constants and options, short."""
        parts = []
        for name, value in self.constants:
            if isinstance(value, bool):
                parts += [name.lower()] if value else []
            elif value != 1 or name.isupper():
                parts.append(f"{name.lower()}={value}")
        parts += [f"{name.removeprefix('num_')}={value}" for name, value in self.options]
        return " ".join(parts) + ("" if self.aligned else " unaligned")


def describe(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    """The launch of a kernel with these arguments."""
    names = kernel.arg_names
    options = {name: value for name, value in named.items() if name not in names}
    options.pop("grid", None)
    options.pop("warmup", None)
    values = {**dict(zip(names, arguments, strict=False)), **{n: v for n, v in named.items() if n in names}}
    constant_names = {param.name for param in kernel.params if param.is_constexpr}
    signature, constants, aligned = [], [], []
    for place, name in enumerate(names):
        value = values[name]
        keeps = name.startswith("stride") or name in WIDTHS
        kind = _kind(value)
        if name in constant_names or kind is None or (keeps and value == 1):
            kind = "constexpr"
            constants.append((name, value))
        elif (isinstance(value, Tensor) and value.data_ptr() % 16 == 0) or (keeps and value % 16 == 0):
            aligned.append(place)
        signature.append((name, kind))
    return Launch(
        kernel.fn.__module__, kernel.fn.__name__, tuple(signature), tuple(constants), tuple(aligned),
        tuple(sorted(options.items())),
    )  # fmt: skip


def _kind(value: Any) -> str | None:
    """Triton's name of a value's type; None for what can only be a constant."""
    if isinstance(value, Tensor):
        pointed = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
        integers = {torch.uint8: "u8", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1"}
        return "*" + {**pointed, **integers}[value.dtype]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return None
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches within the block are noted instead of made; each is kept once."""
    found: dict[Launch, None] = {}
    launches: list[Launch] = []

    def note(kernel: Any, *arguments: Any, **named: Any) -> None:
        launch = describe(kernel, arguments, named)
        if launch not in found:
            found[launch] = None
            launches.append(launch)

    launch_of = triton.runtime.jit.JITFunction.run
    triton.runtime.jit.JITFunction.run = note
    try:
        yield launches
    finally:
        triton.runtime.jit.JITFunction.run = launch_of


def max_sim() -> None:
    """One query and many; tokens and patches of the usual encoders, and one under and over a block; D as well."""
    shapes = [(1, l_q, 196, 512) for l_q in (1, 32, 50, 77, 128)]
    shapes += [(32, l_q, l_d, 512) for l_q in (1, 16, 32, 50, 77) for l_d in (50, 1024)]
    shapes += [(32, 77, 257, 768), (1, 64, 576, 1024), (1, 32, 196, 100)]
    for n_q, l_q, l_d, dim in shapes:
        _max_sim(n_q, l_q, l_d, dim, BF16)
    for n_q, l_q, l_d, dim in shapes[1:]:
        _max_sim(n_q, l_q, l_d, dim, BF16, masks=True, argmax=True)
        _max_sim(n_q, l_q, l_d, dim, BF16, temperature=0.07)
    for n_q, l_q, l_d, dim in [(1, 16, 50, 100), (1, 32, 196, 512), (32, 50, 257, 768), (8, 77, 196, 512)]:
        for dtype, soft in ((BF16, True), (FP32, False), (FP32, True)):
            options = {"temperature": 0.07 if soft else None}
            _max_sim(n_q, l_q, l_d, dim, dtype, **options)
            _max_sim(n_q, l_q, l_d, dim, dtype, masks=True, weights=True, symmetric=True, argmax=True, **options)
            _max_sim(n_q, l_q, l_d, dim, dtype, symmetric=True, pairs=True, **options)
    # Documents that stay on the chip while all queries pass.
    for n_q, l_q, l_d, dim in [(32, 32, 1024, 128), (64, 77, 50, 96), (1000, 1, 196, 16), (2, 300, 257, 64)]:
        _max_sim(n_q, l_q, l_d, dim, BF16)
        _max_sim(n_q, l_q, l_d, dim, BF16, temperature=0.07)
        _max_sim(n_q, l_q, l_d, dim, BF16, masks=True, weights=True, argmax=True)
    _max_sim(32, 32, 1024, 128, FP16, masks=True, temperature=0.07)
    _max_sim(32, 77, 196, 512, FP16)
    _max_sim(2, 77, 196, 512, FP16, masks=True, weights=True, symmetric=True, argmax=True, temperature=0.07)
    _max_sim(32, 77, 196, 512, FP32, precision="tf32")


def _max_sim(
    n_q: int, l_q: int, l_d: int, dim: int, dtype: torch.dtype, *, masks: bool = False, weights: bool = False,
    symmetric: bool = False, argmax: bool = False, temperature: float | None = None, pairs: bool = False,
    precision: str = "ieee",
) -> None:  # fmt: skip
    from engine.kernels.max_sim import max_sim_forward
    from engine.reference.max_sim import empty_outputs

    n_d = n_q if pairs else 3
    q, d = torch.empty(n_q, l_q, dim, dtype=dtype), torch.empty(n_d, l_d, dim, dtype=dtype)
    per_token: list[Tensor | None] = [None] * 4
    if masks:
        per_token[:2] = [torch.ones(x.shape[:2], dtype=torch.bool) for x in (q, d)]
    if weights:
        per_token[2:] = [torch.ones(x.shape[:2]) for x in (q, d)]
    outputs = empty_outputs(q, d, symmetric=symmetric, pairs=pairs, need_argmax=argmax, need_values=argmax)
    max_sim_forward(q, d, *per_token, outputs, temperature=temperature, pairs=pairs, precision=precision)


def max_sim_sides() -> None:
    """Packed tokens of either side and of both, and int8 codes, dense and packed."""
    from engine.kernels.max_sim import Side, score_sides

    flags = (False, True)
    for packed_q, packed_d, dtype, dim in itertools.product(flags, flags, (BF16, torch.int8), (128, 512)):
        for n_q, full in itertools.product((1, 32), (False, True)):
            codes = dtype == torch.int8
            if not codes and not packed_q and not packed_d:
                continue
            sides = []
            for number, length, packed in ((n_q, 77, packed_q), (3, 196, packed_d)):
                shape = (number * length,) if packed else (number, length)
                per_token = torch.ones(shape, dtype=torch.bool) if full else None, torch.ones(shape) if full else None
                bounds = torch.arange(number + 1) * length if packed else None
                scales = torch.empty(shape) if codes else None
                sides.append(Side(torch.empty(*shape, dim, dtype=dtype), *per_token, bounds, scales, length))
            grid, nothing = (n_q, 3), torch.empty(0)
            both = full and not codes
            places = torch.empty(3, 4, 5, dtype=torch.int32) if full else nothing.int()
            outputs = (
                torch.empty(grid), torch.empty(grid) if both else nothing, places, places.float(),
                places if both else nothing.int(), places.float() if both else nothing,
            )  # fmt: skip
            score_sides(*sides, outputs, None, False, "ieee")
            if codes and not packed_q and not packed_d and n_q == 32:
                queries, documents = sides
                of_pairs = (torch.empty(32, 1), nothing, *outputs[2:4], nothing.int(), nothing)
                score_sides(queries, replace(documents, tokens=torch.empty(32, 196, dim, dtype=dtype)), of_pairs, None,
                            True, "ieee")  # fmt: skip


def max_sim_backward() -> None:
    """Texts and images of the usual encoders, short and long, hard and soft, one way and both, dense and packed."""
    from engine.kernels.max_sim_backward import max_sim_backward as backward
    from engine.kernels.max_sim_plan import Side

    flags = (False, True)
    usual = [(77, 196, 512, dtype) for dtype in (BF16, FP32, FP16)]
    shapes = [*usual, (32, 50, 1152, BF16), (16, 17, 33, FP16)]
    for l_q, l_d, dim, dtype in shapes:
        for packed_d, packed_q, soft, full in itertools.product(flags, repeat=4):
            if packed_q and not packed_d:
                continue  # its kernels are those of packed documents
            sides, results = [], []
            for number, others, length, packed in ((3, 2, l_q, packed_q), (2, 3, l_d, packed_d)):
                shape = (number * length,) if packed else (number, length)
                per_token = torch.ones(shape, dtype=torch.bool) if full else None, torch.ones(shape) if full else None
                bounds = torch.arange(number + 1) * length if packed else None
                sides.append(Side(torch.empty(*shape, dim, dtype=dtype), *per_token, bounds, None, length))
                places = torch.empty((others, number * length) if packed else (3, 2, length))
                results.append((torch.empty(3, 2), places if full else None, places.int()))
            back = results[1] if full else (None, None, None)
            backward(*sides, (results[0], back), temperature=0.07 if soft else None, pairs=False, precision="ieee")


def crop_batch() -> None:
    """Squares of the usual encoders, oblong and tiny results."""
    from engine.kernels.crop_batch import crop_batch_forward
    from engine.reference.crop_batch import Placements

    images = [torch.zeros(8, 9, 3, dtype=torch.uint8)]
    sizes = [(224, 224), (384, 384), (336, 336), (1, 1), (14, 30), (640, 32)]
    for (height, width), dtype in zip(sizes, (BF16, FP32, FP16, FP32, BF16, BF16), strict=True):
        n = 2
        place = torch.zeros(n, 2, dtype=torch.int64)
        placed = Placements(
            **{name: place for name in Placements._fields if name != "columns_first"},
            columns_first=torch.tensor([True, False]),
        )
        taps = (torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32),
                torch.zeros(4, 3, dtype=torch.int32))  # fmt: skip
        crop_batch_forward(
            images, torch.zeros(n, dtype=torch.int64), placed, place, taps, torch.zeros(n, 3, dtype=torch.uint8),
            [1.0] * 3, [0.5] * 3, torch.empty(n, 3, height, width, dtype=dtype),
        )  # fmt: skip


def window_attention() -> None:
    """Heads of 16 to 128 elements, own keys or none, windows shared or not."""
    from engine.kernels.window_attention import window_attention_backward, window_attention_forward

    heads = [(14, 64, BF16), (14, 64, FP16), (27, 72, BF16), (14, 33, FP32), (16, 128, BF16), (1, 16, FP32)]
    for side, dim, dtype in heads:
        for own, shared in ((True, True), (False, False)):
            q, k = torch.empty(2, 5, 3, dim, dtype=dtype), torch.empty(2, side * side, 3, dim, dtype=dtype)
            windows = torch.zeros((5, 4) if shared else (2, 5, 4), dtype=torch.int32)
            own_rows = torch.empty_like(q) if own else None
            sizes = {"rows": side, "columns": side, "scale": 0.125}
            inputs = (q, k, k, own_rows, own_rows, windows)
            window_attention_forward(*inputs, torch.empty_like(q), **sizes)
            window_attention_backward(q, *inputs, **sizes)


def peak_patch() -> None:
    """Captions of 77 and of a few tokens, widths 512 to 1152 and odd, heads 8 to 32, every switch."""
    from engine.kernels.peak_patch import pool_forward
    from engine.kernels.peak_patch_backward import pool_backward

    shapes = [(8, 77, 512, BF16), (16, 64, 1152, FP32), (32, 77, 1024, BF16), (1, 5, 33, FP16)]
    for (heads, length, width, dtype), full in itertools.product(shapes, (True, False)):
        peak = torch.empty(3, length, width, dtype=dtype)
        anchor = peak if full else peak[:, 0]
        keys, mask, end = torch.empty(heads, width), torch.ones(3, length, dtype=torch.bool), torch.zeros(3).long()
        attention = torch.empty(3, heads, length)
        factors = attention if full else None
        norm = torch.empty(width) if full else None
        inputs = (peak, anchor, keys, mask, end, factors, norm, norm, 1e-5)
        pooled = torch.empty(3, heads + 3, width)
        pool_forward(*inputs, (pooled, attention))
        incoming = [pooled, attention if full else None, attention]
        grads = (torch.empty(heads, width), torch.empty(3, length, width), torch.empty(anchor.shape))
        pool_backward(*inputs, incoming, grads)


def peak_patch_correct() -> None:
    """Rows of 33 to 1152 elements."""
    from engine.kernels import peak_patch_correct as kernels

    for dim, dtype in ((33, FP16), (512, BF16), (768, BF16), (1152, FP32)):
        f, grad, alpha = torch.empty(3, dim, dtype=dtype), torch.empty(3, dim), torch.empty(())
        kernels.correct_forward(f, f, alpha, grad)
        kernels.correct_backward(f, f, alpha, grad, (grad, grad, torch.empty(3)))
        text, cross, sims = torch.empty(3, 4, dim, dtype=dtype), torch.empty(3, 4, dim), torch.empty(3, 4, 2)
        kernels.pairs_forward(f, text, text, (sims, cross))
        kernels.pairs_backward(f, text, text, (sims, cross), (grad, cross, cross))


def centroid() -> None:
    """Vectors of 33 to 1152 elements."""
    from engine.kernels import centroid as kernels

    for dim, dtype in ((33, FP16), (512, BF16), (1152, FP32)):
        tokens, cu_seqlens, classes = torch.empty(9, dim, dtype=dtype), torch.tensor([0, 4, 9]), torch.tensor([0, 1])
        direction = torch.empty(2, dim)
        kernels.centroids_forward(tokens, cu_seqlens, classes, (direction, torch.empty(2), torch.empty(2)))
        kernels.centroids_spread(direction, cu_seqlens, classes, torch.empty(9, dim))


OPS = (
    max_sim, max_sim_sides, max_sim_backward, crop_batch, window_attention, peak_patch, peak_patch_correct, centroid,
)  # fmt: skip
CASES: dict[str, Callable[[], None]] = {case.__name__: case for case in OPS}


def all_launches(ops: tuple[str, ...], arch: int) -> list[Launch]:
    """What the launchers of these ops launch over their shapes on a GPU of this architecture; each launch once."""
    from engine.kernels import max_sim as planned

    asked = planned.architecture
    planned.architecture = lambda device: arch
    try:
        with recorded() as launches:
            for op in ops:
                CASES[op]()
    finally:
        planned.architecture = asked
    return launches
