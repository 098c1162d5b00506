"""Makes the parts of an engine core that depend on the model, once the executor has loaded it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from engine.config.engine_config import EngineConfig, SchedulerConfig
from engine.core.drafts.drafter import most_bytes
from engine.core.encoder_cache_manager import EncoderCacheManager
from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.block_lives import BlockLifeWatch
from engine.core.kv_cache.tiered_blocks import TieredBlocks
from engine.core.offload.offloading_connector import OffloadingConnector
from engine.core.policy import PolicyContext, PolicyFactory, SchedulingPolicy, fcfs
from engine.core.request import Request, RequestStatus
from engine.core.routed_experts import RoutedExpertsStore
from engine.core.scheduler import Scheduler
from engine.core.traced_scheduler import TracedScheduler
from engine.core_process.core_part import CoreParts
from engine.core_process.saved_kv.saved_prefixes import SavedPrefixes
from engine.errors import ConfigError, RequestError
from engine.executor import ModelInfo
from engine.kv_transfer.block_store import open_blocks
from engine.kv_transfer.moved_turns import MovedTurns
from engine.media.checks import check_media
from engine.records.door import DRAINING, Door
from engine.records.media import MediaModels
from engine.records.messages import EngineCoreOutput, EngineCoreRequest, EngineReady
from engine.records.priority import check_priority
from engine.records.sampling_params import check_vocabulary
from engine.tokenization.prompt_encoder import extreme_tokens
from tracing.tracer import Tracer


def policy_context(config: EngineConfig, info: ModelInfo, tracer: Tracer) -> PolicyContext:
    """What the policy knows of the engine."""
    return PolicyContext(
        config.cache.block_size,
        info.num_gpu_blocks - 1,
        tracer,
        num_host_blocks=info.num_host_blocks,
        kv_cache_groups=info.kv_cache_groups,
        num_states=max(0, info.num_states - 1),
        engine_index=config.parallel.data_parallel_rank,
    )


def make_policy(
    factory: PolicyFactory, config: EngineConfig, info: ModelInfo, tracer: Tracer
) -> SchedulingPolicy:
    """The chosen policy; for a pooling model, which has no jobs, ``fcfs`` takes the place of one that uses
    signals."""
    policy = factory(policy_context(config, info, tracer))
    return (
        policy
        if info.pooling is None or not policy.wants_signals
        else fcfs(policy_context(config, info, tracer))
    )


def scheduler_config(config: EngineConfig, info: ModelInfo) -> SchedulerConfig:
    """The limits of a step for this model."""
    scheduler = replace(config.scheduler, max_loras=_max_loras(config))
    if info.pooling is None or not info.pooling.whole_prompts:
        return scheduler
    budget = max(scheduler.max_num_batched_tokens, info.max_model_len)
    return replace(
        scheduler,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=0,
        max_num_batched_tokens=budget,
    )


def engine_ready(config: EngineConfig, info: ModelInfo, policy: SchedulingPolicy) -> EngineReady:
    """What API server processes need to know of the engine."""
    return EngineReady(
        num_gpu_blocks=info.num_gpu_blocks,
        max_model_len=info.max_model_len,
        block_size=config.cache.block_size,
        vocab_size=info.vocab_size,
        dtype=info.dtype,
        wants_signals=policy.wants_signals,
        orders_by_priority=policy.orders_by_priority,
        prompt_logprobs=info.prompt_logprobs,
        kv_cache_groups=info.kv_cache_groups,
        pooling=info.pooling,
        media=info.media,
        most_draft_bytes=most_bytes(config.speculative),
        hands_over=config.kv_transfer is not None and config.kv_transfer.hands_over,
        start_phases=info.start_phases,
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
    block_size = config.cache.block_size
    connector = None
    transfer = config.kv_transfer
    if info.num_host_blocks:
        connector = OffloadingConnector(info.num_host_blocks, block_size, disk_level=info.disk_level)
    scheduler = Scheduler(
        replace(scheduler_config(config, info), async_scheduling=overlap),
        block_size=block_size,
        num_blocks=info.num_gpu_blocks,
        max_model_len=info.max_model_len,
        policy=policy,
        enable_prefix_caching=_caches_prefixes(config, info),
        kv_connector=connector,
        loads_remote=transfer is not None and (transfer.fetches or transfer.loads_saved),
        kv_cache_groups=info.kv_cache_groups,
        num_states=info.num_states,
        num_stages=config.model.pipeline_parallel_size,
        on_request_ended=on_request_ended,
    )
    if config.cache.kv_cache_metrics:
        scheduler.kv.pool.lives = BlockLifeWatch(config.cache.kv_cache_metrics_sample, time.monotonic)
    if config.speculative is not None:
        scheduler.kv.num_lookahead_tokens = config.speculative.num_lookahead_tokens
    if info.media is not None:
        scheduler.add_parts(_encoder_cache(config, info.media))
    if info.routed_experts is not None:
        scheduler.add_parts(RoutedExpertsStore(info.routed_experts, info.num_gpu_blocks, block_size))
    if transfer is not None and transfer.saves_all:
        _save_all(scheduler)
    return scheduler


def _encoder_cache(config: EngineConfig, media: MediaModels) -> EncoderCacheManager:
    """An encoder cache of at least the largest picture or clip, as V1's ``compute_encoder_budget``.
    ConfigError if that must be whole in a step, and does not fit."""
    whole = config.scheduler.disable_chunked_mm_input
    most = config.scheduler.max_num_batched_tokens
    if whole and most < media.max_tokens:
        raise ConfigError(
            f"disable_chunked_mm_input needs max_num_batched_tokens of at least {media.max_tokens}, the "
            f"tokens of the largest of its {media.nouns}, got {most}."
        )
    budget = config.scheduler.max_num_encoder_input_tokens or config.scheduler.max_num_batched_tokens
    size = config.scheduler.encoder_cache_size or config.scheduler.max_num_batched_tokens
    sizes = max(size, media.max_tokens), max(budget, media.max_tokens)
    return EncoderCacheManager(*sizes, keeps_whole=whole)


def _caches_prefixes(config: EngineConfig, info: ModelInfo) -> bool:
    return config.cache.enable_prefix_caching and (info.pooling is None or info.pooling.caches_prefixes)


def _max_loras(config: EngineConfig) -> int | None:
    return None if config.lora is None else config.lora.max_loras


def _save_all(scheduler: Scheduler) -> None:
    """Let the scheduler save what is computed in the folder or store that servers share."""
    if scheduler.kv.states is not None:
        raise ConfigError(
            "kv_connector: not all states of linear attention, which this model has, are saved: "
            'SharedStorageConnector with "shared_storage_saves": "pins" saves those that pins hold.'
        )
    scheduler.loads.saves = []


def open_saved_prefixes(config: EngineConfig, info: ModelInfo, scheduler: Scheduler) -> SavedPrefixes | None:
    """Finds prefixes of prompts there; None if this engine reads none. ConfigError if a store cannot be
    used."""
    transfer = config.kv_transfer
    if transfer is None or not transfer.loads_saved or info.saved_kv is None:
        return None
    must_load = transfer.kv_load_failure_policy == "fail"
    name_of = partial(_first_name, scheduler.kv.tiered)
    has_all = transfer.kv_connector_extra_config.shared_storage_saves == "all"
    cuts = not scheduler.kv.has_windows and scheduler.kv.states is None
    size = config.cache.block_size
    saved = open_blocks(transfer, info.saved_kv, "scheduler")
    turns = None if transfer.storage_path is None else MovedTurns(info.saved_kv.parent)
    return SavedPrefixes(saved, turns, size, name_of, must_load=must_load, has_all=has_all, cuts=cuts)


def _first_name(tiered: TieredBlocks, block_hash: BlockHash) -> BlockHash:
    """The name of a block in the first group: all groups' are saved together."""
    return tiered.names_of([block_hash])[0]


