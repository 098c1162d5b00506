"""Layers with states in Triton: a program holds a part of one sequence's state in registers and processes
token after token; longer prompts are computed in chunks (``state_chunks``).

They compute the functions of ``torch_states``, against which they are tested.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (arguments of kernels have Triton's types)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.worker.gpu.state_chunks.launches import delta_rule_chunks, scan_chunks
from engine.worker.gpu.state_chunks.prepare import softplus
from engine.worker.gpu.state_chunks.table import StepTable, table_on
from engine.worker.states.operations import ChannelScan, Convolution, DeltaRule, Scan
from engine.worker.states.state_batch import StateBatch
from engine.worker.states.torch_states import channel_scan

_STATE_NUMBERS = 4096
"""Numbers of the part of a state that a program holds, in 32 registers of each of its 128 threads."""
_IN_CHUNKS = {torch.bfloat16}
"""Types whose prompts the gated delta rule computes in chunks: without tensor cores chunks need as many
operations, and spill registers."""
_SCANS_IN_CHUNKS: frozenset[torch.dtype] = frozenset()
"""The same for the selective scan. Empty: on an H200 its chunks were wrong in bf16, and later changes have
not been run there."""
_CONV_TOKENS = 16
_CONV_CHANNELS = 128


class TritonStates:
    """``StateOps`` for a GPU: inputs are bf16 or fp32, sums and recurrent states fp32."""

    def causal_conv(self, conv: Convolution, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """See ``StateOps``."""
        num_channels, width = conv.weight.shape
        x = _rows(conv.x)
        pool_stride = _slot_stride(pool)
        output = x.new_empty(len(x), num_channels)
        _causal_conv[(len(batch.query_lens), triton.cdiv(num_channels, _CONV_CHANNELS))](
            x,
            conv.weight.contiguous(),
            conv.bias,
            pool,
            output,
            table_on(batch, x.device).sequences,
            x.stride(0),
            pool_stride,
            NUM_CHANNELS=num_channels,
            WIDTH=width,
            PADDED_WIDTH=triton.next_power_of_2(width),
            TOKENS=_CONV_TOKENS,
            CHANNELS=_CONV_CHANNELS,
            HAS_BIAS=conv.bias is not None,
            HAS_SILU=conv.has_silu,
        )
        return output

    def gated_delta_rule(self, rule: DeltaRule, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """See ``StateOps``."""
        rule = DeltaRule(
            _rows(rule.q), _rows(rule.k), _rows(rule.v), rule.g.contiguous(), rule.beta.contiguous()
        )
        q, k, v, *_ = rule
        num_k_heads, k_size = k.shape[1:]
        num_tokens, num_v_heads, v_size = v.shape
        pool_stride = _slot_stride(pool)
        table = table_on(batch, v.device)
        output = v.new_empty(num_tokens, num_v_heads, v_size)
        by_channel = rule.g.dim() > 2
        num_short = _num_short(table, v.dtype in _IN_CHUNKS and not by_channel)
        if num_short < len(batch.query_lens):
            delta_rule_chunks(rule, pool, output, table)
        if not num_short:
            return output
        padded = triton.next_power_of_2(k_size)
        columns = _part(v_size, padded)
        _gated_delta_rule[(num_short, num_v_heads, triton.cdiv(v_size, columns))](
            *rule,
            pool,
            output,
            table.sequences,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            pool_stride,
            HEADS_EACH=num_v_heads // num_k_heads,
            K_SIZE=k_size,
            V_SIZE=v_size,
            PADDED_K=padded,
            COLUMNS=columns,
            BY_CHANNEL=by_channel,
        )
        return output

    def channel_scan(self, scan: ChannelScan, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """See ``StateOps``. No kernel yet: in torch, token by token."""
        return channel_scan(scan, pool, batch)

    def selective_scan(self, scan: Scan, pool: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """See ``StateOps``."""
        x = _rows(scan.x)
        b = _rows(scan.b)
        c = _rows(scan.c)
        num_tokens, num_heads, head_size = x.shape
        num_groups, state_size = b.shape[1:]
        pool_stride = _slot_stride(pool)
        dt, a, d, dt_bias = (each.contiguous() for each in (scan.dt, scan.a, scan.d, scan.dt_bias))
        output = x.new_empty(num_tokens, num_heads, head_size)
        table = table_on(batch, x.device)
        num_short = _num_short(table, x.dtype in _SCANS_IN_CHUNKS)
        if num_short < len(batch.query_lens):
            scan_chunks(Scan(x, dt, b, c, a, d, dt_bias), pool, output, table)
        if not num_short:
            return output
        padded = triton.next_power_of_2(state_size)
        rows = _part(head_size, padded)
        _selective_scan[(num_short, num_heads, triton.cdiv(head_size, rows))](
            x,
            dt,
            a,
            b,
            c,
            d,
            dt_bias,
            pool,
            output,
            table.sequences,
            x.stride(0),
            b.stride(0),
            c.stride(0),
            pool_stride,
            HEADS_EACH=num_heads // num_groups,
            HEAD_SIZE=head_size,
            STATE_SIZE=state_size,
            ROWS=rows,
            PADDED_STATE=padded,
        )
        return output


def _num_short(table: StepTable, in_chunks: bool) -> int:
    """The number of the table's first sequences that are computed token by token."""
    return table.num_short if in_chunks else len(table.sequences)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x [tokens, ...] with each token's numbers contiguous."""
    return x if x[0].is_contiguous() else x.contiguous()


