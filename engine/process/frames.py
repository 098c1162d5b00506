"""Reads frames from untrusted peers in pieces as they arrive, bounded in size and time."""

from __future__ import annotations

import socket
import time

PIECE_BYTES = 2**16


def receive_exactly(connection: socket.socket, count: int, deadline: float | None) -> bytearray:
    """Returns ``count`` bytes; memory grows with what has arrived. ``deadline``: of ``time.monotonic``; None:
    the socket's own timeout per piece. ConnectionError if the peer closes before, TimeoutError if it is
    slow."""
    content = bytearray()
    before = connection.gettimeout()
    try:
        while len(content) < count:
            if deadline is not None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("the other side is too slow")
                connection.settimeout(left_s if before is None else min(left_s, before))
            piece = connection.recv(min(PIECE_BYTES, count - len(content)))
            if not piece:
                raise ConnectionError("the connection was closed")
            content += piece
    finally:
        connection.settimeout(before)
    return content


def frame_length(head: bytes | bytearray, most: int) -> int:
    """The length encoded in four bytes; ConnectionError if it is above ``most``."""
    length = int.from_bytes(head, "big")
    if length > most:
        raise ConnectionError(f"a message of {length} bytes, above the {most} that are allowed")
    return length
