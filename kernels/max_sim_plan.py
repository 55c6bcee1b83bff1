"""How max-sim is launched: what comes, and the shape of tiles, by plain arithmetic on the shape of the problem.

Patches are rows of a tile, tokens its columns. Tensor cores take rows by 64 but columns by 8, and Triton's blocks are
powers of two, so that columns come in two parts: 80 is 64 + 16. Tokens of several queries share a tile where that
makes it fuller: three queries of 77 tokens are 231 of 256 columns. Nothing is tuned on a user's first call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Numbers of a tile (sums, maxima, places) that a thread may hold in registers, of 255; the rest are addresses and,
# before sm_90, what is multiplied.
TILE_REGISTERS, OLD_TILE_REGISTERS = 132, 80
# Shared memory of a block on sm_80, bytes, with some room for reductions.
SHARED_BYTES = 152 * 1024
# Bytes that a processor of the chip gets from the L2 cache in a clock, and from its own shared memory (sm_90).
L2_BYTES = 28
SHARED_SPEED_BYTES = 128
# Bytes of a row up to which a document stays on the chip while queries pass, and most rows of queries in one launch.
STATIONARY_BYTES, STATIONARY_ROWS = 256, 8192


@dataclass(frozen=True)
class Side:
    """The queries or the documents: tokens `(N, L, D)`, or `(total, D)` with `cu_seqlens (N + 1,)` int64; what belongs
    to each token, `(N, L)` or `(total,)`; scales are those of int8 tokens. Tokens are dense in their last axis."""

    tokens: Tensor
    mask: Tensor | None = None
    weights: Tensor | None = None
    cu_seqlens: Tensor | None = None
    scales: Tensor | None = None
    longest: int = 0

    @property
    def number(self) -> int:
        return self.tokens.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def length(self) -> int:
        """Of the longest item."""
        return self.tokens.shape[1] if self.cu_seqlens is None else self.longest

    @property
    def strides(self) -> tuple[int, int]:
        """Of items and of tokens."""
        item = 0 if self.cu_seqlens is not None else self.tokens.stride(0)
        return item, self.tokens.stride(-2)


def architecture(device: torch.device) -> int:
    """Compute capability as in sm_90, which the interpreter takes the CPU for."""
    return 10 * torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 90


def processors(device: torch.device) -> int:
    """Of the chip; one in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@dataclass(frozen=True)
class Plan:
    """Shape of a launch: rows, columns (two parts, the second may be 0) and elements of D per tile; queries per
    program; whether both directions come from one tile; warps; pipeline stages."""

    block_m: int
    block_n: int
    block_e: int
    block_k: int
    group: int
    reverse: bool
    num_warps: int
    num_stages: int
    max_registers: int | None
    """Per thread; None leaves it to the assembler."""

    @property
    def columns(self) -> int:
        return self.block_n + self.block_e