def _slot_stride(pool: torch.Tensor) -> int:
    assert pool[0].is_contiguous()
    return pool.stride(0)


def _part(size: int, padded_other: int) -> int:
    """The part of ``size`` that a program holds, along with all of the state's other size."""
    whole: int = triton.next_power_of_2(size)
    return min(whole, max(1, _STATE_NUMBERS // padded_other))


@triton.jit
def _sequence(sequences, seq):
    """The sequence's first token, number of tokens, source and target."""
    own = sequences + 6 * seq
    return tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3)


@triton.jit
def _causal_conv(
    x,
    weight,
    bias,
    pool,
    output,
    sequences,
    x_stride,
    pool_stride,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
):
    """One program convolves some channels of one sequence."""
    seq = tl.program_id(0)
    start, length, source, target = _sequence(sequences, seq)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < NUM_CHANNELS
    before: tl.constexpr = WIDTH - 1
    x += start * x_stride + channels[None, :]
    history = pool + source * pool_stride + channels[None, :] * before + before
    output += start * NUM_CHANNELS + channels[None, :]
    for first in range(0, length, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        sums = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
        if HAS_BIAS:
            sums += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        for i in tl.static_range(WIDTH):
            places = tokens - before + i
            numbers = _inputs(x, history, places, places < length, is_channel, source, x_stride)
            sums += numbers * tl.load(weight + channels * WIDTH + i, mask=is_channel, other=0.0).to(
                tl.float32
            )
        if HAS_SILU:
            sums = sums / (1 + tl.exp(-sums))
        found = sums.to(output.dtype.element_ty)
        inside = (tokens < length)[:, None] & is_channel[None, :]
        tl.store(output + tokens[:, None] * NUM_CHANNELS, found, mask=inside)
    place = tl.arange(0, PADDED_WIDTH)
    is_kept = place < before
    kept = _inputs(x, history, length - before + place, is_kept, is_channel, source, x_stride)
    tl.debug_barrier()  # other threads of this program may still read what is overwritten
    kept_places = pool + target * pool_stride + channels[None, :] * before + place[:, None]
    tl.store(kept_places, kept.to(pool.dtype.element_ty), mask=is_kept[:, None] & is_channel[None, :])


@triton.jit
def _inputs(x, history, places, is_wanted, is_channel, source, x_stride):
    """The inputs at these places of a sequence; places of earlier steps are negative."""
    wanted = is_wanted[:, None] & is_channel[None, :]
    is_new = (places >= 0)[:, None]
    new = tl.load(x + places[:, None] * x_stride, mask=wanted & is_new, other=0.0)
    old = tl.load(history + places[:, None], mask=wanted & (places < 0)[:, None] & (source > 0), other=0.0)
    return tl.where(is_new, new.to(tl.float32), old.to(tl.float32))


@triton.jit
def _gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    pool,
    output,
    sequences,
    q_stride,
    k_stride,
    v_stride,
    pool_stride,
    HEADS_EACH: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    PADDED_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """One program computes some columns of the state of one head of one sequence."""
    seq, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start, length, source, target = _sequence(sequences, seq)
    rows, columns = tl.arange(0, PADDED_K), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < K_SIZE, columns < V_SIZE
    places = head * K_SIZE * V_SIZE + rows[:, None] * V_SIZE + columns[None, :]
    is_place = is_row[:, None] & is_column[None, :]
    state = tl.load(pool + source * pool_stride + places, mask=is_place & (source > 0), other=0.0)
    for token in range(start, start + length):
        key_places = head // HEADS_EACH * K_SIZE + rows
        q_row = tl.load(q + token * q_stride + key_places, mask=is_row, other=0.0).to(tl.float32)
        k_row = tl.load(k + token * k_stride + key_places, mask=is_row, other=0.0).to(tl.float32)
        q_row /= tl.sqrt((tl.sum(q_row * q_row) + 1e-6) * K_SIZE)
        k_row /= tl.sqrt(tl.sum(k_row * k_row) + 1e-6)
        value = tl.load(v + token * v_stride + head * V_SIZE + columns, mask=is_column, other=0.0).to(
            tl.float32
        )
        if BY_CHANNEL:
            logarithms = tl.load(g + (token * num_heads + head) * K_SIZE + rows, mask=is_row, other=0.0)
            state *= tl.exp(logarithms.to(tl.float32))[:, None]
        else:
            state *= tl.exp(tl.load(g + token * num_heads + head).to(tl.float32))
        delta = value.to(tl.float32) - tl.sum(state * k_row[:, None], axis=0)
        delta *= tl.load(beta + token * num_heads + head).to(tl.float32)
        state += k_row[:, None] * delta[None, :]
        found = tl.sum(state * q_row[:, None], axis=0).to(output.dtype.element_ty)
        tl.store(output + (token * num_heads + head) * V_SIZE + columns, found, mask=is_column)
    tl.store(pool + target * pool_stride + places, state, mask=is_place)


@triton.jit
def _selective_scan(
    x,
    dt,
    a,
    b,
    c,
    d,
    dt_bias,
    pool,
    output,
    sequences,
    x_stride,
    b_stride,
    c_stride,
    pool_stride,
    HEADS_EACH: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_STATE: tl.constexpr,
):
    """One program computes some rows of the state of one head of one sequence."""
    seq, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start, length, source, target = _sequence(sequences, seq)
    rows, columns = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED_STATE)
    is_row, is_column = rows < HEAD_SIZE, columns < STATE_SIZE
    places = head * HEAD_SIZE * STATE_SIZE + rows[:, None] * STATE_SIZE + columns[None, :]
    is_place = is_row[:, None] & is_column[None, :]
    state = tl.load(pool + source * pool_stride + places, mask=is_place & (source > 0), other=0.0)
    rate, skip = tl.load(a + head).to(tl.float32), tl.load(d + head).to(tl.float32)
    for token in range(start, start + length):
        step = tl.load(dt + token * num_heads + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        step = softplus(step)
        own = head // HEADS_EACH * STATE_SIZE + columns
        written = tl.load(b + token * b_stride + own, mask=is_column, other=0.0).to(tl.float32)
        read = tl.load(c + token * c_stride + own, mask=is_column, other=0.0).to(tl.float32)
        numbers = tl.load(x + token * x_stride + head * HEAD_SIZE + rows, mask=is_row, other=0.0).to(
            tl.float32
        )
        state = state * tl.exp(step * rate) + (numbers * step)[:, None] * written[None, :]
        found = tl.sum(state * read[None, :], axis=1) + skip * numbers
        place = (token * num_heads + head) * HEAD_SIZE + rows
        tl.store(output + place, found.to(output.dtype.element_ty), mask=is_row)
    tl.store(pool + target * pool_stride + places, state, mask=is_place)
