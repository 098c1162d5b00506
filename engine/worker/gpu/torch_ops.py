"""FusedOps in plain torch: the reference for the kernels, and the fallback where there is no Triton.

It rounds numbers to the dtype of the activations where transformers' models do.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from engine.worker.gpu.kv_write import HeadNorms, KVWrite
from engine.worker.models.moe import Experts
from engine.worker.models.rotary import rotate

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
"""Larger values are clamped to this: the format has no infinity."""


class TorchOps:
    """See FusedOps."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        return _normalize(total, weight, eps), total

    def rope_and_write(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        write: KVWrite,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        num_kv_heads = write.num_kv_heads
        heads = qkv.view(len(qkv), -1, write.head_dim)
        query, key, value = torch.split(heads, [write.num_heads(qkv), num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            query = _normalize(query, norms.query, norms.eps)
            key = _normalize(key, norms.key, norms.eps)
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        cos = torch.cat((cos, cos), dim=-1)
        sin = torch.cat((-sin, sin), dim=-1)
        store(write.keys, rotate(key, cos, sin), write.slots, write.scale)
        store(write.values, value, write.slots, write.scale)
        return rotate(query, cos, sin)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def linear_of_row(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, weight, bias)

    def swiglu_of_row(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.swiglu(linear(x, weight, bias))

    def mix_experts(
        self, x: torch.Tensor, experts: Experts, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return experts.forward(x, chosen, weights)

    def can_mix(self, experts: Experts) -> bool:
        """See FusedOps. No: the plain implementation queries the device for the chosen experts."""
        return False


def store(pages: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: float) -> None:
    """Write rows [num_tokens, num_kv_heads, head_dim] to those slots of pages [num_blocks, block_size,
    num_kv_heads, head_dim] that are not -1.

    For a row without a slot, it rewrites the first slot of the null block: shapes do not depend on data.
    """
    block_size = pages.shape[1]
    places = slots.clamp(min=0)
    if pages.dtype == torch.float8_e4m3fn:
        rows = (rows.float() * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX)
    rows = torch.where((slots < 0)[:, None, None], pages[0, 0].to(rows.dtype), rows)
    pages[places // block_size, places % block_size] = rows.to(pages.dtype)


def _normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last axis: in fp32, rounded before the multiplication by the weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight
