"""A KV pool whose blocks hold the drafter's KV next to the model's: finding, pinning, evicting or copying a
block applies to both. Does not know what a drafter computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.memory import zeros_on_host


@dataclass(frozen=True, slots=True)
class KvPool:
    """One pool, and the views of it that attention uses; see ``KvCacheSpec.allocate`` for their shape."""

    blocks: torch.Tensor
    """[num_blocks, ...] whole blocks, as other tiers copy them."""
    kv: torch.Tensor
    """The model's part of each block."""
    draft_kv: torch.Tensor | None = None
    """The drafter's part of each block; None without one."""

    def first(self, num_blocks: int) -> KvPool:
        """The first ``num_blocks`` blocks."""
        draft_kv = None if self.draft_kv is None else self.draft_kv[:num_blocks]
        return KvPool(self.blocks[:num_blocks], self.kv[:num_blocks], draft_kv)


def open_pool(spec: KvCacheSpec, draft: KvCacheSpec | None, num_blocks: int, device: torch.device) -> KvPool:
    """Allocate the pool, zeroed. The blocks of ``spec`` already include the bytes of ``draft``."""
    if draft is None:
        pool = spec.allocate(num_blocks, device)
        return KvPool(pool, pool)
    kv_bytes = spec.kv_bytes_per_block
    draft_bytes = draft.kv_bytes_per_block
    shape = (num_blocks, kv_bytes + draft_bytes)
    blocks = (
        zeros_on_host(shape, torch.uint8)
        if device.type == "cpu"
        else torch.zeros(shape, dtype=torch.uint8, device=device)
    )
    return KvPool(blocks, _part(blocks, 0, spec), _part(blocks, kv_bytes, draft))


def _part(blocks: torch.Tensor, start: int, spec: KvCacheSpec) -> torch.Tensor:
    """The part of all blocks from byte ``start`` on: [num_blocks, *spec.block_shape]"""
    part = blocks[:, start : start + spec.kv_bytes_per_block].view(spec.dtype)
    return part.view(len(blocks), *spec.block_shape)
