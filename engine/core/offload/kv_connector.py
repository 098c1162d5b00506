"""The interface to a second tier, to which KV blocks are offloaded: V1's KVConnector, scheduler side.

It keeps the index only: the worker makes the copies that a plan lists.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.tiered_blocks import LoadablePrefix
from engine.core.offload.disk_tier import NO_DISK_COUNTS, DiskLevel, DiskWriteCounts
from engine.core.outputs import NO_COPIES, NO_DISK_WRITES, BlockCopies, DiskWrites, KVLoad
from engine.core.request import Request

if TYPE_CHECKING:
    from engine.core.kv_cache.kv_event_recorder import TierRecorder

FindPrefix = Callable[[Container[BlockHash]], LoadablePrefix]
"""The longest prefix of a request that need not be computed, given the names of the blocks that can be
loaded."""


@dataclass(frozen=True, slots=True)
class KVConnectorMetadata:
    """The transfers that go with one plan."""

    loads: Sequence[KVLoad] = ()
    stores: BlockCopies = NO_COPIES
    disk_writes: DiskWrites = NO_DISK_WRITES
    state_stores: BlockCopies = NO_COPIES


@dataclass(frozen=True, slots=True)
class KVConnectorStatistics:
    """How full the tier is, in host memory and on disk."""

    num_blocks: int
    num_used_blocks: int
    num_disk_blocks: int = 0
    num_used_disk_blocks: int = 0


class KVConnector(Protocol):
    """Knows which block contents the other tier holds, in O(1) per block.

    A content has the name under which the device's pool caches it, which includes its KV cache group.
    """

    has_tier: bool
    """Whether there is a second tier. If not, no blocks are offered to it."""
    min_load_tokens: int
    """The fewest tokens that are loaded; fewer are computed instead."""
    disk_level: DiskLevel | None
    """The disk level below host memory, if there is one."""
    copies: Container[BlockHash]
    """Names of the blocks that it holds, on any level."""
    recorder: TierRecorder | None
    """Records which blocks host memory has; None: not recorded."""

    def find_loadable(
        self, request: Request, num_computed_tokens: int, find: FindPrefix
    ) -> LoadablePrefix | None:
        """The prefix to load blocks for, longer than the first ``num_computed_tokens``, in full blocks.

        None if there is none, or if loading is not worth it. The last token is never part of it.
        """

    def update_state_after_alloc(
        self, load_id: int, request: Request, keys: Sequence[BlockHash], block_ids: Sequence[int]
    ) -> int:
        """Load the contents of these names, which were found, into these blocks, with the next plan.

        Returns how many of the blocks are read from disk.
        """

    def store_blocks(self, keys: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        """Offload the blocks that are new to the tier; it has their content once the next plan has run."""

    def store_state(self, keys: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        """Offload all blocks of a state, or none, before the next plan runs, which evicts it."""

    def passed(self, keys: Sequence[BlockHash]) -> None:
        """Let contents that have left the window of the request that stored them be evicted first."""

    def build_connector_meta(self) -> KVConnectorMetadata:
        """Take the transfers that go with the plan being made, once per plan."""

    def end_load(self, load_id: int, loaded: bool) -> None:
        """End a load that the worker reported; what could not be loaded is not offered again."""

    def end_disk_writes(self, finished: Iterable[int], failed: Iterable[int]) -> None:
        """End the writes to these slots of the disk, which the worker reported."""

    def take_write_counts(self) -> DiskWriteCounts:
        """Counts of writes to disk since the last call."""

    @property
    def num_disk_writes(self) -> int:
        """Writes to disk that the worker has not reported yet; their content is not found until then."""

    def request_finished(self, keys: Sequence[BlockHash]) -> None:
        """Mark as just used what a return of a request, which ended or was preempted, would hit."""

    def superseded(self, keys: Sequence[BlockHash]) -> None:
        """Let the offloaded blocks of a stale prefix be evicted first."""

    def evict(self, keys: Sequence[BlockHash]) -> None:
        """Evict offloaded blocks whose content is of no use, except for those that are being loaded."""

    def reset_cache(self) -> bool:
        """Evict every offloaded block; False, and nothing is changed, while a load reads any."""

    def statistics(self) -> KVConnectorStatistics:
        """Capacity and use as they are now."""

    def check_invariants(self, load_ids: Sequence[int]) -> None:
        """Raise AssertionError unless exactly these loads are in flight and every slot is accounted for."""


class NoConnector:
    """The KVConnector of a scheduler without a second tier: it holds nothing and loads nothing."""

    has_tier = False
    min_load_tokens = 0
    disk_level: DiskLevel | None = None
    copies: Container[BlockHash] = ()
    recorder: TierRecorder | None = None

    def find_loadable(
        self, request: Request, num_computed_tokens: int, find: FindPrefix
    ) -> LoadablePrefix | None:
        return None

    def update_state_after_alloc(
        self, load_id: int, request: Request, keys: Sequence[BlockHash], block_ids: Sequence[int]
    ) -> int:
        raise AssertionError("nothing was found")

    def store_blocks(self, keys: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        pass

    def store_state(self, keys: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        pass

    def passed(self, keys: Sequence[BlockHash]) -> None:
        pass

    def build_connector_meta(self) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def end_load(self, load_id: int, loaded: bool) -> None:
        raise AssertionError("no load was ever planned")

    def end_disk_writes(self, finished: Iterable[int], failed: Iterable[int]) -> None:
        raise AssertionError("nothing was ever written")

    def take_write_counts(self) -> DiskWriteCounts:
        return NO_DISK_COUNTS

    @property
    def num_disk_writes(self) -> int:
        return 0

    def request_finished(self, keys: Sequence[BlockHash]) -> None:
        pass

    def superseded(self, keys: Sequence[BlockHash]) -> None:
        pass

    def evict(self, keys: Sequence[BlockHash]) -> None:
        pass

    def reset_cache(self) -> bool:
        return True

    def statistics(self) -> KVConnectorStatistics:
        return KVConnectorStatistics(num_blocks=0, num_used_blocks=0)

    def check_invariants(self, load_ids: Sequence[int]) -> None:
        assert not load_ids, "a load came from nowhere"
