"""The states of a model that has layers with states: their sizes, their pool, and what they exclude."""

from __future__ import annotations

import numpy as np
import torch

from engine.config.engine_config import CacheConfig, EngineConfig
from engine.core.outputs import SchedulerOutput
from engine.errors import ConfigError
from engine.records.kv_cache_groups import KVCacheGroup
from engine.worker.attention.backend import IntArray
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from engine.worker.states.state_batch import StateBatch
from engine.worker.states.state_pool import StatePool, StateSpec

NO_STATES = StateSpec(())


def state_spec_of(model: CausalModel, cache: CacheConfig) -> StateSpec:
    """The shape of the states that the model keeps per sequence. ConfigError if num_state_slots is set for a
    model without states."""
    spec = model.state_spec if isinstance(model, Decoder) else NO_STATES
    if not spec.layers and cache.num_state_slots is not None:
        raise ConfigError("num_state_slots needs a model that has layers with states, and this has none.")
    return spec


def attention_beside_states(resolved: str, config: EngineConfig, states: StateSpec) -> str:
    """The attention backend of a model. With states, torch's replaces Triton's, whose steps do not support
    them. ConfigError if the user requests Triton's explicitly."""
    if not states.layers or resolved != "triton":
        return resolved
    option = "attention_backend=triton" if config.model.attention_backend == "triton" else "kv_cache_dtype"
    if config.model.attention_backend == "triton" or config.cache.kv_cache_dtype != "auto":
        raise ConfigError(f"{option} is not supported for models that have layers with states.")
    return "torch"


def with_state_group(
    groups: tuple[KVCacheGroup, ...], states: StateSpec, kv: KvCacheSpec
) -> tuple[KVCacheGroup, ...]:
    """Returns the groups of all layers; that of the layers with a state is last."""
    if not states.layers:
        return groups
    num_blocks = blocks_of_state(states, kv)
    return (*groups, KVCacheGroup(tuple(range(len(states.layers))), state_blocks=num_blocks))


def blocks_of_state(states: StateSpec, kv: KvCacheSpec) -> int:
    """Blocks of the KV pool that a state takes; 0 for a model without states."""
    return -(-states.bytes_per_state // kv.pool_bytes_per_block)


def open_states(model: CausalModel, states: StateSpec, blocks: torch.Tensor, each: int) -> StatePool | None:
    """Let the model use the last blocks of a pool, ``each`` per state; None for a model without states.

    blocks: [num_states * each, ...], block-major, contiguous
    """
    if not states.layers:
        return None
    assert isinstance(model, Decoder)
    pool = StatePool(states, blocks.view(len(blocks), -1).view(torch.uint8).view(len(blocks) // each, -1))
    model.use_states(pool)
    return pool


def use_again(model: CausalModel, pool: StatePool | None) -> None:
    """Let the model use this pool, after a trial or when it was loaded again."""
    if pool is not None:
        assert isinstance(model, Decoder)
        model.use_states(pool)


def begin_trial(model: CausalModel, query_lens: IntArray, device: torch.device) -> None:
    """Start sequences with separate temporary states, for a trial run whose states are discarded."""
    if not isinstance(model, Decoder) or not model.state_spec.layers:
        return
    num_states = len(query_lens) + 1
    num_bytes = model.state_spec.bytes_per_state
    pool = StatePool(model.state_spec, torch.zeros(num_states, num_bytes, dtype=torch.uint8, device=device))
    model.use_states(pool)
    sources = np.zeros(len(query_lens), dtype=np.int64)
    pool.begin_step(StateBatch(query_lens, sources, np.arange(1, num_states)))


def drafts_of(plan: SchedulerOutput, req_ids: list[str]) -> IntArray | None:
    """[num_seqs] number of drafts of each sequence of a step; None if there are none."""
    drafts = plan.scheduled_spec_decode_tokens
    if not drafts:
        return None
    return np.array([len(drafts.get(req_id, ())) for req_id in req_ids], dtype=np.int64)


def state_batch(plan: SchedulerOutput, req_ids: list[str], query_lens: IntArray) -> StateBatch:
    """The slots of a step's sequences, in the order of ``req_ids``."""
    slots = np.array([plan.state_slots[req_id] for req_id in req_ids], dtype=np.int64)
    return StateBatch(query_lens, *np.ascontiguousarray(slots.T))
