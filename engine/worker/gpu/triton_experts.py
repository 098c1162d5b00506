"""Experts in Triton: one grouped GEMM for gates and ups of all of them, one for their outputs.

Rows are sorted by expert. A tile is rows of one expert, found from tables on the device: nothing makes the
host wait and no shape depends on data.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (arguments of kernels have Triton's types)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.worker.gpu.triton_dot import dot
from engine.worker.models.moe import Experts

_FEW_ROWS, _MANY_ROWS = 16, 64
"""Rows of a tile: in a decode most experts have one or two, in a prompt's step dozens."""
_ROWS_EACH_FOR_MANY = 32
"""Rows per expert from which larger tiles are used."""
_BLOCK_N, _BLOCK_K = 64, 64


@dataclass(frozen=True, slots=True)
class _Sorted:
    """The chosen experts of a step as rows sorted by expert, and these in tiles."""

    order: torch.Tensor
    """[num_rows] where each sorted row was."""
    tokens: torch.Tensor
    """[num_rows] the token of each sorted row."""
    tile_rows: int
    experts: torch.Tensor
    """[num_tiles] the expert of each tile."""
    begins: torch.Tensor
    """[num_tiles] its first row."""
    ends: torch.Tensor
    """[num_tiles] where the rows of its expert end; not behind its first row for tiles beyond the last."""


def mix_experts(
    x: torch.Tensor,
    experts: Experts,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    swiglu: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """As ``Experts.forward``."""
    rows = _sort(chosen - experts.first, len(experts.gate_up))
    gated = swiglu(_multiply(x, experts.gate_up, rows, rows.tokens))
    found = _multiply(gated, experts.down, rows, None)
    outputs = torch.empty_like(found).index_copy_(0, rows.order, found)
    outputs = outputs.view(*chosen.shape, -1) * weights[..., None]
    return outputs.sum(dim=1, dtype=torch.float32).to(x.dtype)


def _sort(chosen: torch.Tensor, num_experts: int) -> _Sorted:
    """chosen [num_tokens, experts_per_token]: numbers of the rank's own experts, others are left out"""
    ascending, order = chosen.flatten().sort(stable=True)
    num_rows = len(order)
    tile_rows = _MANY_ROWS if num_rows >= _ROWS_EACH_FOR_MANY * num_experts else _FEW_ROWS
    bounds = torch.arange(num_experts + 1, device=chosen.device)
    borders = torch.searchsorted(ascending, bounds)
    begins, ends = borders[:-1], borders[1:]
    tile_ends = ((ends - begins + tile_rows - 1) // tile_rows).cumsum(0)
    tiles = torch.arange(num_rows // tile_rows + min(num_experts, num_rows), device=chosen.device)
    owners = torch.searchsorted(tile_ends, tiles, right=True).clamp_(max=num_experts - 1)
    counts = (ends - begins + tile_rows - 1) // tile_rows
    first_tiles = tile_ends - counts
    return _Sorted(
        order,
        order // chosen.shape[1],
        tile_rows,
        owners,
        begins[owners] + (tiles - first_tiles[owners]) * tile_rows,
        ends[owners],
    )


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, rows: _Sorted, sources: torch.Tensor | None
) -> torch.Tensor:
    """Each sorted row times the weight of its expert. x [*, inputs], of which ``sources`` names the row of
    each sorted one, None: the same; weight [num_experts, outputs, inputs] -> [num_rows, outputs], zeros for
    rows of no expert"""
    _, num_outputs, num_inputs = weight.shape
    assert x.is_contiguous()
    out = x.new_zeros(len(rows.order), num_outputs)
    _expert_gemm[(len(rows.experts), triton.cdiv(num_outputs, _BLOCK_N))](
        x,
        weight,
        out,
        sources,
        rows.experts,
        rows.begins,
        rows.ends,
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        TILE_ROWS=rows.tile_rows,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        HAS_SOURCES=sources is not None,
    )
    return out


@triton.jit
def _expert_gemm(
    x,
    weight,
    out,
    sources,
    experts,
    begins,
    ends,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
):
    """One program computes some outputs of one tile."""
    tile = tl.program_id(0)
    begin, end = tl.load(begins + tile), tl.load(ends + tile)
    if begin < end:
        rows = begin + tl.arange(0, TILE_ROWS)
        is_row = rows < end
        places = rows
        if HAS_SOURCES:
            places = tl.load(sources + rows, mask=is_row, other=0)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < NUM_OUTPUTS
        words = tl.arange(0, BLOCK_K)
        own_rows = x + places[:, None].to(tl.int64) * NUM_INPUTS + words[None, :]
        own_weight = weight + tl.load(experts + tile).to(tl.int64) * NUM_OUTPUTS * NUM_INPUTS
        own_weight += columns[None, :] * NUM_INPUTS + words[:, None]
        sums = tl.zeros((TILE_ROWS, BLOCK_N), dtype=tl.float32)
        for first in range(0, NUM_INPUTS, BLOCK_K):
            inside = words < NUM_INPUTS - first
            a = tl.load(own_rows + first, mask=is_row[:, None] & inside[None, :], other=0.0)
            b = tl.load(own_weight + first, mask=inside[:, None] & is_column[None, :], other=0.0)
            sums = dot(a, b, sums)
        target = out + rows[:, None].to(tl.int64) * NUM_OUTPUTS + columns[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
