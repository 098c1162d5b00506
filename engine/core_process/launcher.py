"""Starts the engine core's process, notices at once when it ends, and stops it. Knows nothing of requests.

``JoinedCore`` gives an API server process the same interface to a core that another process started.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from engine.config.kv_transfer import HANDOVER_S
from engine.core_process.client_registry import FIRST_CLIENT
from engine.core_process.core_start import FAILED, READY, CoreSpec, CoreStart
from engine.core_process.output_sockets import socket_address
from engine.errors import ConfigError, EngineDeadError, EngineError, ModelLoadError
from engine.process.private_folder import make_private_folder, remove_private_folder
from engine.process.process_log import start_log
from engine.process.spawn import spawn_command
from engine.records.messages import EngineReady, EngineStartFailed

logger = logging.getLogger(__name__)

POLL_MS = 100
FINAL_MESSAGE_MS = 1000
"""How long to wait for a final message after the core has ended: it may still be in the socket's buffers, or
with a thread that waits for a CPU."""
PROGRESS_EVERY_S = 10.0
STOP_TIMEOUT_S = 5.0
"""A core that was asked to stop exits within two seconds; after this it is killed."""

_START_ERRORS: dict[str, type[EngineError]] = {
    error.__name__: error for error in (ConfigError, ModelLoadError, EngineDeadError)
}


class Core(Protocol):
    """The core's process as a client sees it: started by this process, or joined with a ``ClientHandle``."""

    @property
    def client_index(self) -> int: ...

    @property
    def folder(self) -> str:
        """Private folder of the sockets; removed when the core ends."""

    @property
    def pid(self) -> int: ...

    @property
    def exited(self) -> bool: ...

    @property
    def exit_code(self) -> int | None:
        """Negative for the signal that ended it; None while it runs, or if it is not known."""

    def start(self, on_exit: Callable[[], None]) -> None:
        """Start it. ``on_exit`` is called once, on a separate thread, when the core has ended."""

    def handshake(self, context: zmq.Context[zmq.Socket[bytes]]) -> EngineReady:
        """Wait until the core is ready; raises the error that kept it from starting."""

    def ask_to_end(self) -> None:
        """If this process started the core, let it end by itself, which ``on_exit`` reports."""

    def stop(self) -> None:
        """Release the core; stops it if this process started it. May be called again."""


@dataclass(frozen=True, slots=True)
class ClientHandle:
    """All that an API server process needs to join a core that another process started."""

    folder: str
    pid: int
    ready: EngineReady
    client_index: int


class JoinedCore:
    """A core that another process started. That process reports its end by calling ``stop``; this class never
    stops the core itself."""

    def __init__(self, handle: ClientHandle) -> None:
        self._handle = handle
        self._ended = threading.Event()
        self.exit_code = None

    @property
    def client_index(self) -> int:
        return self._handle.client_index

    @property
    def folder(self) -> str:
        return self._handle.folder

    @property
    def pid(self) -> int:
        return self._handle.pid

    @property
    def exited(self) -> bool:
        return self._ended.is_set()

    def start(self, on_exit: Callable[[], None]) -> None:
        def watch() -> None:
            self._ended.wait()
            on_exit()

        threading.Thread(target=watch, name="core-watch", daemon=True).start()

    def handshake(self, context: zmq.Context[zmq.Socket[bytes]]) -> EngineReady:
        return self._handle.ready

    def ask_to_end(self) -> None:
        """Do nothing: another process started it."""

    def stop(self) -> None:
        """Note that the core has ended, or is no longer needed."""
        self._ended.set()


class CoreProcess:
    """The core's process, started by this one, and the private folder of its sockets."""

    client_index = FIRST_CLIENT

    def __init__(self, spec: CoreSpec) -> None:
        """ConfigError if the spec cannot be sent to another process."""
        self._spec = pickled_spec(spec)
        self._model = spec.config.model.model
        transfer = spec.config.kv_transfer
        hands_over = transfer is not None and transfer.hands_over
        self._stop_timeout_s = STOP_TIMEOUT_S + (HANDOVER_S if hands_over else 0.0)
        self._exited = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start the process, without a client yet: it loads the model while we load our libraries."""
        self.folder = make_private_folder("engine-")
        self._process = subprocess.Popen(
            spawn_command("engine.core_process.core_proc"), stdin=subprocess.PIPE
        )
        self._send_start(self._process)

    def start(self, on_exit: Callable[[], None]) -> None:
        if self._process is None:
            self.launch()
        threading.Thread(target=self._watch, args=(on_exit,), name="core-watch", daemon=True).start()

    @property
    def _launched(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the core was not started"
        return self._process

    @property
    def pid(self) -> int:
        return self._launched.pid

    @property
    def exited(self) -> bool:
        return self._exited.is_set()

    @property
    def exit_code(self) -> int | None:
        """Negative for the signal that ended it; None while it runs."""
        return self._launched.returncode

    def handshake(self, context: zmq.Context[zmq.Socket[bytes]]) -> EngineReady:
        """Wait, without a limit, until the core is ready; raises the error that kept it from starting."""
        with context.socket(zmq.PULL) as socket:
            socket.linger = 0
            socket.bind(socket_address(self.folder, "handshake"))
            return self._await_ready(socket)

    def _send_start(self, process: subprocess.Popen[bytes]) -> None:
        """Send the start message. The pipe stays open: the core exits when it reads the end of file."""
        start = CoreStart(self.folder, os.getpid(), logging.getLogger().getEffectiveLevel(), self._spec)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a process that has ended already is noticed later
            process.stdin.write(pickle.dumps(sys.path) + pickle.dumps(start))
            process.stdin.flush()

    def _await_ready(self, socket: zmq.Socket[bytes]) -> EngineReady:
        started = reported = time.monotonic()
        while not socket.poll(POLL_MS):
            if self.exited and not socket.poll(FINAL_MESSAGE_MS):
                raise self._died()
            if time.monotonic() - reported >= PROGRESS_EVERY_S:
                reported = time.monotonic()
                start_log.info("Loading %s: %.0f s elapsed.", self._model, reported - started)
        kind, payload = socket.recv_multipart()
        if kind == FAILED:
            raise start_error(msgspec.msgpack.decode(payload, type=EngineStartFailed))
        assert kind == READY, kind
        return msgspec.msgpack.decode(payload, type=EngineReady)

    def _died(self) -> EngineDeadError:
        self._exited.wait(STOP_TIMEOUT_S)
        return EngineDeadError(
            f"The engine core process died during startup (exit code {self.exit_code}); see its log."
        )

    def _watch(self, on_exit: Callable[[], None]) -> None:
        self._launched.wait()
        self._exited.set()
        on_exit()

    def ask_to_end(self) -> None:
        """Close the core's standard input: it exits then."""
        stdin = self._launched.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                stdin.close()

    def stop(self) -> None:
        """End the core and wait until it has exited. May be called again."""
        self.ask_to_end()
        process = self._launched
        try:  # not the event: a core that was only launched has no thread that watches it
            process.wait(self._stop_timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("The engine core did not stop within %s s: killing it.", self._stop_timeout_s)
            process.kill()
            process.wait()
        remove_private_folder(self.folder)


def start_error(failure: EngineStartFailed) -> EngineError:
    """Rebuild the error that kept another process from starting."""
    return _START_ERRORS.get(failure.error, EngineDeadError)(failure.message)


def pickled_spec(spec: CoreSpec) -> bytes:
    """The pickled spec; ConfigError if it cannot be sent to another process."""
    try:
        return pickle.dumps(spec)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"The executor or policy factory cannot be sent to the engine core: {error}."
        ) from error
