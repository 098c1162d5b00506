"""Runs the model in the calling process: load, size the KV pool, then step after step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.executor import FinishedOutput, ModelInfo, PendingOutput
from engine.outputs import SchedulerOutput
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.attention.selection import resolve_attention, select_attention, storage_dtype
from engine.worker.disk_level import open_disk
from engine.worker.gpu.device_host_pool import select_host_pool
from engine.worker.host_pool import choose_num_host_blocks
from engine.worker.input_batch import InputBatch
from engine.worker.kv_pool import choose_num_blocks
from engine.worker.loader import load_model
from engine.worker.memory import keep_freed
from engine.worker.model_folder import choose_device
from engine.worker.model_runner import ModelRunner
from engine.worker.models.compiled_decoder import with_compiled_steps
from engine.worker.parallel.group import ALONE, TensorParallelGroup
from engine.worker.parallel.rank_sampler import select_sampler
from engine.worker.profile_run import measure_activations, measure_token_s


class UniProcExecutor:
    """An Executor, and its own factory: ``UniProcExecutor(config)`` loads the model; with a group, a part."""

    def __init__(self, config: EngineConfig, group: TensorParallelGroup = ALONE) -> None:
        backend = resolve_attention(config, choose_device(config.model.device))
        loaded = load_model(config.model, group)
        spec = KvCacheSpec(
            num_layers=loaded.model.num_layers,
            num_kv_heads=loaded.model.num_kv_heads,
            head_dim=loaded.model.head_dim,
            dtype=storage_dtype(config.cache, loaded.dtype),
            block_size=config.cache.block_size,
        )
        activation_bytes = measure_activations(loaded, spec, config) if loaded.device.type == "cuda" else 0
        num_blocks = choose_num_blocks(
            config, spec, loaded.max_model_len, loaded.device, activation_bytes, group
        )
        num_host_blocks = choose_num_host_blocks(config.cache, spec, loaded.device, num_blocks, group)
        pool = spec.allocate(num_blocks, loaded.device)
        attention = select_attention(pool, backend, config.cache.kv_cache_scale)
        opened = open_disk(config.cache, pool, lambda: measure_token_s(loaded, pool, attention, spec, config))
        disk, disk_level = opened or (None, None)
        self._info = ModelInfo(
            num_gpu_blocks=num_blocks,
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            dtype=str(loaded.dtype).removeprefix("torch."),
            num_host_blocks=num_host_blocks,
            disk_level=disk_level,
        )
        batch = InputBatch(
            config.scheduler.max_num_seqs, loaded.max_model_len, config.cache.block_size, loaded.vocab_size
        )
        self._runner: ModelRunner | None = ModelRunner(
            with_compiled_steps(loaded.model, attention),
            attention,
            batch,
            select_sampler(config.model.seed, group),
            loaded.device,
            select_host_pool(pool, num_host_blocks, disk, beside_steps=loaded.device.type == "cuda"),
        )
        plans_ahead = config.scheduler.plans_ahead(loaded.device.type != "cpu")
        self._thread = ThreadPoolExecutor(1, "model-steps") if plans_ahead else None
        """Runs the steps in order where the host is to plan meanwhile."""
        keep_freed()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def max_concurrent_batches(self) -> int:
        return 1 if self._thread is None else 2

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        assert self._runner is not None, "submit after shutdown"
        if self._thread is None:
            return FinishedOutput(self._runner.execute_model(plan))
        return self._thread.submit(self._runner.execute_model, plan)

    def on_failure(self, told: Callable[[EngineError], None]) -> None:
        """It fails in steps only."""

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        torch.cuda.empty_cache()
