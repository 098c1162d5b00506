"""A KVConnector whose second tier is host memory, write-through: a block is copied as soon as it is full, so
that the device may drop it at any time for nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.core.block_hash import BlockHash
from engine.core.host_tier import HostTier
from engine.core.kv_connector import KVConnectorMetadata, KVConnectorStatistics
from engine.outputs import NO_COPIES, BlockCopies, KVLoad
from engine.request import Request

MIN_LOAD_TOKENS = 64
"""Fewer are computed instead. A transfer costs about a millisecond before its first byte; an 8B model on an
H200 computes some 43 tokens in it (13.96 GFLOP per token at 600 TFLOP/s effective)."""


class OffloadingConnector:
    """Implements ``KVConnector`` on a ``HostTier``."""

    def __init__(self, num_blocks: int, block_size: int, min_load_tokens: int = MIN_LOAD_TOKENS) -> None:
        """``num_blocks``: slots of the host pool. ``block_size`` in tokens, the device pool's."""
        self.tier = HostTier(num_blocks)
        self.min_load_tokens = min_load_tokens
        self._block_size = block_size
        self._min_load_blocks = max(1, -(-min_load_tokens // block_size))
        self._loads: dict[int, list[BlockHash]] = {}
        """Contents that loads in flight read."""
        self._new_loads: list[KVLoad] = []
        self._new_stores: dict[BlockHash, tuple[int, int]] = {}
        """Of the next plan: block and slot."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        size = self._block_size
        start, end = num_computed_tokens // size, (request.num_tokens - 1) // size
        if end - start < self._min_load_blocks:
            return 0
        num_held = self.tier.count_held(request.block_hashes[start:end])
        return num_held * size if num_held >= self._min_load_blocks else 0

    def update_state_after_alloc(
        self, load_id: int, request: Request, block_ids: Sequence[int], num_computed_tokens: int
    ) -> None:
        first = num_computed_tokens // self._block_size
        hashes = request.block_hashes[first : first + len(block_ids)]
        self._loads[load_id] = hashes
        copies = BlockCopies(block_ids, self.tier.acquire(hashes))
        self._new_loads.append(KVLoad(load_id, request.request_id, copies))

    def store_blocks(self, block_hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        for block_hash, block_id in zip(block_hashes, block_ids, strict=True):
            slot = self.tier.add(block_hash)
            if slot is not None:
                self._new_stores[block_hash] = (block_id, slot)

    def build_connector_meta(self) -> KVConnectorMetadata:
        loads, self._new_loads = self._new_loads, []
        return KVConnectorMetadata(loads, self._take_stores())

    def _take_stores(self) -> BlockCopies:
        """Slots were busy while the plan was made, so that it names none twice; from now on they may be
        loaded from, by later plans."""
        if not self._new_stores:
            return NO_COPIES
        stores, self._new_stores = self._new_stores, {}
        self.tier.release(list(stores))
        return BlockCopies([block for block, _ in stores.values()], [slot for _, slot in stores.values()])

    def end_load(self, load_id: int, loaded: bool) -> None:
        hashes = self._loads.pop(load_id)
        self.tier.release(hashes)
        if not loaded:
            self.tier.discard(hashes)

    def request_finished(self, request: Request) -> None:
        self.tier.touch(request.block_hashes[: request.num_computed_tokens // self._block_size])

    def superseded(self, block_hashes: Sequence[BlockHash]) -> None:
        self.tier.give_way_first(block_hashes)

    def reset_cache(self) -> bool:
        return self.tier.reset()

    def statistics(self) -> KVConnectorStatistics:
        return KVConnectorStatistics(self.tier.num_blocks, len(self.tier))

    def check_invariants(self, load_ids: Sequence[int]) -> None:
        assert sorted(self._loads) == sorted(load_ids), "a load is lost or unknown"
        assert not self._new_loads, "loads were planned and not handed out"
        assert not self._new_stores
        self.tier.check_invariants(Counter(h for hashes in self._loads.values() for h in hashes))
