"""Checks the elementwise ops between a decoder's GEMMs against their definitions in fp64."""

from __future__ import annotations

import torch

from benchmarks.gpu.measures.bench import Bench
from benchmarks.gpu.measures.closeness import LIMITS, picked, row_error
from benchmarks.gpu.shapes import TimedModel
from engine.worker.gpu.kv_write import HeadNorms, KVWrite
from engine.worker.gpu.ops import FusedOps, select_ops

_EPS = 1e-6
_KV_SCALE = 0.05


def check(bench: Bench) -> None:
    ops = select_ops(bench.device.where)
    for shape in (bench.sizes.large, bench.sizes.small):
        for dtype in (torch.float32, torch.bfloat16):
            kind = f"{shape.name}, {str(dtype).removeprefix('torch.')}"
            with bench.case(f"RMS norm, {kind}"):
                _check_rms_norm(bench, ops, shape, dtype, kind)
            with bench.case(f"SwiGLU, {kind}"):
                _check_swiglu(bench, ops, shape, dtype, kind)
            with bench.case(f"RoPE and KV write, {kind}"):
                _check_rope(bench, ops, shape, dtype, dtype, kind)
        with bench.case(f"RoPE and KV write, {shape.name}, fp8 pages"):
            _check_rope(bench, ops, shape, torch.bfloat16, torch.float8_e4m3fn, f"{shape.name}, fp8 pages")


def _noise(bench: Bench, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(bench.device.where).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=bench.device.where).to(dtype)


def _limit(bench: Bench, dtype: torch.dtype) -> float:
    return bench.sizes.slack * LIMITS[dtype]


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + _EPS).sqrt() * weight.double()


def _check_rms_norm(bench: Bench, ops: FusedOps, shape: TimedModel, dtype: torch.dtype, kind: str) -> None:
    size = (bench.sizes.fused_tokens, shape.hidden_size)
    x, residual = (_noise(bench, dtype, *size, seed=seed) for seed in (1, 2))
    weight = 1 + _noise(bench, dtype, shape.hidden_size) / 8
    normed, total = ops.rms_norm(x, weight, _EPS, residual)
    expected = x.double() + residual.double()
    bench.check(f"RMS norm: residual, {kind}", row_error(total, expected), _limit(bench, dtype))
    bench.check(f"RMS norm, {kind}", row_error(normed, _norm(expected, weight)), _limit(bench, dtype))


def _check_swiglu(bench: Bench, ops: FusedOps, shape: TimedModel, dtype: torch.dtype, kind: str) -> None:
    gate_up = _noise(bench, dtype, bench.sizes.fused_tokens, 2 * shape.intermediate_size)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate / (1 + (-gate).exp()) * up
    bench.check(f"SwiGLU, {kind}", row_error(ops.swiglu(gate_up), expected), _limit(bench, dtype))


def _check_rope(
    bench: Bench, ops: FusedOps, shape: TimedModel, dtype: torch.dtype, stored: torch.dtype, kind: str
) -> None:
    """Checks RoPE, with query and key norms if the family has them; every third token has no slot."""
    num_tokens = bench.sizes.fused_tokens
    heads = shape.num_heads
    kv_heads = shape.num_kv_heads
    where = bench.device.where
    block_size = bench.sizes.block_size
    qkv = _noise(bench, dtype, num_tokens, (heads + 2 * kv_heads) * shape.head_dim)
    q_norm, k_norm = (
        (1 + _noise(bench, dtype, shape.head_dim) / 8, 1 - _noise(bench, dtype, shape.head_dim) / 8)
        if shape.family == "qwen3"
        else (None, None)
    )
    table = _rope_table(bench, shape, dtype)
    positions = (torch.arange(num_tokens, device=where) * 37) % len(table)
    slots = torch.randperm(num_tokens, device=where) + block_size
    slots[::3] = -1
    pool = torch.zeros(
        num_tokens // block_size + 2, 2, 2, block_size, kv_heads, shape.head_dim, device=where
    ).to(stored)
    keys = pool[:, 1, 0]
    values = pool[:, 1, 1]
    scale = _KV_SCALE if stored != dtype else 1.0
    norms = None if q_norm is None or k_norm is None else HeadNorms(q_norm, k_norm, _EPS)
    query = ops.rope_and_write(qkv, table, positions, KVWrite(keys, values, slots, scale), norms)
    wide = qkv.double().view(num_tokens, -1, shape.head_dim)
    q, k, v = torch.split(wide, [heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q = _norm(q, q_norm)
        k = _norm(k, k_norm)
    bench.check(
        f"RoPE: queries, {kind}", row_error(query, _rotated(q, table, positions)), _limit(bench, dtype)
    )
    limit = _limit(bench, stored)
    written = slots >= 0
    places = slots[written]
    for name, pages, expected in (("keys", keys, _rotated(k, table, positions)), ("values", values, v)):
        found = picked(pages, places // block_size, places % block_size) * scale
        bench.check(f"KV write: {name}, {kind}", row_error(found, expected[written]), limit)
    num_touched = int(pool[:, 1].float().abs().amax(dim=(-1, -2)).count_nonzero())
    expected_touched = 2 * int(written.sum())
    untouched = float(num_touched != expected_touched or bool(pool[:, 0].float().any()))
    bench.check(f"KV write: other slots and layers, {kind}", untouched, 0.0)


def _rope_table(bench: Bench, shape: TimedModel, dtype: torch.dtype) -> torch.Tensor:
    """Returns [max_positions, head_dim]: cosines, then sines."""
    half = shape.head_dim // 2
    frequencies = 500_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(1024, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(bench.device.where, dtype)


def _rotated(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates x [num_tokens, num_heads, head_dim] in fp64, its first half against its second."""
    cos, sin = table.double()[positions][:, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
