"""The Triton kernels of paged attention, launched by ``triton_attention``, which describes them.

rows: (token, head) pairs. tiles: of KV, counted from the start of a sequence. PAGE: tokens per block of the
pool; ROWS, TILE, PADDED_DIM: sizes of tiles, powers of two. Strides are in elements.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (arguments of kernels have Triton's types)

from __future__ import annotations

import triton
import triton.language as tl

from engine.worker.gpu.triton_dot import dot

_HIDDEN = tl.constexpr(-1.0e30)
"""Score of a masked token. Finite, so that differences are not NaN. If all tokens of a row so far are masked,
their sums vanish with its first unmasked score."""
_NO_WEIGHT = tl.constexpr(1.0e-30)
"""Replaces an empty sum of weights."""
_LOG2_E = tl.constexpr(1.4426950408889634)
STEP_TENSORS = ["rows", "query_starts", "seq_lens", "block_tables", "slots", "prefix", "prefix_lens"]
"""Slices of larger tensors: their alignment must not specialize a kernel."""
STEP_NUMBERS = [
    "uniform_len",
    "num_tokens",
    "first_seq",
    "num_seqs",
    "min_tiles",
    "max_blocks",
    "first_split",
]
"""Arguments that must not specialize a kernel when they are 1 or a multiple of 16."""


@triton.jit
def _tanh(x):
    """1 - 2 / (e^2x + 1) with the hardware's power of two; correct at both infinities."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def _page_offsets(
    table, positions, first_position, end, block_stride,
    PAGE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Offsets of a tile's tokens in the pool [TILE], 64-bit: a pool may have more than 2^31 elements."""
    if PAGE % TILE == 0:
        block = tl.load(table + first_position // PAGE)
    else:
        block = tl.load(table + positions // PAGE, mask=positions < end, other=0)
    return block.to(tl.int64) * block_stride + positions % PAGE * TOKEN_STRIDE


@triton.jit
def no_sums(ROWS: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Initial state of the online softmax: weighted sums, maximum and sum of weights."""
    row_max = tl.full((ROWS,), _HIDDEN, tl.float32)
    return tl.zeros((ROWS, PADDED_DIM), tl.float32), row_max, tl.zeros((ROWS,), tl.float32)


@triton.jit
def attend_tiles(
    sums, row_max, row_sum, query, query_positions,
    keys, values, table, block_stride, first_tile, last_tile, begin, end, factor,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr,
    PAGE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Update the online softmax of the rows with the KV tiles from ``first_tile`` on, and return it.

    query [rows, PADDED_DIM]; query_positions [rows]; keys, values: of one KV head; begin, end: of the
    tokens that any row attends to; others may have any value, even NaN.
    MASKED: a token of these tiles may be masked for some row.
    """
    dims = tl.arange(0, PADDED_DIM)
    for tile in range(first_tile, last_tile):
        positions = tile * TILE + tl.arange(0, TILE)
        offsets = _page_offsets(table, positions, tile * TILE, end, block_stride, PAGE, TOKEN_STRIDE, TILE)
        places = offsets[:, None] + dims[None, :]
        inside = (dims < HEAD_DIM)[None, :]
        if MASKED:
            inside &= (positions < end)[:, None]
        if WINDOW > 0 or CHUNK > 0:
            inside &= (positions >= begin)[:, None]
        key = tl.load(keys + places, mask=inside, other=0.0).to(query.dtype)
        scores = dot(query, tl.trans(key), tl.zeros((query.shape[0], TILE), tl.float32)) * factor
        if CAP > 0:
            scores = CAP * _tanh(scores)
        if MASKED:
            distance = query_positions[:, None] - positions[None, :]
            seen = distance >= 0
            if WINDOW > 0:
                seen &= distance < WINDOW
            if CHUNK > 0:
                seen &= distance <= (query_positions % CHUNK)[:, None]
            scores = tl.where(seen, scores, _HIDDEN)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        value = tl.load(values + places, mask=inside, other=0.0).to(query.dtype)
        sums = dot(weights.to(query.dtype), value, sums * shrink[:, None])
        row_max = new_max
    return sums, row_max, row_sum


@triton.jit
def load_query(
    query, tokens, heads, is_row, token_stride, head_stride,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Load queries [rows, PADDED_DIM], zeros where is_row is false. tokens, heads, is_row [rows]"""
    dims = tl.arange(0, PADDED_DIM)
    places = tokens.to(tl.int64) * token_stride + heads * head_stride
    inside = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(query + places[:, None] + dims[None, :], mask=inside, other=0.0)


@triton.jit
def _first_seen(first_query_position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first token that queries from this position on attend to."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(first_query_position - WINDOW + 1, 0)
    if CHUNK > 0:
        position = tl.maximum(first_query_position, 0)  # negative for a sequence without tokens
        first = position - position % CHUNK
    return first


@triton.jit
def tiles_of_split(first, end, min_tiles):
    """This program's split of the tiles from ``first`` to ``end``: its first tile, and one past its last."""
    size = tl.maximum(tl.cdiv(end - first, tl.num_programs(2)), min_tiles)
    begin = first + tl.program_id(2) * size
    return begin, tl.minimum(begin + size, end)


@triton.jit
def _sink_weight(sink, maximum):
    """The weight of a sink next to scores with this maximum, in base 2. For the rows of a sequence without
    tokens it is huge, so that the weighted sums become zeros."""
    return tl.exp2(tl.minimum(sink.to(tl.float32) * _LOG2_E - maximum, 126.0))


@triton.jit
def places_of_split(rows, num_splits, first_split):
    """Indices of this program's split of rows with ``num_splits`` each; its launch's begin at first_split."""
    return rows.to(tl.int64) * num_splits + first_split + tl.program_id(2)


@triton.jit
def store_rows(
    output, log_sums, sinks, rows, num_splits, first_split, heads, is_row, sums, row_max, row_sum, kv_scale,
    SPLIT: tl.constexpr, SINKS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Normalize and store the sums of rows; for a split, also their log-sum-exp, in base 2.

    output [num_rows, num_splits, HEAD_DIM], log_sums [num_rows, num_splits]; rows: indices into both. Sinks
    of splits are added when the splits are merged.
    """
    dims = tl.arange(0, PADDED_DIM)
    if SINKS and not SPLIT:
        row_sum += _sink_weight(tl.load(sinks + heads, mask=is_row, other=0.0), row_max)
    means = sums * (kv_scale / tl.maximum(row_sum, _NO_WEIGHT))[:, None]
    places = places_of_split(rows, num_splits, first_split)
    inside = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(output + places[:, None] * HEAD_DIM + dims[None, :], means, mask=inside)
    if SPLIT:
        tl.store(log_sums + places, row_max + tl.log2(row_sum), mask=is_row)


@triton.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_TENSORS)
def uniform_kernel(
    output, log_sums, sinks, query, keys, values, rows, seq_lens, prefix_lens, block_tables,
    uniform_len, min_tiles, max_blocks, token_stride, head_stride, block_stride, factor, kv_scale,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    ROWS: tl.constexpr, PADDED_DIM: tl.constexpr, TILE: tl.constexpr, ALL_SPLITS: tl.constexpr,
):  # fmt: skip
    """One program computes the query rows of one KV head of one sequence, for one split of the KV. ALL_SPLITS
    is 0, or the number of splits with those of a prefix: then the KV begins after the sequence's prefix.

    Programs that run at the same time read the KV heads of a sequence, which are adjacent in memory. A
    sequence without tokens, the padding of a CUDA graph, has no tiles: its result is zeros.
    """
    seq, row_tiles = tl.program_id(1), tl.num_programs(0) // NUM_KV_HEADS
    kv_head, row_tile = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    row = row_tile * ROWS + tl.arange(0, ROWS)
    is_row = row < uniform_len * GROUP
    tokens, heads = seq * uniform_len + row // GROUP, kv_head * GROUP + row % GROUP
    output_rows = tokens * (NUM_KV_HEADS * GROUP) + heads
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - uniform_len
    seen = _first_seen(context, WINDOW, CHUNK)
    first_tile = seen // TILE
    num_splits = tl.num_programs(2)
    if ALL_SPLITS > 0:
        first_tile = tl.load(prefix_lens + seq) // TILE
        num_splits = ALL_SPLITS
    first, end = tiles_of_split(first_tile, tl.cdiv(seq_len, TILE), min_tiles)
    if SPLIT and first >= end:
        store_nothing(log_sums, output_rows, num_splits, 0, is_row)
        return
    loaded = load_query(query, tokens, heads, is_row, token_stride, head_stride, HEAD_DIM, PADDED_DIM)
    table = block_tables + tl.load(rows + seq).to(tl.int64) * max_blocks
    sums, row_max, row_sum = no_sums(ROWS, PADDED_DIM)
    sums, row_max, row_sum = attend_tiles(
        sums, row_max, row_sum, loaded, context + row // GROUP,
        keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM, table, block_stride,
        first, end, seen, seq_len, factor,
        True, WINDOW, CHUNK, CAP, PAGE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, PADDED_DIM, TILE,
    )  # fmt: skip
    store_rows(
        output, log_sums, sinks, output_rows, num_splits, 0, heads, is_row, sums, row_max, row_sum, kv_scale,
        SPLIT, SINKS, HEAD_DIM, PADDED_DIM,
    )  # fmt: skip


@triton.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_TENSORS)
def latent_kernel(
    output, log_sums, query, latents, rows, seq_lens, block_tables,
    uniform_len, min_tiles, max_blocks, token_stride, head_stride, block_stride, factor, kv_scale,
    SPLIT: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_REST: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One program computes some query rows of one sequence, for one split of its latents: HEAD_DIM numbers
    are the key and the first VALUE_DIM of them the value. These are loaded once for both; the rest of the key
    has a separate GEMM, so that nothing is padded to the power of two above HEAD_DIM."""
    seq, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < uniform_len * NUM_HEADS
    tokens, heads = seq * uniform_len + row // NUM_HEADS, row % NUM_HEADS
    output_rows = tokens * NUM_HEADS + heads
    seq_len = tl.load(seq_lens + seq)
    first, end = tiles_of_split(0, tl.cdiv(seq_len, TILE), min_tiles)
    if SPLIT and first >= end:
        store_nothing(log_sums, output_rows, tl.num_programs(2), 0, is_row)
        return
    query_positions = seq_len - uniform_len + row // NUM_HEADS
    main = load_query(query, tokens, heads, is_row, token_stride, head_stride, VALUE_DIM, PADDED_DIM)
    rest = load_query(
        query + VALUE_DIM, tokens, heads, is_row, token_stride, head_stride, HEAD_DIM - VALUE_DIM, PADDED_REST
    )
    table = block_tables + tl.load(rows + seq).to(tl.int64) * max_blocks
    dims, rest_dims = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_REST)
    sums, row_max, row_sum = no_sums(ROWS, PADDED_DIM)
    for tile in range(first, end):
        positions = tile * TILE + tl.arange(0, TILE)
        offsets = _page_offsets(
            table, positions, tile * TILE, seq_len, block_stride, PAGE, HEAD_DIM, TILE
        )[:, None]  # fmt: skip
        is_token = (positions < seq_len)[:, None]
        value = tl.load(latents + offsets + dims, mask=is_token & (dims < VALUE_DIM), other=0.0)
        inside = is_token & (rest_dims < HEAD_DIM - VALUE_DIM)
        turned = tl.load(latents + offsets + VALUE_DIM + rest_dims, mask=inside, other=0.0)
        value = value.to(main.dtype)
        scores = dot(main, tl.trans(value), tl.zeros((ROWS, TILE), tl.float32))
        scores = dot(rest, tl.trans(turned.to(main.dtype)), scores) * factor
        scores = tl.where(query_positions[:, None] >= positions[None, :], scores, _HIDDEN)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        sums = dot(weights.to(main.dtype), value, sums * shrink[:, None])
        row_max = new_max
    store_rows(
        output, log_sums, log_sums, output_rows, tl.num_programs(2), 0, heads, is_row,
        sums, row_max, row_sum, kv_scale, SPLIT, False, VALUE_DIM, PADDED_DIM,
    )  # fmt: skip


@triton.jit
def store_nothing(log_sums, rows, num_splits, first_split, is_row):
    """Store the log-sum-exp of zero weight for a split without tiles, so that the merge ignores it."""
    places = places_of_split(rows, num_splits, first_split)
    tl.store(log_sums + places, tl.full(rows.shape, _HIDDEN, tl.float32), mask=is_row)


@triton.jit
def merge_kernel(
    output, partial, log_sums, sinks,
    NUM_HEADS: tl.constexpr, SINKS: tl.constexpr,
    NUM_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """One program merges the splits of one row by their log-sum-exp. See store_rows for the shapes."""
    row = tl.program_id(0).to(tl.int64)
    places, dims = row * NUM_SPLITS + tl.arange(0, NUM_SPLITS), tl.arange(0, PADDED_DIM)
    logs = tl.load(log_sums + places)
    used = logs > 0.5 * _HIDDEN
    maximum = tl.max(logs, 0)
    weights = tl.where(used, tl.exp2(logs - maximum), 0.0)
    weight = tl.sum(weights, 0)
    if SINKS:
        weight += _sink_weight(tl.load(sinks + row % NUM_HEADS), maximum)
    inside = used[:, None] & (dims < HEAD_DIM)[None, :]
    means = tl.load(partial + places[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    merged = tl.sum(means * weights[:, None], 0) / tl.maximum(weight, _NO_WEIGHT)
    tl.store(output + row * HEAD_DIM + dims, merged, mask=dims < HEAD_DIM)


@triton.jit
def _queries_of_tile(tile, query_starts, num_seqs, QUERIES: tl.constexpr):
    """The sequence that a query tile belongs to, the tile's first token, and the end of the sequence's
    tokens; counted from the first sequence and its first token.

    The tiles of sequence i begin at start_i // QUERIES + i, so that no tile belongs to two sequences; some
    are empty. The sequence is found by bisection.
    """
    origin = tl.load(query_starts)
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        first_tile = (tl.load(query_starts + middle) - origin) // QUERIES + middle
        low, high = tl.where(first_tile <= tile, middle + 1, low), tl.where(first_tile <= tile, high, middle)
    seq = low - 1
    start, end = tl.load(query_starts + seq) - origin, tl.load(query_starts + seq + 1) - origin
    return seq, start + (tile - start // QUERIES - seq) * QUERIES, end


@triton.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_TENSORS)
def prompt_kernel(
    output, log_sums, sinks, query, keys, values, rows, query_starts, seq_lens, block_tables,
    first_seq, num_seqs, min_tiles, max_blocks, token_stride, head_stride, block_stride, factor, kv_scale,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    ROWS: tl.constexpr, PADDED_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program computes a query tile of one prompt, the heads of one KV head, one split of the KV. The
    last tiles, which have the most KV, run first."""
    queries: tl.constexpr = ROWS // GROUP
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    seq, first_token, end = _queries_of_tile(tile, query_starts + first_seq, num_seqs, queries)
    if first_token >= end:
        return
    seq += first_seq
    row = tl.arange(0, ROWS)
    tokens, heads = first_token + row // GROUP, kv_head * GROUP + row % GROUP
    is_row = (row < queries * GROUP) & (tokens < end)
    output_rows = tokens * (NUM_KV_HEADS * GROUP) + heads
    context = tl.load(seq_lens + seq) - end  # from the index of a token to its position
    first_position, last_seen = context + first_token, context + tl.minimum(first_token + queries, end)
    seen = _first_seen(first_position, WINDOW, CHUNK)
    first, stop = tiles_of_split(seen // TILE, tl.cdiv(last_seen, TILE), min_tiles)
    if SPLIT and first >= stop:
        store_nothing(log_sums, output_rows, tl.num_programs(2), 0, is_row)
        return
    # Before this tile, no token is masked for any row.
    clear = first
    if WINDOW == 0 and CHUNK == 0:
        clear = tl.minimum(tl.maximum((first_position + 1) // TILE, first), stop)
    loaded = load_query(query, tokens, heads, is_row, token_stride, head_stride, HEAD_DIM, PADDED_DIM)
    table = block_tables + tl.load(rows + seq).to(tl.int64) * max_blocks
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    sums, row_max, row_sum = no_sums(ROWS, PADDED_DIM)
    sums, row_max, row_sum = attend_tiles(
        sums, row_max, row_sum, loaded, context + tokens,
        keys, values, table, block_stride, first, clear, seen, last_seen, factor,
        False, WINDOW, CHUNK, CAP, PAGE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, PADDED_DIM, TILE,
    )  # fmt: skip
    sums, row_max, row_sum = attend_tiles(
        sums, row_max, row_sum, loaded, context + tokens,
        keys, values, table, block_stride, clear, stop, seen, last_seen, factor,
        True, WINDOW, CHUNK, CAP, PAGE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, PADDED_DIM, TILE,
    )  # fmt: skip
    store_rows(
        output, log_sums, sinks, output_rows, tl.num_programs(2), 0, heads, is_row,
        sums, row_max, row_sum, kv_scale, SPLIT, SINKS, HEAD_DIM, PADDED_DIM,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=STEP_TENSORS)
def write_kernel(
    keys, values, key, value, slots, block_stride,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride, kv_scale, limit,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, PADDED_SIZE: tl.constexpr,
):  # fmt: skip
    """Write key and value of one token, all heads, to its slot; values are clamped to the limit."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    numbers = tl.arange(0, PADDED_SIZE)
    heads, dims = numbers // HEAD_DIM, numbers % HEAD_DIM
    inside = numbers < NUM_KV_HEADS * HEAD_DIM
    places = slot // PAGE * block_stride + slot % PAGE * (NUM_KV_HEADS * HEAD_DIM) + numbers
    new_key = tl.load(key + token * key_token_stride + heads * key_head_stride + dims, mask=inside)
    new_value = tl.load(value + token * value_token_stride + heads * value_head_stride + dims, mask=inside)
    tl.store(keys + places, _within(new_key, kv_scale, limit), mask=inside)
    tl.store(values + places, _within(new_value, kv_scale, limit), mask=inside)


@triton.jit
def _within(numbers, kv_scale, limit):
    return tl.clamp(numbers.to(tl.float32) / kv_scale, -limit, limit)
