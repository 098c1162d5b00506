"""Experts in Triton: rows sorted by expert, a grouped GEMM for gates and ups, one for outputs, their sum.

A tile holds rows of one expert, found from a table on the device: no call makes the host wait, and no shape
depends on data.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (arguments of kernels have Triton's types)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.worker.gpu.tiling import HOPPER_SHARED_BYTES, shared_bytes_of
from engine.worker.gpu.triton_dot import dot, gated_by_gelu, gated_by_silu, rounded
from engine.worker.models.moe import Experts


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Sizes of a program's tiles, and how it runs."""

    rows: int
    columns: int
    """Rows of weights that a program multiplies by: in the first GEMM half are gates, half ups."""
    depth: int
    """Inputs of the GEMM that are loaded at a time."""
    num_warps: int
    num_stages: int


_FEW = _Tiles(rows=16, columns=64, depth=128, num_warps=4, num_stages=4)
"""For decodes, where most experts have a row or two: bound by loading weights."""
_SOME = _Tiles(rows=64, columns=128, depth=64, num_warps=4, num_stages=3)
"""For short prompts; for long ones where ``_MANY`` does not fit. It takes 72 KiB of shared memory."""
_MANY = _Tiles(rows=128, columns=256, depth=64, num_warps=8, num_stages=3)
"""For prompts: bound by the tensor cores. The fastest of those tried on an H200 at 128 rows per expert. Not
used on an A100, which has enough shared memory but spills registers."""
_ROWS_EACH_FOR_SOME = 32
_ROWS_EACH_FOR_MANY = 64
"""Rows per expert from which larger tiles are used. The second is twice the first, so that some power of two
of tokens is between them, and warm-up runs use all of these tiles."""
_TILES_TOGETHER = 8
"""The number of tiles whose programs are neighbors, see ``_tile_and_block``."""
_SORTED_AT_ONCE = 2048
_SUMMED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a step, one per token and chosen expert; sorted by expert."""

    chosen: torch.Tensor
    """[num_tokens, experts_per_token] numbers of experts, of all ranks."""
    tokens: torch.Tensor
    """[num_rows] int32, the token of each sorted row; arbitrary after the last row of this rank's experts."""
    places: torch.Tensor
    """[num_tokens, experts_per_token] int32, the sorted position of each row of this rank's experts."""
    tiles: _Tiles
    table: torch.Tensor
    """[num_tiles, 3] int32: a tile's expert, its first row, and the end of the rows of its expert, which is
    at most its first row for an empty tile."""


def mix_experts(
    x: torch.Tensor, experts: Experts, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Like ``Experts.forward``."""
    rows = _sort(chosen.contiguous(), experts)
    found = _outputs(_gated(x.contiguous(), experts, rows), experts, rows)
    return _weighted_sum(found, experts, rows, weights.contiguous())


def _tiles_for(num_rows: int, num_experts: int, device: torch.device) -> _Tiles:
    """num_experts: of all ranks, like the rows"""
    if num_rows < _ROWS_EACH_FOR_SOME * num_experts:
        return _FEW
    is_many = num_rows >= _ROWS_EACH_FOR_MANY * num_experts
    return _MANY if is_many and shared_bytes_of(device) >= HOPPER_SHARED_BYTES else _SOME


def _sort(chosen: torch.Tensor, experts: Experts) -> _Rows:
    """chosen [num_tokens, experts_per_token]"""
    num_rows = chosen.numel()
    num_experts = len(experts.gate_up)
    tiles = _tiles_for(num_rows, experts.shape.routing.num_experts, chosen.device)
    most = num_rows // tiles.rows + min(num_experts, num_rows)
    num_tiles = triton.cdiv(most, _TILES_TOGETHER) * _TILES_TOGETHER
    tokens = torch.empty(num_rows, dtype=torch.int32, device=chosen.device)
    places = torch.empty(chosen.shape, dtype=torch.int32, device=chosen.device)
    table = torch.empty(num_tiles, 3, dtype=torch.int32, device=chosen.device)
    _sort_rows[(num_experts,)](
        chosen,
        tokens,
        places,
        table,
        num_rows,
        num_tiles,
        FIRST=experts.first,
        NUM_EXPERTS=num_experts,
        PER_TOKEN=chosen.shape[1],
        TILE_ROWS=tiles.rows,
        BLOCK=_SORTED_AT_ONCE,
        num_warps=8,
    )
    return _Rows(chosen, tokens, places, tiles, table)


def _gated(x: torch.Tensor, experts: Experts, rows: _Rows) -> torch.Tensor:
    """x [num_tokens, hidden_size] -> [num_rows, size of an expert]: gates times ups of the sorted rows"""
    _, size, num_inputs = experts.gate_up.shape
    size = size // 2
    tiles = rows.tiles
    clamped = experts.shape.clamped
    gated = x.new_empty(len(rows.tokens), size)
    block = tiles.columns // 2
    _gates_times_ups[(len(rows.table) * triton.cdiv(size, block),)](
        x,
        experts.gate_up,
        experts.gate_up_bias,
        gated,
        rows.tokens,
        rows.table,
        ALPHA=0.0 if clamped is None else clamped.alpha,
        LIMIT=0.0 if clamped is None else clamped.limit,
        IS_CLAMPED=clamped is not None,
        BY_GELU=experts.shape.by_gelu,
        SIZE=size,
        NUM_INPUTS=num_inputs,
        TILE_ROWS=tiles.rows,
        BLOCK_N=block,
        BLOCK_K=tiles.depth,
        TOGETHER=_TILES_TOGETHER,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return gated


def _outputs(gated: torch.Tensor, experts: Experts, rows: _Rows) -> torch.Tensor:
    """gated [num_rows, size of an expert] -> [num_rows, hidden_size]"""
    _, num_outputs, num_inputs = experts.down.shape
    bias = experts.added_bias
    tiles = rows.tiles
    out = gated.new_empty(len(gated), num_outputs)
    _multiply_rows[(len(rows.table) * triton.cdiv(num_outputs, tiles.columns),)](
        gated,
        experts.down,
        bias,
        out,
        rows.table,
        HAS_BIAS=bias is not None,
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        TILE_ROWS=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=tiles.depth,
        TOGETHER=_TILES_TOGETHER,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def _weighted_sum(found: torch.Tensor, experts: Experts, rows: _Rows, weights: torch.Tensor) -> torch.Tensor:
    """found [num_rows, hidden_size], weights [num_tokens, experts_per_token] -> [num_tokens, hidden_size]"""
    num_tokens, per_token = rows.chosen.shape
    size = found.shape[1]
    out = found.new_empty(num_tokens, size)
    _sum_rows[(num_tokens, triton.cdiv(size, _SUMMED_AT_ONCE))](
        found,
        rows.chosen,
        rows.places,
        weights,
        out,
        FIRST=experts.first,
        NUM_EXPERTS=len(experts.down),
        PER_TOKEN=per_token,
        SIZE=size,
        BLOCK=_SUMMED_AT_ONCE,
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _sort_rows(
    chosen,
    tokens,
    places,
    table,
    num_rows,
    num_tiles,
    FIRST: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program places the rows of one expert, in order, after those of the experts before it, which it
    counts. Each program reads all rows, a MB for 16,384 tokens, so that none waits for another."""
    expert = tl.program_id(0)
    numbers = tl.arange(0, BLOCK)
    are_before, are_own = tl.zeros((BLOCK,), dtype=tl.int32), tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, num_rows, BLOCK):
        found = _experts_of(chosen, first + numbers, num_rows, FIRST)
        are_before += ((found >= 0) & (found < expert)).to(tl.int32)
        are_own += (found == expert).to(tl.int32)
    begin = tl.sum(are_before, axis=0)
    end = begin + tl.sum(are_own, axis=0)
    place = begin
    for first in range(0, num_rows, BLOCK):
        rows = first + numbers
        is_own = _experts_of(chosen, rows, num_rows, FIRST) == expert
        targets = place + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(tokens + targets, rows // PER_TOKEN, mask=is_own)
        tl.store(places + rows, targets, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), axis=0)
    last_tile = _first_tile(expert + 1, end, TILE_ROWS)
    if expert == NUM_EXPERTS - 1:
        last_tile = num_tiles
    _write_tiles(table, expert, begin, end, _first_tile(expert, begin, TILE_ROWS), last_tile, TILE_ROWS)