def plan_max_sim(
    n_queries: int,
    n_tokens: int,
    n_patches: int,
    dim: int,
    dtype: torch.dtype,
    *,
    soft: bool = False,
    argmax: bool = False,
    symmetric: bool = False,
    exact: bool = True,
    aligned: bool = True,
    wgmma: bool = True,
) -> Plan:
    """The launch for queries of `n_tokens` (the longest) against documents of `n_patches` (the longest).

    Args:
        n_queries: how many queries a document meets; 1 where each program must have a single one (pairs, packed
            queries).
        soft, argmax, symmetric: what is computed; each holds more numbers per similarity in registers. Both directions
            from one tile need all tokens of a query in it; with longer queries the plan is that of one direction.
        exact: float32 products in full precision, which tensor cores do not have.
        aligned: rows begin at multiples of 16 bytes. Others are read number by number, each with its own address.
        wgmma: the tensor cores of sm_90, which take what they multiply from shared memory.
    """
    by_hand = dtype == torch.float32 and exact
    block_k = _block_k(dim, dtype, aligned)
    best, best_cost = None, math.inf
    for block_m, block_n, block_e, num_warps in _tiles(2 + 2 * soft + argmax + 2 * symmetric, by_hand, wgmma):
        columns = block_n + block_e
        if symmetric and n_tokens > columns:
            continue
        group = 1 if symmetric else max(1, min(n_queries, columns // max(n_tokens, 1), 16))
        passes = math.ceil(max(n_tokens, 1) / columns) if group == 1 else math.ceil(n_queries / group) / n_queries
        clocks = math.ceil(max(n_patches, 1) / block_m) * passes * _clocks(block_m, block_n, block_e, num_warps)
        if clocks < best_cost * (1 - 1e-9):
            best, best_cost = (block_m, block_n, block_e, group, num_warps), clocks
    if best is None:
        return plan_max_sim(
            n_queries, n_tokens, n_patches, dim, dtype,
            soft=soft, argmax=argmax, exact=exact, aligned=aligned, wgmma=wgmma,
        )  # fmt: skip
    block_m, block_n, block_e, group, num_warps = best
    stage_bytes = (block_m + block_n + block_e) * block_k * dtype.itemsize
    num_stages = min(1 if by_hand else 4, max(1, SHARED_BYTES // stage_bytes))
    # Left alone, the assembler aims at more blocks per processor and spills for them where operands are in registers.
    max_registers = 255 if by_hand or not wgmma else None
    return Plan(block_m, block_n, block_e, block_k, group, symmetric, num_warps, num_stages, max_registers)


def _block_k(dim: int, dtype: torch.dtype, aligned: bool) -> int:
    """128 bytes of a row at a time, or fewer for rows that are short or not aligned; tensor cores take at least 32."""
    longest, shortest = (128 if aligned else 64) // dtype.itemsize, max(16, 32 // dtype.itemsize)
    return min(longest, max(shortest, 1 << max(dim - 1, 0).bit_length()))


def _tiles(numbers: int, by_hand: bool, wgmma: bool) -> Iterator[tuple[int, int, int, int]]:
    """Rows, columns in two parts, warps: tiles that fit in registers, narrow ones first."""
    if by_hand:
        # Operands pass through registers as well.
        yield from ((64, block_n, 0, 4) for block_n in (16, 32, 64) if 64 * block_n * numbers <= 128 * 80)
        return
    for block_n, block_m, block_e in itertools.product((16, 32, 64, 128), (64, 128), (0, 16, 32, 64)):
        size = block_m * (block_n + block_e) * numbers
        if block_e >= block_n:
            continue
        if wgmma and size <= TILE_REGISTERS * 256:
            yield block_m, block_n, block_e, 4 if size <= TILE_REGISTERS * 128 and block_m == 64 else 8
        # Before sm_90 every warp has rows of its own: more warps than that would repeat others' work.
        if not wgmma and size <= OLD_TILE_REGISTERS * 2 * block_m:
            yield block_m, block_n, block_e, block_m // 16


def _clocks(block_m: int, block_n: int, block_e: int, num_warps: int) -> float:
    """Clocks of a processor for 16 elements of D (16-bit numbers): the slower of multiplying and loading.

    A warpgroup multiplies 64 rows by n columns in n / 2 clocks, and reads both from shared memory for it.
    """
    split = max(1, num_warps // 4 * 64 // block_m)  # warpgroups that share 64 rows halve the columns
    multiplying = 0.0
    for n in (block_n, block_e):
        if n:
            one = max(n / split / 2, (64 + n / split) * 32 / SHARED_SPEED_BYTES)
            multiplying += block_m / 64 * split * one
    return max(multiplying, (block_m + block_n + block_e) * 32 / L2_BYTES)


@dataclass(frozen=True)
class BackwardPlan:
    """Shape of a launch of the backward: rows that a program owns, rows of the others per step, elements of D (per
    step of the similarities, and owned), warps, pipeline stages, registers per thread."""

    block_r: int
    block_f: int
    block_k: int
    block_d: int
    num_warps: int
    num_stages: int
    max_registers: int | None


def plan_max_sim_backward(
    length: int, dim: int, dtype: torch.dtype, *, soft: bool, scatter: bool, aligned: bool = True
) -> BackwardPlan:
    """The launch for items of `length` rows.

    Args:
        soft: similarities are made again. scatter: others' tokens reach their winners through products of matrices,
            which want many rows; without them a program gathers rows, and a few will do.
        aligned: as in `plan_max_sim`.
    """
    block_k = _block_k(dim, dtype, aligned)
    block_d = min(128, max(16, 1 << max(dim - 1, 0).bit_length()))
    if dtype == torch.float32:
        block_r = 16 if length <= 16 or not scatter else 32
        return BackwardPlan(block_r, 16, min(block_k, 32), min(block_d, 64), 4, 1, 255)
    # float16 goes by way of float32, whose numbers take registers, as do addresses of rows that are not aligned.
    by_way_of_float32 = dtype == torch.float16
    if not scatter:
        return BackwardPlan(16, 16, block_k, block_d, 4, 2, 128 if by_way_of_float32 else None)
    block_r = 64 if length <= 64 or soft else 128
    if by_way_of_float32 and not soft and not aligned:
        block_d = min(block_d, 32)
    block_f = 64 if soft and dtype == torch.bfloat16 else 32
    num_warps = 4 if block_r == 64 and not soft and dtype == torch.bfloat16 else 8
    return BackwardPlan(block_r, block_f, block_k, block_d, num_warps, 3, 255 if by_way_of_float32 else None)


@dataclass(frozen=True)
class StationaryPlan:
    """Shape of a document-stationary launch: query tokens, patches and elements of D per tile; queries and tokens of
    them whose scores are summed at a time; programs; queries per launch; warps; pipeline stages."""

    block_r: int
    block_t: int
    block_k: int
    block_q: int
    block_u: int
    programs: int
    queries: int
    num_warps: int
    num_stages: int
    max_registers: int | None


def plan_stationary(
    q: Side, d: Side, *, soft: bool, argmax: bool, single: bool, aligned: bool, wgmma: bool, processors: int
) -> StationaryPlan | None:
    """The document-stationary launch; None where it is not to be had or gains nothing.

    Args:
        soft, argmax: what is computed; both at once are left to the other loop.
        single: each program must have a single query, or both directions are wanted from one tile.
        aligned: as in `plan_max_sim`.
        processors: of the chip; fewer documents than these would leave some without work.
    """
    dim, item, block_r = q.tokens.shape[-1], q.tokens.dtype.itemsize, 128
    if single or (soft and argmax) or not aligned or dim * item % 16 or item > 2:
        return None
    if not 0 < dim * item <= STATIONARY_BYTES:
        return None
    if q.number * q.length < 4 * block_r or d.number < processors:
        return None
    # Patches in tiles of 64 only where that saves one, or where the registers of sm_80 want it.
    narrow = not wgmma or math.ceil(d.length / 64) * 64 < math.ceil(d.length / 128) * 128
    # All of D at once: up to 256 bytes a power of two is no more than whole blocks of 128 bytes are.
    block_k = max(32 // item, 16, 1 << (dim - 1).bit_length())
    block_u = min(128, 1 << (q.length - 1).bit_length())
    return StationaryPlan(
        block_r, 64 if narrow else 128, block_k, 1024 // block_u, block_u, 4 * processors,
        max(1, STATIONARY_ROWS // q.length), 8, 2 if wgmma else 3, None if wgmma else 255,
    )  # fmt: skip
