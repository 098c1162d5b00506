"""Where the events of a trace go: to a file, to a viewer, to both, or nowhere. It may change at any
step. Knows nothing of what the events mean.
"""

from __future__ import annotations

from typing import Protocol

from tracing.events import TraceEvent


class TraceSink(Protocol):
    """Takes events, as a ``TraceWriter`` does: never waits, never raises, changes nothing in them."""

    def emit(self, event: TraceEvent) -> None: ...


class Tracer:
    """What emits asks ``on`` first: while there is no sink, no events are made.

    Not thread safe: sinks come and go between steps, under the lock that steps take.
    """

    def __init__(self, *sinks: TraceSink) -> None:
        self._sinks = sinks
        self.on = bool(sinks)
        """Whether there is any sink."""

    def add(self, sink: TraceSink) -> None:
        self._sinks = (*self._sinks, sink)
        self.on = True

    def remove(self, sink: TraceSink) -> None:
        """Remove a sink; a missing one was removed before, which is no error."""
        self._sinks = tuple(each for each in self._sinks if each is not sink)
        self.on = bool(self._sinks)

    def emit(self, event: TraceEvent) -> None:
        """Hand an event to all sinks; nothing in it may be changed afterwards."""
        for sink in self._sinks:
            sink.emit(event)
