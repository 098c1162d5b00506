"""Profile runs at the start: measure a step's memory on an accelerator, or its time."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import numpy as np
import torch

from engine.config.engine_config import EngineConfig
from engine.worker.attention.backend import AttentionBackend, AttentionBatch, IntArray
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.attention.mixed_heads import over_pool
from engine.worker.attention.torch_paged import TorchPagedAttention
from engine.worker.loading.loader import LoadedModel
from engine.worker.memory import available_bytes
from engine.worker.model_states import begin_trial
from engine.worker.parallel.group import TensorParallelGroup

PROBE_TOKENS = 2048
CPU_PROBE_TOKENS = 256
_WARM_UP_BLOCKS = 2


@torch.inference_mode()
def measure_activations(loaded: LoadedModel, spec: KvCacheSpec, config: EngineConfig) -> int:
    """Peak bytes of a step with a full token budget that samples every request, plus attention's scratch."""
    device = loaded.device
    num_tokens = config.scheduler.max_num_batched_tokens
    batch, positions = _largest_step(num_tokens, loaded.max_model_len, spec)
    num_tokens = len(positions)
    pool = spec.allocate(int(batch.slot_blocks[-1]) + 1, device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    attention = over_pool(pool, spec.places, TorchPagedAttention)
    begin_trial(loaded.model, batch.query_lens, device)
    attention.begin_step(batch)
    logits = loaded.model.forward(
        torch.zeros(num_tokens, dtype=torch.int64, device=device),
        torch.from_numpy(positions).to(device),
        torch.arange(min(num_tokens, config.scheduler.max_num_seqs), device=device),
        attention,
    )
    # The most expensive sampling: every request with top-p over the whole vocabulary.
    logits.float().softmax(dim=-1).sort(dim=-1)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del pool, attention, logits
    torch.cuda.empty_cache()
    return peak + TorchPagedAttention.scratch_bytes(spec, loaded.max_model_len)


def measure_gpu_steps(
    loaded: LoadedModel, spec: KvCacheSpec, config: EngineConfig, group: TensorParallelGroup
) -> int:
    """Bytes that steps on the GPU need, CUDA graphs included: the memory taken by warm-up runs of all kinds
    over a KV pool of two blocks. As a side effect, it compiles their kernels."""
    from engine.worker.gpu.backend import GPUBackend  # Triton is optional

    torch.cuda.empty_cache()
    available = available_bytes(loaded.device)
    pool = spec.allocate(_WARM_UP_BLOCKS, loaded.device)
    backend = GPUBackend(loaded, pool, spec.places, config, group)
    del pool
    backend.capture()
    backend.warm_up()  # last: capturing frees the allocator's cached memory, which holds the steps' peak
    torch.cuda.synchronize(loaded.device)
    taken = available - available_bytes(loaded.device)
    del backend
    gc.collect()
    torch.cuda.empty_cache()
    return taken


@torch.inference_mode()
def measure_token_s(
    loaded: LoadedModel,
    pool: torch.Tensor,
    attention: AttentionBackend,
    spec: KvCacheSpec,
    config: EngineConfig,
) -> float:
    """Seconds to prefill one token in a typical step with no context. Call it before the pool is used, and
    then give a model with states its own pool again.
    ``attention``: the backend over that pool."""
    device = loaded.device
    enough = PROBE_TOKENS if device.type == "cuda" else CPU_PROBE_TOKENS
    capacity = (len(pool) - 1) * spec.block_size
    num_tokens = min(config.scheduler.max_num_batched_tokens, loaded.max_model_len, capacity, enough)
    batch, positions = _largest_step(num_tokens, loaded.max_model_len, spec)
    begin_trial(loaded.model, batch.query_lens, device)
    seconds = 0.0
    for _ in range(2):  # the first warms up
        started_s = time.perf_counter()
        attention.begin_step(batch)
        logits = loaded.model.forward(
            torch.zeros(num_tokens, dtype=torch.int64, device=device),
            torch.from_numpy(positions).to(device),
            torch.zeros(1, dtype=torch.int64, device=device),
            attention,
        )
        logits.argmax().item()
        seconds = time.perf_counter() - started_s
    pool[: -(-num_tokens // spec.block_size)] = 0
    return seconds / num_tokens


def _largest_step(num_tokens: int, max_model_len: int, spec: KvCacheSpec) -> tuple[AttentionBatch, IntArray]:
    """Uncached prompts of equal length that fill the token budget, and their positions. KV cache
    groups use the same blocks and overwrite each other's KV, which changes no size."""
    num_seqs = -(-num_tokens // max_model_len)
    length = -(-num_tokens // num_seqs)
    blocks_each = -(-length // spec.block_size)
    tables = np.arange(num_seqs * blocks_each, dtype=np.int64).reshape(num_seqs, blocks_each)
    seqs, positions = np.divmod(np.arange(num_seqs * length, dtype=np.int64), length)
    lengths = np.full(num_seqs, length, dtype=np.int64)
    batch = AttentionBatch(
        num_decodes=0,
        query_lens=lengths,
        seq_lens=lengths,
        block_tables=tables,
        slot_blocks=tables[seqs, positions // spec.block_size],
        slot_offsets=positions % spec.block_size,
    )
    return replace(batch, other_groups=(batch,) * (len(spec.groups) - 1)), positions
