"""Computes what needs no state for a chunk's tokens: decays, weights, and the delta rule's w and u."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (arguments of kernels have Triton's types)

from __future__ import annotations

import triton
import triton.language as tl

from engine.worker.gpu.state_chunks.kernels import (
    column,
    decay_between,
    store_column,
    store_tile,
    tile,
    to_type,
)
from engine.worker.gpu.state_chunks.table import CHUNK
from engine.worker.gpu.triton_dot import dot

_CHUNK = tl.constexpr(CHUNK)
_BLOCK = tl.constexpr(16)
_BLOCKS = tl.constexpr(CHUNK // 16)


@triton.jit
def softplus(x):
    """log(1 + e^x), exact even where 1 + e^x loses most of e^x: the divisor has the same rounding (Goldberg,
    "What every computer scientist should know about floating-point arithmetic", theorem 4)."""
    power = tl.exp(tl.minimum(x, 20.0))
    sum_of_both = 1 + power
    rest = sum_of_both - 1
    found = tl.where(rest == 0, power, tl.log(sum_of_both) * (power / tl.where(rest == 0, 1.0, rest)))
    return tl.where(x > 20, x, found)


@triton.jit
def prepare_scan(dt, a, dt_bias, passed, key_weights, query_weights, chunks):
    """One program prepares one chunk and head of a selective scan."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    own = chunks + 2 * tl.program_id(0)
    first, length = tl.load(own), tl.load(own + 1)
    place, is_token = first * num_heads + head, tl.arange(0, _CHUNK) < length
    step = softplus(column(dt + place, num_heads, length) + tl.load(dt_bias + head).to(tl.float32))
    step = tl.where(is_token, step, 0.0)
    fade = tl.cumsum(step * tl.load(a + head).to(tl.float32), 0)
    store_column(passed + place, num_heads, length, fade)
    store_column(key_weights + place, num_heads, length, step)
    store_column(query_weights + place, num_heads, length, tl.full((_CHUNK,), 1.0, dtype=tl.float32))


@triton.jit
def prepare_delta(
    q,
    k,
    v,
    g,
    beta,
    recalling,
    values,
    passed,
    key_weights,
    query_weights,
    chunks,
    q_stride,
    k_stride,
    v_stride,
    HEADS_EACH: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
):
    """One program prepares one chunk and head of the gated delta rule: w and u of its WY representation
    (arXiv:2412.06464, section 3.3), so that corrections are u - w @ state."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    own = chunks + 2 * tl.program_id(0)
    first, length = tl.load(own), tl.load(own + 1)
    rows, columns, tokens = tl.arange(0, PADDED_K), tl.arange(0, PADDED_V), tl.arange(0, _CHUNK)
    place = first * num_heads + head
    keys = tile(k + first * k_stride + head // HEADS_EACH * K_SIZE, k_stride, length, rows, K_SIZE)
    queries = tile(q + first * q_stride + head // HEADS_EACH * K_SIZE, q_stride, length, rows, K_SIZE)
    query_weight = 1 / tl.sqrt((_squares(queries) + 1e-6) * K_SIZE)
    key_weight = 1 / tl.sqrt(_squares(keys) + 1e-6)
    fade = tl.cumsum(column(g + place, num_heads, length), 0)
    store_column(passed + place, num_heads, length, fade)
    store_column(key_weights + place, num_heads, length, key_weight)
    store_column(query_weights + place, num_heads, length, query_weight)
    write = column(beta + place, num_heads, length)
    system = dot(keys, tl.trans(keys), tl.zeros((_CHUNK, _CHUNK), dtype=tl.float32))
    system *= decay_between(fade, tokens[:, None] > tokens[None, :])
    system *= (write * key_weight)[:, None] * key_weight[None, :]
    inverse = _inverse(system) * write[None, :]
    numbers = tile(v + first * v_stride + head * V_SIZE, v_stride, length, columns, V_SIZE)
    found = dot(to_type(inverse, k), numbers, tl.zeros((_CHUNK, PADDED_V), dtype=tl.float32))
    store_tile(values + place * V_SIZE, num_heads * V_SIZE, length, columns, to_type(found, k), V_SIZE)
    inverse *= (tl.exp(fade) * key_weight)[None, :]
    found = dot(to_type(inverse, k), keys, tl.zeros((_CHUNK, PADDED_K), dtype=tl.float32))
    store_tile(recalling + place * K_SIZE, num_heads * K_SIZE, length, rows, to_type(found, k), K_SIZE)


@triton.jit
def _squares(x):
    """The squared length of each row."""
    x = x.to(tl.float32)
    return tl.sum(x * x, axis=1)


@triton.jit
def _inverse(system):
    """(I + system)^-1 of a strictly lower triangular system. It inverts the blocks D on the diagonal row by
    row, then iterates X = D (I - rest X), which is exact after one iteration per block below the first.
    TF32 suffices, as the inverse is rounded to bf16."""
    tokens = tl.arange(0, _CHUNK)
    is_own = tokens[:, None] // _BLOCK == tokens[None, :] // _BLOCK
    own = tl.where(is_own, system, 0.0)
    solved = _inverse_blocks(tl.sum(tl.reshape(own, (_BLOCKS, _BLOCK, _BLOCKS, _BLOCK)), axis=2))
    spread = tl.broadcast_to(solved[:, :, None, :], (_BLOCKS, _BLOCK, _BLOCKS, _BLOCK))
    diagonal = tl.where(is_own, tl.reshape(spread, (_CHUNK, _CHUNK)), 0.0)
    step = -tl.dot(diagonal, tl.where(is_own, 0.0, system), input_precision="tf32")
    found = diagonal
    for _ in tl.static_range(_BLOCKS - 1):
        found = tl.dot(step, found, diagonal, input_precision="tf32")
    return found


@triton.jit
def _inverse_blocks(blocks):
    """[blocks, 16, 16] strictly lower triangular -> the inverses of I + each, by forward substitution."""
    places = tl.arange(0, _BLOCK)
    is_diagonal = (places[:, None] == places[None, :])[None, :, :]
    found = tl.where(is_diagonal, 1.0, tl.zeros_like(blocks))
    for i in range(1, _BLOCK):
        is_row = (places == i)[None, :, None]
        row = tl.sum(tl.where(is_row, blocks, 0.0), axis=1)
        known = tl.sum(row[:, :, None] * found, axis=1)
        found -= tl.where(is_row, known[:, None, :], 0.0)
    return found
