"""What the core tells its clients, each over a socket of its own. What nobody waits for goes with the next
message that somebody does: to wake a client for each token of an answer that it gives whole would take the
model's threads their turn."""

from __future__ import annotations

import threading

import msgspec
import zmq

from engine.core_process.client_registry import ClientRegistry
from engine.messages import EngineCoreOutputs, EngineCoreRequest
from engine.sampling_params import RequestOutputKind

LINGER_MS = 1000
"""Last messages get this long to leave."""
MAX_HELD_S = 0.02
"""Metrics lag by so much, and no client has more than this to catch up with."""


def socket_address(folder: str, name: str) -> str:
    return f"ipc://{folder}/{name}"


def output_address(folder: str, client_index: int) -> str:
    """Where a client listens for its outputs; the core connects to it."""
    return socket_address(folder, f"output-{client_index}")


class OutputSockets:
    """A socket per client, opened when it is first sent something. Thread safe; sends never wait."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: str, clients: ClientRegistry) -> None:
        self._context = context
        self._folder = folder
        self._clients = clients
        self._lock = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._patient: set[str] = set()
        """Unfinished requests of which nothing is read before they are finished."""
        self._held: list[EngineCoreOutputs] = []
        self._closed = False

    def expect(self, request: EngineCoreRequest) -> None:
        """A request has come in: its outputs will be told."""
        params = request.sampling_params
        # Stop strings are looked for by the client.
        if params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop:
            self._patient.add(request.request_id)

    def tell(self, message: EngineCoreOutputs) -> None:
        """A step's outputs, to whom they concern."""
        with self._lock:
            self._held.append(message)
            if self._is_awaited(message) or message.timestamp - self._held[0].timestamp > MAX_HELD_S:
                self._send_held()

    def _is_awaited(self, message: EngineCoreOutputs) -> bool:
        awaited = not message.outputs
        for output in message.outputs:
            if output.request_id not in self._patient:
                awaited = True
            elif output.finished:
                self._patient.discard(output.request_id)
                awaited = True
        return awaited

    def flush(self) -> None:
        """No step follows soon."""
        if self._held:
            with self._lock:
                self._send_held()

    def answer(self, client_index: int, message: EngineCoreOutputs) -> None:
        """To one client, if it is there."""
        with self._lock:
            self._send_held()
            if self._clients.knows(client_index):
                self._send(client_index, [self._encode(message)])

    def tell_all(self, frame: bytes) -> None:
        """The last words."""
        with self._lock:
            self._send_held()
            for client_index in self._clients.indexes:
                self._send(client_index, [frame])

    def _send_held(self) -> None:
        frames: dict[int, list[bytes]] = {}
        for message in self._held:
            for client_index, share in self._clients.divide(message):
                frames.setdefault(client_index, []).append(self._encode(share))
        self._held.clear()
        for client_index, shares in frames.items():
            self._send(client_index, shares)

    def _send(self, client_index: int, frames: list[bytes]) -> None:
        if self._closed:
            return
        socket = self._sockets.get(client_index)
        if socket is None:
            socket = self._sockets[client_index] = self._open(client_index)
        for frame in frames[:-1]:
            socket.send(frame, zmq.SNDMORE)
        socket.send(frames[-1])

    def _open(self, client_index: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.linger = LINGER_MS
        socket.sndhwm = 0
        socket.connect(output_address(self._folder, client_index))
        return socket

    def drop(self, client_index: int) -> None:
        """Nothing is sent to this client any more."""
        with self._lock:
            socket = self._sockets.pop(client_index, None)
            if socket is not None:
                socket.close(linger=0)

    def close(self) -> None:
        """What was told before still leaves; nothing after it does."""
        with self._lock:
            self._send_held()
            self._closed = True
            for socket in self._sockets.values():
                socket.close()
