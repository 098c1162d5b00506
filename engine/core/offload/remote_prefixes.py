"""Finds prefixes that other servers have computed, and plans to fetch them from there or a shared folder.

A request names the source of its prefix (``PrefixSource``). It is loaded once: after the load has ended, or
the request was preempted, what is missing is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.core.kv_cache.tiered_blocks import LoadablePrefix, TieredBlocks
from engine.core.offload.offloading_connector import MIN_LOAD_TOKENS
from engine.core.outputs import NO_COPIES, KVLoad, RemoteReads
from engine.core.request import Request
from engine.records.kv_transfer import RemotePrefix, SavedPrefix


class RemotePrefixes:
    """Finds the prefix of a request that is elsewhere, and plans its load."""

    def __init__(self, tiered: TieredBlocks, block_size: int) -> None:
        """``block_size`` in tokens."""
        self._tiered = tiered
        self._block_size = block_size
        self._loads: dict[int, Request] = {}
        self._new_loads: list[KVLoad] = []
        self._lost: list[Request] = []

    def find(self, request: Request, num_computed_tokens: int) -> LoadablePrefix | None:
        """The prefix at the request's source, if it is longer by enough than what is computed."""
        source = request.kv_transfer
        if not isinstance(source, (RemotePrefix, SavedPrefix)):
            return None
        size = self._block_size
        num_blocks = min(source.num_tokens, request.num_tokens - 1) // size
        if num_blocks * size - num_computed_tokens < MIN_LOAD_TOKENS:
            return None
        names = frozenset(self._tiered.names_of_prefix(request.block_hashes[:num_blocks]))
        prefix = self._tiered.find(request, names)
        if prefix.num_tokens - num_computed_tokens < MIN_LOAD_TOKENS or not prefix.keys:
            return None
        return replace(prefix, source=source)

    def start(self, load_id: int, request: Request, prefix: LoadablePrefix, block_ids: Sequence[int]) -> None:
        """Fetch the blocks of a prefix that was found into these, with the next plan."""
        assert prefix.source is not None
        reads = RemoteReads(prefix.source, tuple(prefix.keys), block_ids, request.owner or "")
        self._loads[load_id] = request
        self._new_loads.append(KVLoad(load_id, request.request_id, NO_COPIES, remote=reads))

    def take_new_loads(self) -> list[KVLoad]:
        """The loads that go with the plan being made."""
        loads = self._new_loads
        self._new_loads = []
        return loads

    def end(self, load_id: int, *, loaded: bool) -> bool:
        """End a load that the worker reported; False if it is not a remote one."""
        request = self._loads.pop(load_id, None)
        if request is None:
            return False
        source = request.kv_transfer
        request.kv_transfer = None
        if not loaded and isinstance(source, (RemotePrefix, SavedPrefix)) and source.must_load:
            self._lost.append(request)
        return True

    def take_lost(self) -> list[Request]:
        """Requests that are to end with an error, as their KV could not be fetched."""
        lost = self._lost
        self._lost = []
        return lost

    @property
    def load_ids(self) -> list[int]:
        """Loads in flight."""
        return list(self._loads)
