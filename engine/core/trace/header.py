"""Makes the header of a scheduler's trace: all that a replay needs to make a scheduler and a policy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.core.offload.disk_tier import NO_DISK
from engine.core.scheduler import Scheduler
from engine.process.machine import describe_machine
from engine.records.kv_cache_groups import KVCacheGroup, attention_groups
from engine.version import package_version
from tracing.events import TraceHeader


def trace_header(scheduler: Scheduler, wall_time_s: float, now: float, *, from_start: bool) -> TraceHeader:
    """Describe the scheduler and its policy.

    ``from_start``: nothing has come in yet, so what the policy had learned before is written, too.
    """
    policy = scheduler.policy.describe()
    config = scheduler.config
    states = scheduler.kv.states
    disk = scheduler.loads.disk_level or NO_DISK
    encoder = scheduler.encoder
    return TraceHeader(
        wall_time_s=wall_time_s,
        monotonic_s=now,
        from_start=from_start,
        program=package_version(),
        machine=describe_machine(),
        policy=policy.name,
        policy_options={name: _in_json(value) for name, value in policy.options.items()},
        estimator_state=policy.estimator_state if from_start else None,
        block_size=scheduler.kv.block_size,
        num_blocks=scheduler.kv.pool.num_usable_blocks,
        kv_group_windows=_windows(attention_groups(scheduler.kv.kv_cache_groups)),
        kv_group_chunks=_chunks(attention_groups(scheduler.kv.kv_cache_groups)),
        num_states=0 if states is None else states.pool.num_usable_blocks,
        state_blocks=0 if states is None else states.blocks_per_state,
        num_host_blocks=scheduler.loads.tier_statistics().num_blocks,
        min_load_tokens=scheduler.loads.min_load_tokens,
        num_disk_blocks=disk.num_blocks,
        max_disk_writes=disk.max_writes,
        disk_fixed_tokens=disk.fixed_tokens,
        disk_read_share=disk.read_share,
        enable_prefix_caching=scheduler.kv.enable_caching,
        max_model_len=scheduler.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_loras=config.max_loras or 0,
        encoder_cache_size=0 if encoder is None else encoder.cache_size,
        max_encoder_input_tokens=0 if encoder is None else encoder.step_size,
        disable_chunked_mm_input=encoder is not None and encoder.keeps_whole,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
        async_scheduling=scheduler.steps.overlap,
        num_stages=scheduler.steps.num_stages,
        num_lookahead_tokens=scheduler.kv.num_lookahead_tokens,
        loads_remote=scheduler.loads.loads_remote,
    )


def _windows(groups: Sequence[KVCacheGroup]) -> list[int]:
    """The window of each group, 0 where it has none; empty for a single group of full attention."""
    return [] if len(groups) == 1 and groups[0].is_full else [group.sliding_window or 0 for group in groups]


def _chunks(groups: Sequence[KVCacheGroup]) -> list[int]:
    """The chunk of each group, 0 where it has none; empty if no group has any."""
    chunks = [group.attention_chunk or 0 for group in groups]
    return chunks if any(chunks) else []


def _in_json(value: float | int | str | bool | None) -> float | int | str | bool | None:
    """The value, or its name where JSON cannot write it: it has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
