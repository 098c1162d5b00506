"""The states of a model that has layers with states: their sizes, their pool, and what they exclude."""

from __future__ import annotations

import numpy as np
import torch

from engine.config import CacheConfig, EngineConfig
from engine.core.outputs import SchedulerOutput
from engine.errors import ConfigError
from engine.kv_cache_groups import KVCacheGroup
from engine.worker.attention.backend import IntArray
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from engine.worker.states.state_batch import StateBatch
from engine.worker.states.state_pool import StatePool, StateSpec

NO_STATES = StateSpec(())


def state_spec_of(model: CausalModel, cache: CacheConfig) -> StateSpec:
    """What the model keeps of a sequence in layers with a state. ConfigError if the cache cannot have it."""
    spec = model.state_spec if isinstance(model, Decoder) else NO_STATES
    if not spec.layers and cache.num_state_slots is not None:
        raise ConfigError("num_state_slots needs a model that has layers with states, and this has none.")
    if spec.layers and cache.has_host_tier:
        option = (
            "kv_offloading_size" if cache.num_host_blocks_override is None else "num_host_blocks_override"
        )
        raise ConfigError(f"{option}: host memory takes KV blocks only, and this model has states, too.")
    return spec


def attention_beside_states(resolved: str, config: EngineConfig, states: StateSpec) -> str:
    """The attention of a model: beside states Triton's, whose steps know none, gives way to torch's.
    ConfigError if the user insists on it."""
    if not states.layers or resolved != "triton":
        return resolved
    option = "attention_backend=triton" if config.model.attention_backend == "triton" else "kv_cache_dtype"
    if config.model.attention_backend == "triton" or config.cache.kv_cache_dtype != "auto":
        raise ConfigError(f"{option} is not supported for models that have layers with states.")
    return "torch"


def with_state_group(
    groups: tuple[KVCacheGroup, ...], states: StateSpec, kv: KvCacheSpec
) -> tuple[KVCacheGroup, ...]:
    """The groups of all layers: those with a state come last."""
    if not states.layers:
        return groups
    num_blocks = -(-states.bytes_per_state // kv.bytes_per_block)
    return (*groups, KVCacheGroup(tuple(range(len(states.layers))), state_blocks=num_blocks))


def open_states(
    model: CausalModel, states: StateSpec, num_states: int, device: torch.device
) -> StatePool | None:
    """Allocate the pool, and let the model use it; None for a model without states."""
    if not states.layers:
        return None
    assert isinstance(model, Decoder)
    pool = StatePool(states, num_states, device)
    model.use_states(pool)
    return pool


def begin_trial(model: CausalModel, query_lens: IntArray, device: torch.device) -> None:
    """Give sequences that begin now states of their own, for a run whose states nobody needs."""
    if not isinstance(model, Decoder):
        return
    pool = open_states(model, model.state_spec, len(query_lens) + 1, device)
    if pool is not None:
        sources = np.zeros(len(query_lens), dtype=np.int64)
        pool.begin_step(StateBatch(query_lens, sources, np.arange(1, len(query_lens) + 1)))


def state_batch(plan: SchedulerOutput, req_ids: list[str], query_lens: IntArray) -> StateBatch:
    """The slots of a step's sequences, in the order of ``req_ids``."""
    slots = np.array([plan.state_slots[req_id] for req_id in req_ids], dtype=np.int64)
    return StateBatch(query_lens, *np.ascontiguousarray(slots.T))
