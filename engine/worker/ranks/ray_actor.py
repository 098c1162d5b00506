"""An actor of Ray that starts a rank on its node and watches it. Imports no Ray: it is made an actor of by
the core, and knows nothing of models."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import replace

from engine.worker.ranks.rank_messages import RankStart
from engine.worker.ranks.rank_process import STOP_TIMEOUT_S, spawn_rank


class RankActor:
    """The rank is a process of its own, as it is without Ray, and ends with the actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, int, list[str]]:
        """The node's address, a free port there, and the GPUs that the actor was given."""
        import ray

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.create_server((address, 0)) as free:
            port: int = free.getsockname()[1]
        return address, port, [str(gpu) for gpu in ray.get_gpu_ids()]

    def start(self, start: RankStart, gpus: list[str]) -> None:
        """Start the rank. ``gpus``: those of all ranks on the node, so that they reach each other's."""
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._process = spawn_rank(replace(start, parent_pid=os.getpid()))

    def wait(self) -> int:
        """Wait until the rank has exited; returns its exit code."""
        assert self._process is not None
        return self._process.wait()

    def stop(self) -> None:
        """Wait for the rank, which was asked to exit, and kill it if it does not."""
        if self._process is not None:
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
