"""The Triton kernel of cascade attention, launched by ``triton_attention``: all sequences that begin with one
prefix attend to it at once. See ``triton_attention_kernels`` for names."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (arguments of kernels have Triton's types)

from __future__ import annotations

import triton
import triton.language as tl

from engine.worker.gpu.triton_attention_kernels import (
    STEP_NUMBERS,
    STEP_TENSORS,
    attend_tiles,
    load_query,
    no_sums,
    store_nothing,
    store_rows,
    tiles_of_split,
)


@triton.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_TENSORS)
def prefix_kernel(
    output, log_sums, query, keys, values, prefix, prefix_lens, block_tables,
    num_tokens, uniform_len, first_split, min_tiles, max_blocks,
    token_stride, head_stride, block_stride, factor, kv_scale,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    CAP: tl.constexpr, ROWS: tl.constexpr, PADDED_DIM: tl.constexpr, TILE: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
):  # fmt: skip
    """One program computes query rows of one KV head, of any sequences, for one split of the prefix. The
    prefix ends with a tile and before all queries, so nothing is masked. Results for rows of sequences that
    do not begin with the prefix are not stored."""
    row_tiles = tl.num_programs(0) // NUM_KV_HEADS
    kv_head, row_tile = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    row = row_tile * ROWS + tl.arange(0, ROWS)
    tokens, heads = row // GROUP, kv_head * GROUP + row % GROUP
    output_rows = tokens * (NUM_KV_HEADS * GROUP) + heads
    exists = tokens < num_tokens
    has_prefix = tl.load(prefix_lens + tokens // uniform_len, mask=exists, other=0) > 0
    num_with_prefix = tl.sum(has_prefix.to(tl.int32), 0)
    length = tl.load(prefix + 1)
    first, end = tiles_of_split(0, length // TILE, min_tiles)
    if (first >= end) | (num_with_prefix == 0):
        store_nothing(log_sums, output_rows, ALL_SPLITS, first_split, exists)
        return
    store_nothing(log_sums, output_rows, ALL_SPLITS, first_split, exists & (has_prefix == 0))
    loaded = load_query(query, tokens, heads, has_prefix, token_stride, head_stride, HEAD_DIM, PADDED_DIM)
    table = block_tables + tl.load(prefix).to(tl.int64) * max_blocks
    sums, row_max, row_sum = no_sums(ROWS, PADDED_DIM)
    sums, row_max, row_sum = attend_tiles(
        sums, row_max, row_sum, loaded, tokens,
        keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM, table, block_stride,
        first, end, 0, length, factor,
        False, 0, 0, CAP, PAGE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, PADDED_DIM, TILE,
    )  # fmt: skip
    store_rows(
        output, log_sums, log_sums, output_rows, ALL_SPLITS, first_split,
        heads, has_prefix, sums, row_max, row_sum, kv_scale,
        True, False, HEAD_DIM, PADDED_DIM,
    )  # fmt: skip
