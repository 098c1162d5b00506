"""The shape and size of the paged KV pool. Does not know which request uses which block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.worker.memory import zeros_on_host


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """The shape of one model's KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int

    @property
    def bytes_per_block(self) -> int:
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.block_size

    def allocate(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]: a block is contiguous.

        Zeroed: padding of a page is multiplied by a weight of 0, and 0 * NaN would not vanish.
        """
        shape = (num_blocks, self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)
        if device.type == "cpu":
            return zeros_on_host(shape, self.dtype)
        return torch.zeros(shape, dtype=self.dtype, device=device)
