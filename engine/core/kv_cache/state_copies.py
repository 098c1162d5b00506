"""States in other tiers: a state is as many blocks there as it has in the device's pool, each with a name of
its own."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from engine.core.kv_cache.block_hash import BlockHash

_MARK = b"state"


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where the states lie in the device's pool: behind all KV blocks, slot by slot."""

    first_block: int
    """The block at which slot 0 begins."""
    num_parts: int
    """Blocks of a slot."""

    def blocks_of(self, slot: int) -> range:
        """Ids of the blocks that a slot has."""
        first = self.first_block + slot * self.num_parts
        return range(first, first + self.num_parts)

    def names_of(self, block_hash: BlockHash) -> list[BlockHash]:
        """Names of the blocks of the state behind the block of this hash."""
        return [self._name(block_hash, part) for part in range(self.num_parts)]

    def is_among(self, block_hash: BlockHash, copies: Container[BlockHash]) -> bool:
        """Whether all of a state is there. Its last part is the first to be evicted."""
        last = self.num_parts - 1
        return all(self._name(block_hash, part) in copies for part in range(last, -1, -1))

    def begins_among(self, block_hash: BlockHash, copies: Container[BlockHash]) -> bool:
        """Whether the part of a state that is evicted last is there."""
        return self._name(block_hash, 0) in copies

    @staticmethod
    def _name(block_hash: BlockHash, part: int) -> BlockHash:
        return block_hash + _MARK + part.to_bytes(4, "big")
