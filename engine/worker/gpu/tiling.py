"""How much of an attention's work a program has in hand at a time. Knows no kernel.

Found by compiling for sm_90: nothing is spilled, and the loads are asynchronous. Not timed on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows are queries times the heads that share a KV head."""

    num_rows: int
    """Of a query tile."""
    tile_size: int
    """Tokens of KV."""
    num_warps: int
    num_stages: int
    """Tiles of KV under way, from the look-up of their pages to their products."""
    max_registers: int | None = None
    """Per thread; None: as many as the compiler likes. More of them mean fewer programs at a time."""


def uniform_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """For sequences of few queries: what counts is that much KV, of type ``dtype``, is being loaded by many
    programs: four on each processor, by 128 of its 65,536 registers a thread. The rows are those of the
    queries, if they are fewer."""
    return Tiling(
        num_rows=64,
        tile_size=max(16, min(64, 4096 // padded(head_dim))),
        num_warps=4,
        num_stages=7 if dtype.itemsize == 1 else 5,
        max_registers=128,
    )


def prompt_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """For prompts: what counts is that the matrix units are busy. As many rows as registers hold the sums of;
    no more shared memory than all GPUs since Ampere have, 99 KiB."""
    size = padded(head_dim)
    tile_size = max(16, min(64, 16384 // (size * max(2, dtype.itemsize))))
    return Tiling(num_rows=128 if size <= 128 else 64, tile_size=tile_size, num_warps=8, num_stages=3)


def padded(size: int) -> int:
    """The least power of two that holds it, and that matrix units take."""
    return max(16, 1 << (size - 1).bit_length())
