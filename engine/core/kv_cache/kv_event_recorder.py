"""Records what enters and leaves the prefix cache, tier by tier, for publication.

Content that two blocks hold is recorded once: when the first block gets it, and when the last one loses it.
So the events, applied in order, give exactly what is cached at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.request import Request
from engine.records.adapters import name_of
from engine.records.kv_cache_groups import KVCacheGroup
from engine.records.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    event_hash,
)

if TYPE_CHECKING:
    from engine.core.kv_cache.kv_cache_manager import KVCacheManager

_HASH_BYTES = 32
_GROUP_BYTES = 2


class KVEventRecorder:
    """Events of all tiers in the order in which they happened."""

    def __init__(
        self, block_size: int, groups: Sequence[KVCacheGroup], requests: Mapping[str, Request]
    ) -> None:
        """``requests``: those that have not ended, by id; their tokens are the content of blocks."""
        self._block_size = block_size
        self._groups = groups
        self._requests = requests
        self._events: list[KVCacheEvent] = []
        self._source = ("", 0, 0)
        self.device = TierRecorder(self, MEDIUM_GPU, 0)
        """Records blocks of the device; where there are several groups, a name includes the group."""
        self.states = TierRecorder(self, MEDIUM_GPU, len(groups) - 1)
        """Records states, the last group."""
        self.host = TierRecorder(self, MEDIUM_CPU, 0)
        """Records copies in host memory, except those of states."""

    def begin(self, request_id: str, start: int, end: int) -> None:
        """Say that the blocks stored until the next call are among blocks [start, end) of this request."""
        self._source = (request_id, start, end)

    def attach(self, kv: KVCacheManager) -> None:
        """Record changes of the device's blocks and states from now on."""
        kv.pool.recorder = self.device
        if kv.states is not None:
            kv.states.pool.recorder = self.states

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        events = self._events
        self._events = []
        return events

    def stored(self, medium: str, group: int, hashes: Iterable[BlockHash]) -> None:
        """Record that these contents of one group are cached from now on."""
        request_id, start, end = self._source
        request = self._requests[request_id]
        wanted = set(hashes)
        chain = request.block_hashes[start:end]
        for first, last in _runs([i for i, h in enumerate(chain, start) if h in wanted]):
            self._events.append(self._stored_event(request, medium, group, first, last + 1))

    def _stored_event(
        self, request: Request, medium: str, group_idx: int, start: int, end: int
    ) -> BlockStored:
        size = self._block_size
        group = self._groups[group_idx]
        context = request.hash_context
        return BlockStored(
            block_hashes=[event_hash(h) for h in request.block_hashes[start:end]],
            parent_block_hash=event_hash(request.block_hashes[start - 1]) if start else None,
            token_ids=request.all_token_ids[start * size : end * size],
            block_size=size,
            lora_id=None,
            medium=medium,
            lora_name=name_of(context.adapter),
            extra_keys=[context.event_keys(i * size, (i + 1) * size) for i in range(start, end)],
            group_idx=group_idx,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.sliding_window,
            session_id=request.job.job_id if request.job is not None else None,
        )

    def removed(self, medium: str, group: int, block_hash: BlockHash) -> None:
        """Record that this content is no longer cached. Consecutive removals become one event."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == medium and last.group_idx == group:
            last.block_hashes.append(event_hash(block_hash))
        else:
            self._events.append(BlockRemoved([event_hash(block_hash)], medium, group))

    def cleared(self) -> None:
        """Record that nothing is cached any more, on any tier."""
        if not (self._events and isinstance(self._events[-1], AllBlocksCleared)):
            self._events.append(AllBlocksCleared())


class TierRecorder:
    """Records for one pool or tier, where a name is a hash, perhaps followed by a group."""

    def __init__(self, recorder: KVEventRecorder, medium: str, group: int) -> None:
        """``group``: that of names which include none."""
        self._recorder = recorder
        self._medium = medium
        self._group = group

    def begin(self, request_id: str, start: int, end: int) -> None:
        """See ``KVEventRecorder.begin``."""
        self._recorder.begin(request_id, start, end)

    def stored(self, names: Iterable[BlockHash]) -> None:
        """Record that the contents with these names, which were not here, are stored from now on."""
        by_group: dict[int, list[BlockHash]] = {}
        for name in names:
            if (group := self._group_of(name)) is not None:
                by_group.setdefault(group, []).append(name[:_HASH_BYTES])
        for group, hashes in by_group.items():
            self._recorder.stored(self._medium, group, hashes)

    def removed(self, name: BlockHash) -> None:
        """Record that the content with this name is no longer stored."""
        if (group := self._group_of(name)) is not None:
            self._recorder.removed(self._medium, group, name[:_HASH_BYTES])

    def cleared(self) -> None:
        """See ``KVEventRecorder.cleared``."""
        self._recorder.cleared()

    def _group_of(self, name: BlockHash) -> int | None:
        """The group of a name; None for a part of a state in another tier, whose name is longer."""
        suffix = name[_HASH_BYTES:]
        if not suffix:
            return self._group
        return int.from_bytes(suffix, "big") if len(suffix) == _GROUP_BYTES else None


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of ascending indices without a hole."""
    first = previous = None
    for index in indices:
        if first is None or previous is None:
            first = index
        elif index != previous + 1:
            yield first, previous
            first = index
        previous = index
    if first is not None and previous is not None:
        yield first, previous
