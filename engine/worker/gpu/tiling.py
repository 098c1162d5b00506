"""Tile sizes of the Triton attention kernels. Knows no kernel.

Found by compiling for sm_90: no register is spilled, and the loads are asynchronous. Not timed on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tile sizes of one kernel. Rows are query tokens times the heads that share a KV head."""

    num_rows: int
    """Rows of a query tile."""
    tile_size: int
    """Tokens of a KV tile."""
    num_warps: int
    num_stages: int
    """Software pipelining: KV tiles in flight, from the block table lookup to the GEMM."""
    max_registers: int | None = None
    """Limit per thread; None: the compiler's choice. More registers mean fewer programs at a time."""


def uniform_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """For decode, which is bound by loading KV of type ``dtype``: many programs at a time, four per
    processor, so 128 of its 65,536 registers per thread. Fewer rows are used if there are fewer."""
    return Tiling(
        num_rows=64,
        tile_size=max(16, min(64, 4096 // padded(head_dim))),
        num_warps=4,
        num_stages=7 if dtype.itemsize == 1 else 5,
        max_registers=128,
    )


def prompt_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """For prefill, which is bound by the tensor cores: as many rows as the registers hold accumulators for,
    and no more shared memory than all GPUs since Ampere have, 99 KiB."""
    size = padded(head_dim)
    tile_size = max(16, min(64, 16384 // (size * max(2, dtype.itemsize))))
    return Tiling(num_rows=128 if size <= 128 else 64, tile_size=tile_size, num_warps=8, num_stages=3)


def latent_tiling() -> Tiling:
    """For decode over latents, of which one program's tile has as many numbers as 32 tokens have: what many
    rows share is loaded again by other programs, from the L2 cache."""
    return Tiling(num_rows=16, tile_size=32, num_warps=4, num_stages=2)


def padded(size: int) -> int:
    """The least power of two of at least ``size`` that tensor cores support."""
    return max(16, 1 << (size - 1).bit_length())