def check_token_budget(scheduler: SchedulerConfig, max_model_len: int) -> None:
    """Without chunked prefill, a prompt longer than the token budget would never be scheduled."""
    if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"Without chunked prefill max_num_batched_tokens ({scheduler.max_num_batched_tokens}) must be at "
            f"least max_model_len ({max_model_len}): raise the former or lower the latter."
        )


def check_request(message: EngineCoreRequest, ready: EngineReady) -> None:
    """Validate again what the InputProcessor has checked: a client that does not use it must not stop the
    core. Raises RequestError."""
    if (message.pooling is None) is not (ready.pooling is None):
        raise RequestError("The request does not fit the model: only one of them pools.", "model")
    num_before = 0 if message.continues is None else message.continues.num_tokens
    num_tokens = num_before + len(message.prompt_token_ids)
    most_tokens = ready.max_model_len - (ready.pooling is None)
    if not message.prompt_token_ids or num_tokens > most_tokens:
        raise RequestError(f"The prompt has {num_tokens} tokens; 1 to {most_tokens} fit.")
    check_vocabulary("The prompt", extreme_tokens(message.prompt_token_ids), ready.vocab_size)
    check_media(message.media, num_tokens, ready.media)
    check_priority(message.priority)
    params = message.sampling_params
    params.verify()
    params.verify_vocabulary(ready.vocab_size)
    if params.max_tokens is None:
        raise RequestError("max_tokens is not set.", "max_tokens")


def refuse_new(
    request: Request, scheduler: Scheduler | TracedScheduler, parts: CoreParts, now: float, door: Door
) -> list[EngineCoreOutput]:
    """End a request that has just been queued, if it begins a job and the core is being left, or if the
    policy expects it to start too late; returns its last output, if so. Called under the core's lock."""
    is_open = scheduler.requests.get(request.request_id) is request
    if is_open and door is not Door.OPEN and not scheduler.policy.goes_on(request):
        late_by_s = None
        request.stop_reason = DRAINING
    else:
        late_by_s = scheduler.policy.late_by_s(request, now) if is_open else None
        if late_by_s is None:
            return []
        request.stop_reason = (
            f"The job is expected to begin {math.ceil(late_by_s)} s later than it may: memory is full, and "
            "other jobs wait, too. Try again in that time."
        )
    outputs = scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ERROR, now)
    for output in outputs:
        output.late_by_s = late_by_s
    parts.answered(outputs)
    return outputs
