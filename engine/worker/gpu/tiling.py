"""Tile sizes of the Triton attention kernels. Knows no kernel.

The sizes were found by compiling for sm_90, where no register is spilled, and by timing on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

HOPPER_SHARED_BYTES = 227 * 1024
"""Shared memory of one program on a Hopper GPU."""


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
    """Limit per thread; None: the compiler chooses. More registers mean fewer programs at a time."""


def uniform_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """For decode, which is bound by loading KV of type ``dtype``: four programs per processor at a time, so
    128 of its 65,536 registers per thread. Callers use fewer rows if there are fewer. Heads of more than 256
    numbers need more registers, and memory for fewer tiles."""
    if padded(head_dim) > 256:
        return Tiling(num_rows=64, tile_size=16, num_warps=4, num_stages=3)
    return Tiling(
        num_rows=64,
        tile_size=max(16, min(64, 4096 // padded(head_dim))),
        num_warps=4,
        num_stages=7 if dtype.itemsize == 1 else 5,
        max_registers=128,
    )


def prompt_tiling(head_dim: int, dtype: torch.dtype, shared_bytes: int) -> Tiling:
    """For prefill, which is bound by the tensor cores: as many rows as there are registers for accumulators.
    Tiles of 128 tokens, with which an H200 is a fifth faster, where shared memory exceeds the 99 KiB that all
    GPUs since Ampere have."""
    size = padded(head_dim)
    if size <= 128 and 6 * 128 * size * max(2, dtype.itemsize) < shared_bytes:
        return Tiling(num_rows=128, tile_size=128, num_warps=8, num_stages=3)
    tile_size = max(16, min(64, 16384 // (size * max(2, dtype.itemsize))))
    num_rows = 128 if size <= 128 else 64
    if size > 256:  # Gemma 4's layers without a window
        num_rows = 32
    return Tiling(num_rows=num_rows, tile_size=tile_size, num_warps=8, num_stages=3)


def prefix_tiling(num_rows: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """For a prefix that sequences with ``num_rows`` rows share: like decode if one of its tiles holds the
    rows, but with all registers; else like prefill with small shared memory, two programs per processor. Not
    timed."""
    few = uniform_tiling(head_dim, dtype)
    if num_rows <= few.num_rows:
        return replace(few, max_registers=None)
    return prompt_tiling(head_dim, dtype, shared_bytes=0)


def latent_tiling(num_rows: int, shared_bytes: int, rest_size: int = 64) -> Tiling:
    """For decode over latents with ``num_rows`` rows per sequence. 128 heads are bound by the tensor cores,
    which need 64 rows; their tiles need a Hopper's shared memory. ``rest_size``: the numbers of a latent that
    are no value, more with an indexer's key."""
    if num_rows <= 16 or shared_bytes < HOPPER_SHARED_BYTES:
        return Tiling(num_rows=16, tile_size=32, num_warps=4, num_stages=2)
    if num_rows <= 32:
        return Tiling(num_rows=32, tile_size=64, num_warps=4, num_stages=2)
    return Tiling(num_rows=64, tile_size=64 if rest_size <= 64 else 32, num_warps=8, num_stages=2)


def padded(size: int) -> int:
    """The smallest power of two that is at least ``size`` and that tensor cores support."""
    return max(16, 1 << (size - 1).bit_length())


def shared_bytes_of(device: torch.device) -> int:
    """Shared memory available to one program; where kernels are interpreted, a Hopper GPU's."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))
