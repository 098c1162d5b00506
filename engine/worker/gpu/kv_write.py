"""What the pass between a layer's QKV projection and its attention is given: pages to write, head norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVWrite:
    """Where one layer's keys and values of a step go."""

    keys: torch.Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim], a view of the pool"""
    values: torch.Tensor
    """like keys"""
    slots: torch.Tensor
    """[num_tokens] int64: block * block_size + offset; -1: nowhere"""
    scale: float = 1.0
    """Pages of 8 bits hold K and V divided by it."""

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    def num_heads(self, qkv: torch.Tensor) -> int:
        """How many of the heads in each row of ``qkv`` are queries."""
        return qkv.shape[1] // self.head_dim - 2 * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head of the queries and keys, before they are rotated."""

    query: torch.Tensor
    """[head_dim]"""
    key: torch.Tensor
    """[head_dim]"""
    eps: float
