"""Tracks which contents are on disk: a level below host memory, filled with what that evicts.

A write takes time and may fail, so its content is found only once it is reported. This module knows nothing
of requests, of files or of the device's blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.offload.block_tier import BlockTier
from engine.core.outputs import NO_DISK_WRITES, DiskWrites

MAX_DISK_WRITES = 64
"""Blocks that may be written to disk at once, unless a state takes more.

Each takes a block of host memory outside the pool: 128 MiB in all for an 8B model.
"""


def max_disk_writes(blocks_per_state: int = 0) -> int:
    """Blocks that may be written to disk at once: at least two states, as a part of one is useless."""
    return max(MAX_DISK_WRITES, 2 * blocks_per_state)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLevel:
    """The size of a disk level, and when to read from it.

    To read n tokens takes as long as to compute ``fixed_tokens + read_share * n``.
    """

    num_blocks: int
    max_writes: int
    """Writes that may be in flight at once; further ones are dropped."""
    fixed_tokens: float = 0.0
    """Tokens that could be computed before the first one is read."""
    read_share: float = 0.0
    """Time to read a token, as a share of the time to compute it; with 1 nothing is ever worth reading."""

    def is_worth(self, num_tokens: int, num_read_tokens: int) -> bool:
        """Whether gaining ``num_tokens`` is worth reading ``num_read_tokens``, reads in flight included."""
        return num_tokens >= self.fixed_tokens + self.read_share * num_read_tokens


NO_DISK = DiskLevel(num_blocks=0, max_writes=0)


@dataclass(frozen=True, slots=True)
class DiskWriteCounts:
    """Results of writes since the last call, in blocks."""

    num_written: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    """Blocks that were not written, as too many writes were in flight: the disk is too slow."""


NO_DISK_COUNTS = DiskWriteCounts()


class DiskTier:
    """Contents on disk, and those that are being written."""

    def __init__(self, level: DiskLevel) -> None:
        self.level = level
        self.tier = BlockTier(level.num_blocks)
        self._writing: dict[int, BlockHash | None] = {}
        """What is being written to each slot; None if it was evicted meanwhile."""
        self._contents_written: set[BlockHash] = set()
        self._new: list[tuple[int, int]] = []
        """Host slot and disk slot of each write that goes with the next plan."""
        self._counts = DiskWriteCounts()

    def write(self, block_hash: BlockHash, host_slot: int) -> None:
        """Keep a content that host memory evicts, unless it is here already or cannot be written now."""
        if block_hash in self.tier or block_hash in self._contents_written:
            self.tier.touch([block_hash])
            return
        slot = self.tier.reserve() if len(self._writing) < self.level.max_writes else None
        if slot is None:
            self._count(dropped=1)
            return
        self._writing[slot] = block_hash
        self._contents_written.add(block_hash)
        self._new.append((host_slot, slot))

    @property
    def num_writes(self) -> int:
        """Writes that the worker has not reported yet."""
        return len(self._writing)

    def take_writes(self) -> DiskWrites:
        """Take the writes that go with the plan being made."""
        if not self._new:
            return NO_DISK_WRITES
        new = self._new
        self._new = []
        return DiskWrites([host_slot for host_slot, _ in new], [slot for _, slot in new])

    def end_writes(self, finished: Iterable[int], failed: Iterable[int]) -> None:
        """End the writes to these slots, which the worker reported.

        A slot whose write failed is not tried again: the disk is full, or worn.
        """
        for slot in finished:
            self.tier.fill(slot, self._end_write(slot))
            self._count(written=1)
        for slot in failed:
            self._end_write(slot)
            self.tier.retire(slot)
            self._count(failed=1)

    def _end_write(self, slot: int) -> BlockHash | None:
        block_hash = self._writing.pop(slot)
        if block_hash is not None:
            self._contents_written.remove(block_hash)
        return block_hash

    def evict(self, block_hashes: Sequence[BlockHash]) -> None:
        """Evict contents that are of no use, except for those that a load reads; writes of them go on."""
        self.tier.discard(block_hashes)
        gone = self._contents_written.intersection(block_hashes)
        if gone:
            self._writing = {s: None if h in gone else h for s, h in self._writing.items()}
            self._contents_written -= gone

    def reset(self) -> bool:
        """Evict all; False, and nothing is changed, while a load reads here. Ongoing writes are ignored."""
        if not self.tier.reset():
            return False
        self._writing = dict.fromkeys(self._writing)
        self._contents_written.clear()
        return True

    def take_counts(self) -> DiskWriteCounts:
        """Counts of writes since the last call."""
        counts = self._counts
        self._counts = NO_DISK_COUNTS
        return counts

    def _count(self, *, written: int = 0, failed: int = 0, dropped: int = 0) -> None:
        c = self._counts
        self._counts = DiskWriteCounts(
            c.num_written + written, c.num_failed + failed, c.num_dropped + dropped
        )

    def check_invariants(self, num_users: dict[BlockHash, int]) -> None:
        """Raise AssertionError unless each slot is free, read, or written once."""
        self.tier.check_invariants(num_users, self._writing)
        assert not self._new, "writes were planned and not handed out"
        assert len(self._writing) <= self.level.max_writes
        written = [h for h in self._writing.values() if h is not None]
        assert len(set(written)) == len(written)
        assert set(written) == self._contents_written
        assert not any(block_hash in self.tier for block_hash in written), "a content has two slots"
