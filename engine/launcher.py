"""Starts the engine core's process, notices its end at once, and ends it. Knows nothing of requests."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from engine.core_proc import FAILED, HELLO, READY, CoreAddresses, CoreSpec, CoreStart, socket_address
from engine.errors import ConfigError, EngineDeadError, EngineError, ModelLoadError
from engine.messages import EngineReady, EngineStartFailed

logger = logging.getLogger(__name__)

# A new interpreter instead of multiprocessing's spawn: it does not run the user's script again, so a script
# needs no ``if __name__ == "__main__"``, and it works from a notebook or standard input too. SIGINT of a
# terminal goes to the whole group: the front end decides what it means.
_BOOTSTRAP = """\
import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)
import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer)
from engine.core_proc import main; main()
"""

POLL_MS = 100
PROGRESS_EVERY_S = 10.0
STOP_TIMEOUT_S = 5.0
"""A core that was told to stop ends itself within two seconds; after this it is killed."""

_START_ERRORS: dict[str, type[EngineError]] = {
    error.__name__: error for error in (ConfigError, ModelLoadError, EngineDeadError)
}


class CoreProcess:
    """The core's process and the private folder of its sockets."""

    def __init__(self, spec: bytes, model: str, on_exit: Callable[[], None]) -> None:
        """``spec`` is pickled. ``on_exit`` is called once, on its own thread, when the process has ended."""
        self._spec = spec
        self._model = model
        self.folder = tempfile.mkdtemp(prefix="engine-")
        self._on_exit = on_exit
        self._exited = threading.Event()
        self._process = subprocess.Popen([sys.executable, "-P", "-c", _BOOTSTRAP], stdin=subprocess.PIPE)
        self.pid = self._process.pid
        threading.Thread(target=self._watch, name="core-watch", daemon=True).start()

    def address(self, name: str) -> str:
        return socket_address(self.folder, name)

    @property
    def exited(self) -> bool:
        return self._exited.is_set()

    @property
    def exit_code(self) -> int | None:
        """Negative for the signal that ended it; None while it runs."""
        return self._process.returncode

    def handshake(self, context: zmq.Context[zmq.Socket[bytes]]) -> EngineReady:
        """Wait, for as long as loading takes, until the core is ready; raises why it could not start."""
        with context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(self.address("handshake"))
            self._send_start()
            identity, _ = self._receive(socket, HELLO)
            addresses = CoreAddresses(self.address("input"), self.address("output"))
            socket.send_multipart([identity, msgspec.msgpack.encode(addresses)])
            _, payload = self._receive(socket, READY)
            return msgspec.msgpack.decode(payload, type=EngineReady)

    def _send_start(self) -> None:
        """The pipe stays open: its end tells the core that we are gone."""
        start = CoreStart(self.folder, os.getpid(), logging.getLogger().getEffectiveLevel(), self._spec)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(pickle.dumps(sys.path) + pickle.dumps(start))
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def _receive(self, socket: zmq.Socket[bytes], expected: bytes) -> tuple[bytes, bytes]:
        """Identity and payload of the next handshake message."""
        started = told = time.monotonic()
        while not socket.poll(POLL_MS):
            if self.exited and not socket.poll(0):
                raise self._died()
            if time.monotonic() - told >= PROGRESS_EVERY_S:
                told = time.monotonic()
                logger.info("Loading %s: %.0f s so far.", self._model, told - started)
        identity, kind, *rest = socket.recv_multipart()
        if kind == FAILED:
            failure = msgspec.msgpack.decode(rest[0], type=EngineStartFailed)
            raise _START_ERRORS.get(failure.error, EngineDeadError)(failure.message)
        assert kind == expected, kind
        return identity, rest[0] if rest else b""

    def _died(self) -> EngineDeadError:
        self._exited.wait(STOP_TIMEOUT_S)
        return EngineDeadError(
            f"The engine core process died while it started (exit code {self.exit_code}); see its log."
        )

    def _watch(self) -> None:
        self._process.wait()
        self._exited.set()
        self._on_exit()

    def stop(self) -> None:
        """End the core and wait until it has gone. Repeatable."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if not self._exited.wait(STOP_TIMEOUT_S):
            logger.warning("The engine core did not stop within %s s and is killed.", STOP_TIMEOUT_S)
            self._process.kill()
            self._exited.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def pickled_spec(spec: CoreSpec) -> bytes:
    try:
        return pickle.dumps(spec)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"The executor or policy factory cannot be sent to the engine core: {error}."
        ) from error
