"""Runs the model in the calling process: load, size the KV pool, then step after step."""

from __future__ import annotations

import numpy as np
import torch

from engine.config import EngineConfig
from engine.executor import ModelInfo
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.worker.attention.backend import AttentionBatch
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.attention.torch_paged import TorchPagedAttention
from engine.worker.input_batch import InputBatch
from engine.worker.kv_pool import choose_num_blocks
from engine.worker.loader import LoadedModel, load_model
from engine.worker.model_runner import ModelRunner
from engine.worker.sampler import Sampler


class UniProcExecutor:
    """An Executor, and its own factory: ``UniProcExecutor(config)`` loads the model."""

    def __init__(self, config: EngineConfig) -> None:
        loaded = load_model(config.model)
        spec = KvCacheSpec(
            num_layers=loaded.model.num_layers,
            num_kv_heads=loaded.model.num_kv_heads,
            head_dim=loaded.model.head_dim,
            dtype=loaded.dtype,
            block_size=config.cache.block_size,
        )
        activation_bytes = _profile(loaded, spec, config) if loaded.device.type == "cuda" else 0
        num_blocks = choose_num_blocks(config, spec, loaded.max_model_len, loaded.device, activation_bytes)
        self._info = ModelInfo(
            num_gpu_blocks=num_blocks,
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            dtype=str(loaded.dtype).removeprefix("torch."),
        )
        batch = InputBatch(
            config.scheduler.max_num_seqs, loaded.max_model_len, config.cache.block_size, loaded.vocab_size
        )
        self._runner: ModelRunner | None = ModelRunner(
            loaded.model,
            TorchPagedAttention(spec.allocate(num_blocks, loaded.device)),
            batch,
            Sampler(config.model.seed),
            loaded.device,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        assert self._runner is not None, "execute_model after shutdown"
        return self._runner.execute_model(plan)

    def shutdown(self) -> None:
        self._runner = None
        torch.cuda.empty_cache()


@torch.inference_mode()
def _profile(loaded: LoadedModel, spec: KvCacheSpec, config: EngineConfig) -> int:
    """Bytes of activations in the largest step: a full token budget, every request sampled."""
    num_tokens = config.scheduler.max_num_batched_tokens
    num_seqs = -(-num_tokens // loaded.max_model_len)
    query_lens = np.full(num_seqs, -(-num_tokens // num_seqs), dtype=np.int64)
    num_tokens = int(query_lens.sum())
    slots = np.arange(num_tokens, dtype=np.int64)
    num_blocks = -(-num_tokens // spec.block_size)
    pool = spec.allocate(num_blocks, loaded.device)
    attention = TorchPagedAttention(pool)
    positions = slots % query_lens[0]
    batch = AttentionBatch(
        num_decodes=0,
        query_lens=query_lens,
        seq_lens=query_lens,
        block_tables=np.zeros((num_seqs, -(-int(query_lens[0]) // spec.block_size)), dtype=np.int64),
        slot_blocks=slots // spec.block_size,
        slot_offsets=slots % spec.block_size,
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(loaded.device)
    before = torch.cuda.memory_allocated(loaded.device)
    attention.begin_step(batch)
    num_samples = min(num_tokens, config.scheduler.max_num_seqs)
    logits = loaded.model.forward(
        torch.zeros(num_tokens, dtype=torch.int64, device=loaded.device),
        torch.from_numpy(positions).to(loaded.device),
        torch.arange(num_samples, device=loaded.device),
        attention,
    )
    logits.float().softmax(dim=-1).sort(dim=-1)
    torch.cuda.synchronize(loaded.device)
    peak = torch.cuda.max_memory_allocated(loaded.device) - before
    del pool, attention, logits
    torch.cuda.empty_cache()
    return peak
