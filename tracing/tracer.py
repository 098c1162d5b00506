"""Sends the events of a trace to a file, a viewer, both, or nowhere; this may change at any step. It does not
know the meaning of the events.
"""

from __future__ import annotations

from typing import Protocol

from tracing.events import TraceEvent


class TraceSink(Protocol):
    """Receives events, like a ``TraceWriter``: never waits, never raises, never changes them."""

    def emit(self, event: TraceEvent) -> None: ...


class Tracer:
    """Sends events to sinks. An emitter checks ``on`` first: without a sink, no events are made.

    Not thread safe: sinks are added and removed between steps, under the lock that steps take.
    """

    def __init__(self, *sinks: TraceSink) -> None:
        self._sinks = sinks
        self.on = bool(sinks)
        """Whether there is any sink."""

    def add(self, sink: TraceSink) -> None:
        self._sinks = (*self._sinks, sink)
        self.on = True

    def remove(self, sink: TraceSink) -> None:
        """Removes a sink; it is no error if the sink was removed before."""
        self._sinks = tuple(each for each in self._sinks if each is not sink)
        self.on = bool(self._sinks)

    def emit(self, event: TraceEvent) -> None:
        """Sends an event to all sinks; it must not be changed afterwards."""
        for sink in self._sinks:
            sink.emit(event)
