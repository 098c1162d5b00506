"""Launches the Triton kernels of paged attention. Knows no requests.

The query heads that share a KV head, its group, are rows of one query tile: they read each value of the KV
once together, and decode has more rows for the tensor cores, which need at least 16. The tile size suits the
tensor cores, the page size suits the prefix cache, so the kernels look up the page of each token. Softmax is
in base 2, which the hardware computes; all sums are in fp32. 8-bit KV is converted in registers, and its
scale is a factor of the scores and of the result.

The KV of few sequences is split (Flash-Decoding), because one program per KV head would leave most processors
idle. A CUDA graph keeps the grid it was captured with: the number of splits suits the longest sequences that
the graph may see, and a program whose part is past the end of a shorter sequence returns at once.

A separate launch attends to a prefix that many decodes share (cascade attention). Its query tiles have rows
of many sequences, so it reads the KV once per tile, not per sequence. Its splits are merged with those of the
tokens after the prefix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.worker.gpu.kv_splits import Splits
from engine.worker.gpu.step_batch import PREFIX_UNIT, StepBatch
from engine.worker.gpu.tiling import Tiling, padded
from engine.worker.gpu.triton_attention_kernels import (
    latent_kernel,
    merge_kernel,
    prompt_kernel,
    uniform_kernel,
    write_kernel,
)
from engine.worker.gpu.triton_prefix_kernel import prefix_kernel

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer computes scores from Q·K."""

    scale: float
    window: int | None = None
    """Sliding window: a token attends to itself and the ``window - 1`` tokens before it."""
    soft_cap: float | None = None
    """Logit soft capping: soft_cap * tanh(score / soft_cap)."""
    sinks: torch.Tensor | None = None
    """[num_heads] the score of one more key per head, whose value is 0."""
    kv_scale: float = 1.0
    """Scale of the stored K and V."""
    chunk: int | None = None
    """A token attends to itself and the tokens before it in its chunk of this many tokens."""

    @property
    def sees_all(self) -> bool:
        """Whether a token attends to all tokens before it."""
        return self.window is None and self.chunk is None

    @property
    def factor(self) -> float:
        """The factor of Q·K that gives scores in base 2 or, if capped, the argument of tanh."""
        scale = self.scale * self.kv_scale
        return scale * LOG2_E if self.soft_cap is None else scale / self.soft_cap

    @property
    def cap(self) -> float:
        """The soft cap in base 2; 0: none."""
        return (self.soft_cap or 0.0) * LOG2_E

    def num_seen(self, seq_len: int, query_len: int) -> int:
        """The most tokens that the last ``query_len`` tokens of a sequence attend to."""
        reach = self.window or self.chunk
        return seq_len if reach is None else min(seq_len, reach + query_len - 1)


