"""Limits per connection: time and size of a request's head, and a slot among all connections.

It handles requests that never become complete, which no application sees. It does not know endpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.exceptions import HTTPException
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from engine.api.errors import RETRY_AFTER_S, error_response
from engine.api.http.connection_shares import ConnectionShares
from engine.api.http.half_close import HalfClosed

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
LINGER_S = 5.0
"""Seconds for which the rest of a refused upload is read and discarded: a client that is cut off while it
sends may never read the error."""
NO_ROOM = "The server has its maximum number of connections, and none is idle."
WRITE_STALL_S = 300.0
"""A client that reads nothing of its response for this long is disconnected."""
_FRAMING = (b"content-length", b"transfer-encoding")


@dataclass(slots=True)
class ConnectionGuard:
    """Limits of a process's connections, and which of them are idle."""

    max_connections: int
    head_timeout_s: float
    owner_of: Callable[[Sequence[tuple[bytes, bytes]]], str] | None = None
    """Returns the owner of the key in the headers; None if keys have no owners."""
    shares: ConnectionShares[GuardedProtocol] = field(init=False)

    def __post_init__(self) -> None:
        self.shares = ConnectionShares(self.max_connections)

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> GuardedProtocol:
        """Creates a connection; uvicorn calls this like a protocol class."""
        return GuardedProtocol(self, config, server_state, app_state, _loop)

    def has_room(self, num_connections: int) -> bool:
        """Whether one more connection may stay. If necessary, closes the longest idle connection of the owner
        with the most."""
        if num_connections > self.max_connections:
            longest = self.shares.longest_idle()
            if longest is None:
                return False
            longest.transport.close()
        return True

    def may_say_whose(self, num_connections: int) -> bool:
        """Whether a connection beyond the limit may send its key: an owner with less than an equal share is
        still admitted. So there are never more than twice as many."""
        return self.owner_of is not None and num_connections <= 2 * self.max_connections


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's connection with limits; it refuses in the format of the API."""

    def __init__(
        self,
        guard: ConnectionGuard,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.cycle: RequestResponseCycle | None = None  # type: ignore[assignment]
        self._guard = guard
        self._refused = False
        self._unparsed_bytes = 0
        """Bytes received since the end of the last request, while the next head is incomplete."""
        self._head_bytes = 0
        self._reads_body = False
        self._skips_head = False
        """Whether the head being parsed has been parsed before."""
        self._is_on_top = False
        """Whether the connection is beyond the limit: it stays only for an owner with less than its share."""
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        guard = self._guard
        number = len(self.connections)
        guard.shares.opened(self)
        if guard.has_room(number):
            guard.shares.rests(self)
        elif guard.may_say_whose(number):
            self._is_on_top = True
        else:
            self._refuse(503, NO_ROOM)
            return
        self._start_timer(guard.head_timeout_s, self._head_timed_out)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.shares.closed(self)
        self._cancel_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Handles that the client closed its sending side. If its request is complete, it may still wait for
        the response; otherwise it has left: uvloop closes its connection some turns later, and its request is
        cancelled now."""
        if self.cycle is None or self.cycle.response_complete:
            return None
        if self._reads_body or self.scheme == "https":  # TLS cannot be half-closed
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            return None
        HalfClosed(self.cycle, self.loop)
        return True

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unparsed_bytes += len(data)
        self._parse(data)
        if not self._is_idle:
            self._unparsed_bytes = 0
        elif self._unparsed_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self._unparsed_bytes and self._timer is None:
            self._start_timer(self._guard.head_timeout_s, self._head_timed_out)

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            # The parser stops after the head, since data of an unsupported protocol would follow. The client
            # continues as if it had not offered the upgrade (RFC 9110, 7.8), and so does the server.
            self._read_on_without_upgrade()
            self._parse(data[upgrade.args[0] :])
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _read_on_without_upgrade(self) -> None:
        """Replaces the parser by one that has parsed this request's head without the upgrade, so that it
        knows where the body ends."""
        self.parser = HttpRequestParser(self)
        lines = [name + b": " + value for name, value in self.headers if name in _FRAMING]
        self._skips_head = True
        self.parser.feed_data(b"\r\n".join((b"POST / HTTP/1.1", *lines, b"", b"")))

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being read or answered; a head may be incomplete."""
        return not self._reads_body and (self.cycle is None or self.cycle.response_complete)

    # ---- the request ----

    def on_message_begin(self) -> None:
        if not self._skips_head:
            super().on_message_begin()
            self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        if not self._skips_head:
            super().on_url(url)
            self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._skips_head:
            super().on_header(name, value)
            self._count_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if self._skips_head:
            self._skips_head = False
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # A pipelined request is refused: before it is served, a disconnect would go unnoticed. The client
            # may retry on another connection; this one ends with the response that it waits for.
            self.cycle.keep_alive = False
            self._refused = True
            raise _Refused
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._refuse(400, f"A request needs one Host header, this one has {num_hosts}.")
            raise _Refused
        self._guard.shares.works(self)
        if self._guard.owner_of is not None:
            self._say_whose(self._guard.owner_of(self.headers))
        super().on_headers_complete()
        self._reads_body = True
        self._cancel_timer()

    def _say_whose(self, owner: str) -> None:
        self._guard.shares.is_of(self, owner)
        if self._is_on_top and not self._guard.shares.is_within_share(self):
            self._refuse(503, NO_ROOM)
            raise _Refused
        self._is_on_top = False

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser returns this for every head with an offer
        super().on_message_complete()
        self._reads_body = False
        self._unparsed_bytes = 0
        self._cancel_timer()

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse_head()
            raise _Refused

    # ---- responses ----

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self._guard.shares.rests(self)
        if self._reads_body:
            self._start_timer(LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Answers a request that is not HTTP; called by uvicorn."""
        self._refuse(400, msg)

    def _head_timed_out(self) -> None:
        if self._unparsed_bytes:
            self._refuse(408, f"The request's head took longer than {self._guard.head_timeout_s:g} s.")
        else:
            self.transport.close()  # a 408 could be taken for the response to a request in flight

    def _refuse_head(self) -> None:
        self._refuse(431, f"The request's head exceeds {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers.")

    def _refuse(self, status: int, message: str) -> None:
        """Answers and closes; any further input is discarded."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        headers = {"Connection": "close"} | ({"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {})
        response = error_response(HTTPException(status, message, headers))
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body))
        self.transport.close()

    # ---- a client that does not read ----

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # ---- the timer of the head, then of the rest of a refused body ----

    def _start_timer(self, seconds: float, then: Callable[[], object]) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, then)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Refused(Exception):
    """Stops the parser after a refusal."""
