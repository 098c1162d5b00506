"""The shape and size of the paged KV pool. Does not know which request uses which block."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from engine.records.kv_cache_groups import KVCacheGroup, max_blocks_held, num_slots
from engine.worker.attention.layer_places import LayerPlaces, places_of
from engine.worker.memory import zeros_on_host


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """The shape of one model's KV cache."""

    groups: tuple[KVCacheGroup, ...]
    """The layers, grouped by the block table that they share."""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    num_vectors: int = 2
    """Vectors per token and head: 2, key and value; or 1, a latent, which is both."""
    routing_bytes_per_token: int = 0
    """Memory per token for data other than KV: the experts that computed it."""
    layer_heads: tuple[tuple[int, int], ...] = ()
    """Number and size of each layer's key-value heads; empty: they are the same in all layers. Otherwise
    ``num_kv_heads`` and ``head_dim`` are those of the smallest layers."""
    draft_bytes_per_block: int = 0
    """Memory in each block for the KV of a drafter with weights."""

    @property
    def num_slots(self) -> int:
        """Layers whose KV a block holds: those of one group."""
        return num_slots(self.groups)

    @property
    def places(self) -> LayerPlaces:
        """The place of each layer."""
        return places_of(self.groups, self.layer_heads)

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """num_slots, num_vectors, block_size, num_kv_heads, head_dim"""
        return self.num_slots, self.num_vectors, self.block_size, self.num_kv_heads, self.head_dim

    @property
    def kv_bytes_per_block(self) -> int:
        """Bytes of the model's own KV."""
        return prod(self.block_shape) * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of memory that a block takes in total."""
        return self.pool_bytes_per_block + self.routing_bytes_per_token * self.block_size

    @property
    def pool_bytes_per_block(self) -> int:
        """Bytes of a block in the pool itself: the model's KV, and a drafter's."""
        return self.kv_bytes_per_block + self.draft_bytes_per_block

    def blocks_for(self, num_tokens: int, step_tokens: int) -> int:
        """The most blocks that a sequence of ``num_tokens`` holds if ``step_tokens`` of them are computed
        before a window or a chunk moves on."""
        return max_blocks_held(self.groups, self.block_size, num_tokens, step_tokens)

    def allocate(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """[num_blocks, num_slots, num_vectors, block_size, num_kv_heads, head_dim]: a block is contiguous.

        Zeroed, because attention multiplies the padding of a page by a weight of 0, and 0 * NaN is NaN.
        """
        shape = (num_blocks, *self.block_shape)
        if device.type == "cpu":
            return zeros_on_host(shape, self.dtype)
        return torch.zeros(shape, dtype=self.dtype, device=device)
