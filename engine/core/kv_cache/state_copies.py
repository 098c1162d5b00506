"""States in other tiers: a state takes as many blocks there as in the device's pool, each under a separate
name."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from engine.core.kv_cache.block_hash import BlockHash

_MARK = b"state"


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where the device's pool has the states: after all KV blocks, slot by slot."""

    first_block: int
    """The block at which slot 0 begins."""
    num_parts: int
    """Number of blocks of a slot."""

    def blocks_of(self, slot: int) -> range:
        """Ids of the blocks that a slot has."""
        first = self.first_block + slot * self.num_parts
        return range(first, first + self.num_parts)

    def names_of(self, block_hash: BlockHash) -> list[BlockHash]:
        """Names of the blocks of the state after the block with this hash."""
        return [self._name(block_hash, part) for part in range(self.num_parts)]

    def is_among(self, block_hash: BlockHash, copies: Container[BlockHash]) -> bool:
        """Whether ``copies`` has all of a state. Its last part, which is evicted first, is checked first."""
        last = self.num_parts - 1
        return all(self._name(block_hash, part) in copies for part in range(last, -1, -1))

    def begins_among(self, block_hash: BlockHash, copies: Container[BlockHash]) -> bool:
        """Whether ``copies`` has the part of a state that is evicted last."""
        return self._name(block_hash, 0) in copies

    @staticmethod
    def _name(block_hash: BlockHash, part: int) -> BlockHash:
        return block_hash + _MARK + part.to_bytes(4, "big")
