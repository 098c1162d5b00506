"""Waiting requests in the policy's order: a heap whose keys may change, ties in order of arrival."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.core.policy import WaitingKey
from engine.core.request import Request


class QueueEntry:
    """An entry of the heap, whose ``request`` is None once it has left."""

    __slots__ = ("key", "request", "sequence")

    def __init__(self, key: WaitingKey, sequence: int, request: Request) -> None:
        self.key = key
        self.sequence = sequence
        self.request: Request | None = request

    def __lt__(self, other: QueueEntry) -> bool:
        if self.key == other.key:
            return self.sequence < other.sequence
        return self.key < other.key


class Places:
    """Numbers the places at the back and at the front of one queue, or of several that are compared."""

    __slots__ = ("back", "front", "kept")

    def __init__(self) -> None:
        self.back = 0
        self.front = -1
        self.kept: dict[str, int] = {}
        """Places that are kept for requests that are in no queue yet."""

    def keep(self, request: Request) -> None:
        """Keep the next place at the back for the request."""
        self.kept[request.request_id] = self.back
        self.back += 1

    def take(self, request: Request) -> int:
        """The place that was kept for the request, or else the next one at the back."""
        place = self.kept.pop(request.request_id, None)
        if place is None:
            place = self.back
            self.back += 1
        return place


class RequestQueue:
    """Add, prepend, pop, remove and re-key in O(log n); removed entries are dropped when they surface."""

    def __init__(self, places: Places | None = None) -> None:
        self._heap: list[QueueEntry] = []
        self._entries: dict[str, QueueEntry] = {}
        self._places = places or Places()

    def keep_place(self, request: Request) -> None:
        """Keep a place for a request that is added later, before later arrivals with the same key."""
        self._places.keep(request)

    def give_up_place(self, request: Request) -> None:
        """Give up the place of a request that will not be added."""
        del self._places.kept[request.request_id]

    def add(self, request: Request, key: WaitingKey) -> None:
        """Queue a request after all with the same key, or where its place was kept."""
        self._push(QueueEntry(key, self._places.take(request), request))

    def prepend(self, request: Request, key: WaitingKey) -> None:
        """Queue a request before all with the same key."""
        self._push(QueueEntry(key, self._places.front, request))
        self._places.front -= 1

    def rekey(self, request: Request, key: WaitingKey) -> None:
        """Move a queued request to its new place among its peers; order of arrival still breaks ties."""
        entry = self._entries[request.request_id]
        if entry.key != key:
            entry.request = None
            self._push(QueueEntry(key, entry.sequence, request))

    def peek(self) -> Request | None:
        """The request that is next, or None."""
        head = self.head()
        return None if head is None else head.request

    def head(self) -> QueueEntry | None:
        """The entry of the request that is next, or None."""
        heap = self._heap
        while heap:
            if heap[0].request is not None:
                return heap[0]
            heapq.heappop(heap)
        return None

    def pop(self) -> Request:
        """Remove and return the request that is next."""
        request = self.peek()
        assert request is not None, "the queue is empty"
        heapq.heappop(self._heap)
        del self._entries[request.request_id]
        return request

    def set_aside(self) -> QueueEntry:
        """Pop the head, to be put back where it was with ``put_back``."""
        head = self.head()
        assert head is not None, "the queue is empty"
        assert head.request is not None
        del self._entries[head.request.request_id]
        return heapq.heappop(self._heap)

    def put_back(self, entry: QueueEntry) -> None:
        """Queue again what ``set_aside`` has returned."""
        self._push(entry)

    def remove(self, request: Request) -> None:
        """Take a queued request out, wherever it is."""
        self._entries.pop(request.request_id).request = None

    def first(self, count: int) -> list[Request]:
        """Roughly the first ``count`` requests in order, for a trace: removed ones count, but are missing.

        Only the top of the heap is visited: each entry adds its two children to the candidates.
        """
        heap = self._heap
        found = []
        candidates = [(heap[0], 0)] if heap else []
        for _ in range(min(count, len(heap))):
            entry, place = heapq.heappop(candidates)
            if entry.request is not None:
                found.append(entry.request)
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heapq.heappush(candidates, (heap[child], child))
        return found

    def _push(self, entry: QueueEntry) -> None:
        assert entry.request is not None
        self._entries[entry.request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """All requests, in no particular order."""
        return (e.request for e in self._entries.values() if e.request is not None)
