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
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

MAX_FRAME_BYTES = 64 * 2**20
"""Names of a million blocks fit."""
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


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The lease is gone, or the servers do not fit together."""

    reason: str


Answer = Granted | Located | Noted | Refused
Message = TypeVar("Message")

_encode = msgspec.msgpack.Encoder().encode
_asked = msgspec.msgpack.Decoder(Asked)
_answer = msgspec.msgpack.Decoder(Answer)


def send(connection: socket.socket, message: Asked | Answer) -> None:
    """Send one frame."""
    content = _encode(message)
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive_asked(connection: socket.socket) -> Asked | None:
    """The next message of a reader; None if it has closed the connection.

    ConnectionError, msgspec.DecodeError and TimeoutError if what comes is no message.
    """
    content = _receive_frame(connection)
    return None if content is None else _asked.decode(content)


def receive_answer(connection: socket.socket) -> Answer:
    """The answer to what was sent; ConnectionError if there is none."""
    content = _receive_frame(connection)
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


def _receive_frame(connection: socket.socket) -> bytes | None:
    first = connection.recv(1)
    if not first:
        return None
    rest = bytearray(_LENGTH.size - 1)
    receive_into(connection, memoryview(rest))
    (length,) = _LENGTH.unpack(first + rest)
    if length > MAX_FRAME_BYTES:
        raise ConnectionError(f"a message of {length} bytes, above the {MAX_FRAME_BYTES} that are allowed")
    content = bytearray(length)
    receive_into(connection, memoryview(content))
    return bytes(content)
