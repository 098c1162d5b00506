"""Arguments of the fused op between QKV projection and attention: KV pages to write, head norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVWrite:
    """The pages and slots for one layer's keys and values of a step."""

    keys: torch.Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim], a view of the pool."""
    values: torch.Tensor
    """Same shape as keys."""
    slots: torch.Tensor
    """[num_tokens] int64: block * block_size + offset; -1: not stored."""
    scale: float = 1.0
    """8-bit pages hold K and V divided by this."""

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    def num_heads(self, qkv: torch.Tensor) -> int:
        """Number of query heads in each row of ``qkv``."""
        return qkv.shape[1] // self.head_dim - 2 * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the RMS norms of each query and key head, applied before RoPE."""

    query: torch.Tensor
    """[head_dim]"""
    key: torch.Tensor
    """[head_dim]"""
    eps: float
