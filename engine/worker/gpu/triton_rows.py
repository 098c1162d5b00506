"""Linears of one row in Triton: decoding one sequence is bound by reading weights, which a GEMM reads more
slowly, as its tiles are made for many rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (arguments of kernels have Triton's types)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.worker.gpu.triton_dot import gated_by_silu, rounded


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Sizes of a program's tile of the weight."""

    outputs: int
    inputs: int
    num_warps: int


_OF_ROWS = RowTiles(outputs=4, inputs=2048, num_warps=8)
_OF_LONG_ROWS = RowTiles(outputs=4, inputs=512, num_warps=4)
"""Both found on an H200. Rows of 4,096 weights are read in two loads, rows of 14,336 in twenty-eight."""


def row_tiles(inputs: int) -> RowTiles:
    """The fastest of eleven tile sizes that were tried with the linears of Llama-3.1-8B."""
    is_read_at_once = inputs % _OF_ROWS.inputs == 0 and inputs <= 4 * _OF_ROWS.inputs
    return _OF_ROWS if is_read_at_once else _OF_LONG_ROWS


def linear_of_row(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False
) -> torch.Tensor:
    """x [1, inputs], weight [outputs, inputs] -> [1, outputs]. ``gated``: the first half of the weight are
    gates, the second ups -> silu(gate) * up [1, outputs / 2]. Sums are in fp32."""
    outputs, inputs = weight.shape
    outputs = outputs // 2 if gated else outputs
    tiles = row_tiles(inputs)
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    out = x.new_empty(1, outputs)
    _linear_of_row[(triton.cdiv(outputs, tiles.outputs),)](
        x,
        weight,
        bias,
        out,
        NUM_OUTPUTS=outputs,
        NUM_INPUTS=inputs,
        BLOCK_N=tiles.outputs,
        BLOCK_K=tiles.inputs,
        HAS_BIAS=bias is not None,
        GATED=gated,
        num_warps=tiles.num_warps,
    )
    return out


@triton.jit
def _linear_of_row(
    x,
    weight,
    bias,
    out,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
):
    """One program computes some outputs."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < NUM_OUTPUTS
    first = _dots(x, weight, outputs, is_output, NUM_INPUTS, BLOCK_N, BLOCK_K)
    if HAS_BIAS:
        first += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    if GATED:
        ups = outputs + NUM_OUTPUTS
        up = _dots(x, weight, ups, is_output, NUM_INPUTS, BLOCK_N, BLOCK_K)
        if HAS_BIAS:
            up += tl.load(bias + ups, mask=is_output, other=0.0).to(tl.float32)
        first = gated_by_silu(rounded(first, out), rounded(up, out), out)
    tl.store(out + outputs, first.to(out.dtype.element_ty), mask=is_output)


@triton.jit
def _dots(
    x,
    weight,
    outputs,
    is_output,
    NUM_INPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The products of x with these rows of the weight: [BLOCK_N]"""
    words = tl.arange(0, BLOCK_K)
    own = weight + outputs.to(tl.int64)[:, None] * NUM_INPUTS + words[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        if NUM_INPUTS % BLOCK_K == 0:  # a mask along the row would make loads narrow
            numbers = tl.load(x + start + words)
            rows = tl.load(own + start, mask=is_output[:, None], other=0.0)
        else:
            inside = words < NUM_INPUTS - start
            numbers = tl.load(x + start + words, mask=inside, other=0.0)
            rows = tl.load(own + start, mask=is_output[:, None] & inside[None, :], other=0.0)
        sums += rows.to(tl.float32) * numbers.to(tl.float32)[None, :]
    return tl.sum(sums, axis=1)
