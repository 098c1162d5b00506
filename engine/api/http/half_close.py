"""Half-closed connections: finds out whether the client still waits for its response, or has left.

Both look the same, since its sending side is closed. Only a client that has left refuses data. So the first
bytes of the response, which are always the same, are sent early as a probe.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

STATUS_LINE_STARTS = (b"H", b"T", b"T", b"P/1.1 ")
"""The start of every response's status line, sent in pieces."""
CHUNK_START = b"0"
"""The start of the next chunk's length, which may have leading zeros."""
PROBE_AFTER_S = (0.0, 0.05, 1.0, 10.0)
"""Time between two probes: a refusal arrives after a round trip, and the next write reports it."""


class HalfClosed:
    """Probes whether the client is still there until its response is complete."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._loop = loop
        self._transport = cycle.transport
        self._probes = list(zip(PROBE_AFTER_S, STATUS_LINE_STARTS, strict=True))
        self._told = b""
        """The part of a status line that has been sent."""
        cycle.keep_alive = False  # there is no further request
        self._probe()

    def _probe(self) -> None:
        if not self._probes or self._transport.is_closing() or self._cycle.response_complete:
            return
        _, start = self._probes.pop(0)
        if not self._cycle.response_started:
            self._cycle.transport = _Begun(self._cycle, self._transport, self._told + start)  # type: ignore[assignment]
            self._told += start
            self._transport.write(start)
        elif self._cycle.chunked_encoding and self._cycle.scope["method"] != "HEAD":
            self._transport.write(CHUNK_START)
        if self._probes:
            self._loop.call_later(self._probes[0][0], self._probe)


class _Begun:
    """A transport whose response has begun."""

    def __init__(self, cycle: RequestResponseCycle, transport: asyncio.Transport, sent: bytes) -> None:
        self._cycle = cycle
        self._transport = transport
        self._sent = sent

    def write(self, data: bytes) -> None:
        if data.startswith(self._sent):
            self._cycle.transport = self._transport
            data = data[len(self._sent) :]
        self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
