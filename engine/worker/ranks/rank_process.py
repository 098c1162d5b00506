"""The engine core's handle of a rank: a process at the other end of a channel. Needs no torch."""

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

from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.process.spawn import spawn_command
from engine.worker.ranks.rank_messages import RankStart

STOP_TIMEOUT_S = 3.0
"""A rank that was asked to stop exits within a second; after this timeout it is killed."""
_EXIT_CODE_WITHIN_S = 1.0


class RankProcess:
    """The process is started by the constructor and does not outlive this one."""

    def __init__(self, config: EngineConfig, rank: int, folder: str) -> None:
        self.rank = rank
        self._sending = threading.Lock()
        ours, theirs = socket.socketpair()
        with theirs:
            log_level = logging.getLogger().getEffectiveLevel()
            start = RankStart(config, rank, folder, theirs.fileno(), os.getpid(), log_level)
            self._process = subprocess.Popen(
                spawn_command("engine.worker.ranks.rank_proc"),
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                # All ranks must iterate over a plan's sets in the same order.
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
        self.channel: Connection[Any, Any] = Connection(ours.detach())
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # its death is noticed at the channel
            stdin.write(pickle.dumps(sys.path) + pickle.dumps(start))

    def send(self, message: bytes) -> None:
        """Send a pickled message; does nothing if the rank has exited. Thread-safe."""
        with self._sending, suppress(OSError):
            self.channel.send_bytes(message)

    def receive(self) -> Any:
        """The next message; None when there will be no more."""
        try:
            return self.channel.recv()
        except (EOFError, OSError):
            return None

    def death(self) -> EngineDeadError:
        """The error for a rank that has exited."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_CODE_WITHIN_S)
        return EngineDeadError(
            f"Rank {self.rank} of the model has died (exit code {self._process.returncode}); see its log."
        )

    def wait(self) -> None:
        """Wait until it has exited, which it was asked to do."""
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
