"""HTTP as bytes on a socket, for tests of things that no client library does."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 30.0


def connect(url: str) -> socket.socket:
    """Connects to the server at this address; the caller closes the connection."""
    address = urlsplit(url)
    assert address.hostname is not None
    connection = socket.create_connection((address.hostname, address.port or 80), PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def post_head(path: str, *headers: str) -> bytes:
    """The complete head of a POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def post(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return post_head(path, f"Content-Length: {len(content)}") + content


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """Status, headers (names in lower case) and the part of the body read so far."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


def read_answer(connection: socket.socket, until: bytes | None = None) -> RawAnswer:
    """Reads the next answer: to its announced length, or until ``until`` is in its body, or to the end."""
    data = b""
    while not _complete(data, until):
        more = connection.recv(65536)
        if not more:
            break
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return RawAnswer(int(lines[0].split()[1]), headers, body)


def _complete(data: bytes, until: bytes | None) -> bool:
    head, end, body = data.partition(b"\r\n\r\n")
    if not end:
        return False
    if until is not None:
        return until in body
    _, announced, length = head.lower().partition(b"content-length: ")
    return bool(announced) and len(body) >= int(length.split(b"\r\n")[0])


def is_closed_within(connection: socket.socket, seconds: float) -> bool:
    """Whether the server closes the connection in time; discards what it sends before."""
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True
