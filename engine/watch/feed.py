"""A viewer's queue of trace events since its last look; it is bounded and ends with the viewer's lease."""

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
"""Maximum number of events between two looks; later ones are left out."""
LEASE_S = 10.0
"""A viewer that has not looked for this long is removed at the next event."""

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
        """Extends the lease, since the viewer has looked."""
        self._expires_s = now + LEASE_S

    def take(self) -> tuple[list[Watched], int]:
        """Returns the events since the last call, and how many were left out."""
        taken = self._events, self._num_left_out
        self._events = []
        self._num_left_out = 0
        return taken