@triton.jit
def _experts_of(chosen, rows, num_rows, FIRST: tl.constexpr):
    """The experts of rows by their numbers on this rank; negative or too large for those of other ranks."""
    return tl.load(chosen + rows, mask=rows < num_rows, other=FIRST - 1).to(tl.int32) - FIRST


@triton.jit
def _first_tile(expert, begin, TILE_ROWS: tl.constexpr):
    """The index in the table of an expert's first tile; ``begin`` rows are before the expert's.

    It does not count the tiles before: an expert's n > 0 rows increase the index by n // TILE_ROWS + 1 or
    more, which suffices for them. A tile that is left over is empty.
    """
    return begin // TILE_ROWS + tl.minimum(expert, begin)


@triton.jit
def _write_tiles(table, expert, begin, end, first_tile, last_tile, TILE_ROWS: tl.constexpr):
    """Write the tiles of an expert; those after its last row are empty."""
    numbers = tl.arange(0, 128)
    for first in range(first_tile, last_tile, 128):
        tiles = first + numbers
        is_tile = tiles < last_tile
        tl.store(table + 3 * tiles, expert, mask=is_tile)
        tl.store(table + 3 * tiles + 1, begin + (tiles - first_tile) * TILE_ROWS, mask=is_tile)
        tl.store(table + 3 * tiles + 2, end, mask=is_tile)


@triton.jit
def _tile_and_block(NUM_BLOCKS: tl.constexpr, TOGETHER: tl.constexpr):
    """The tile and the block of columns of this program. Programs that run at the same time are neighbors:
    some tiles, mostly of one or two experts, by some blocks. So L2 holds the inputs and the weights of a
    block until the last of them is done, and memory is read about once. In the order of tiles, all rows would
    be read again for each block (0.5 GB for 16,384 tokens, more than L2); in the order of blocks, all weights
    of an expert for each of its tiles (352 MB for Mixtral)."""
    program = tl.program_id(0)
    tile = program // (TOGETHER * NUM_BLOCKS) * TOGETHER + program % TOGETHER
    return tile, program // TOGETHER % NUM_BLOCKS


@triton.jit
def _load_tile(place):
    return tl.load(place).to(tl.int64), tl.load(place + 1), tl.load(place + 2)


