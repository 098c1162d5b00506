"""Runs the model in the calling process: load, size the KV pool, then step after step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from engine.config.engine_config import EngineConfig
from engine.core.offload.disk_tier import max_disk_writes
from engine.core.outputs import SchedulerOutput
from engine.errors import EngineError, RequestError
from engine.executor import ModelInfo, PendingOutput
from engine.process.start_phases import StartPhases
from engine.worker.attention.backend import AttentionBackend
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.attention.layer_places import LayerPlaces
from engine.worker.attention.selection import resolve_attention, storage_dtype
from engine.worker.cpu.backend import CPUBackend
from engine.worker.drafts.loaded_drafter import LoadedDrafter, PlacedDrafter, beside_drafter, check_setup
from engine.worker.drafts.shared_blocks import KvPool, open_pool
from engine.worker.kv_pool import choose_num_blocks, choose_num_states
from engine.worker.kv_tiers.device_host_pool import select_host_pool
from engine.worker.kv_tiers.disk_level import open_disk
from engine.worker.kv_tiers.host_pool import HostTransfers, choose_num_host_blocks
from engine.worker.kv_transfer.shared_kv import SharedKV
from engine.worker.layer_groups import cache_spec, choose_groups, groups_here
from engine.worker.loading.loader import LoadedModel
from engine.worker.loading.model_folder import choose_device
from engine.worker.lora.adapter_store import AdapterStore, open_adapters
from engine.worker.media.beside import without_media_beside
from engine.worker.memory import keep_freed_memory
from engine.worker.model_states import (
    attention_beside_states,
    blocks_of_state,
    open_states,
    state_spec_of,
    use_again,
    with_state_group,
)
from engine.worker.models.decoder import Decoder
from engine.worker.models.routing_recorder import choose_routed_experts
from engine.worker.parallel.group import ALONE, TensorParallelGroup
from engine.worker.parallel.waves import WaveRunner, with_waves
from engine.worker.pooling.loading import load
from engine.worker.pooling.pooling_folder import read_pooling_folder
from engine.worker.profile_run import measure_activations, measure_gpu_steps, measure_token_s
from engine.worker.states.state_pool import StatePool
from engine.worker.step_runner import StepRunner


class Backend(Protocol):
    """The CPU or the GPU backend: runs step plans over one KV pool."""

    @property
    def attention(self) -> AttentionBackend: ...

    def runner(self, host_pool: HostTransfers | None) -> StepRunner:
        """The runner of its steps; called once. ``host_pool``: the host tier, if there is one."""


SLEEP_METHODS = ("check_alone", "sleep", "wake_up", "check_weights", "update_weights", "has_weights")


@dataclass(frozen=True, slots=True)
class Beside:
    """What a model may have beside its weights."""

    states: StatePool | None
    drafter: LoadedDrafter | None
    adapters: AdapterStore | None


class UniProcExecutor:
    """An Executor and its own factory: ``UniProcExecutor(config)`` loads the model, or with a group this
    rank's part of it."""

    def __init__(self, config: EngineConfig, group: TensorParallelGroup = ALONE) -> None:
        phases = StartPhases()
        attention = _choose_attention(config)
        config = without_media_beside(config)
        self._shared = shared = SharedKV(config, group)
        loaded = load(config, group)
        phases.end("weights")
        states = state_spec_of(loaded.model, config.cache)
        attention = attention_beside_states(attention, config, states)
        all_groups = choose_groups(loaded.model, config.cache)
        routed_experts = choose_routed_experts(config.model, loaded.model, all_groups)
        self._adapters = open_adapters(loaded.model, config.lora, group, attention)
        groups = groups_here(loaded.model, all_groups)
        dtype = storage_dtype(config.cache, loaded.dtype)
        spec = cache_spec(loaded.model, groups, dtype, config.cache.block_size)
        if routed_experts is not None:
            spec = replace(spec, routing_bytes_per_token=routed_experts.bytes_per_token)
        drafter, spec = beside_drafter(config, loaded, spec)
        step_bytes = _measure_steps(loaded, attention, spec, config, group)
        room = loaded.max_model_len, loaded.device, step_bytes, group
        max_writes = max_disk_writes(state_blocks := blocks_of_state(states, spec))
        num_blocks, num_states, num_host_blocks = _choose_sizes(config, spec, state_blocks, room)
        num_all = num_blocks + num_states * state_blocks
        everything = open_pool(spec, None if drafter is None else drafter.spec, num_all, loaded.device)
        shared.loaded(everything.blocks)
        phases.end("memory")
        pool = everything.first(num_blocks)
        state_pool = open_states(loaded.model, states, everything.blocks[num_blocks:], state_blocks)
        beside = Beside(state_pool, drafter, self._adapters)
        self._backend = backend = _open_backend(loaded, pool, spec.places, attention, config, group, beside)
        disk, disk_level = open_disk(
            config.cache,
            everything.blocks,
            lambda: measure_token_s(loaded, pool.kv, backend.attention, spec, config),
            max_writes,
        ) or (None, None)
        use_again(loaded.model, state_pool)
        self._info = _info(
            loaded,
            num_gpu_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            disk_level=disk_level,
            kv_cache_groups=with_state_group(all_groups, states, spec),
            num_states=num_states,
            prompt_logprobs=attention != "triton" or isinstance(loaded.model, Decoder),
            routed_experts=routed_experts,
            saved_kv=shared.place,
        )
        host_pool = select_host_pool(
            everything.blocks,
            num_host_blocks,
            disk,
            during_steps=loaded.device.type == "cuda",
            num_groups=len(spec.groups),
            max_writes=max_writes,
        )
        runner = backend.runner(shared.beside(host_pool))
        self._calls: dict[str, Callable[..., Any]] = {
            **shared.calls(),
            **({} if self._adapters is None else self._adapters.calls()),
        }
        """What parts of the worker offer to the core, by name."""
        self._runner: StepRunner | None = with_waves(runner, loaded.model, group)
        self._max_steps = _max_steps(config, loaded.device, group.stage.size)
        keep_freed_memory()
        phases.end("warm-up")
        self._info = replace(self._info, start_phases=phases.all())

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def max_concurrent_batches(self) -> int:
        return self._max_steps

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        assert self._runner is not None, "submit after shutdown"
        return self._runner.launch(plan)

    def on_failure(self, told: Callable[[EngineError], None]) -> None:
        """Does nothing: this executor fails only in steps, which raise."""

    def on_wave(self, told: Callable[[int], None]) -> None:
        if isinstance(self._runner, WaveRunner):
            self._runner.listen(told)

    def call_worker(self, method: str, *args: Any) -> Any:
        if method in self._calls:
            return self._calls[method](*args)
        if method in SLEEP_METHODS:
            if not isinstance(self._backend, CPUBackend):
                raise RequestError("Only a model on a CPU can sleep or take other weights so far.", "level")
            return self._rest_and_call(self._backend, method, *args)
        raise RequestError(f"The worker has no method {method!r}.", "method")

    def _rest_and_call(self, backend: CPUBackend, method: str, *args: Any) -> Any:
        """Call a method of the backend while nothing of the pool can be read from elsewhere. Returns the
        folder of the saved KV of the weights that were loaded; None without one."""
        if method not in ("sleep", "wake_up", "update_weights"):
            return getattr(backend, method)(*args)
        self._shared.rest()
        try:
            getattr(backend, method)(*args)
        finally:  # also if the weights before had to be loaded again
            self._shared.serve(backend.served, backend.take_stamps())
        return self._shared.place

    def shutdown(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        torch.cuda.empty_cache()


def _info(loaded: LoadedModel, **more: Any) -> ModelInfo:
    dtype = str(loaded.dtype).removeprefix("torch.")
    pooling = loaded.pooling
    more["media"] = None if loaded.towers is None else loaded.towers.models
    more |= {"max_model_len": loaded.max_model_len, "vocab_size": loaded.vocab_size}
    return ModelInfo(dtype=dtype, pooling=pooling, **more)


def _max_steps(config: EngineConfig, device: torch.device, num_stages: int) -> int:
    """The most steps under way: one in each stage, or one in the only one and another planned ahead."""
    return num_stages if num_stages > 1 else 1 + config.scheduler.plans_ahead(device.type != "cpu")


def _choose_attention(config: EngineConfig) -> str:
    """The attention of this device. ConfigError if it does not go with other options."""
    device = choose_device(config.model.device)
    attention = resolve_attention(config, device)
    if attention == "triton" and read_pooling_folder(config.model.model, config.pooling) is not None:
        attention = "torch"  # the GPU runner samples
    if config.speculative is not None and config.speculative.has_weights:
        check_setup(config.speculative, config.model, device, attention)
    return attention


def _choose_sizes(
    config: EngineConfig,
    spec: KvCacheSpec,
    state_blocks: int,
    room: tuple[int, torch.device, int, TensorParallelGroup],
) -> tuple[int, int, int]:
    """The numbers of KV blocks, of state slots, which have so many blocks each, and of the host's blocks."""
    state_bytes = state_blocks * spec.pool_bytes_per_block
    num_states = choose_num_states(config, spec, state_bytes, *room)
    num_blocks = choose_num_blocks(config, spec, *room, num_states * state_bytes)
    _, device, _, group = room
    num_all = num_blocks + num_states * state_blocks
    max_writes = max_disk_writes(state_blocks)
    num_host_blocks = choose_num_host_blocks(config.cache, spec, device, num_all, group, max_writes)
    return num_blocks, num_states, num_host_blocks


def _measure_steps(
    loaded: LoadedModel,
    attention: str,
    spec: KvCacheSpec,
    config: EngineConfig,
    group: TensorParallelGroup,
) -> int:
    """Bytes of accelerator memory that steps need in addition to weights and KV pool."""
    if loaded.device.type != "cuda":
        return 0
    if attention != "triton":
        return measure_activations(loaded, spec, config)
    return measure_gpu_steps(loaded, spec, config, group)


def _open_backend(
    loaded: LoadedModel,
    pool: KvPool,
    places: LayerPlaces,
    attention: str,
    config: EngineConfig,
    group: TensorParallelGroup,
    beside: Beside,
) -> Backend:
    if attention != "triton":
        placed = None if beside.drafter is None else PlacedDrafter(beside.drafter, pool, attention)
        parts = beside.states, placed, beside.adapters
        return CPUBackend(loaded, pool.kv, places, attention, config, group, *parts)
    from engine.worker.gpu.backend import GPUBackend  # Triton is optional

    gpu = GPUBackend(loaded, pool.kv, places, config, group)
    gpu.capture()
    return gpu
