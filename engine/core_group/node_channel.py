"""The connection between a server and an engine core on another machine: its messages and heartbeats.

A message is its length, in 4 bytes, and msgpack; what is received is never run as code. A side that is silent
for ``SILENCE_S`` counts as gone.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

import msgspec

from engine.process.frames import frame_length, receive_exactly
from engine.process.network import keep_alive
from engine.records.messages import EngineReady, EngineStartFailed

PROTOCOL = 1
BEAT_S = 0.4
SILENCE_S = 2.0
MAX_MESSAGE_BYTES = 2**30
HELLO_BYTES = 64 * 2**10
HELLO_S = 5.0
"""Limits of a connection's first message, in bytes and seconds: it may be a stranger's."""
MESSAGE_S = 600.0
"""How long a message of a node may take to arrive."""
TOKEN_VARIABLE = "CONTINUUM_GROUP_TOKEN"
_LENGTH = struct.Struct("!I")


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A node can run this core, with these settings."""

    protocol: int
    token: str
    engine: int
    settings: dict[str, str]
    """Settings that all cores of a group must share, by name."""


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The node may start the core."""


class Refuse(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The node may not join; if ``is_final``, it need not try again."""

    reason: str
    is_final: bool


class Ready(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The core has loaded its model."""

    ready: EngineReady
    pid: int


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The core could not start."""

    failure: EngineStartFailed


class Forward(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Frames for the core's input, or from it for one of its clients."""

    client_index: int
    frames: list[bytes]


class Ended(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The core has exited."""

    exit_code: int | None


class Beat(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A heartbeat."""


NodeMessage = Hello | Welcome | Refuse | Ready | Failed | Forward | Ended | Beat

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(NodeMessage)
_BEAT = Beat()


class NodeChannel:
    """One end of a connection. ``send`` may be called on any thread, ``receive`` on one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._closed = threading.Event()
        connection.settimeout(SILENCE_S)
        keep_alive(connection)

    def beat(self) -> None:
        """Send heartbeats to the other side from now on."""
        threading.Thread(target=self._beat, name="node-beat", daemon=True).start()

    def _beat(self) -> None:
        with suppress(OSError):
            while not self._closed.wait(BEAT_S):
                self.send(_BEAT)

    def send(self, message: NodeMessage) -> None:
        """Send a message; OSError if the other side has gone."""
        content = _encode(message)
        with self._sending:
            self._connection.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self, *, is_first: bool = False) -> NodeMessage:
        """The next message except beats; OSError if the other side has gone or sends no valid message.
        ``is_first``: it is a stranger's, with tight limits of time and size."""
        most = HELLO_BYTES if is_first else MAX_MESSAGE_BYTES
        time_s = HELLO_S if is_first else MESSAGE_S
        hello_until = time.monotonic() + HELLO_S if is_first else None
        while True:
            length = frame_length(receive_exactly(self._connection, _LENGTH.size, hello_until), most)
            deadline = time.monotonic() + time_s
            try:
                message: NodeMessage = _decoder.decode(receive_exactly(self._connection, length, deadline))
            except msgspec.DecodeError as error:
                raise ConnectionError(f"not a message of a node: {error}") from error
            if not isinstance(message, Beat):
                return message

    def close(self) -> None:
        """Close the connection: a waiting ``receive`` raises OSError. Thread-safe, may be called again."""
        self._closed.set()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
