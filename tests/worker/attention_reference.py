"""Random attention batches, and plain attention over them in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.records.kv_cache_groups import one_group
from engine.worker.attention.backend import AttentionBackend, AttentionBatch
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.attention.torch_paged import TorchPagedAttention

MIXED_LENGTHS = ((1, 1), (1, 30), (1, 33), (1, 33), (5, 5), (6, 29), (16, 16), (3, 70))
"""Pairs (query, sequence) of lengths: decodes first, shortest first."""
BLOCK_SIZE = 8
NUM_HEADS = 6
HEAD_DIM = 32
LAYER = 1


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One step: the flat query, key, value, and the whole KV of every sequence for the reference."""

    batch: AttentionBatch
    pool: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sequences: list[tuple[torch.Tensor, torch.Tensor]]
    """K and V of each sequence [seq_len, num_kv_heads, head_dim]."""


def make_case(
    *,
    num_kv_heads: int,
    dtype: torch.dtype,
    lengths: tuple[tuple[int, int], ...] = MIXED_LENGTHS,
    device: str = "cpu",
    num_heads: int = NUM_HEADS,
    head_dim: int = HEAD_DIM,
    block_size: int = BLOCK_SIZE,
    seed: int = 0,
) -> AttentionCase:
    """A batch whose contexts are already in a pool of shuffled blocks; the rest of the pool holds noise."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    query_lens, seq_lens = (np.array(x, dtype=np.int64) for x in zip(*lengths, strict=True))
    blocks_each = -(-seq_lens // block_size)
    spec = KvCacheSpec(one_group(3), num_kv_heads, head_dim, dtype, block_size)
    pool = spec.allocate(int(blocks_each.sum()) + 4, torch.device(device))
    pool.copy_(noise(*pool.shape))
    shuffled = (torch.randperm(len(pool) - 1, generator=generator) + 1).numpy()
    tables = np.zeros((len(lengths), int(blocks_each.max())), dtype=np.int64)
    sequences, slots = [], []
    for i, (query_len, seq_len) in enumerate(lengths):
        tables[i, : blocks_each[i]], shuffled = shuffled[: blocks_each[i]], shuffled[blocks_each[i] :]
        positions = np.arange(seq_len)
        blocks, offsets = tables[i, positions // block_size], positions % block_size
        context = seq_len - query_len
        key, value = noise(seq_len, num_kv_heads, head_dim), noise(seq_len, num_kv_heads, head_dim)
        pool[blocks[:context], LAYER, 0, offsets[:context]] = key[:context]
        pool[blocks[:context], LAYER, 1, offsets[:context]] = value[:context]
        sequences.append((key, value))
        slots.append(np.stack((blocks[context:], offsets[context:])))
    flat_slots = np.concatenate(slots, axis=1)
    batch = AttentionBatch(
        num_decodes=int((query_lens == 1).sum()),
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_tables=tables,
        slot_blocks=flat_slots[0],
        slot_offsets=flat_slots[1],
    )
    news = [slice(seq_len - query_len, None) for query_len, seq_len in lengths]
    return AttentionCase(
        batch=batch,
        pool=pool,
        query=noise(int(query_lens.sum()), num_heads, head_dim),
        key=torch.cat([key[new] for (key, _), new in zip(sequences, news, strict=True)]),
        value=torch.cat([value[new] for (_, value), new in zip(sequences, news, strict=True)]),
        sequences=sequences,
    )


def with_stale_blocks(
    case: AttentionCase, window: int | None = None, *, chunk: int | None = None, num_blocks: int = 3
) -> AttentionCase:
    """The case with NaN in all blocks that no query sees, as if others had reused them."""
    block_size = case.pool.shape[3]
    taken = torch.full((num_blocks, *case.pool.shape[1:]), torch.nan).to(case.pool)
    tables = case.batch.block_tables.copy()
    for row, first in enumerate(case.batch.seq_lens - case.batch.query_lens):
        seen = first // chunk * chunk if chunk is not None else max(0, first - (window or first + 1) + 1)
        num_stale = seen // block_size
        tables[row, :num_stale] = len(case.pool) + np.arange(num_stale) % num_blocks
    batch = replace(case.batch, block_tables=tables)
    return replace(case, batch=batch, pool=torch.cat((case.pool, taken)))


def paged_output(
    case: AttentionCase,
    window: int | None,
    backend: Callable[[torch.Tensor], AttentionBackend] = TorchPagedAttention,
    *,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output of a backend over the case's pool, in fp64 on the host."""
    attention = backend(case.pool)
    attention.begin_step(case.batch)
    scale = case.query.shape[-1] ** -0.5
    parts = case.query, case.key, case.value
    output = attention.attend(
        LAYER, *parts, scale=scale, window=window, chunk=chunk, soft_cap=soft_cap, sinks=sinks
    )
    return output.double().cpu()


def reference_output(
    case: AttentionCase,
    window: int | None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """Attention by its definition, in fp64 on the host."""
    outputs = []
    token = 0
    for (key, value), query_len in zip(case.sequences, case.batch.query_lens.tolist(), strict=True):
        query = case.query[token : token + query_len].double().cpu()
        token += query_len
        repeats = query.shape[1] // key.shape[1]
        key = key.double().cpu().repeat_interleave(repeats, dim=1)
        value = value.double().cpu().repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = torch.arange(len(key) - query_len, len(key))[:, None] - torch.arange(len(key))
        hidden = (distance < 0) | (distance >= (window or len(key)))
        if chunk is not None:
            places = torch.arange(len(key))
            hidden |= places[-query_len:, None] // chunk != places // chunk
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            more = sinks.double().cpu()[:, None, None].expand(-1, query_len, 1)
            scores = torch.cat((scores, more), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(key)]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(outputs)