@triton.jit
def _gates_times_ups(
    x,
    weight,
    bias,
    gated,
    tokens,
    table,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    BY_GELU: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """One program computes some columns of one tile. Clamped gates and ups alternate and have biases;
    otherwise all gates come before all ups."""
    tile, block = _tile_and_block((SIZE + BLOCK_N - 1) // BLOCK_N, TOGETHER)
    expert, begin, end = _load_tile(table + 3 * tile)
    if begin < end:
        rows = begin + tl.arange(0, TILE_ROWS)
        is_row = rows < end
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < SIZE
        APART: tl.constexpr = 1 if IS_CLAMPED else SIZE
        gate_rows = expert * (2 * SIZE) + columns * (2 if IS_CLAMPED else 1)
        words = tl.arange(0, BLOCK_K)
        sources = tl.load(tokens + rows, mask=is_row, other=0).to(tl.int64)
        inputs = x + sources[:, None] * NUM_INPUTS + words[None, :]
        of_gates = weight + gate_rows[None, :] * NUM_INPUTS + words[:, None]
        of_ups = of_gates + APART * NUM_INPUTS
        gates = tl.zeros((TILE_ROWS, BLOCK_N), dtype=tl.float32)
        ups = tl.zeros((TILE_ROWS, BLOCK_N), dtype=tl.float32)
        for first in range(0, NUM_INPUTS, BLOCK_K):
            inside = words < NUM_INPUTS - first
            is_weight = inside[:, None] & is_column[None, :]
            a = tl.load(inputs + first, mask=is_row[:, None] & inside[None, :], other=0.0)
            gates = dot(a, tl.load(of_gates + first, mask=is_weight, other=0.0), gates)
            ups = dot(a, tl.load(of_ups + first, mask=is_weight, other=0.0), ups)
        if IS_CLAMPED:
            gates += tl.load(bias + gate_rows, mask=is_column, other=0.0).to(tl.float32)[None, :]
            ups += tl.load(bias + gate_rows + APART, mask=is_column, other=0.0).to(tl.float32)[None, :]
        gates, ups = rounded(gates, gated), rounded(ups, gated)
        if IS_CLAMPED:
            result = _clamped(gates, ups, gated, ALPHA, LIMIT)
        elif BY_GELU:
            result = gated_by_gelu(gates, ups, gated)
        else:
            result = gated_by_silu(gates, ups, gated)
        target = gated + rows[:, None].to(tl.int64) * SIZE + columns[None, :]
        tl.store(target, result.to(gated.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _clamped(gates, ups, like, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Like ``clamped_gate``, which rounds each step."""
    gates = tl.minimum(gates, LIMIT)
    ups = tl.clamp(ups, -LIMIT, LIMIT)
    shares = rounded(1.0 / (1.0 + tl.exp(-rounded(gates * ALPHA, like))), like)
    return rounded(ups + 1.0, like) * rounded(gates * shares, like)


@triton.jit
def _multiply_rows(
    x,
    weight,
    bias,
    out,
    table,
    HAS_BIAS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """One program computes some outputs of one tile."""
    tile, block = _tile_and_block((NUM_OUTPUTS + BLOCK_N - 1) // BLOCK_N, TOGETHER)
    expert, begin, end = _load_tile(table + 3 * tile)
    if begin < end:
        rows = begin + tl.arange(0, TILE_ROWS)
        is_row = rows < end
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < NUM_OUTPUTS
        words = tl.arange(0, BLOCK_K)
        weight_rows = expert * NUM_OUTPUTS + columns
        inputs = x + rows[:, None].to(tl.int64) * NUM_INPUTS + words[None, :]
        of_columns = weight + weight_rows[None, :] * NUM_INPUTS + words[:, None]
        sums = tl.zeros((TILE_ROWS, BLOCK_N), dtype=tl.float32)
        for first in range(0, NUM_INPUTS, BLOCK_K):
            inside = words < NUM_INPUTS - first
            a = tl.load(inputs + first, mask=is_row[:, None] & inside[None, :], other=0.0)
            b = tl.load(of_columns + first, mask=inside[:, None] & is_column[None, :], other=0.0)
            sums = dot(a, b, sums)
        if HAS_BIAS:
            sums += tl.load(bias + weight_rows, mask=is_column, other=0.0).to(tl.float32)[None, :]
        target = out + rows[:, None].to(tl.int64) * NUM_OUTPUTS + columns[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _sum_rows(
    found,
    chosen,
    places,
    weights,
    out,
    FIRST: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program adds up some columns of one token, in fp32, over this rank's experts."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for number in tl.static_range(PER_TOKEN):
        row = token * PER_TOKEN + number
        expert = tl.load(chosen + row) - FIRST
        is_own = (expert >= 0) & (expert < NUM_EXPERTS)
        place = tl.load(places + row, mask=is_own, other=0).to(tl.int64)
        output = tl.load(found + place * SIZE + columns, mask=inside & is_own, other=0.0).to(tl.float32)
        output *= tl.load(weights + row).to(tl.float32)
        if weights.dtype.element_ty != tl.float32:
            output = rounded(output, out)
        total += output
    tl.store(out + token * SIZE + columns, total.to(out.dtype.element_ty), mask=inside)
