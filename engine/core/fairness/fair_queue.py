"""Waiting requests of all tenants, in a max-min fair order.

The tenant with the fewest slots in the batch is first. The policy's order decides among a tenant's own
requests, and between tenants with equally many slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import chain, islice

from engine.core.fairness.tenant_slots import TenantSlots
from engine.core.policy import WaitingKey
from engine.core.request import Request
from engine.core.request_queue import Places, QueueEntry, RequestQueue

LAST = 1 << 30
"""The rank of a tenant that is deferred."""

_Head = tuple[int, QueueEntry, str, int]
"""A tenant's rank, its first entry, its name, and the number of the queue state that they are valid for."""


class FairQueue:
    """Has a ``RequestQueue`` for each tenant with waiting requests; finds the next request in O(log n)."""

    def __init__(self, slots: TenantSlots, is_overdue: Callable[[Request], bool]) -> None:
        self._slots = slots
        self._is_overdue = is_overdue
        self._places = Places()
        self._queues: dict[str, RequestQueue] = {}
        self._only: RequestQueue | None = None
        """The queue of the only tenant with waiting requests; None if there are several tenants, or none."""
        self._states: dict[str, int] = {}
        """A number for each queue, renewed whenever the queue changes."""
        self._next_state = 0
        self._changed: dict[str, None] = {}
        """Tenants whose entry among the heads is out of date."""
        self._heads: list[_Head] = []
        self._deferred: set[str] = set()
        self._skipped: list[QueueEntry] = []

    @property
    def is_contended(self) -> bool:
        """Whether requests of several tenants compete: one waits while another tenant's waits or runs."""
        queues = self._queues
        if len(queues) == 1:
            return not self._slots.are_all_of(next(iter(queues)))
        return bool(queues)

    def __bool__(self) -> bool:
        return bool(self._queues)

    def keep_place(self, request: Request) -> None:
        """Keep a place for a request that is added later, before later arrivals with the same key."""
        self._places.keep(request)

    def give_up_place(self, request: Request) -> None:
        """Give up the place of a request that will not be added."""
        del self._places.kept[request.request_id]

    def add(self, request: Request, key: WaitingKey) -> None:
        """Queue a request after all with the same key of its tenant."""
        self._queue_of(request).add(request, key)

    def prepend(self, request: Request, key: WaitingKey) -> None:
        """Queue a request before all of its tenant with the same key."""
        self._queue_of(request).prepend(request, key)

    def rekey(self, request: Request, key: WaitingKey) -> None:
        """Move a queued request to its new place; order of arrival still breaks ties."""
        self._queue_of(request).rekey(request, key)

    def touch(self, tenant: str) -> None:
        """Note that the tenant's queue or number of slots has changed."""
        if self._only is None and tenant in self._queues:
            self._next_state += 1
            self._states[tenant] = self._next_state
            self._changed[tenant] = None

    def defer(self, tenant: str) -> bool:
        """Let all other tenants go first until ``resume``; False if there are none left."""
        if tenant in self._deferred or len(self._queues) <= 1:
            return False
        self._deferred.add(tenant)
        self.touch(tenant)
        return True

    def skip(self) -> None:
        """Pass over the request that is next until ``resume``, which puts it back where it was."""
        queue = self._first()
        assert queue is not None, "the queue is empty"
        entry = queue.set_aside()
        assert entry.request is not None
        self._taken_from(entry.request.tenant)
        self._skipped.append(entry)

    @property
    def num_skipped(self) -> int:
        """How many requests were passed over since the last ``resume``."""
        return len(self._skipped)

    def resume(self) -> None:
        """End what ``skip`` and ``defer`` began."""
        for entry in self._skipped:
            assert entry.request is not None
            self._queue_of(entry.request).put_back(entry)
        self._skipped.clear()
        deferred = self._deferred
        self._deferred = set()
        for tenant in deferred:
            self.touch(tenant)

    def peek(self) -> Request | None:
        """The request that is next, or None."""
        queue = self._first()
        return None if queue is None else queue.peek()

    def pop(self) -> Request:
        """Remove and return the request that is next."""
        queue = self._first()
        assert queue is not None, "the queue is empty"
        request = queue.pop()
        self._taken_from(request.tenant)
        return request

    def remove(self, request: Request) -> None:
        """Take a queued request out, wherever it is."""
        self._queues[request.tenant].remove(request)
        self._taken_from(request.tenant)

    def take_slot(self, request: Request) -> None:
        """Move a queued request to a slot in the batch."""
        is_overdue = self._is_overdue(request)
        self.remove(request)
        self._slots.take(request, is_overdue=is_overdue)
        self.touch(request.tenant)

    def leave_slot(self, request: Request) -> None:
        """Free the request's slot in the batch, if it has one."""
        if self._slots.give_back(request):
            self.touch(request.tenant)

    def first(self, count: int) -> list[Request]:
        """Roughly the first ``count`` requests, of at most ``count`` tenants, for a trace."""
        queues = islice(self._queues.values(), count)
        return list(islice(chain.from_iterable(queue.first(count) for queue in queues), count))

    def _queue_of(self, request: Request) -> RequestQueue:
        """The queue of the request's tenant, which is about to change."""
        tenant = request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._begin_queue(tenant)
        if self._only is None:
            self.touch(tenant)
        return queue

    def _begin_queue(self, tenant: str) -> RequestQueue:
        queue = self._queues[tenant] = RequestQueue(self._places)
        self._only = queue if len(self._queues) == 1 else None
        if len(self._queues) == 2:  # with one tenant no heads were kept
            self._heads.clear()
            for each in self._queues:
                self.touch(each)
        return queue

    def _taken_from(self, tenant: str) -> None:
        queues = self._queues
        if queues[tenant]:
            if self._only is None:
                self.touch(tenant)
            return
        del queues[tenant]
        self._only = next(iter(queues.values())) if len(queues) == 1 else None
        self._states.pop(tenant, None)
        self._changed.pop(tenant, None)

    def _first(self) -> RequestQueue | None:
        """The queue whose head is next."""
        if self._only is not None or not self._queues:
            return self._only
        self._tell_changed()
        heads = self._heads
        while True:
            _, _, tenant, state = heads[0]
            if self._states.get(tenant) == state:
                return self._queues[tenant]
            heapq.heappop(heads)

    def _tell_changed(self) -> None:
        if len(self._heads) > 64 + 4 * len(self._queues):  # most of them are out of date
            self._heads.clear()
            self._changed = dict.fromkeys(self._queues)
        for tenant in self._changed:
            head = self._queues[tenant].head()
            assert head is not None
            assert head.request is not None
            rank = self._slots.rank(tenant, is_overdue=self._is_overdue(head.request))
            rank = LAST if tenant in self._deferred else rank
            heapq.heappush(self._heads, (rank, head, tenant, self._states[tenant]))
        self._changed.clear()

    def __contains__(self, request: Request) -> bool:
        queue = self._queues.get(request.tenant)
        return queue is not None and request in queue

    def __len__(self) -> int:
        return sum(map(len, self._queues.values())) if self._queues else 0

    def __iter__(self) -> Iterator[Request]:
        """All requests, in no particular order."""
        return chain.from_iterable(self._queues.values())
