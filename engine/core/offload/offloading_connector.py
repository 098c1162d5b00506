"""A KVConnector whose second tier is host memory, with an optional disk behind it.

It is write-through: a block is copied as soon as it is full, so the device may evict it at any time at no
cost. What host memory evicts may go on to the disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.offload.block_tier import BlockTier
from engine.core.offload.disk_tier import NO_DISK_COUNTS, DiskLevel, DiskTier, DiskWriteCounts
from engine.core.offload.kv_connector import KVConnectorMetadata, KVConnectorStatistics
from engine.core.outputs import NO_COPIES, NO_DISK_READS, NO_DISK_WRITES, BlockCopies, DiskReads, KVLoad
from engine.core.request import Request

Item = TypeVar("Item")

MIN_LOAD_TOKENS = 64
"""The fewest tokens that are loaded by default; fewer are computed.

A transfer costs about a millisecond before its first byte. In that time an 8B model on an H200 computes some
43 tokens (13.96 GFLOP per token at 600 TFLOP/s effective).
"""


@dataclass(frozen=True, slots=True)
class _Sources:
    """Which contents a load in flight reads from where."""

    in_memory: list[BlockHash]
    on_disk: list[BlockHash]


class OffloadingConnector:
    """A ``KVConnector`` on a ``BlockTier`` of host memory, and perhaps a ``DiskTier`` behind it."""

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
        self.min_load_tokens = min_load_tokens
        self._block_size = block_size
        self._min_load_blocks = max(1, -(-min_load_tokens // block_size))
        self._loads: dict[int, _Sources] = {}
        self._num_blocks_being_read = 0
        """Blocks that loads in flight read from disk."""
        self._new_loads: list[KVLoad] = []
        self._new_stores: dict[BlockHash, tuple[int, int]] = {}
        """Block and slot of each store that goes with the next plan."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        size = self._block_size
        start, end = num_computed_tokens // size, (request.num_tokens - 1) // size
        if end - start < self._min_load_blocks:
            return 0
        num_held = self._num_worth_loading(request.block_hashes[start:end])
        return num_held * size if num_held >= self._min_load_blocks else 0

    def _num_worth_loading(self, block_hashes: Sequence[BlockHash]) -> int:
        """How many of these blocks, from the first on, are worth loading.

        That is all up to the first that only the disk has, unless reading is faster than computing.
        """
        num_in_memory = self.tier.count_held(block_hashes)
        disk = self.disk
        if disk is None or num_in_memory == len(block_hashes):
            return num_in_memory
        num_held, num_on_disk = num_in_memory, 0
        for block_hash in block_hashes[num_in_memory:]:
            if block_hash not in self.tier:
                if block_hash not in disk.tier:
                    break
                num_on_disk += 1
            num_held += 1
        size, num_to_read = self._block_size, num_on_disk + self._num_blocks_being_read
        is_worth = disk.level.is_worth((num_held - num_in_memory) * size, num_to_read * size)
        return num_held if num_on_disk and is_worth else num_in_memory

    def update_state_after_alloc(
        self, load_id: int, request: Request, block_ids: Sequence[int], num_computed_tokens: int
    ) -> int:
        first = num_computed_tokens // self._block_size
        hashes = request.block_hashes[first : first + len(block_ids)]
        sources, copies, reads = _Sources(hashes, []), block_ids, NO_DISK_READS
        if self.disk is not None and self.tier.count_held(hashes) < len(hashes):
            on_disk = [block_hash not in self.tier for block_hash in hashes]
            sources = _Sources(_where(on_disk, False, hashes), _where(on_disk, True, hashes))
            copies = _where(on_disk, False, block_ids)
            slots = self.disk.tier.acquire(sources.on_disk)
            reads = DiskReads(_where(on_disk, True, block_ids), slots)
        self._loads[load_id] = sources
        self._num_blocks_being_read += len(reads)
        from_memory = BlockCopies(copies, self.tier.acquire(sources.in_memory))
        self._new_loads.append(KVLoad(load_id, request.request_id, from_memory, reads))
        return len(reads) * self._block_size

    def store_blocks(self, block_hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        for block_hash, block_id in zip(block_hashes, block_ids, strict=True):
            slot = self.tier.add(block_hash)
            if slot is not None:
                self._new_stores[block_hash] = (block_id, slot)

    def build_connector_meta(self) -> KVConnectorMetadata:
        loads, self._new_loads = self._new_loads, []
        disk_writes = NO_DISK_WRITES if self.disk is None else self.disk.take_writes()
        return KVConnectorMetadata(loads, self._take_stores(), disk_writes)

    def _take_stores(self) -> BlockCopies:
        """Take the stores of the plan being made.

        Their slots were busy until now, so that the plan names none twice; later plans may load from them.
        """
        if not self._new_stores:
            return NO_COPIES
        stores, self._new_stores = self._new_stores, {}
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

    def request_finished(self, request: Request) -> None:
        hashes = request.block_hashes[: request.num_computed_tokens // self._block_size]
        self.tier.touch(hashes)
        if self.disk is not None:
            self.disk.tier.touch(hashes)

    def superseded(self, block_hashes: Sequence[BlockHash]) -> None:
        self.tier.evict_first(block_hashes)
        if self.disk is not None:
            self.disk.tier.evict_first(block_hashes)

    def evict(self, block_hashes: Sequence[BlockHash]) -> None:
        self.tier.discard(block_hashes)
        if self.disk is not None:
            self.disk.evict(block_hashes)

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
