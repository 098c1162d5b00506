"""An engine core on another machine, which clients use like a local one: a relay passes the frames."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from engine.core_group.node_channel import Ended, Failed, Forward, NodeChannel, Ready
from engine.core_group.node_listener import NodeListener
from engine.core_process.client_registry import FIRST_CLIENT
from engine.core_process.launcher import PROGRESS_EVERY_S, start_error
from engine.core_process.output_sockets import output_address, socket_address
from engine.errors import EngineDeadError
from engine.process.private_folder import make_private_folder, remove_private_folder
from engine.process.process_log import start_log
from engine.records.messages import ENGINE_CORE_DEAD, EngineReady

POLL_MS = 100
POLL_S = 0.1


class RemoteCore:
    """A ``Core`` that a node runs. It ends when the node, the core or the connection does."""

    client_index = FIRST_CLIENT
    pid = 0
    """Process id on its own machine; 0 before it is ready."""

    def __init__(self, engine: int, listener: NodeListener) -> None:
        self._engine = engine
        self._listener = listener
        self._channel: NodeChannel | None = None
        self._ended = threading.Event()
        self._stopping = threading.Event()
        self._on_exit: Callable[[], None] = lambda: None
        self._clients = {FIRST_CLIENT}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._threads: list[threading.Thread] = []
        self.exit_code: int | None = None

    def launch(self) -> None:
        """Make the folder of the sockets; the node starts the core, when it comes."""
        self.folder = make_private_folder("engine-")

    @property
    def exited(self) -> bool:
        return self._ended.is_set()

    def start(self, on_exit: Callable[[], None]) -> None:
        self._on_exit = on_exit

    def handshake(self, context: zmq.Context[zmq.Socket[bytes]]) -> EngineReady:
        """Wait, without a limit, until a node has come and its core is ready."""
        while True:
            channel = self._await_node()
            try:
                said = channel.receive()
            except OSError:
                self._listener.give_back(self._engine, channel)
                continue
            if isinstance(said, Failed):
                self._listener.give_back(self._engine, channel)
                raise start_error(said.failure)
            if isinstance(said, Ready):
                self.pid = said.pid
                self._channel = channel
                self._relay(channel)
                return said.ready
            self._listener.give_back(self._engine, channel)

    def _await_node(self) -> NodeChannel:
        started = reported = time.monotonic()
        while not self._stopping.is_set():
            channel = self._listener.take(self._engine, POLL_S)
            if channel is not None:
                return channel
            if time.monotonic() - reported >= PROGRESS_EVERY_S:
                reported = time.monotonic()
                start_log.info(
                    "Waiting for a node with engine core %d: %.0f s elapsed.",
                    self._engine,
                    reported - started,
                )
        raise EngineDeadError("The engine core was stopped before its node connected.")

    # ---- the relay ----

    def _relay(self, channel: NodeChannel) -> None:
        for target in (self._to_node, self._from_node):
            thread = threading.Thread(target=target, args=(channel,), name="node-relay", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _to_node(self, channel: NodeChannel) -> None:
        """Relay what clients send to the core's input."""
        with self._context.socket(zmq.PULL) as inputs:
            inputs.linger = 0
            inputs.rcvhwm = 0
            inputs.bind(socket_address(self.folder, "input"))
            with suppress(OSError):
                while not self._ended.is_set():
                    if inputs.poll(POLL_MS):
                        channel.send(Forward(FIRST_CLIENT, inputs.recv_multipart()))
        channel.close()

    def _from_node(self, channel: NodeChannel) -> None:
        """Relay what the core sends to its clients, until it ends."""
        sockets: dict[int, zmq.Socket[bytes]] = {}
        with suppress(OSError):
            while not isinstance(said := channel.receive(), Ended):
                if isinstance(said, Forward):
                    if said.client_index not in sockets:
                        sockets[said.client_index] = self._output_socket(said.client_index)
                    sockets[said.client_index].send_multipart(said.frames)
            self.exit_code = said.exit_code
        for outputs in sockets.values():
            outputs.send(ENGINE_CORE_DEAD)
            outputs.close(linger=1000)
        self._end(channel)

    def _output_socket(self, client_index: int) -> zmq.Socket[bytes]:
        outputs = self._context.socket(zmq.PUSH)
        outputs.sndhwm = 0
        outputs.connect(output_address(self.folder, client_index))
        return outputs

    def _end(self, channel: NodeChannel) -> None:
        self._listener.give_back(self._engine, channel)
        if not self._ended.is_set():
            self._ended.set()
            self._on_exit()

    def ask_to_end(self) -> None:
        """Close the connection; its node then ends the core."""
        if self._channel is not None:
            self._channel.close()

    def stop(self) -> None:
        """Release the core, which its node then ends. May be called again."""
        self._stopping.set()
        if self._channel is not None:
            self._channel.close()
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(timeout=2.0)
        self._ended.set()
        self._context.destroy(linger=0)
        remove_private_folder(self.folder)
