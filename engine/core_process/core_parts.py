"""Makes the parts of an engine core that depend on the model, once the executor has loaded it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.config import EngineConfig, SchedulerConfig
from engine.core.offload.offloading_connector import OffloadingConnector
from engine.core.policy import PolicyContext, SchedulingPolicy
from engine.core.request import Request
from engine.core.routed_experts import RoutedExpertsStore
from engine.core.scheduler import Scheduler
from engine.errors import ConfigError
from engine.executor import ModelInfo
from engine.messages import EngineReady
from tracing.tracer import Tracer


def policy_context(config: EngineConfig, info: ModelInfo, tracer: Tracer) -> PolicyContext:
    """What the policy is told of the engine."""
    return PolicyContext(
        config.cache.block_size,
        info.num_gpu_blocks - 1,
        tracer,
        num_host_blocks=info.num_host_blocks,
        kv_cache_groups=info.kv_cache_groups,
        num_states=max(0, info.num_states - 1),
        engine_index=config.parallel.data_parallel_rank,
    )


def engine_ready(config: EngineConfig, info: ModelInfo, policy: SchedulingPolicy) -> EngineReady:
    """What API server processes are told of the engine."""
    return EngineReady(
        num_gpu_blocks=info.num_gpu_blocks,
        max_model_len=info.max_model_len,
        block_size=config.cache.block_size,
        vocab_size=info.vocab_size,
        dtype=info.dtype,
        wants_signals=policy.wants_signals,
        kv_cache_groups=info.kv_cache_groups,
    )


def make_scheduler(
    config: EngineConfig,
    info: ModelInfo,
    policy: SchedulingPolicy,
    overlap: bool,
    on_request_ended: Callable[[Request, float], None] | None,
) -> Scheduler:
    """The scheduler of the KV pool that the executor allocated, and of its host tier, if any.

    ``overlap``: a step is planned while the one before it runs.
    """
    block_size, connector = config.cache.block_size, None
    if info.num_host_blocks:
        connector = OffloadingConnector(info.num_host_blocks, block_size, disk_level=info.disk_level)
    scheduler = Scheduler(
        replace(config.scheduler, async_scheduling=overlap),
        block_size=block_size,
        num_blocks=info.num_gpu_blocks,
        max_model_len=info.max_model_len,
        policy=policy,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        kv_connector=connector,
        loads_remote=config.kv_transfer is not None and config.kv_transfer.fetches,
        kv_cache_groups=info.kv_cache_groups,
        num_states=info.num_states,
        on_request_ended=on_request_ended,
    )
    if config.speculative is not None:
        scheduler.kv.num_lookahead_tokens = config.speculative.num_lookahead_tokens
    if info.routed_experts is not None:
        scheduler.routed_experts = RoutedExpertsStore(info.routed_experts, info.num_gpu_blocks, block_size)
    return scheduler


def check_token_budget(scheduler: SchedulerConfig, max_model_len: int) -> None:
    """Without chunked prefill, a prompt longer than the token budget would never be scheduled."""
    if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"Without chunked prefill max_num_batched_tokens ({scheduler.max_num_batched_tokens}) must be at "
            f"least max_model_len ({max_model_len}): raise the former or lower the latter."
        )
