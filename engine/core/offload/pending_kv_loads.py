"""Tracks requests whose KV is being loaded from another tier, between the queue and the batch.

Such a request was admitted. It has blocks for all its tokens and a slot in the batch, so once its load has
ended, only the step's budget can keep it from running. A load holds the blocks it writes, as a request or a
pin does: they outlive a request that is aborted meanwhile.

For groups of layers with windows, a load brings only the window before its end, and the waiting request has
blocks only for its first step after it. If the load fails, there is nothing to continue from.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.core.kv_cache.kv_event_recorder import TierRecorder
from engine.core.kv_cache.tiered_blocks import LoadablePrefix
from engine.core.offload.disk_tier import DiskLevel, DiskWriteCounts
from engine.core.offload.kv_connector import KVConnector, KVConnectorStatistics
from engine.core.offload.remote_prefixes import RemotePrefixes
from engine.core.outputs import KVSaves, ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request, RequestStatus

NO_REQUESTS: list[Request] = []


@dataclass(frozen=True, slots=True)
class _Load:
    """A load in flight, and its request, which may have ended."""

    request: Request
    prefix: LoadablePrefix
    num_hit_tokens: int
    """Tokens of the prefix that the device had."""
    num_disk_tokens: int
    """Tokens read from disk; where only some of a token's groups are read there, in proportion."""

    @property
    def is_remote(self) -> bool:
        """Whether it comes from another server, or from the folder that servers share."""
        return self.prefix.source is not None

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed thanks to it."""
        return self.prefix.num_tokens - self.num_hit_tokens


@dataclass(slots=True)
class LoadCounts:
    """Results of loads since the last call, in tokens and in loads."""

    num_tokens: int = 0
    """Tokens that were loaded."""
    num_disk_tokens: int = 0
    """Loaded tokens that were read from disk."""
    num_remote_tokens: int = 0
    """Loaded tokens that came from another server, or from the shared folder."""
    num_failed: int = 0
    num_failed_disk: int = 0
    """Failed loads that read from disk."""
    num_failed_remote: int = 0
    """Failed loads from another server, or from the shared folder."""


class PendingKVLoads:
    """Starts and ends loads, and offers what was computed to the other tier."""

    def __init__(self, kv: KVCacheManager, connector: KVConnector, *, loads_remote: bool = False) -> None:
        """``loads_remote``: requests may name a prefix that another server has."""
        if connector.has_tier or loads_remote:
            assert kv.enable_caching, "copies are found by the hashes of blocks"
            kv.join_tier(connector.copies, keeps_blocks=connector.has_tier)
        self._remote = RemotePrefixes(kv.tiered, kv.block_size) if loads_remote else None
        self._kv = kv
        self._connector = connector
        self._ids = itertools.count(1)
        self._in_flight: dict[int, _Load] = {}
        self._loading: dict[str, Request] = {}
        self._ready: dict[str, Request] = {}
        self._num_offered: dict[str, int] = {}
        """Number of blocks of tokens of each request that were offered to the other tier."""
        self._to_compute: set[str] = set()
        """Requests whose load failed: they are computed, and not loaded again."""
        self.saves: list[tuple[Sequence[BlockHash], Sequence[int]]] | None = None
        """Names and ids of the blocks to save in the folder that servers share; None: nothing is saved."""
        self._useless: list[BlockHash] = []
        """Names of blocks to delete from that folder."""
        self._counts = LoadCounts()

    @property
    def num_requests(self) -> int:
        """Number of requests that have a slot in the batch and are not in it yet."""
        return len(self._loading) + len(self._ready)

    @property
    def num_in_flight(self) -> int:
        """Loads that the worker has not reported yet."""
        return len(self._in_flight)

    @property
    def num_disk_writes(self) -> int:
        """Writes to disk that the worker has not reported yet."""
        return self._connector.num_disk_writes

    @property
    def loads_remote(self) -> bool:
        """Whether requests may name a prefix that another server has."""
        return self._remote is not None

    @property
    def min_load_tokens(self) -> int:
        """The fewest tokens that are loaded; 0 without another tier."""
        return self._connector.min_load_tokens

    @property
    def disk_level(self) -> DiskLevel | None:
        """The disk level of the other tier, if there is one."""
        return self._connector.disk_level

    @property
    def ready(self) -> list[Request]:
        """Requests whose load has ended, in the order in which the loads did."""
        return list(self._ready.values())

    @property
    def requests(self) -> list[Request]:
        """Requests that are loading, and those that are ready to run."""
        return [*self._loading.values(), *self._ready.values()]

    # ---- loads ----

    def find_loadable(self, request: Request, num_hit_tokens: int) -> LoadablePrefix | None:
        """The prefix, longer than the device's hit, that is worth loading."""
        if request.request_id in self._to_compute:
            return None
        connector = self._connector
        prefix = None
        if connector.has_tier:
            prefix = connector.find_loadable(request, num_hit_tokens, partial(self._kv.tiered.find, request))
        if self._remote is None:
            return prefix
        return self._remote.find(request, num_hit_tokens if prefix is None else prefix.num_tokens) or prefix

    def start(self, request: Request, prefix: LoadablePrefix, num_hit_tokens: int) -> None:
        """Load what the device lacks of this prefix with the next plan; the request fits with all its
        tokens."""
        load_id = next(self._ids)
        block_ids = self._kv.begin_load(load_id, request, prefix)
        request.num_computed_tokens = num_hit_tokens if self._kv.is_unitary else 0
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        num_read = 0
        if prefix.source is None:
            num_read = self._connector.update_state_after_alloc(load_id, request, prefix.keys, block_ids)
        else:
            assert self._remote is not None
            self._remote.start(load_id, request, prefix, block_ids)
        num_tokens = prefix.num_tokens - num_hit_tokens
        num_disk_tokens = num_tokens * num_read // len(block_ids)
        self._in_flight[load_id] = _Load(request, prefix, num_hit_tokens, num_disk_tokens)
        self._loading[request.request_id] = request

    def update_from_output(self, result: ModelRunnerOutput) -> list[Request]:
        """Apply the worker's reports on loads and on writes to disk.

        Returns requests that must be queued again, as their load failed.
        """
        if result.finished_disk_writes or result.failed_disk_writes:
            self._connector.end_disk_writes(result.finished_disk_writes, result.failed_disk_writes)
        if not result.finished_loads and not result.failed_loads:
            return NO_REQUESTS
        self._end(result.finished_loads, loaded=True)
        return self._end(result.failed_loads, loaded=False)

    def _end(self, load_ids: Iterable[int], *, loaded: bool) -> list[Request]:
        """End loads: a request that waited for one runs next, and computes what could not be loaded.

        Returns those that cannot continue, as they lack the windows that they would compute from.
        """
        unfit: list[Request] = []
        for load_id in load_ids:
            load = self._in_flight.pop(load_id)
            if load.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                if loaded:
                    self._kv.tiered.cache_loaded(load_id, load.request, load.prefix)
                self._settle(load, loaded)
                if not loaded and not self._kv.is_unitary:
                    unfit.append(load.request)
            if self._remote is None or not self._remote.end(load_id, loaded=loaded):
                self._connector.end_load(load_id, loaded)
            self._kv.tiered.end_load(load_id)
        return unfit

    def _settle(self, load: _Load, loaded: bool) -> None:
        request = load.request
        if loaded:
            request.num_computed_tokens = load.prefix.num_tokens
            request.num_external_computed_tokens = load.num_tokens
            request.num_disk_tokens = load.num_disk_tokens
            self._counts.num_tokens += load.num_tokens
            self._counts.num_disk_tokens += load.num_disk_tokens
            self._counts.num_remote_tokens += load.num_tokens if load.is_remote else 0
        else:
            self._counts.num_failed += 1
            self._counts.num_failed_disk += load.num_disk_tokens > 0
            self._counts.num_failed_remote += load.is_remote
            self._to_compute.add(request.request_id)
            if request.first_scheduled_time is None:
                request.num_cached_tokens = load.num_hit_tokens
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        del self._loading[request.request_id]
        if loaded or self._kv.is_unitary:
            self._ready[request.request_id] = request

    def take_lost(self) -> list[Request]:
        """Requests that are to end with an error, as their KV could not be fetched from another server."""
        return [] if self._remote is None else self._remote.take_lost()

    def remove(self, request: Request) -> bool:
        """Remove a request that starts or ends, during its load or after; False if it is not here."""
        request_id = request.request_id
        here = self._ready.pop(request_id, None) or self._loading.pop(request_id, None)
        return here is not None

    # ---- the other tier ----

    def record(self, recorder: TierRecorder) -> None:
        """Let this recorder note which blocks host memory has, if there is another tier."""
        if self._connector.has_tier:
            self._connector.recorder = recorder

    def fill_in(self, plan: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Add the transfers to a plan whose tokens count as computed.

        These are the loads that were started, stores of the blocks that are full of known tokens then, and
        stores of the states that the plan evicts. The hit of a request that was just admitted is offered,
        too, as its offloaded blocks may be gone.
        """
        connector = self._connector
        if connector.has_tier or self.saves is not None:
            self._offer(plan, requests)
        if self.saves:
            names = [name for some, _ in self.saves for name in some]
            plan.kv_saves = KVSaves(names, [block_id for _, some in self.saves for block_id in some])
            self.saves = []
        if self._useless:
            plan.kv_saves = replace(plan.kv_saves, useless=self._useless)
            self._useless = []
        if connector.has_tier:
            meta = connector.build_connector_meta()
            plan.kv_loads = meta.loads
            plan.kv_stores = meta.stores
            plan.kv_disk_writes = meta.disk_writes
            plan.state_stores = meta.state_stores
        if self._remote is not None and (remote := self._remote.take_new_loads()):
            plan.kv_loads = [*plan.kv_loads, *remote]

    def _offer(self, plan: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Offer the tier what the plan computes, and what it evicts."""
        connector = self._connector
        size = self._kv.block_size
        admitted = {
            new.req_id for new in plan.scheduled_new_reqs
        } | plan.scheduled_cached_reqs.resumed_req_ids
        for request_id in plan.num_scheduled_tokens:
            request = requests[request_id]
            end = min(request.num_computed_tokens, request.num_tokens) // size
            start = 0 if request_id in admitted else self._num_offered[request_id]
            if start < end:
                if self._kv.has_windows:
                    connector.passed(self._kv.tiered.passed(request, start, end))
                if connector.recorder is not None:
                    connector.recorder.begin(request_id, start, end)
                connector.store_blocks(*self._kv.tiered.worth_storing(request, start, end))
                if self.saves is not None:
                    self.saves.append(self._kv.tiered.computed(request, start, end))
            self._num_offered[request_id] = end
        for names, block_ids in self._kv.tiered.evicted_states():
            connector.store_state(names, block_ids)

    def release(self, request: Request) -> None:
        """Note for the other tier that the request frees its blocks, which were in use until now."""
        self._to_compute.discard(request.request_id)
        self._num_offered.pop(request.request_id, None)
        if not self._connector.has_tier:
            return
        hashes = request.block_hashes[: request.num_computed_tokens // self._kv.block_size]
        self._connector.request_finished(self._kv.tiered.names_of_hit(hashes))

    def evict(self, request: Request) -> None:
        """Evict the request's offloaded blocks, whose content is of no use."""
        if self._connector.has_tier:
            self._connector.evict(self._kv.tiered.all_names_of(request.block_hashes))
        if self.saves is not None:
            self._useless += self._kv.tiered.all_names_of(request.block_hashes)

    def superseded(self, block_hashes: Sequence[BlockHash]) -> None:
        """Let these offloaded blocks, which are stale, be evicted first."""
        if self._connector.has_tier:
            self._connector.superseded(self._kv.tiered.names_of(block_hashes))

    def reset_cache(self) -> bool:
        """Evict all offloaded blocks; False while a load reads any."""
        return self._connector.reset_cache()

    def take_counts(self) -> LoadCounts:
        """Counts of loads since the last call."""
        counts = self._counts
        self._counts = LoadCounts()
        return counts

    def take_write_counts(self) -> DiskWriteCounts:
        """Counts of writes to disk since the last call."""
        return self._connector.take_write_counts()

    def tier_statistics(self) -> KVConnectorStatistics:
        """How full the other tier is."""
        return self._connector.statistics()

    def check_invariants(self) -> None:
        """Raise AssertionError unless each request's state is its load's, with blocks for all its tokens."""
        waiting_for = [load.request for load in self._in_flight.values()]
        for request in self._loading.values():
            assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            assert sum(request is other for other in waiting_for) == 1, "a request waits for no load"
        for request in self._ready.values():
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        for request in self.requests:
            assert request.num_computed_tokens < request.num_tokens
            num_slots = self._kv.num_slots_of(request.request_id)
            num_reserved = self._kv.tiered.num_reserved(request, request.num_computed_tokens)
            assert num_slots >= num_reserved, "a loaded request could get stuck"
        remote = () if self._remote is None else self._remote.load_ids
        self._connector.check_invariants([i for i in self._in_flight if i not in remote])
