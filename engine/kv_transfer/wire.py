"""What servers say to each other about leased KV, over TCP.

A frame is its length, in 4 bytes, and a message in msgpack. The answer to ``ReadBlocks`` is ``Granted`` and
then, for each chunk of blocks, in the order asked for: one byte, ``CHUNK`` or ``GONE``, and behind ``CHUNK``
the bytes of its blocks. The answer to ``LocateBlocks`` is ``Located``: the reader has a library read them,
and asks with ``ConfirmLease`` whether what it read was still the lease's. All else is answered by ``Noted``,
or by ``Refused``.
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
"""Names of a million blocks fit."""
HELLO_BYTES = 4096
"""Longest first message on a connection, and answer that holds no blocks' places."""
FRAME_TIME_S = 30.0
"""How long a message may take to come."""
PLACE_BYTES = 16
"""Most bytes of a block's name or place in a message."""
CHUNK_BYTES = 4 * 2**20
CHUNK, GONE = b"\x01", b"\x00"
_LENGTH = struct.Struct("!I")


class ReadBlocks(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Send the blocks of these names, which are in the lease."""

    lease_id: str
    fingerprint: str
    """Names the model and the layout of its KV: both sides must have the same."""
    names: list[bytes]


class LocateBlocks(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Say where the blocks of these names are, to be read there."""

    lease_id: str
    fingerprint: str
    names: list[bytes]
    library: str
    """Which reads them; the server must have given its pool to the same."""


class ConfirmLease(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Say whether the lease goes on: then none of its blocks has been overwritten."""

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
    """What kind of memory it is, as the library has it."""
    device: int
    address: int
    """The address of block 0."""
    block_bytes: int
    block_ids: list[int]


class Noted(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The lease is renewed or released, or goes on."""


class NotYet(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """There is no such lease so far: a worker may hear of one a moment after its reader. Ask again."""


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
    """The next message of a reader, of so many bytes at most; None if it has closed the connection.
    ``time_s``: for the message once it has begun; ``wait_s``: for its first byte, None as the socket says.

    ConnectionError, msgspec.DecodeError and TimeoutError if what comes is no message.
    """
    content = _receive_frame(connection, most_bytes, time_s, wait_s)
    return None if content is None else _asked.decode(content)


def receive_answer(connection: socket.socket, num_blocks: int = 0) -> Answer:
    """The answer to what was sent, which may hold the places of so many blocks; ConnectionError if there is
    none."""
    content = _receive_frame(connection, HELLO_BYTES + PLACE_BYTES * num_blocks, FRAME_TIME_S, None)
    if content is None:
        raise ConnectionError("the other server closed the connection")
    answer: Answer = _answer.decode(content)
    return answer


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer; ConnectionError if the other side stops before."""
    num_received = 0
    while num_received < len(buffer):
        count = connection.recv_into(buffer[num_received:])
        if not count:
            raise ConnectionError("the other server closed the connection")
        num_received += count


def chunks(block_ids: Sequence[int], block_bytes: int) -> Iterator[Sequence[int]]:
    """The blocks, so many at a time as go into one chunk."""
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
