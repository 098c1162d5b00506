"""A persistent HTTP connection to any server. The client shares the machine with the server it measures, so
it does little while it waits and parses the response afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

from eval.errors import ServerError

OK = 200
CHUNK_BYTES = 1 << 16
MAX_COMPLAINT_BYTES = 200


@dataclass(slots=True)
class Answer:
    """The response, piece by piece; the parser calls its methods."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """The pieces, each with the ``time.monotonic`` of its arrival."""
    complete: bool = False
    is_last: bool = False
    """Whether the server closes the connection afterwards."""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"connection" and value.lower() == b"close":
            self.is_last = True

    def on_body(self, piece: bytes) -> None:
        self.pieces.append((time.monotonic(), piece))

    def on_message_complete(self) -> None:
        self.complete = True

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def events(self) -> Iterator[tuple[float, bytes]]:
        """Yields the data of each event except [DONE], with the arrival time of its last byte."""
        rest = b""
        for moment, piece in self.pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield moment, data


class Connection:
    """A connection, opened on first use and reopened if the server closed it. One request at a time."""

    def __init__(self, base_url: str) -> None:
        address = urlsplit(base_url)
        self._host = address.hostname
        self._port = address.port
        self._name = address.netloc
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def request(self, method: str, path: str, payload: bytes = b"") -> bytes:
        """The bytes of a request."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._name}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        )
        return head.encode() + payload

    async def ask(self, request: bytes) -> Answer:
        """Sends a request and reads the response. ServerError if its status is not 200; OSError if
        refused."""
        was_open = self._streams is not None
        try:
            return await self._ask_once(request)
        except (ConnectionError, EOFError):
            self.close()
            if not was_open:
                raise
        return await self._ask_once(request)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None

    async def _ask_once(self, request: bytes) -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(request)
        answer = Answer()
        parser = httptools.HttpResponseParser(answer)
        while not answer.complete:
            data = await reader.read(CHUNK_BYTES)
            if not data:
                self.close()
                raise EOFError("the server closed the connection before its response was complete")
            try:
                parser.feed_data(data)
            except httptools.HttpParserError as error:
                self.close()
                raise ServerError(f"the server's response is not HTTP: {error}") from error
        if answer.is_last:  # the parser cannot parse another: every complete message is its last
            self.close()
        if parser.get_status_code() != OK:
            complaint = answer.body[:MAX_COMPLAINT_BYTES].decode(errors="replace")
            raise ServerError(f"HTTP {parser.get_status_code()}: {complaint}")
        return answer
