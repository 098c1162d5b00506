"""Opens the disk tier, and measures at the start from how many tokens on reading beats recomputing."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from engine.config.engine_config import CacheConfig
from engine.core.offload.disk_tier import MAX_DISK_WRITES, DiskLevel
from engine.errors import ModelLoadError
from engine.worker.kv_tiers.disk_pool import DiskPool
from engine.worker.memory import as_gib

logger = logging.getLogger(__name__)


def open_disk(
    cache: CacheConfig,
    pool: torch.Tensor,
    measure_token_s: Callable[[], float],
    max_writes: int = MAX_DISK_WRITES,
) -> tuple[DiskPool, DiskLevel] | None:
    """Open the disk tier; None if none is configured, or if reading is slower than recomputing.
    ModelLoadError if the folder has too little free space."""
    block_bytes = pool[0].numel() * pool.element_size()
    num_blocks = cache.num_disk_blocks(block_bytes)
    if not num_blocks:
        return None
    assert cache.kv_offloading_disk_path is not None, "was checked"
    folder = Path(cache.kv_offloading_disk_path)
    try:
        _check_free_space(folder, num_blocks * block_bytes)
        disk = DiskPool(folder, pool)
    except OSError as error:
        raise ModelLoadError(f"The disk tier cannot use {folder}: {error.strerror or error}.") from error
    level = _level(cache, disk, num_blocks, measure_token_s, max_writes)
    if level is not None:
        return disk, level
    disk.close()
    return None


def _check_free_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelLoadError(
            f"The disk tier needs {as_gib(needed)} in {folder}, but only {as_gib(free)} are free."
        )


def _level(
    cache: CacheConfig,
    disk: DiskPool,
    num_blocks: int,
    measure_token_s: Callable[[], float],
    max_writes: int,
) -> DiskLevel | None:
    """The level, which says what reads are worth it; None if none is."""
    if cache.kv_offloading_disk_min_tokens is not None:
        return DiskLevel(
            num_blocks=num_blocks,
            max_writes=max_writes,
            fixed_tokens=float(cache.kv_offloading_disk_min_tokens),
        )
    speed = disk.measure(num_blocks)
    if speed is None:
        logger.warning("Disk tier disabled: its folder cannot be written.")
        return None
    token_s = measure_token_s()
    read_share = speed.block_s / (cache.block_size * token_s)
    if read_share >= 1:
        logger.warning(
            "Disk tier disabled: reading a KV block takes %.2f ms, recomputing it %.2f ms.",
            speed.block_s * 1e3,
            cache.block_size * token_s * 1e3,
        )
        return None
    fixed_tokens = max(0.0, speed.first_s - speed.block_s) / token_s
    logger.info(
        "Disk tier: %d KV blocks; reading %d tokens takes as long as computing %d.",
        num_blocks,
        1000,
        round(fixed_tokens + read_share * 1000),
    )
    return DiskLevel(
        num_blocks=num_blocks, max_writes=max_writes, fixed_tokens=fixed_tokens, read_share=read_share
    )
