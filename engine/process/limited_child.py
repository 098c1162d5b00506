"""What processes have in common that do for a server what clients may make endless or huge: messages on
their standard input and output, and a limit on memory."""

from __future__ import annotations

import resource
import struct
from pathlib import Path
from typing import IO

import msgspec

_LENGTH = struct.Struct(">I")
_STATM = Path("/proc/self/statm")


def write_message(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Write a message behind its length."""
    payload = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(payload)))
    stream.write(payload)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes | None:
    """The next message; None at the end."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    payload = stream.read(length)
    return payload if len(payload) == length else None


def limit_memory(num_bytes: int) -> None:
    """Let this process have so many bytes more than now, where the system tells what it has."""
    if _STATM.exists():
        used = int(_STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes,) * 2)
