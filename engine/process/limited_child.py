"""For child processes that do work which clients could make endless or huge: messages on standard input and
output, and a memory limit."""

from __future__ import annotations

import resource
import struct
from pathlib import Path
from typing import IO

import msgspec

_LENGTH = struct.Struct(">I")
_STATM = Path("/proc/self/statm")


def write_message(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Writes a message, preceded by its length."""
    payload = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(payload)))
    stream.write(payload)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes | None:
    """Returns the next message; None at the end."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    payload = stream.read(length)
    return payload if len(payload) == length else None


def limit_memory(num_bytes: int) -> None:
    """Limits this process to ``num_bytes`` more memory than it uses now, if /proc shows how much that is."""
    if _STATM.exists():
        used = int(_STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes,) * 2)
