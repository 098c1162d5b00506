"""Decompresses bodies in gzip, deflate or zstd, within a size limit.

They are decompressed in chunks, so a kilobyte that expands to a gigabyte costs no more than the
limit.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Iterator
from typing import Protocol

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api.http.middleware import refusal

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdDecompressor, ZstdError
else:
    from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

PIECE_BYTES = 256 * 1024
"""Size of a decompressed chunk; between two chunks other connections are served."""
ENCODINGS = ("gzip", "deflate", "zstd")
_MAX_WINDOW_LOG = 23
"""The largest zstd window: 8 MiB, which every decoder must support (RFC 8878, 3.1.1.1.2)."""
_GZIP = 31
_ZLIB = 15
_PLAIN = -15
"""Codes of zlib for the container formats."""


class _Unpacker(Protocol):
    """Decompresses one member or frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def unpack(self, data: bytes) -> bytes:
        """Returns at most PIECE_BYTES of output; keeps unread input."""

    @property
    def has_more(self) -> bool:
        """Whether there may be output without further input."""


class _Zlib:
    def __init__(self, window_bits: int) -> None:
        self._zlib = zlib.decompressobj(window_bits)
        self._is_full = False

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    @property
    def has_more(self) -> bool:
        return bool(self._zlib.unconsumed_tail) or self._is_full

    def unpack(self, data: bytes) -> bytes:
        piece = self._zlib.decompress(self._zlib.unconsumed_tail + data, PIECE_BYTES)
        self._is_full = len(piece) == PIECE_BYTES
        return piece


class _Zstd:
    def __init__(self) -> None:
        self._zstd = ZstdDecompressor(options={DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})

    @property
    def eof(self) -> bool:
        return self._zstd.eof

    @property
    def unused_data(self) -> bytes:
        return self._zstd.unused_data

    @property
    def has_more(self) -> bool:
        return not self._zstd.eof and not self._zstd.needs_input

    def unpack(self, data: bytes) -> bytes:
        return self._zstd.decompress(data, PIECE_BYTES)


class _Body:
    """Decompresses a body, member by member."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._unpacker: _Unpacker | None = None

    @property
    def is_whole(self) -> bool:
        return self._unpacker is not None and self._unpacker.eof

    def unpack(self, data: bytes) -> Iterator[bytes]:
        """Yields the chunks that are available now."""
        while data or (self._unpacker is not None and self._unpacker.has_more):
            if self._unpacker is None or self._unpacker.eof:
                self._unpacker = self._begin(data)
            yield self._unpacker.unpack(data)
            data = self._unpacker.unused_data if self._unpacker.eof else b""

    def _begin(self, data: bytes) -> _Unpacker:
        if self._encoding == "zstd":
            return _Zstd()
        if self._encoding == "gzip":
            return _Zlib(_GZIP)
        # Half of all clients omit the zlib header that the standard requires of deflate.
        has_header = data[0] & 0x0F == 8 and (len(data) < 2 or (data[0] * 256 + data[1]) % 31 == 0)
        return _Zlib(_ZLIB if has_header else _PLAIN)


class ContentEncodingMiddleware:
    """Decompresses bodies; 415 for an unknown encoding, 413 for more than ``max_bytes`` of content."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        encoding = _encoding(scope)
        if encoding is None:
            await self._app(scope, receive, send)
        elif encoding not in ENCODINGS:
            error = HTTPException(
                415,
                f"Content-Encoding {encoding[:40]!r} is not supported; use one of {', '.join(ENCODINGS)}.",
                {"Accept-Encoding": ", ".join(ENCODINGS)},
            )
            await refusal(error, scope)(scope, receive, send)
        else:
            await self._app(scope, self._unpacked(encoding, receive), send)

    def _unpacked(self, encoding: str, receive: Receive) -> Receive:
        """Wraps ``receive``; errors are raised where the body is read, so that the endpoint formats them."""
        body = _Body(encoding)
        num_bytes = 0
        is_done = False

        async def receive_unpacked() -> Message:
            nonlocal num_bytes, is_done
            message = await receive()
            if is_done or message["type"] != "http.request":
                return message
            pieces: list[bytes] = []
            try:
                for piece in body.unpack(message.get("body", b"")):
                    num_bytes += len(piece)
                    if num_bytes > self._max_bytes:
                        raise HTTPException(
                            413, f"The request's decompressed body exceeds {self._max_bytes} bytes."
                        )
                    pieces.append(piece)
                    await asyncio.sleep(0)
            except (zlib.error, ZstdError):
                raise HTTPException(400, f"The request's body is not {encoding}.") from None
            is_done = not message.get("more_body", False)
            if is_done and not body.is_whole:
                raise HTTPException(400, f"The request's body is cut off, or is not {encoding}.")
            return {**message, "body": b"".join(pieces)}

        return receive_unpacked


def _encoding(scope: Scope) -> str | None:
    """The content encoding of the request; None if there is nothing to decompress."""
    if scope["type"] != "http":
        return None
    values = Headers(scope=scope).getlist("content-encoding")
    named = [name.strip().lower() for line in values for name in line.split(",")]
    named = [name.removeprefix("x-") for name in named if name not in ("", "identity")]
    return ", ".join(named) or None
