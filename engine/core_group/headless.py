"""A node without API servers: runs engine cores of a group whose head is another machine.

A core is started when the head has accepted the node, and ends with the connection. The node then keeps
trying to join, so a head that restarts finds it.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from contextlib import ExitStack, suppress

import msgspec
import zmq

from engine.core_group.agreement import settings_of
from engine.core_group.engine_config import spec_of_engine
from engine.core_group.node_channel import (
    PROTOCOL,
    Ended,
    Failed,
    Forward,
    Hello,
    NodeChannel,
    Ready,
    Refuse,
)
from engine.core_group.node_listener import group_token
from engine.core_process.client_registry import FIRST_CLIENT
from engine.core_process.core_start import CoreSpec
from engine.core_process.launcher import CoreProcess
from engine.core_process.output_sockets import output_address, socket_address
from engine.errors import ConfigError, EngineError
from engine.process.process_log import plain_log, start_log
from engine.process.restart_limit import RestartLimit
from engine.records.messages import ClientNotice, EngineCoreRequestType, EngineStartFailed

logger = logging.getLogger(__name__)

POLL_MS = 100
FIRST_DELAY_S = 0.3
LONGEST_DELAY_S = 3.0
"""Delay between two attempts to reach the head; doubled each time."""


def run_headless(spec: CoreSpec) -> int:
    """Run this node's cores until SIGTERM or SIGINT; returns the exit code, 1 if a core has died too often.

    ConfigError if the head refuses the node.
    """
    plain_log()
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    parallel = spec.config.parallel
    nodes = [NodeCore(spec_of_engine(spec, index), stopping) for index in parallel.local_engines]
    threads = [threading.Thread(target=node.run, name=f"core-{node.engine}") for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for node in nodes:
        if node.refusal is not None:
            raise ConfigError(f"The head of the group refuses this node: {node.refusal}.")
    return 1 if any(node.has_given_up for node in nodes) else 0


class NodeCore:
    """One core of this node, restarted whenever it ends."""

    def __init__(self, spec: CoreSpec, stopping: threading.Event) -> None:
        """``stopping`` is set to end the core, also by this object if it cannot go on."""
        self._spec = spec
        self._stopping = stopping
        self.engine = spec.config.parallel.data_parallel_rank
        self._token = group_token(spec.config.parallel.data_parallel_address)
        self._limit = RestartLimit()
        self.refusal: str | None = None
        self.has_given_up = False

    def run(self) -> None:
        """Run the core until ``stopping`` is set."""
        delay_s = FIRST_DELAY_S
        is_told = False
        while not self._stopping.is_set():
            channel = self._joined()
            if channel is None:
                if not is_told:
                    is_told = True
                    start_log.info("Engine core %d waits for the head of the group.", self.engine)
                self._stopping.wait(delay_s)
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)
                continue
            delay_s = FIRST_DELAY_S
            is_told = False
            has_died = CoreRelay(self._spec, channel, self._stopping).run()
            if has_died and not self._limit.count():
                start_log.error("Engine core %d has died too often.", self.engine)
                self.has_given_up = True
                self._stopping.set()

    def _joined(self) -> NodeChannel | None:
        """A connection to the head, which has accepted this core; None if there is no head, or it refuses."""
        config = self._spec.config
        address = config.parallel.data_parallel_address, config.parallel.data_parallel_rpc_port
        try:
            channel = NodeChannel(socket.create_connection(address, timeout=2.0))
        except OSError:
            return None
        try:
            channel.send(Hello(PROTOCOL, self._token, self.engine, settings_of(config)))
            answer = channel.receive()
        except OSError:
            channel.close()
            return None
        if not isinstance(answer, Refuse):
            channel.beat()
            return channel
        channel.close()
        if answer.is_final:
            self.refusal = answer.reason
            self._stopping.set()
        return None


class CoreRelay:
    """Runs a core from its start to its end, and relays the frames between it and the head."""

    def __init__(self, spec: CoreSpec, channel: NodeChannel, stopping: threading.Event) -> None:
        self._core = CoreProcess(spec)
        self._engine = spec.config.parallel.data_parallel_rank
        self._channel = channel
        self._stopping = stopping
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._over = threading.Event()
        """The core has exited, or the head has gone."""
        self._has_died = False
        self._clients: dict[int, threading.Thread] = {}

    def run(self) -> bool:
        """Run the core; returns whether it has died by itself."""
        self._core.launch()
        self._core.start(self._over.set)
        self._add_client(FIRST_CLIENT)
        threads = [threading.Thread(target=target, name="node-relay") for target in (self._read, self._guard)]
        for thread in threads:
            thread.start()
        self._await_ready()
        for thread in (*threads, *self._clients.values()):
            thread.join()
        self._context.destroy(linger=0)
        return self._has_died

    def _guard(self) -> None:
        """End the core, which may still be loading, when the head has gone or the node is to stop."""
        while not self._over.wait(0.1) and not self._stopping.is_set():
            pass
        self._has_died = self._core.exited
        if self._has_died:
            with suppress(OSError):
                self._channel.send(Ended(self._core.exit_code))
            start_log.warning(
                "Engine core %d (process %d) exited with code %s.",
                self._engine,
                self._core.pid,
                self._core.exit_code,
            )
        self._over.set()
        self._core.stop()
        self._channel.close()

    def _await_ready(self) -> None:
        """Report to the head that the core is ready, or why it is not."""
        try:
            ready = self._core.handshake(self._context)
        except EngineError as error:
            if not self._stopping.is_set():
                start_log.error("Engine core %d could not be started: %s", self._engine, error)
            with suppress(OSError):
                self._channel.send(Failed(EngineStartFailed(type(error).__name__, str(error))))
            self._over.set()
            return
        with suppress(OSError):
            self._channel.send(Ready(ready, self._core.pid))
        start_log.info("Engine core %d is ready, as process %d.", self._engine, self._core.pid)

    def _read(self) -> None:
        """Relay what the head sends to the core's input."""
        with ExitStack() as stack, suppress(OSError):
            inputs = stack.enter_context(self._context.socket(zmq.PUSH))
            inputs.linger = 0
            inputs.sndhwm = 0
            inputs.connect(socket_address(self._core.folder, "input"))
            while not self._over.is_set():
                said = self._channel.receive()
                if isinstance(said, Forward):
                    self._note_clients(said.frames)
                    inputs.send_multipart(said.frames)
        self._over.set()

    def _note_clients(self, frames: list[bytes]) -> None:
        """Listen for the outputs of an API server process before the core learns of it."""
        for kind, payload in zip(frames[::2], frames[1::2], strict=False):
            if kind == EngineCoreRequestType.JOIN.value:
                self._add_client(msgspec.msgpack.decode(payload, type=ClientNotice).client_index)

    def _add_client(self, index: int) -> None:
        if index in self._clients:
            return
        bound = threading.Event()
        thread = threading.Thread(target=self._write, args=(index, bound), name="node-relay", daemon=True)
        self._clients[index] = thread
        thread.start()
        bound.wait(5.0)

    def _write(self, index: int, bound: threading.Event) -> None:
        """Relay what the core sends to one of its clients."""
        with self._context.socket(zmq.PULL) as outputs, suppress(OSError):
            outputs.linger = 0
            outputs.rcvhwm = 0
            outputs.bind(output_address(self._core.folder, index))
            bound.set()
            while outputs.poll(POLL_MS) or not self._over.is_set():
                if outputs.poll(0):
                    self._channel.send(Forward(index, outputs.recv_multipart()))
