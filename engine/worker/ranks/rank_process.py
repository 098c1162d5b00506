"""The engine core's handle for a rank: a process at the other end of a channel. Needs no torch."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from engine.config.engine_config import EngineConfig
from engine.errors import EngineDeadError
from engine.process.spawn import spawn_command
from engine.worker.ranks.rank_messages import RankPlace, RankStart

STOP_TIMEOUT_S = 3.0
"""A rank exits within a second after a stop order; after this timeout it is killed."""
_EXIT_CODE_WITHIN_S = 1.0


class RankLink:
    """The channel to a rank, wherever it runs."""

    def __init__(self, rank: int, channel: Connection[Any, Any]) -> None:
        self.rank = rank
        self.channel = channel
        self._sending = threading.Lock()

    def send(self, message: bytes) -> None:
        """Send a pickled message; does nothing if the rank has exited. Thread-safe."""
        with self._sending, suppress(OSError):
            self.channel.send_bytes(message)

    def receive(self) -> Any:
        """Return the next message; None when there will be no more."""
        try:
            return self.channel.recv()
        except (EOFError, OSError):
            return None

    def death(self) -> EngineDeadError:
        """The error for a rank that has exited."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until the rank, which has received a stop order, has exited."""
        raise NotImplementedError


class RankProcess(RankLink):
    """A rank's process, which the constructor starts. It does not outlive this process."""

    def __init__(self, config: EngineConfig, place: RankPlace, folder: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            log_level = logging.getLogger().getEffectiveLevel()
            start = RankStart(config, place, theirs.fileno(), os.getpid(), log_level, folder)
            self._process = spawn_rank(start, theirs.fileno())
        super().__init__(place.rank, Connection(ours.detach()))

    def death(self) -> EngineDeadError:
        """The error for a rank that has exited."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_CODE_WITHIN_S)
        return EngineDeadError(
            f"Rank {self.rank} of the model has died (exit code {self._process.returncode}); see its log."
        )

    def wait(self) -> None:
        """Wait until the rank, which has received a stop order, has exited."""
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def spawn_rank(start: RankStart, *filenos: int) -> subprocess.Popen[bytes]:
    """Start the process of a rank, which inherits these files."""
    process = subprocess.Popen(
        spawn_command("engine.worker.ranks.rank_proc"),
        stdin=subprocess.PIPE,
        pass_fds=filenos,
        # All ranks must iterate over a plan's sets in the same order.
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:  # the channel shows that it has died
        stdin.write(pickle.dumps(sys.path) + pickle.dumps(start))
    return process