class Pages(NamedTuple):
    """One layer's views of the pool, [num_blocks, block_size, num_kv_heads, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor


def attend_uniform(
    output: torch.Tensor,
    query: torch.Tensor,
    pages: Pages,
    batch: StepBatch,
    scoring: Scoring,
    tiling: Tiling,
    splits: Splits,
) -> None:
    """Attention of the first ``batch.num_uniform`` sequences. If ``splits`` have others, it attends to the
    tokens after the shared prefix and merges the result of ``attend_prefix`` from scratch memory.

    output, contiguous, and query [batch.num_uniform_tokens, num_heads, head_dim]
    """
    num_kv_heads = pages.keys.shape[2]
    num_rows = batch.uniform_len * (query.shape[1] // num_kv_heads)
    rows_each = min(padded(num_rows), tiling.num_rows)
    uniform_kernel[num_kv_heads * -(-num_rows // rows_each), batch.num_uniform, splits.number](
        splits.target(output),
        splits.scratch.log_sums,
        splits.scratch.log_sums if scoring.sinks is None else scoring.sinks,
        query,
        pages.keys,
        pages.values,
        batch.rows,
        batch.seq_lens,
        batch.seq_lens if batch.prefix is None else batch.prefix.lens,
        batch.block_tables,
        batch.uniform_len,
        -(-splits.min_part // tiling.tile_size),
        batch.block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        pages.keys.stride(0),
        scoring.factor,
        scoring.kv_scale,
        ROWS=rows_each,
        ALL_SPLITS=splits.total if splits.num_others else 0,
        **_constants(query, pages, scoring, tiling, splits),
    )
    _merge(output, splits, scoring)


def attend_prefix(
    query: torch.Tensor, pages: Pages, batch: StepBatch, scoring: Scoring, tiling: Tiling, splits: Splits
) -> None:
    """Attention of the uniform sequences to their shared prefix, stored in scratch memory for
    ``attend_uniform``. Supports neither windows nor chunks.

    query [batch.num_uniform_tokens, num_heads, head_dim]
    """
    assert batch.prefix is not None
    assert scoring.sees_all
    assert PREFIX_UNIT % tiling.tile_size == 0, "a prefix ends with a tile"
    num_kv_heads = pages.keys.shape[2]
    num_rows = len(query) * (query.shape[1] // num_kv_heads)
    rows_each = min(padded(num_rows), tiling.num_rows)
    constants = _constants(query, pages, scoring, tiling, splits)
    for name in ("SPLIT", "SINKS", "WINDOW", "CHUNK"):  # it is a split, and nothing is masked
        del constants[name]
    prefix_kernel[num_kv_heads * -(-num_rows // rows_each), 1, splits.number](
        splits.scratch.partial,
        splits.scratch.log_sums,
        query,
        pages.keys,
        pages.values,
        batch.prefix.place,
        batch.prefix.lens,
        batch.block_tables,
        len(query),
        batch.uniform_len,
        splits.first,
        -(-splits.min_part // tiling.tile_size),
        batch.block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        pages.keys.stride(0),
        scoring.factor,
        scoring.kv_scale,
        ROWS=rows_each,
        ALL_SPLITS=splits.total,
        **constants,
    )


def attend_latents(
    output: torch.Tensor,
    query: torch.Tensor,
    latents: torch.Tensor,
    batch: StepBatch,
    scoring: Scoring,
    tiling: Tiling,
    splits: Splits,
) -> None:
    """Attention over latents of the first ``batch.num_uniform`` sequences.

    output, contiguous, [batch.num_uniform_tokens, num_heads, value_size]; query [the same, latent_size];
    latents [num_blocks, block_size, 1, latent_size]
    """
    page, _, latent_size = latents.shape[1:]
    num_heads, value_size = output.shape[1:]
    assert query.stride(2) == 1
    latent_kernel[-(-batch.uniform_len * num_heads // tiling.num_rows), batch.num_uniform, splits.number](
        splits.target(output),
        splits.scratch.log_sums,
        query,
        latents,
        batch.rows,
        batch.seq_lens,
        batch.block_tables,
        batch.uniform_len,
        -(-splits.min_part // tiling.tile_size),
        batch.block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        latents.stride(0),
        scoring.factor,
        scoring.kv_scale,
        SPLIT=splits.number > 1,
        NUM_HEADS=num_heads,
        HEAD_DIM=latent_size,
        VALUE_DIM=value_size,
        PAGE=page,
        ROWS=tiling.num_rows,
        PADDED_DIM=padded(value_size),
        PADDED_REST=padded(latent_size - value_size),
        TILE=tiling.tile_size,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=True,
    )
    _merge(output, splits, scoring)


def attend_prompts(
    output: torch.Tensor,
    query: torch.Tensor,
    pages: Pages,
    batch: StepBatch,
    scoring: Scoring,
    tiling: Tiling,
    splits: Splits,
) -> None:
    """Attention of ``batch.prompts``.

    output, contiguous, and query [num_prompt_tokens, num_heads, head_dim]
    """
    num_kv_heads = pages.keys.shape[2]
    group = query.shape[1] // num_kv_heads
    num_rows = max(tiling.num_rows, padded(group))
    num_tiles = len(query) // (num_rows // group) + len(batch.prompts)
    prompt_kernel[num_tiles, num_kv_heads, splits.number](
        splits.target(output),
        splits.scratch.log_sums,
        splits.scratch.log_sums if scoring.sinks is None else scoring.sinks,
        query,
        pages.keys,
        pages.values,
        batch.rows,
        batch.query_starts,
        batch.seq_lens,
        batch.block_tables,
        batch.num_uniform,
        len(batch.prompts),
        -(-splits.min_part // tiling.tile_size),
        batch.block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        pages.keys.stride(0),
        scoring.factor,
        scoring.kv_scale,
        ROWS=num_rows,
        **_constants(query, pages, scoring, tiling, splits),
    )
    _merge(output, splits, scoring)


def write_kv(
    pages: Pages, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, kv_scale: float
) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_dim] to ``StepBatch.slots``."""
    page, num_kv_heads, head_dim = pages.keys.shape[1:]
    assert key.stride(2) == value.stride(2) == 1
    write_kernel[(len(slots),)](
        pages.keys,
        pages.values,
        key,
        value,
        slots,
        pages.keys.stride(0),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_scale,
        torch.finfo(pages.keys.dtype).max,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page,
        PADDED_SIZE=padded(num_kv_heads * head_dim),
        enable_fp_fusion=True,
    )


def _constants(
    query: torch.Tensor, pages: Pages, scoring: Scoring, tiling: Tiling, splits: Splits
) -> dict[str, int | float | None]:
    """Compile-time constants of the attention kernels, by argument name."""
    page, num_kv_heads, head_dim = pages.keys.shape[1:]
    assert query.stride(2) == 1
    return {
        "SPLIT": splits.total > 1,
        "SINKS": scoring.sinks is not None,
        "GROUP": query.shape[1] // num_kv_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE": page,
        "WINDOW": scoring.window or 0,
        "CHUNK": scoring.chunk or 0,
        "CAP": scoring.cap,
        "PADDED_DIM": padded(head_dim),
        "TILE": tiling.tile_size,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
        "maxnreg": tiling.max_registers,
        "enable_fp_fusion": True,
    }


def _merge(output: torch.Tensor, splits: Splits, scoring: Scoring) -> None:
    """Merge the partial results into output [num_tokens, num_heads, head_dim]."""
    if splits.total == 1:
        return
    num_tokens, num_heads, head_dim = output.shape
    merge_kernel[(num_tokens * num_heads,)](
        output,
        splits.scratch.partial,
        splits.scratch.log_sums,
        splits.scratch.log_sums if scoring.sinks is None else scoring.sinks,
        NUM_HEADS=num_heads,
        SINKS=scoring.sinks is not None,
        NUM_SPLITS=splits.total,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded(head_dim),
        enable_fp_fusion=True,
    )
