"""Accepts the connections of nodes that join a group, and refuses those that do not belong to it."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Collection
from contextlib import suppress

from engine.config.engine_config import EngineConfig
from engine.config.parallel import is_loopback
from engine.core_group.agreement import difference, settings_of
from engine.core_group.node_channel import (
    PROTOCOL,
    TOKEN_VARIABLE,
    Hello,
    NodeChannel,
    Refuse,
    Welcome,
)
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_STRANGERS = 64
"""The most connections that have not said hello; further ones are closed at once."""


def group_token(address: str) -> str:
    """The secret that nodes and their head share. ConfigError if there is none although other machines can
    reach the address."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and not is_loopback(address):
        raise ConfigError(
            f"data_parallel_address {address}: set {TOKEN_VARIABLE} to the same secret on all nodes."
        )
    return token


class NodeListener:
    """Owned by the process that owns the group's cores. Thread-safe."""

    def __init__(self, config: EngineConfig, engines: Collection[int]) -> None:
        """``engines``: numbers of the cores that run on other machines. ConfigError if the port is taken."""
        self._settings = settings_of(config)
        self._engines = frozenset(engines)
        address = config.parallel.data_parallel_address
        port = config.parallel.data_parallel_rpc_port
        self._token = group_token(address)
        self._joined: dict[int, NodeChannel] = {}
        """Connections of nodes that no core has taken yet."""
        self._in_use: dict[int, NodeChannel] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        try:
            self._socket = socket.create_server((address, port), backlog=64)
        except OSError as error:
            raise ConfigError(
                f"data_parallel_rpc_port: cannot listen at {address}:{port}: {error.strerror or error}."
            ) from error
        threading.Thread(target=self._listen, name="nodes", daemon=True).start()

    def take(self, engine: int, timeout_s: float) -> NodeChannel | None:
        """The connection of the node that will run this core; None if none has come in time."""
        with self._changed:
            self._changed.wait_for(lambda: engine in self._joined or self._closed, timeout_s)
            channel = self._joined.pop(engine, None)
            if channel is not None:
                self._in_use[engine] = channel
            return channel

    def give_back(self, engine: int, channel: NodeChannel) -> None:
        """Note that the connection has ended: another node may come for this core."""
        channel.close()
        with self._changed:
            if self._in_use.get(engine) is channel:
                del self._in_use[engine]

    def close(self) -> None:
        """Take no more nodes. Repeatable."""
        with self._changed:
            self._closed = True
            waiting = list(self._joined.values())
            self._joined = {}
            self._changed.notify_all()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for channel in waiting:
            channel.close()

    def _listen(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                if not self._strangers.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(target=self._meet, args=(connection,), daemon=True).start()

    def _meet(self, connection: socket.socket) -> None:
        try:
            self._admit(connection)
        finally:
            self._strangers.release()

    def _admit(self, connection: socket.socket) -> None:
        channel = NodeChannel(connection)
        try:
            hello = channel.receive(is_first=True)
            if not isinstance(hello, Hello):
                raise ConnectionError("it did not send a hello message")
            refusal = self._refusal(hello)
            if refusal is not None:
                logger.warning("A node for engine core %d is refused: %s.", hello.engine, refusal.reason)
                channel.send(refusal)
                channel.close()
                return
            channel.send(Welcome())
            channel.beat()
        except OSError as error:
            logger.debug("A connection of a node failed: %s", error)
            channel.close()
            return
        with self._changed:
            before = self._joined.get(hello.engine)
            if self._closed or before is not None:
                channel.close()
                return
            self._joined[hello.engine] = channel
            self._changed.notify_all()

    def _refusal(self, hello: Hello) -> Refuse | None:
        if not secrets.compare_digest(hello.token.encode(), self._token.encode()):
            return Refuse(f"its {TOKEN_VARIABLE} is not the head's", True)
        if hello.protocol != PROTOCOL:
            return Refuse(f"its protocol is {hello.protocol}, the head's is {PROTOCOL}", True)
        if hello.engine not in self._engines:
            places = ", ".join(map(str, sorted(self._engines)))
            return Refuse(f"cores {places} of the group run on nodes, not core {hello.engine}", True)
        differs = difference(self._settings, hello.settings)
        if differs is not None:
            return Refuse(differs, True)
        with self._changed:
            if hello.engine in self._joined or hello.engine in self._in_use:
                return Refuse(f"core {hello.engine} runs on another node", False)
        return None
