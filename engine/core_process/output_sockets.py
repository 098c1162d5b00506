"""Sends the core's outputs to its clients, over one socket per client.

Outputs that no caller waits for are sent with the next message that one does wait for. Waking a client for
each token of a response that is not streamed would take CPU time from the model's threads.
"""

from __future__ import annotations

import threading

import msgspec
import zmq

from engine.core_process.client_registry import ClientRegistry
from engine.records.messages import EngineCoreOutputs, EngineCoreRequest
from engine.records.sampling_params import RequestOutputKind

LINGER_MS = 1000
"""How long the last messages may take to be sent when a socket is closed."""
MAX_DELAY_S = 0.02
"""Longest delay of outputs. It bounds the lag of metrics and what a client must catch up with."""


def socket_address(folder: str, name: str) -> str:
    return f"ipc://{folder}/{name}"


def output_address(folder: str, client_index: int) -> str:
    """Where a client listens for its outputs; the core connects to it."""
    return socket_address(folder, f"output-{client_index}")


class OutputSockets:
    """One socket per client, opened when the first message is sent to it. Thread-safe; sends never block."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: str, clients: ClientRegistry) -> None:
        self._context = context
        self._folder = folder
        self._clients = clients
        self._lock = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._final_only: set[str] = set()
        """Unfinished requests whose clients read nothing before they are finished."""
        self._unsent: list[EngineCoreOutputs] = []
        self._closed = False

    def expect(self, request: EngineCoreRequest) -> None:
        """Register a new request, so that its outputs are sent in time."""
        params = request.sampling_params
        # Stop strings are looked for by the client.
        if params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop:
            self._final_only.add(request.request_id)

    def send(self, message: EngineCoreOutputs) -> None:
        """Send a step's outputs to the clients whose requests they are."""
        with self._lock:
            self._unsent.append(message)
            if self._is_awaited(message) or message.timestamp - self._unsent[0].timestamp > MAX_DELAY_S:
                self._send_unsent()

    def _is_awaited(self, message: EngineCoreOutputs) -> bool:
        awaited = not message.outputs
        for output in message.outputs:
            if output.request_id not in self._final_only:
                awaited = True
            elif output.finished:
                self._final_only.discard(output.request_id)
                awaited = True
        return awaited

    def flush(self) -> None:
        """Send everything now: no step follows soon."""
        if self._unsent:
            with self._lock:
                self._send_unsent()

    def answer(self, client_index: int, message: EngineCoreOutputs) -> None:
        """Send a message to one client, unless it has left."""
        with self._lock:
            self._send_unsent()
            if self._clients.knows(client_index):
                self._send_frames(client_index, [self._encode(message)])

    def send_to_all(self, frame: bytes) -> None:
        """Send a final message to every client."""
        with self._lock:
            self._send_unsent()
            for client_index in self._clients.indexes:
                self._send_frames(client_index, [frame])

    def _send_unsent(self) -> None:
        frames: dict[int, list[bytes]] = {}
        for message in self._unsent:
            for client_index, share in self._clients.split(message):
                frames.setdefault(client_index, []).append(self._encode(share))
        self._unsent.clear()
        for client_index, shares in frames.items():
            self._send_frames(client_index, shares)

    def _send_frames(self, client_index: int, frames: list[bytes]) -> None:
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
        """Close the socket of a client that has left."""
        with self._lock:
            socket = self._sockets.pop(client_index, None)
            if socket is not None:
                socket.close(linger=0)

    def close(self) -> None:
        """Send what is pending, then drop all later messages."""
        with self._lock:
            self._send_unsent()
            self._closed = True
            for socket in self._sockets.values():
                socket.close()
