"""The coordinator of most models: one group of full-attention layers.

It is that group's manager, so a step of such a model has no further cost.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.block_pool import KVCacheBlock
from engine.core.kv_cache.single_type_kv_cache_manager import FullAttentionManager


class UnitaryKVCacheCoordinator(FullAttentionManager):
    """One group of full-attention layers; the group's manager is the coordinator."""

    num_groups = 1
    has_windows = False

    def blocks_of(self, request_id: str) -> list[KVCacheBlock]:
        return self.req_to_blocks.get(request_id, [])

    held_by = blocks_of

    def has_blocks_for(self, request_id: str, num_tokens: int) -> bool:
        table = self.req_to_blocks.get(request_id)
        return table is not None and num_tokens <= len(table) * self.block_size

    def expect_branches(
        self,
        request_id: str,
        block_hashes: Sequence[BlockHash],
        num_prompt_tokens: int,
        copies: Container[BlockHash],
    ) -> None:
        pass

    def note_cached(self, request_id: str, num_blocks: int) -> None:
        self.num_cached_block[request_id] = num_blocks

    def worth_storing(
        self, request_id: str, block_hashes: Sequence[BlockHash], start: int, end: int
    ) -> tuple[Sequence[BlockHash], list[int]]:
        blocks = self.req_to_blocks[request_id][start:end]
        return block_hashes[start:end], [block.block_id for block in blocks]

    computed_blocks = worth_storing

    def passed(
        self, request_id: str, block_hashes: Sequence[BlockHash], start: int, end: int
    ) -> list[BlockHash]:
        return []

    def names_of_hit(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        return block_hashes

    def take(self, request_id: str) -> list[KVCacheBlock]:
        self.num_cached_block.pop(request_id, None)
        return self.req_to_blocks.pop(request_id, [])

    def take_prefix(self, request_id: str, num_blocks: int) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        num_cached = self.num_cached_block.pop(request_id, 0)
        assert num_blocks <= num_cached, "only full, cached blocks are worth holding"
        blocks = self.req_to_blocks.pop(request_id, [])
        return blocks[:num_blocks], blocks[num_blocks:]

    def keys_of(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        return block_hashes

    def key_of_full(self, block_hash: BlockHash) -> BlockHash | None:
        return block_hash
