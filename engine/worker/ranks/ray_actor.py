"""A Ray actor that starts a rank on its node and watches it. Does not import Ray at the top: the core makes
it an actor. Knows nothing of models."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import replace

from engine.worker.ranks.rank_messages import RankStart
from engine.worker.ranks.rank_process import STOP_TIMEOUT_S, spawn_rank


class RankActor:
    """The rank is a separate process, as without Ray, and ends with the actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, int, list[str]]:
        """The node's address, a free port there, and the GPUs that Ray assigned to the actor."""
        import ray

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.create_server((address, 0)) as free:
            port: int = free.getsockname()[1]
        return address, port, [str(gpu) for gpu in ray.get_gpu_ids()]

    def start(self, start: RankStart, gpus: list[str]) -> None:
        """Start the rank. ``gpus``: those of all ranks on the node, so that they can access each other's."""
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._process = spawn_rank(replace(start, parent_pid=os.getpid()))

    def wait(self) -> int:
        """Wait until the rank has exited; returns its exit code."""
        assert self._process is not None
        return self._process.wait()

    def stop(self) -> None:
        """Wait for the rank, which has received a stop order, and kill it if it does not exit."""
        if self._process is not None:
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
