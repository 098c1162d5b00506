"""A Ray actor that starts a node of a group and watches it. Imports no Ray, and no model code."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass

from engine.core_group.node_channel import TOKEN_VARIABLE
from engine.process.process_log import start_log
from engine.process.spawn import spawn_command

STOP_TIMEOUT_S = 8.0


@dataclass(frozen=True, slots=True)
class NodeStart:
    """All that a node needs to start."""

    spec: bytes
    """A pickled ``CoreSpec``, headless and with one core."""
    token: str
    log_level: int


class NodeActor:
    """Runs the node as a separate process; the end of the actor closes its standard input, which ends it."""

    def __init__(self, start: NodeStart) -> None:
        self._stopping = False
        self._process = subprocess.Popen(
            spawn_command("engine.core_group.ray_node_proc"),
            stdin=subprocess.PIPE,
            env={**os.environ, TOKEN_VARIABLE: start.token},
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(pickle.dumps(sys.path) + pickle.dumps(start))
            self._process.stdin.flush()
        threading.Thread(target=self._watch, name="node-watch", daemon=True).start()

    def stop(self) -> None:
        """End the node, and its core with it."""
        self._stopping = True
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _watch(self) -> None:
        """Watch the node. If it was killed, end the actor, so that Ray restarts both; if it gave up, or the
        head refuses it, it has logged the reason."""
        code = self._process.wait()
        if code < 0 and not self._stopping:
            os._exit(1)
        if not self._stopping:
            start_log.error("The node of an engine core ended with exit code %d.", code)
