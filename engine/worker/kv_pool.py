"""Chooses the number of KV blocks in the pool, and raises an error if the pool is too small or too large."""

from __future__ import annotations

from bisect import bisect_right

import torch

from engine.config.engine_config import CacheConfig, EngineConfig
from engine.core.steps_in_flight import max_steps
from engine.errors import ModelLoadError
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.memory import as_gib, available_bytes
from engine.worker.parallel.group import ALONE, TensorParallelGroup, sharers

CPU_DEFAULT_BYTES = 4 * 2**30
CPU_SHARE_OF_FREE_MEMORY = 0.4
NUM_NULL_BLOCKS = 1
STATES_OF_REQUEST = 4
"""The most slots that a running request takes: its state, a spare one, and its last two checkpoints."""
SHARE_OF_STATES = 0.4
"""The share of states in the memory of blocks and states together."""


def choose_num_blocks(
    config: EngineConfig,
    spec: KvCacheSpec,
    max_model_len: int,
    device: torch.device,
    activation_bytes: int,
    group: TensorParallelGroup = ALONE,
    state_bytes: int = 0,
) -> int:
    """The number of blocks in the pool, null block included: the requested number, or else what fits in the
    memory of each rank's device next to ``state_bytes`` of states."""
    step_tokens = _tokens_under_way(config)
    one_sequence = spec.blocks_for(max_model_len, step_tokens)
    num_blocks = _requested_blocks(config.cache, spec, state_bytes)
    if num_blocks is not None and group.stage.size > 1:  # stages may have one layer more or less
        num_blocks = group.smallest(num_blocks)
    available = available_bytes(device) // sharers(group, device)
    if num_blocks is None:
        budget = _budget(config, spec, max_model_len, device, activation_bytes, group)
        budget = max(0, budget - state_bytes)
        all_cached = len(spec.groups) * -(-max_model_len // spec.block_size)
        useful = config.scheduler.max_num_seqs * all_cached + NUM_NULL_BLOCKS
        num_blocks = group.smallest(min(budget // spec.bytes_per_block, useful))
    elif (needed := num_blocks * spec.bytes_per_block + state_bytes) > available:
        raise ModelLoadError(
            f"The KV cache of {num_blocks} blocks needs {as_gib(needed)} of memory on {device.type}, "
            f"but only {as_gib(available)} are available."
        )
    if num_blocks < one_sequence + NUM_NULL_BLOCKS:
        raise _too_few(num_blocks, one_sequence + NUM_NULL_BLOCKS, spec, max_model_len, step_tokens)
    return num_blocks


def choose_num_states(
    config: EngineConfig,
    spec: KvCacheSpec,
    bytes_per_state: int,
    max_model_len: int,
    device: torch.device,
    activation_bytes: int,
    group: TensorParallelGroup = ALONE,
) -> int:
    """The number of state slots, slot 0 included: the requested number, or else a share of the memory, but no
    more than all running requests and as many checkpoints can use; 0 for a model without states."""
    if not bytes_per_state:
        return 0
    if config.cache.num_state_slots is not None:
        return config.cache.num_state_slots
    budget = _budget(config, spec, max_model_len, device, activation_bytes, group)
    useful = 2 * STATES_OF_REQUEST * config.scheduler.max_num_seqs + 1
    num_states = min(int(budget * SHARE_OF_STATES) // bytes_per_state, useful)
    return group.smallest(max(num_states, STATES_OF_REQUEST + 1))


def _budget(
    config: EngineConfig,
    spec: KvCacheSpec,
    max_model_len: int,
    device: torch.device,
    activation_bytes: int,
    group: TensorParallelGroup,
) -> int:
    """Bytes available for blocks and states together."""
    cache = config.cache
    available = available_bytes(device) // sharers(group, device)
    if cache.num_gpu_blocks_override is not None:
        return int(cache.num_gpu_blocks_override * spec.bytes_per_block / (1 - SHARE_OF_STATES))
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    if device.type == "cuda":
        return _accelerator_bytes(cache, device, activation_bytes, available)
    one_sequence = spec.blocks_for(max_model_len, _tokens_under_way(config))
    return _host_bytes(spec, one_sequence, available, group.size * group.stage.size)


def _tokens_under_way(config: EngineConfig) -> int:
    """The most tokens that a sequence can have in all steps under way."""
    return max_steps(config.model.pipeline_parallel_size) * config.scheduler.max_num_batched_tokens


def _requested_blocks(cache: CacheConfig, spec: KvCacheSpec, state_bytes: int) -> int | None:
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        return max(0, cache.kv_cache_memory_bytes - state_bytes) // spec.bytes_per_block
    return None


def _accelerator_bytes(
    cache: CacheConfig, device: torch.device, activation_bytes: int, available: int
) -> int:
    """``gpu_memory_utilization`` of the total, less the memory in use."""
    _, total = torch.cuda.mem_get_info(device)
    in_use = total - available
    return max(0, int(total * cache.gpu_memory_utilization) - in_use - activation_bytes)


def _host_bytes(spec: KvCacheSpec, blocks_of_one: int, available: int, num_ranks: int) -> int:
    """This rank's share of ``CPU_DEFAULT_BYTES``, or more if one sequence needs it."""
    one_sequence = (blocks_of_one + NUM_NULL_BLOCKS) * spec.bytes_per_block
    wanted = max(CPU_DEFAULT_BYTES // num_ranks, one_sequence)
    return min(wanted, int(available * CPU_SHARE_OF_FREE_MEMORY))


def _too_few(
    num_blocks: int, needed: int, spec: KvCacheSpec, max_model_len: int, step_tokens: int
) -> ModelLoadError:
    """The error for a pool in which the longest sequence does not fit."""
    most = max(0, num_blocks - NUM_NULL_BLOCKS)
    lengths = range(0, max_model_len + 1, spec.block_size)
    fitting = lengths[bisect_right(lengths, most, key=lambda n: spec.blocks_for(n, step_tokens)) - 1]
    return ModelLoadError(
        f"The maximum context length of {max_model_len} tokens needs {needed} KV blocks "
        f"({as_gib(needed * spec.bytes_per_block)}), but the KV cache has {num_blocks} "
        f"({as_gib(num_blocks * spec.bytes_per_block)}): set max_model_len to at most {fitting} "
        "or give the KV cache more memory."
    )
