"""A KVConnector whose second tier is host memory, with an optional disk level below it.

It is write-through: a block is copied as soon as it is full, so the device may evict it at any time at no
cost. What host memory evicts may be written to the disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.kv_event_recorder import TierRecorder
from engine.core.kv_cache.tiered_blocks import LoadablePrefix
from engine.core.offload.block_tier import BlockTier
from engine.core.offload.disk_tier import NO_DISK_COUNTS, DiskLevel, DiskTier, DiskWriteCounts
from engine.core.offload.kv_connector import FindPrefix, KVConnectorMetadata, KVConnectorStatistics
from engine.core.outputs import NO_COPIES, NO_DISK_READS, NO_DISK_WRITES, BlockCopies, DiskReads, KVLoad
from engine.core.request import Request

Item = TypeVar("Item")

MIN_LOAD_TOKENS = 64
"""The fewest tokens that are loaded by default; fewer are computed.

A transfer costs about a millisecond before its first byte. In that time an 8B model on an H200 computes some
43 tokens (13.96 GFLOP per token at 600 TFLOP/s effective).
"""


@dataclass(frozen=True, slots=True)
class _Levels:
    """The contents that host memory or the disk has."""

    memory: BlockTier
    disk: BlockTier

    def __contains__(self, key: object) -> bool:
        return key in self.memory or key in self.disk


@dataclass(frozen=True, slots=True)
class _Sources:
    """The contents that a load in flight reads, by source."""

    in_memory: list[BlockHash]
    on_disk: list[BlockHash]


class OffloadingConnector:
    """A ``KVConnector`` with a ``BlockTier`` of host memory, and perhaps a ``DiskTier`` below it."""

    has_tier = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        min_load_tokens: int = MIN_LOAD_TOKENS,
        disk_level: DiskLevel | None = None,
    ) -> None:
        """Make one with ``num_blocks`` slots of host memory, of the device's ``block_size`` in tokens."""
        self.disk = None if disk_level is None else DiskTier(disk_level)
        self.disk_level = disk_level
        self.tier = BlockTier(num_blocks, None if self.disk is None else self.disk.write)
        self.copies: Container[BlockHash] = (
            self.tier if self.disk is None else _Levels(self.tier, self.disk.tier)
        )
        self.min_load_tokens = min_load_tokens
        self._block_size = block_size
        self._min_load_blocks = max(1, -(-min_load_tokens // block_size))
        self._loads: dict[int, _Sources] = {}
        self._num_blocks_being_read = 0
        """Blocks that loads in flight read from disk."""
        self._new_loads: list[KVLoad] = []
        self._new_stores: dict[BlockHash, tuple[int, int]] = {}
        """Block and slot of each store that goes with the next plan."""
        self._new_state_stores: dict[BlockHash, tuple[int, int]] = {}
        """Block and slot of each store of a state's block that goes with the next plan."""

    @property
    def recorder(self) -> TierRecorder | None:
        """Records which blocks host memory has; None: not recorded."""
        return self.tier.recorder

    @recorder.setter
    def recorder(self, recorder: TierRecorder | None) -> None:
        self.tier.recorder = recorder

    def find_loadable(
        self, request: Request, num_computed_tokens: int, find: FindPrefix
    ) -> LoadablePrefix | None:
        size = self._block_size
        if (request.num_tokens - 1) // size - num_computed_tokens // size < self._min_load_blocks:
            return None
        prefix = self._worth_loading(request, find)
        is_longer = prefix.num_tokens - num_computed_tokens >= self._min_load_blocks * size
        return prefix if is_longer else None

    def _worth_loading(self, request: Request, find: FindPrefix) -> LoadablePrefix:
        """The prefix in host memory, or a longer one on disk if reading it is faster than computing."""
        in_memory = find(self.tier)
        size = self._block_size
        disk = self.disk
        if disk is None or in_memory.num_tokens >= (request.num_tokens - 1) // size * size:
            return in_memory
        longer = find(self.copies)
        num_to_read = self._num_blocks_being_read + sum(key not in self.tier for key in longer.keys)
        num_more_tokens = longer.num_tokens - in_memory.num_tokens
        is_worth = num_more_tokens > 0 and disk.level.is_worth(num_more_tokens, num_to_read * size)
        return longer if is_worth else in_memory

    def update_state_after_alloc(
        self, load_id: int, request: Request, keys: Sequence[BlockHash], block_ids: Sequence[int]
    ) -> int:
        sources = _Sources(list(keys), [])
        copies = block_ids
        reads = NO_DISK_READS
        if self.disk is not None and self.tier.count_held(keys) < len(keys):
            on_disk = [key not in self.tier for key in keys]
            sources = _Sources(_where(on_disk, False, keys), _where(on_disk, True, keys))
            copies = _where(on_disk, False, block_ids)
            slots = self.disk.tier.acquire(sources.on_disk)
            reads = DiskReads(_where(on_disk, True, block_ids), slots)
        self._loads[load_id] = sources
        self._num_blocks_being_read += len(reads)
        from_memory = BlockCopies(copies, self.tier.acquire(sources.in_memory))
        self._new_loads.append(KVLoad(load_id, request.request_id, from_memory, reads))
        return len(reads)

    def store_blocks(self, keys: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        new = []
        for key, block_id in zip(keys, block_ids, strict=True):
            slot = self.tier.add(key)
            if slot is not None:
                self._new_stores[key] = (block_id, slot)
                new.append(key)
        if self.recorder is not None:
            self.recorder.stored(new)

    def store_state(self, keys: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        self.evict(keys)  # what is left of an earlier copy
        if self.tier.num_usable < len(keys):
            return
        for key, block_id in zip(keys, block_ids, strict=True):
            slot = self.tier.add(key)
            assert slot is not None, "there was room"
            self._new_state_stores[key] = block_id, slot

    def passed(self, keys: Sequence[BlockHash]) -> None:
        self._evict_first(keys)

    def build_connector_meta(self) -> KVConnectorMetadata:
        loads = self._new_loads
        self._new_loads = []
        disk_writes = NO_DISK_WRITES if self.disk is None else self.disk.take_writes()
        stores = self._new_stores
        self._new_stores = {}
        state_stores = self._new_state_stores
        self._new_state_stores = {}
        return KVConnectorMetadata(loads, self._taken(stores), disk_writes, self._taken(state_stores))

    def _taken(self, stores: dict[BlockHash, tuple[int, int]]) -> BlockCopies:
        """Stores of the plan being made.

        Their slots were busy until now, so that the plan names none twice; later plans may load from them.
        """
        if not stores:
            return NO_COPIES
        self.tier.release(list(stores))
        return BlockCopies([block for block, _ in stores.values()], [slot for _, slot in stores.values()])

    def end_load(self, load_id: int, loaded: bool) -> None:
        sources = self._loads.pop(load_id)
        self._num_blocks_being_read -= len(sources.on_disk)
        _end_use(self.tier, sources.in_memory, loaded)
        if self.disk is not None:
            _end_use(self.disk.tier, sources.on_disk, loaded)

    def end_disk_writes(self, finished: Iterable[int], failed: Iterable[int]) -> None:
        if self.disk is not None:
            self.disk.end_writes(finished, failed)

    def take_write_counts(self) -> DiskWriteCounts:
        return NO_DISK_COUNTS if self.disk is None else self.disk.take_counts()

    @property
    def num_disk_writes(self) -> int:
        return 0 if self.disk is None else self.disk.num_writes

    def request_finished(self, keys: Sequence[BlockHash]) -> None:
        self.tier.touch(keys)
        if self.disk is not None:
            self.disk.tier.touch(keys)

    def superseded(self, keys: Sequence[BlockHash]) -> None:
        self._evict_first(keys)

    def _evict_first(self, keys: Sequence[BlockHash]) -> None:
        self.tier.evict_first(keys)
        if self.disk is not None:
            self.disk.tier.evict_first(keys)

    def evict(self, keys: Sequence[BlockHash]) -> None:
        self.tier.discard(keys)
        if self.disk is not None:
            self.disk.evict(keys)

    def reset_cache(self) -> bool:
        if self._loads:
            return False
        return self.tier.reset() and (self.disk is None or self.disk.reset())

    def statistics(self) -> KVConnectorStatistics:
        if self.disk is None:
            return KVConnectorStatistics(self.tier.num_blocks, len(self.tier))
        disk = self.disk.tier
        return KVConnectorStatistics(self.tier.num_blocks, len(self.tier), disk.num_blocks, len(disk))

    def check_invariants(self, load_ids: Sequence[int]) -> None:
        assert sorted(self._loads) == sorted(load_ids), "a load is lost or unknown"
        assert not self._new_loads, "loads were planned and not handed out"
        assert not self._new_stores
        assert not self._new_state_stores
        loads = self._loads.values()
        self.tier.check_invariants(Counter(h for load in loads for h in load.in_memory))
        if self.disk is not None:
            self.disk.check_invariants(Counter(h for load in loads for h in load.on_disk))
        assert self._num_blocks_being_read == sum(len(load.on_disk) for load in loads)


def _where(flags: Sequence[bool], wanted: bool, items: Sequence[Item]) -> list[Item]:
    """The items whose flag is as wanted."""
    return [item for flag, item in zip(flags, items, strict=True) if flag is wanted]


def _end_use(tier: BlockTier, block_hashes: Sequence[BlockHash], worked: bool) -> None:
    tier.release(block_hashes)
    if not worked:
        tier.discard(block_hashes)
