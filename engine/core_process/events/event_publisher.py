"""Publishes batches of events over ZMQ as vLLM V1 does, on separate threads.

A message has three frames: topic, sequence number (8 bytes, big endian, from 0) and the batch as msgpack. A
subscriber that missed some requests all from a number on at a second socket, which answers with those that
are left and then with the number -1. The engine never waits: what does not fit into the queue is dropped and
counted. Its numbers are skipped, so that subscribers notice.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from queue import Full, Queue

import msgspec
import zmq

from engine.errors import ConfigError
from engine.records.kv_events import EventBatch

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
LINGER_MS = 500
"""How long messages in flight may take when the engine stops."""
STOP_TIMEOUT_S = 1.0
"""How long queued batches may take to be sent when the engine stops."""

Numbered = tuple[int, EventBatch]
Socket = zmq.Socket[bytes]


class EventPublisher:
    """Sends batches in the order in which they come; may be called by one thread at a time."""

    def __init__(
        self,
        endpoint: str,
        topic: str,
        *,
        hwm: int,
        max_queue_size: int,
        replay_endpoint: str | None = None,
        buffer_steps: int = 1,
    ) -> None:
        """ConfigError if an address cannot be bound or connected to. For the arguments see
        ``KVEventsConfig``."""
        self.num_dropped = 0
        """Batches that did not fit into the queue."""
        self._topic = topic.encode()
        self._sequence = 0
        self._queue: Queue[Numbered | None] = Queue(max_queue_size)
        self._past: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._past_lock = threading.Lock()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._threads: list[threading.Thread] = []
        try:
            publisher = _open(self._context, zmq.PUB, hwm, endpoint, binds=_is_to_bind(endpoint))
            # Space for a whole replay to a slow subscriber: ZMQ counts messages as sent by half the mark.
            replies = 2 * (buffer_steps + 1)
            replay = replay_endpoint and _open(
                self._context, zmq.ROUTER, replies, replay_endpoint, binds=True
            )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._publishing = threading.Thread(
            target=self._publish_all, args=(publisher,), name="event-publisher", daemon=True
        )
        self._publishing.start()
        if replay:
            answering = threading.Thread(
                target=self._answer_all, args=(replay,), name="event-replay", daemon=True
            )
            answering.start()

    def publish(self, batch: EventBatch) -> None:
        """Queue a batch; never waits. It is dropped, and counted, if the queue is full."""
        sequence = self._sequence
        self._sequence = self._sequence + 1
        try:
            self._queue.put_nowait((sequence, batch))
        except Full:
            if not self.num_dropped:
                logger.warning("KV events come faster than they can be sent: batch %d is lost.", sequence)
            self.num_dropped += 1

    def close(self) -> None:
        """Send queued batches, for up to a second, and close the sockets."""
        try:
            self._queue.put(None, timeout=STOP_TIMEOUT_S)
        except Full:
            logger.warning("KV events were lost: the publisher is stuck.")
            return
        self._publishing.join(STOP_TIMEOUT_S)
        if not self._publishing.is_alive():
            self._context.term()  # ends the thread that answers, too

    def _publish_all(self, socket: Socket) -> None:
        encoder = msgspec.msgpack.Encoder()
        with socket:
            while (numbered := self._queue.get()) is not None:
                sequence, batch = numbered
                number = sequence.to_bytes(8, "big")
                payload = encoder.encode(batch)
                with self._past_lock:  # first: a new subscriber that requests the past misses none
                    self._past.append((number, payload))
                socket.send_multipart((self._topic, number, payload))

    def _answer_all(self, socket: Socket) -> None:
        with socket:
            while True:
                try:
                    self._answer(socket, socket.recv_multipart())
                except zmq.ContextTerminated:
                    return

    def _answer(self, socket: Socket, frames: list[bytes]) -> None:
        """Answer one request, of three frames: the client, an empty one, and the first number wanted."""
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("A request for past KV events has frames of %s bytes.", [len(f) for f in frames])
            return
        client, _, first = frames
        with self._past_lock:
            past = [each for each in self._past if each[0] >= first]
        for number, payload in past:
            socket.send_multipart((client, b"", self._topic, number, payload))
        socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _is_to_bind(endpoint: str) -> bool:
    """V1's rule for the PUB socket: a wildcard is bound, the address of a host is connected to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _open(context: zmq.Context[Socket], kind: int, hwm: int, endpoint: str, *, binds: bool) -> Socket:
    socket = context.socket(kind)
    socket.linger = LINGER_MS
    socket.sndhwm = hwm
    socket.ipv6 = "::" in endpoint or "[" in endpoint
    try:
        if binds:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"kv_events_config: cannot open {endpoint!r}: {error.strerror}.") from error
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT) if binds else endpoint
    logger.info("KV events: %s %s.", "bound" if binds else "connecting to", bound)
    return socket
