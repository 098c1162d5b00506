"""Compute the states and outputs of chunks, for all layers whose state maps keys to values:

    state' = decay * state + sum of fading * key ⊗ value,   output = query of the state after the token

(arXiv:2405.21060, section 6; arXiv:2412.06464, section 3.3). Dots are of the inputs' type, bf16 on a
GPU, summed in fp32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (arguments of kernels have Triton's types)

from __future__ import annotations

import triton
import triton.language as tl

from engine.worker.gpu.state_chunks.table import CHUNK
from engine.worker.gpu.triton_dot import dot

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def tile(first, stride, length, columns, NUM_COLUMNS: tl.constexpr):
    """Load rows of a chunk of ``length`` tokens, from ``first`` on: [chunk, columns]; 0 outside."""
    tokens = tl.arange(0, _CHUNK)
    inside = (tokens < length)[:, None] & (columns < NUM_COLUMNS)[None, :]
    return tl.load(first + tokens[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(first, stride, length, columns, numbers, NUM_COLUMNS: tl.constexpr):
    """The counterpart of ``tile``."""
    tokens = tl.arange(0, _CHUNK)
    inside = (tokens < length)[:, None] & (columns < NUM_COLUMNS)[None, :]
    tl.store(first + tokens[:, None] * stride + columns[None, :], numbers, mask=inside)


@triton.jit
def column(first, stride, length):
    """Load one number of each token in fp32: [chunk]; 0 after the last token."""
    tokens = tl.arange(0, _CHUNK)
    return tl.load(first + tokens * stride, mask=tokens < length, other=0.0).to(tl.float32)


@triton.jit
def store_column(first, stride, length, numbers):
    """The counterpart of ``column``."""
    tokens = tl.arange(0, _CHUNK)
    tl.store(first + tokens * stride, numbers, mask=tokens < length)


@triton.jit
def decay_between(passed, is_read):
    """[chunk, chunk] the decay from the column's token to the row's, where the row's reads it; else 0. The
    mask is applied before exp, which may overflow above the diagonal and after the last token."""
    between = tl.minimum(passed[:, None] - passed[None, :], 0.0)
    return tl.exp(tl.where(is_read, between, float("-inf")))


@triton.jit
def to_type(x, like):
    """Round x to the nearest in the type that ``like`` points to; Triton's interpreter truncates bf16."""
    if _INTERPRETED and like.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & -65536).to(tl.float32, bitcast=True)
    return x.to(like.dtype.element_ty)


@triton.jit
def states_before_chunks(
    k,
    values,
    recalling,
    corrections,
    passed,
    key_weights,
    pool,
    states,
    sequences,
    k_stride,
    values_stride,
    pool_stride,
    HEADS_EACH: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    PADDED_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    CORRECTS: tl.constexpr,
):
    """One program carries some columns of a head's state through the chunks of a sequence. It stores each
    chunk's state before it, and the final one; with CORRECTS, values minus what the state recalls."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    own = sequences + 6 * tl.program_id(0)
    start, length = tl.load(own), tl.load(own + 1)
    source, target, chunk, num_chunks = tl.load(own + 2), tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
    rows, columns = tl.arange(0, PADDED_K), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < K_SIZE)[:, None] & (columns < V_SIZE)[None, :]
    in_slot = head * K_SIZE * V_SIZE + rows[:, None] * K_STEP + columns[None, :] * V_STEP
    state = tl.load(pool + source * pool_stride + in_slot, mask=inside & (source > 0), other=0.0)
    states += head * K_SIZE * V_SIZE + rows[:, None] * V_SIZE + columns[None, :]
    for i in range(num_chunks):
        first, left = start + i * _CHUNK, length - i * _CHUNK
        tl.store(states + (chunk + i) * num_heads * K_SIZE * V_SIZE, state, mask=inside)
        keys = tile(k + first * k_stride + head // HEADS_EACH * K_SIZE, k_stride, left, rows, K_SIZE)
        numbers = tile(values + first * values_stride + head * V_SIZE, values_stride, left, columns, V_SIZE)
        place = first * num_heads + head
        if CORRECTS:
            stride = num_heads * K_SIZE
            recalled = tile(recalling + place * K_SIZE, stride, left, rows, K_SIZE)
            sums = tl.zeros((_CHUNK, COLUMNS), dtype=tl.float32)
            numbers = to_type(numbers.to(tl.float32) - dot(recalled, to_type(state, k), sums), k)
            store_tile(corrections + place * V_SIZE, num_heads * V_SIZE, left, columns, numbers, V_SIZE)
        whole, fading = _fading(passed + place, num_heads, left)
        fading *= column(key_weights + place, num_heads, left)
        written = to_type(numbers.to(tl.float32) * fading[:, None], k)
        state = dot(tl.trans(keys), written, state * tl.exp(whole))
    tl.store(pool + target * pool_stride + in_slot, state, mask=inside)


@triton.jit
def _fading(passed, stride, length):
    """The logarithm of a chunk's total decay, and [chunk] the decay from each token to its end."""
    whole = tl.load(passed + (tl.minimum(length, _CHUNK) - 1) * stride)
    return whole, tl.exp(tl.minimum(whole - column(passed, stride, length), 0.0))


@triton.jit
def outputs_of_chunks(
    q,
    k,
    values,
    passed,
    key_weights,
    query_weights,
    skip,
    states,
    output,
    chunks,
    q_stride,
    k_stride,
    values_stride,
    HEADS_EACH: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    PADDED_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
):
    """One program computes some columns of the outputs of one chunk and head, from the state before it."""
    chunk, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    first, length = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    rows, columns = tl.arange(0, PADDED_K), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place, tokens = first * num_heads + head, tl.arange(0, _CHUNK)
    queries = tile(q + first * q_stride + head // HEADS_EACH * K_SIZE, q_stride, length, rows, K_SIZE)
    past = column(passed + place, num_heads, length)
    weights = column(query_weights + place, num_heads, length)
    states += (chunk * num_heads + head) * K_SIZE * V_SIZE + rows[:, None] * V_SIZE + columns[None, :]
    inside = (rows < K_SIZE)[:, None] & (columns < V_SIZE)[None, :]
    state = tl.load(states, mask=inside, other=0.0)
    sums = _read(queries, state, k, tl.zeros((_CHUNK, COLUMNS), dtype=tl.float32))
    sums *= (weights * tl.exp(past))[:, None]
    keys = tile(k + first * k_stride + head // HEADS_EACH * K_SIZE, k_stride, length, rows, K_SIZE)
    scores = dot(queries, tl.trans(keys), tl.zeros((_CHUNK, _CHUNK), dtype=tl.float32))
    scores *= decay_between(past, tokens[:, None] >= tokens[None, :])
    scores *= weights[:, None] * column(key_weights + place, num_heads, length)[None, :]
    if HAS_SKIP:
        is_own = tokens[:, None] == tokens[None, :]
        scores += tl.where(is_own, tl.load(skip + head).to(tl.float32), 0.0)
    numbers = tile(values + first * values_stride + head * V_SIZE, values_stride, length, columns, V_SIZE)
    sums = dot(to_type(scores, k), numbers, sums)
    store_tile(output + place * V_SIZE, num_heads * V_SIZE, length, columns, to_type(sums, output), V_SIZE)


@triton.jit
def _read(queries, state, like, sums):
    """queries @ state + sums. If one token dominates the state, a query's result may be small compared with
    the rounding error of bf16, so the state is read in two parts."""
    part = to_type(state, like)
    sums = dot(queries, part, sums)
    return dot(queries, to_type(state - part.to(tl.float32), like), sums)
