"""A subscriber of KV events that requests missed ones: it uses only ZMQ and msgpack, none of our code."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

TIMEOUT_MS = 30_000
MOMENT_MS = RECONNECT_MS = 10
END = -1
Past = tuple[bytes, int, list[Any] | None]
"""Topic, number and batch."""


def free_ports(count: int) -> list[int]:
    """Ports of this machine that no process listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def ask_for_past(context: zmq.Context[zmq.Socket[bytes]], address: str, first: int) -> list[Past]:
    """The kept batches from this number on, and the end mark."""
    past: list[Past] = []
    with context.socket(zmq.DEALER) as asks:
        asks.linger = 0
        asks.reconnect_ivl = RECONNECT_MS
        asks.connect(address)
        asks.send_multipart([b"", first.to_bytes(8, "big")])
        while not past or past[-1][1] != END:
            assert asks.poll(TIMEOUT_MS), "the past has no end"
            empty, topic, number, payload = asks.recv_multipart()
            assert empty == b""
            batch = msgspec.msgpack.decode(payload) if payload else None
            past.append((topic, int.from_bytes(number, "big", signed=True), batch))
    return past


class Subscriber:
    """Reads batches in order, each once."""

    def __init__(self, reads: zmq.Socket[bytes], context: zmq.Context[Any], replay: str | None) -> None:
        self._socket = reads
        self._context = context
        self._replay = replay
        self.batches: dict[int, list[Any]] = {}
        """Batches by number."""
        self.topics: set[bytes] = set()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for number in sorted(self.batches) for event in self.batches[number][1]]

    @property
    def has_news(self) -> bool:
        """Whether a message arrives within a moment."""
        return bool(self._socket.poll(MOMENT_MS))

    def read_until(self, done: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Returns all events once ``done`` accepts them; fails if it does not in time."""
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while not done(self.events):
            assert time.monotonic() < deadline, f"nothing came behind {self.events[-3:]}"
            if self.has_news:
                topic, number, payload = self._socket.recv_multipart()
                self.topics.add(topic)
                self.batches[int.from_bytes(number, "big")] = msgspec.msgpack.decode(payload)
            if not self.has_news or len(self.batches) <= max(self.batches):
                self._catch_up()  # the last ones may have been sent before the subscription
        return self.events

    def take(self) -> None:
        """Reads all messages that arrive within a moment."""
        while self.has_news:
            topic, number, payload = self._socket.recv_multipart()
            self.topics.add(topic)
            self.batches[int.from_bytes(number, "big")] = msgspec.msgpack.decode(payload)

    def _catch_up(self) -> None:
        if self._replay is not None:
            for _, number, batch in ask_for_past(self._context, self._replay, len(self.batches)):
                if batch is not None:
                    self.batches[number] = batch


@contextmanager
def subscriber(
    address: str, topic: str = "", *, replay: str | None = None, binds: bool = False
) -> Iterator[Subscriber]:
    """``replay``: the address for past batches. ``binds``: the publisher connects to ``address``; otherwise
    the publisher binds it, now or soon."""
    with zmq.Context() as context, context.socket(zmq.SUB) as reads:
        reads.linger = 0
        reads.reconnect_ivl = RECONNECT_MS
        reads.setsockopt_string(zmq.SUBSCRIBE, topic)
        (reads.bind if binds else reads.connect)(address)
        yield Subscriber(reads, context, replay)
