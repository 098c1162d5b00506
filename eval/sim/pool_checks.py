"""Checks that the pools of a simulation are possible and that its jobs fit in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.records.kv_cache_groups import max_blocks_held
from eval.errors import UsageError, WorkloadError
from eval.workloads.job import Job

if TYPE_CHECKING:
    from eval.sim.sim_config import SimConfig

MAX_BLOCKS = 10_000_000
"""Most blocks on each tier, of all replicas together: about 1 GB of the simulator's memory."""


def check_pool(flag: str, num_tokens: int, config: SimConfig) -> None:
    """Raises UsageError if the pool that ``flag`` requests holds no block or too many."""
    if num_tokens < config.block_size:
        raise UsageError(f"{flag} is {num_tokens:,} tokens, less than one block of {config.block_size:,}.")
    num_blocks = num_tokens // config.block_size * config.num_replicas
    if num_blocks > MAX_BLOCKS:
        raise UsageError(
            f"{flag} makes {num_blocks:,} blocks in all replicas; a simulation keeps track of {MAX_BLOCKS:,}."
        )


def check_fit(config: SimConfig, jobs: Sequence[Job]) -> None:
    """Raises WorkloadError if a job can never fit."""
    groups = config.kv_cache_groups
    for job in jobs:
        step_tokens = config.scheduler.max_num_batched_tokens
        num_blocks = max_blocks_held(groups, config.block_size, job.max_context_tokens, step_tokens)
        if num_blocks > config.num_blocks:
            raise WorkloadError(
                f"Job {job.job_id} needs {job.max_context_tokens:,} tokens of KV at once; the pool holds "
                f"{config.num_blocks * config.block_size:,}. Raise --kv-tokens or lower --max-context-tokens."
            )
