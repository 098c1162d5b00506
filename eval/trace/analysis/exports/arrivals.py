"""Puts rows that are known at a request's end into the order of arrivals, while a trace is being read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Row = TypeVar("Row")


class InArrivalOrder(Generic[Row]):
    """Holds at most as many rows as there are requests between the oldest open one and the latest."""

    def __init__(self) -> None:
        self._arrived: deque[str] = deque()
        self._known: set[str] = set()
        self._rows: dict[str, Row | None] = {}

    def arrive(self, req_id: str) -> None:
        if req_id not in self._known:
            self._known.add(req_id)
            self._arrived.append(req_id)

    def end(self, req_id: str, row: Row | None) -> Iterator[Row]:
        """Returns all rows that can be written now; ``row`` is None for a request without one."""
        self.arrive(req_id)
        self._rows[req_id] = row
        while self._arrived and self._arrived[0] in self._rows:
            first = self._arrived.popleft()
            self._known.discard(first)
            ready = self._rows.pop(first)
            if ready is not None:
                yield ready
