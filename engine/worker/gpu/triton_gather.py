"""Gathers the KV pages of prompts by a Triton kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (arguments of kernels have Triton's types)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.worker.gpu.prompt_paths.path import Prompts

_NUMBERS_EACH = 8192
"""Values of K, and as many of V, that one program copies."""


def gather_pages_fused(
    keys: torch.Tensor,
    values: torch.Tensor,
    prompts: Prompts,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_scale: float,
    window: int | None,
) -> None:
    """See gather_pages."""
    assert keys.stride() == values.stride(), "views of one pool"
    row = key.shape[1] * key.shape[2]
    assert keys.stride()[2:] == (key.shape[2], 1), "the heads of a token lie together"
    row_block = triton.next_power_of_2(row)
    tokens_each = max(1, _NUMBERS_EACH // row_block)
    _gather_pages[(triton.cdiv(prompts.max_seq_len, tokens_each), len(prompts.chunks))](
        keys,
        values,
        key,
        value,
        prompts.block_tables,
        prompts.kv_starts,
        prompts.query_starts,
        *keys.stride()[:2],
        prompts.block_tables.stride(0),
        kv_scale,
        WINDOW=window or 0,
        BLOCK_SIZE=keys.shape[1],
        ROW=row,
        ROW_BLOCK=row_block,
        TOKENS_EACH=tokens_each,
        num_warps=8,
    )


@triton.jit
def _gather_pages(
    keys,
    values,
    key,
    value,
    block_tables,
    kv_starts,
    query_starts,
    block_stride,
    place_stride,
    table_stride,
    kv_scale,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    TOKENS_EACH: tl.constexpr,
):
    """One program copies some tokens of one prompt."""
    prompt = tl.program_id(1)
    start = tl.load(kv_starts + prompt)
    seq_len = tl.load(kv_starts + prompt + 1) - start
    first = tl.program_id(0) * TOKENS_EACH
    if first < seq_len:
        tokens = first + tl.arange(0, TOKENS_EACH)
        present = tokens < seq_len
        table = block_tables + prompt * table_stride
        seen = present
        if WINDOW > 0:
            num_queries = tl.load(query_starts + prompt + 1) - tl.load(query_starts + prompt)
            seen &= tokens > seq_len - num_queries - WINDOW
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        columns = tl.arange(0, ROW_BLOCK)[None, :]
        mask = present[:, None] & (columns < ROW)
        read = seen[:, None] & (columns < ROW)
        source = (blocks * block_stride + (tokens % BLOCK_SIZE) * place_stride)[:, None] + columns
        target = (start + tokens).to(tl.int64)[:, None] * ROW + columns
        _copy(keys + source, key + target, read, mask, kv_scale)
        _copy(values + source, value + target, read, mask, kv_scale)


@triton.jit
def _copy(source, target, read, mask, kv_scale):
    """Copy what ``read`` selects, zeros for the rest; 8-bit values are converted and scaled."""
    numbers = tl.load(source, mask=read, other=0.0)
    if source.dtype.element_ty != target.dtype.element_ty:
        numbers = numbers.to(tl.float32) * kv_scale
    tl.store(target, numbers.to(target.dtype.element_ty), mask=mask)
