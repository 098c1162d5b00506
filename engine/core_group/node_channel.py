"""The connection between a server and an engine core on another machine: what is said, and that both live.

A message is its length, in 4 bytes, and msgpack; nothing that comes is ever run. Who is silent for
``SILENCE_S`` is gone.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

import msgspec

from engine.messages import EngineReady, EngineStartFailed
from engine.process.frames import frame_length, receive_exactly
from engine.process.network import keep_alive

PROTOCOL = 1
BEAT_S = 0.4
SILENCE_S = 2.0
MAX_MESSAGE_BYTES = 2**30
HELLO_BYTES = 64 * 2**10
HELLO_S = 5.0
"""How large a connection's first message may be and how long it may take: it may be a stranger's."""
MESSAGE_S = 600.0
"""How long a message of a node may take to come."""
TOKEN_VARIABLE = "CONTINUUM_GROUP_TOKEN"
_LENGTH = struct.Struct("!I")


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A node has a place for this core, and is configured like this."""

    protocol: int
    token: str
    engine: int
    settings: dict[str, str]
    """What all cores of a group must have in common, by name."""


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The node may start the core."""


class Refuse(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The node may not join: nothing is gained by asking again if it is final."""

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
    """Still there."""


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
        """Let the other side know, from now on, that this one lives."""
        threading.Thread(target=self._beat, name="node-beat", daemon=True).start()

    def _beat(self) -> None:
        with suppress(OSError):
            while not self._closed.wait(BEAT_S):
                self.send(_BEAT)

    def send(self, message: NodeMessage) -> None:
        """OSError if the other side has gone."""
        content = _encode(message)
        with self._sending:
            self._connection.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self, *, is_first: bool = False) -> NodeMessage:
        """The next message but for beats; OSError if the other side has gone or says what is no message.
        ``is_first``: of a stranger, who has little time and room."""
        most = HELLO_BYTES if is_first else MAX_MESSAGE_BYTES
        time_s = HELLO_S if is_first else MESSAGE_S
        hello_until = time.monotonic() + HELLO_S if is_first else None
        while True:
            length = frame_length(receive_exactly(self._connection, _LENGTH.size, hello_until), most)
            deadline = time.monotonic() + time_s
            try:
                message: NodeMessage = _decoder.decode(receive_exactly(self._connection, length, deadline))
            except msgspec.DecodeError as error:
                raise ConnectionError(f"no message of a node: {error}") from error
            if not isinstance(message, Beat):
                return message

    def close(self) -> None:
        """May be called on any thread, and again: who receives gets an OSError."""
        self._closed.set()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
