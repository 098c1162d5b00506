"""What one viewer has yet to be told: a bounded queue of trace events that ends with its lease."""

from __future__ import annotations

from collections.abc import Callable

from tracing.events import (
    JobEvent,
    PinEvent,
    PrefixCacheEvent,
    RequestArrived,
    RequestsEnded,
    StepDecision,
    StepOutput,
    TraceEvent,
)

CAPACITY = 4096
"""Events between two looks; what is more is left out."""
LEASE_S = 10.0
"""A viewer that has not looked for so long has gone, and is forgotten with the next event."""

Watched = JobEvent | PinEvent | PrefixCacheEvent | RequestArrived | RequestsEnded | StepDecision | StepOutput


class Feed:
    """A sink of trace events. Not thread safe: used under the lock of the core."""

    def __init__(self, on_expiry: Callable[[Feed], None]) -> None:
        self._on_expiry = on_expiry
        self._expires_s = 0.0
        self._events: list[Watched] = []
        self._num_left_out = 0

    def emit(self, event: TraceEvent) -> None:
        if not isinstance(event, Watched):
            return
        if event.now > self._expires_s:
            self._on_expiry(self)
        elif len(self._events) < CAPACITY:
            self._events.append(event)
        else:
            self._num_left_out += 1

    def renew(self, now: float) -> None:
        """Its viewer is there."""
        self._expires_s = now + LEASE_S

    def take(self) -> tuple[list[Watched], int]:
        """Events since the last call, and how many were left out of them."""
        taken = self._events, self._num_left_out
        self._events, self._num_left_out = [], 0
        return taken
