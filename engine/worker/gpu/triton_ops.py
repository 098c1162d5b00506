"""FusedOps in Triton. Values are rounded where ``TorchOps`` rounds them, so both yield the same tokens.

At each of those places, a value is computed in fp32 and rounded to its narrow type. The compiler may fuse the
operations between two such places, but no more.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (arguments of kernels have Triton's types)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.worker.gpu.kv_write import HeadNorms, KVWrite
from engine.worker.gpu.torch_ops import FP8_MAX
from engine.worker.gpu.triton_dot import gated_by_silu, rounded
from engine.worker.gpu.triton_experts import mix_experts
from engine.worker.gpu.triton_rows import linear_of_row
from engine.worker.models.moe import Experts

_FP8_MAX = tl.constexpr(FP8_MAX)
_SWIGLU_BLOCK = 1024
_HEADS_EACH = 8
"""Heads of a token that one program rotates in RoPE."""


class TritonOps:
    """See FusedOps."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert residual is None or residual.is_contiguous()
        num_tokens, size = x.shape
        normed = x.new_empty(num_tokens, size)
        total = x if residual is None else torch.empty_like(normed)
        block = triton.next_power_of_2(size)
        _rms_norm[(num_tokens,)](
            x,
            residual,
            weight,
            normed,
            total,
            x.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
            num_warps=min(16, max(1, block // 512)),
        )
        return normed, total

    def rope_and_write(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        write: KVWrite,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        keys = write.keys
        values = write.values
        assert keys.stride() == values.stride(), "views of one pool"
        assert keys.stride(3) == 1, "heads are contiguous"
        num_tokens = len(qkv)
        head_dim = write.head_dim
        num_heads = write.num_heads(qkv)
        num_kv_heads = write.num_kv_heads
        query = qkv.new_empty(num_tokens, num_heads, head_dim)
        _rope_and_write[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS_EACH))](
            qkv,
            cos_sin,
            positions,
            write.slots,
            query,
            keys,
            values,
            None if norms is None else norms.query,
            None if norms is None else norms.key,
            qkv.stride(0),
            *keys.stride()[:3],
            0.0 if norms is None else norms.eps,
            1.0 / write.scale,
            BLOCK_SIZE=keys.shape[1],
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
            HEADS_EACH=_HEADS_EACH,
            HAS_NORM=norms is not None,
        )
        return query

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_tokens = len(gate_up)
        inner = gate_up.shape[1] // 2
        gated = gate_up.new_empty(num_tokens, inner)
        _swiglu[(num_tokens, triton.cdiv(inner, _SWIGLU_BLOCK))](
            gate_up, gated, gate_up.stride(0), INNER=inner, BLOCK=_SWIGLU_BLOCK
        )
        return gated

    def linear_of_row(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear_of_row(x, weight, bias)

    def swiglu_of_row(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear_of_row(x, weight, bias, gated=True)

    def can_mix(self, experts: Experts) -> bool:
        """See FusedOps. The kernels support all kinds."""
        return True

    def mix_experts(
        self, x: torch.Tensor, experts: Experts, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return mix_experts(x, experts, chosen, weights)


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    normed,
    total,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One program computes one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    numbers = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        numbers += tl.load(residual + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        numbers = rounded(numbers, total)
        tl.store(total + row * SIZE + columns, numbers.to(total.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(numbers * numbers, axis=0) / SIZE + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = rounded(numbers * scale, normed) * weights
    tl.store(normed + row * SIZE + columns, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])  # slices of a larger tensor
def _rope_and_write(
    qkv,
    cos_sin,
    positions,
    slots,
    query,
    keys,
    values,
    q_norm,
    k_norm,
    qkv_stride,
    block_stride,
    place_stride,
    head_stride,
    eps,
    kv_factor,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS_EACH: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One program handles some heads of one token, of queries, keys or values, in two halves."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_EACH + tl.arange(0, HEADS_EACH)[:, None]
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (columns < HALF)
    FIRST_VALUE: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    is_query = heads < NUM_HEADS
    is_value = heads >= FIRST_VALUE

    source = qkv + token * qkv_stride + heads * (2 * HALF) + columns
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    turned_first, turned_second = first, second
    if HAS_NORM:
        turned_first, turned_second = _normalized(
            first, second, q_norm, k_norm, columns, eps, is_query, qkv, HALF
        )
    angles = cos_sin + tl.load(positions + token) * (2 * HALF) + columns
    turned_first, turned_second = _turned(turned_first, turned_second, angles, columns, qkv, HALF)
    first = tl.where(is_value, first, turned_first)
    second = tl.where(is_value, second, turned_second)

    target = query + (token * NUM_HEADS + heads) * (2 * HALF) + columns
    _store_halves(target, first, second, HALF, inside & is_query)
    slot = tl.load(slots + token)
    if slot >= 0:
        place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * place_stride + columns
        if keys.dtype.element_ty == tl.float8e4nv:
            first = tl.clamp(first * kv_factor, -_FP8_MAX, _FP8_MAX)
            second = tl.clamp(second * kv_factor, -_FP8_MAX, _FP8_MAX)
        key = keys + place + (heads - NUM_HEADS) * head_stride
        _store_halves(key, first, second, HALF, inside & (heads >= NUM_HEADS) & (heads < FIRST_VALUE))
        value = values + place + (heads - FIRST_VALUE) * head_stride
        _store_halves(value, first, second, HALF, inside & is_value)


@triton.jit
def _normalized(first, second, q_norm, k_norm, columns, eps, is_query, like, HALF: tl.constexpr):
    """RMS norm of each head, given as halves [heads, columns]."""
    scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)[:, None]
    first_weight = _weight_of_heads(q_norm, k_norm, columns, columns < HALF, is_query)
    second_weight = _weight_of_heads(q_norm + HALF, k_norm + HALF, columns, columns < HALF, is_query)
    first = rounded(rounded(first * scale, like) * first_weight, like)
    second = rounded(rounded(second * scale, like) * second_weight, like)
    return first, second


@triton.jit
def _weight_of_heads(q_norm, k_norm, columns, inside, is_query):
    """[1, columns] -> [heads, columns]: queries and keys have different weights."""
    of_query = tl.load(q_norm + columns, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(k_norm + columns, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query, of_query, of_key)


@triton.jit
def _turned(first, second, angles, columns, like, HALF: tl.constexpr):
    """RoPE of the halves of heads [heads, columns]; angles [1, columns]: cosines, then sines."""
    cos = tl.load(angles, mask=columns < HALF, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=columns < HALF, other=0.0).to(tl.float32)
    turned_first = rounded(first * cos, like) - rounded(second * sin, like)
    turned_second = rounded(second * cos, like) + rounded(first * sin, like)
    return rounded(turned_first, like), rounded(turned_second, like)


@triton.jit
def _store_halves(target, first, second, HALF: tl.constexpr, mask):
    tl.store(target, first.to(target.dtype.element_ty), mask=mask)
    tl.store(target + HALF, second.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu(gate_up, gated, gate_up_stride, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """One program computes a block of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    source = gate_up + row * gate_up_stride + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + INNER, mask=inside, other=0.0).to(tl.float32)
    result = gated_by_silu(gate, up, gated)
    tl.store(gated + row * INNER + columns, result.to(gated.dtype.element_ty), mask=inside)
