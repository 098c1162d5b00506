"""The protocol by which servers exchange leased KV, over TCP.

A frame is its length, in 4 bytes, and a message in msgpack. The answer to ``ReadBlocks`` is ``Granted`` and
then, for each chunk of blocks, in the order of the request: one byte, ``CHUNK`` or ``GONE``, and after
``CHUNK`` the bytes of its blocks. The answer to ``LocateBlocks`` is ``Located``: the reader has a library
read them, and checks with ``ConfirmLease`` that the lease still held what it read. All else is answered by
``Noted``, or by ``Refused``.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from engine.process.frames import frame_length, receive_exactly

MAX_FRAME_BYTES = 64 * 2**20
"""Largest frame: the names of a million blocks fit."""
HELLO_BYTES = 4096
"""Longest first message on a connection, and longest answer without places of blocks."""
FRAME_TIME_S = 30.0
"""How long a message may take to arrive."""
PLACE_BYTES = 16
"""Most bytes of a block's name or place in a message."""
CHUNK_BYTES = 4 * 2**20
CHUNK = b"\x01"
GONE = b"\x00"
_LENGTH = struct.Struct("!I")


class ReadBlocks(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Requests the blocks with these names, which are in the lease."""

    lease_id: str
    fingerprint: str
    """Names the model and the layout of its KV: both sides must have the same."""
    names: list[bytes]


class LocateBlocks(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Requests the places of the blocks with these names, to be read there."""

    lease_id: str
    fingerprint: str
    names: list[bytes]
    library: str
    """Library that reads them; the server must have given its pool to the same."""


class ConfirmLease(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Asks whether the lease still holds: then none of its blocks has been overwritten."""

    lease_id: str


class RenewLease(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The reader needs more time."""

    lease_id: str


class ReleaseLease(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The blocks have been read, or are not wanted."""

    lease_id: str


Asked = ReadBlocks | LocateBlocks | ConfirmLease | RenewLease | ReleaseLease


class Granted(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The blocks follow."""

    block_bytes: int


class Located(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Where the blocks are in the memory of the server that leases them out."""

    agent: bytes
    """How the library finds that memory."""
    memory: str
    """Kind of that memory, in the library's terms."""
    device: int
    address: int
    """The address of block 0."""
    block_bytes: int
    block_ids: list[int]


class Noted(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The lease is renewed or released, or still holds."""


class NotYet(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """There is no such lease yet: a worker may learn of one a moment after its reader. Try again."""


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The lease is gone, or the servers do not fit together."""

    reason: str


Answer = Granted | Located | Noted | NotYet | Refused
Message = TypeVar("Message")

_encode = msgspec.msgpack.Encoder().encode
_asked = msgspec.msgpack.Decoder(Asked)
_answer = msgspec.msgpack.Decoder(Answer)


def send(connection: socket.socket, message: Asked | Answer) -> None:
    """Send one frame."""
    content = _encode(message)
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive_asked(
    connection: socket.socket, most_bytes: int, time_s: float = FRAME_TIME_S, wait_s: float | None = None
) -> Asked | None:
    """The next message of a reader, of at most ``most_bytes``; None if it has closed the connection.

    ``time_s``: limit for the message once it has begun; ``wait_s``: limit for its first byte, None: the
    socket's. ConnectionError, msgspec.DecodeError or TimeoutError if no valid message arrives.
    """
    content = _receive_frame(connection, most_bytes, time_s, wait_s)
    return None if content is None else _asked.decode(content)


def receive_answer(connection: socket.socket, num_blocks: int = 0) -> Answer:
    """The answer to what was sent, which may hold the places of ``num_blocks`` blocks; ConnectionError if
    there is none."""
    content = _receive_frame(connection, HELLO_BYTES + PLACE_BYTES * num_blocks, FRAME_TIME_S, None)
    if content is None:
        raise ConnectionError("the other server closed the connection")
    answer: Answer = _answer.decode(content)
    return answer


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer; ConnectionError if the other side stops early."""
    num_received = 0
    while num_received < len(buffer):
        count = connection.recv_into(buffer[num_received:])
        if not count:
            raise ConnectionError("the other server closed the connection")
        num_received += count


def chunks(block_ids: Sequence[int], block_bytes: int) -> Iterator[Sequence[int]]:
    """Split the blocks into chunks."""
    size = blocks_per_chunk(block_bytes)
    for start in range(0, len(block_ids), size):
        yield block_ids[start : start + size]


def blocks_per_chunk(block_bytes: int) -> int:
    """How many blocks go into one chunk, at least one."""
    return max(1, CHUNK_BYTES // block_bytes)


def _receive_frame(
    connection: socket.socket, most_bytes: int, time_s: float, wait_s: float | None
) -> bytes | None:
    before = connection.gettimeout()
    if wait_s is not None:
        connection.settimeout(wait_s)
    try:
        first = connection.recv(1)
    finally:
        connection.settimeout(before)
    if not first:
        return None
    deadline = time.monotonic() + time_s
    head = first + receive_exactly(connection, _LENGTH.size - 1, deadline)
    length = frame_length(head, min(most_bytes, MAX_FRAME_BYTES))
    return bytes(receive_exactly(connection, length, deadline))
