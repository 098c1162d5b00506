"""Runs a step of the model at the start, to measure what it takes: memory on an accelerator, or time."""

from __future__ import annotations

import gc
import time

import numpy as np
import torch

from engine.config import EngineConfig
from engine.worker.attention.backend import AttentionBackend, AttentionBatch, IntArray
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.attention.torch_paged import TorchPagedAttention
from engine.worker.loading.loader import LoadedModel
from engine.worker.memory import available_bytes
from engine.worker.parallel.group import TensorParallelGroup

PROBE_TOKENS = 2048
CPU_PROBE_TOKENS = 256
_REHEARSAL_BLOCKS = 2


@torch.inference_mode()
def measure_activations(loaded: LoadedModel, spec: KvCacheSpec, config: EngineConfig) -> int:
    """Peak bytes of a step with a full token budget and every request sampled, and what attention may add."""
    device = loaded.device
    batch, positions = _largest_step(config.scheduler.max_num_batched_tokens, loaded.max_model_len, spec)
    num_tokens = len(positions)
    pool = spec.allocate(int(batch.slot_blocks[-1]) + 1, device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    attention = TorchPagedAttention(pool)
    attention.begin_step(batch)
    logits = loaded.model.forward(
        torch.zeros(num_tokens, dtype=torch.int64, device=device),
        torch.from_numpy(positions).to(device),
        torch.arange(min(num_tokens, config.scheduler.max_num_seqs), device=device),
        attention,
    )
    # The dearest sampling: every request with top-p over the whole vocabulary.
    logits.float().softmax(dim=-1).sort(dim=-1)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del pool, attention, logits
    torch.cuda.empty_cache()
    return peak + TorchPagedAttention.scratch_bytes(spec, loaded.max_model_len)


def measure_device_path(
    loaded: LoadedModel, spec: KvCacheSpec, config: EngineConfig, group: TensorParallelGroup
) -> int:
    """Bytes that steps on the device take with all they keep, graphs too: those that are gone once steps of
    all kinds have run over a pool of next to nothing. Their kernels are compiled by then."""
    from engine.worker.gpu.backend import GPUBackend  # Triton is not installed everywhere

    torch.cuda.empty_cache()
    available = available_bytes(loaded.device)
    path = GPUBackend(loaded, spec.allocate(_REHEARSAL_BLOCKS, loaded.device), config, group)
    path.capture()
    path.rehearse()  # last: whoever captures gives back what the allocator keeps, which are the steps' peaks
    torch.cuda.synchronize(loaded.device)
    taken = available - available_bytes(loaded.device)
    del path
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
    """Seconds to compute a token of a prompt in a step like most, with nothing before it. Before the pool is
    used. ``attention``: over that pool."""
    device = loaded.device
    enough = PROBE_TOKENS if device.type == "cuda" else CPU_PROBE_TOKENS
    room = (len(pool) - 1) * spec.block_size
    num_tokens = min(config.scheduler.max_num_batched_tokens, loaded.max_model_len, room, enough)
    batch, positions = _largest_step(num_tokens, loaded.max_model_len, spec)
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
    """Fresh prompts of equal length that fill the budget, and their positions."""
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
    return batch, positions
