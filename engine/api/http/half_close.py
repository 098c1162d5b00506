"""A client that has said it will send no more: does it still wait for its answer, or has it gone?

Both look the same: the end of what it sends. Only who has gone refuses what it is sent. So the answer begins
before it is known, with bytes that it begins with whatever it is.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

STATUS_LINE_STARTS = (b"H", b"T", b"T", b"P/1.1 ")
"""Of every answer; sent piece by piece."""
CHUNK_START = b"0"
"""Of the next chunk's length, whose digits may have zeros before them."""
PROBE_AFTER_S = (0.0, 0.05, 1.0, 10.0)
"""The first refusal comes back after a round trip; what is sent then tells of it."""


class HalfClosed:
    """Asks whether the client is still there, as long as its answer is not complete."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._loop = loop
        self._transport = cycle.transport
        self._probes = list(zip(PROBE_AFTER_S, STATUS_LINE_STARTS, strict=True))
        self._told = b""
        """What has been sent of a status line."""
        cycle.keep_alive = False  # no other request will come
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
    """The transport of an answer whose first bytes have been sent."""

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
