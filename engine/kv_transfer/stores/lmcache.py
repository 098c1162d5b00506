"""KV in an LMCache server (``lmcache_server HOST PORT``), by the messages of LMCache's ``lm://`` remote.

Each request is a head of nine integers and a key, each answer one of nine integers, then the content
(``lmcache/v1/protocol.py``, version 0.5.6). The server evicts nothing and knows no deletion: its memory grows
until it is started again.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence
from enum import IntEnum

from engine.errors import ConfigError
from engine.kv_transfer.kv_store import StoreConfig

_REQUEST = struct.Struct("=9i150s")
_ANSWER = struct.Struct("=9i")
_BINARY = 4
"""``MemoryFormat.BINARY``: bytes without a shape."""
_UINT8 = 6
_SUCCESS = 200
_NOTHING = memoryview(b"")
TIMEOUT_S = 10.0


class _Command(IntEnum):
    PUT = 1
    GET = 2
    EXIST = 3
    HEALTH = 5


class LMCacheServerConnector:
    """A ``KVStore``. Option: ``server`` (host:port)."""

    def __init__(self, config: StoreConfig) -> None:
        config.check_names("server")
        host, _, port = config.text("server").rpartition(":")
        if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ConfigError("kv_connector_extra_config: server must be host:port, such as localhost:65432.")
        self._address = host, int(port)
        self._block_bytes = config.block_bytes
        self._local = threading.local()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        try:
            self._ask(_Command.HEALTH, "0")
        except OSError as error:
            raise ConfigError(f"kv_connector: no LMCache server at {host}:{port}: {error}.") from error

    def num_held(self, keys: Sequence[str]) -> int:
        """The blocks up to the last one that is there: they are written from the first on, so a dozen
        questions are enough."""
        low = 0
        high = len(keys)
        while low < high:
            middle = (low + high) // 2
            if self._ask(_Command.EXIST, keys[middle]) is not None:
                low = middle + 1
            else:
                high = middle
        return low

    def read(self, keys: Sequence[str], into: memoryview) -> None:
        size = self._block_bytes
        for index, key in enumerate(keys):
            length = self._ask(_Command.GET, key)
            if length is None:
                raise OSError("a block is no longer in the LMCache server")
            if length != size:
                self._drop()
                raise OSError(f"a block of the LMCache server has {length} bytes instead of {size}")
            self._receive(into[index * size : (index + 1) * size])

    def write(self, keys: Sequence[str], content: memoryview) -> None:
        size = self._block_bytes
        for index, key in enumerate(keys):
            self._send(_Command.PUT, key, content[index * size : (index + 1) * size])

    def delete(self, keys: Sequence[str]) -> None:
        """The server deletes nothing; nobody will ask for these."""

    def close(self) -> None:
        with self._lock:
            for each in self._sockets:
                each.close()

    # ---- this thread's connection ----

    def _ask(self, command: _Command, key: str) -> int | None:
        """The length of the content that follows; None if the server has none of this key."""
        self._send(command, key)
        head = bytearray(_ANSWER.size)
        self._receive(memoryview(head))
        code, length, *_ = _ANSWER.unpack(head)
        return length if code == _SUCCESS else None

    def _send(self, command: _Command, key: str, content: memoryview = _NOTHING) -> None:
        model, _, block = key.rpartition("-")
        name = f"{model}@1@0@{block}@uint8".encode().ljust(150)
        shape = len(content), 0, 0, 0
        head = _REQUEST.pack(command, len(content), _BINARY, _UINT8, 0, *shape, name)
        try:
            connection = self._connection()
            connection.sendall(head)
            connection.sendall(content)
        except OSError:
            self._drop()
            raise

    def _receive(self, into: memoryview) -> None:
        try:
            while into:
                count = self._connection().recv_into(into)
                if not count:
                    raise ConnectionError("the LMCache server has closed the connection")
                into = into[count:]
        except OSError:
            self._drop()
            raise

    def _connection(self) -> socket.socket:
        known: socket.socket | None = getattr(self._local, "socket", None)
        if known is None:
            known = self._local.socket = socket.create_connection(self._address, TIMEOUT_S)
            with self._lock:
                self._sockets.append(known)
        return known

    def _drop(self) -> None:
        """Forget a connection whose answers are no longer in step with the questions."""
        known: socket.socket | None = getattr(self._local, "socket", None)
        self._local.socket = None
        if known is not None:
            known.close()
            with self._lock:
                self._sockets.remove(known)
