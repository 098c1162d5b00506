"""What a server tells who started it, on its output and its error output."""

from __future__ import annotations

import socket
import sys

from engine.api.config import ServerConfig
from engine.api.processes.listener import address_of
from engine.messages import EngineReady

JOB_TOKENS = 32 * 1024
"""As many as a coding agent sends in its first turns."""


def say_ready(config: ServerConfig, sock: socket.socket, core: EngineReady) -> None:
    address = address_of(config, sock)
    lines = [_pool(core), *([f"Dashboard: {address}/dashboard"] if config.dashboard else [])]
    print("\n".join([*lines, f"Serving {config.served_model_names[0]} at {address}"]), flush=True)
    if config.is_open_to_all:
        _complain(
            "Warning: the server listens on all interfaces without an API key: whoever reaches this machine "
            "may use it. --host 127.0.0.1 keeps it to this machine; CONTINUUM_API_KEY asks for a key."
        )


def _pool(core: EngineReady) -> str:
    """How much KV fits, also in a measure that users know."""
    num_tokens = core.num_gpu_blocks * core.block_size
    job_tokens = min(JOB_TOKENS, core.max_model_len)
    job = "32k tokens" if job_tokens == JOB_TOKENS else f"{job_tokens:,} tokens, the longest that it takes"
    return (
        f"KV pool: {num_tokens:,} tokens in {core.num_gpu_blocks:,} blocks of {core.block_size}: "
        f"{num_tokens / job_tokens:,.1f} jobs of {job}"
    )


def say_core_died() -> None:
    _complain("The engine core process has died; the server stops.")


def say_front_end_ended(pid: int, exit_code: int) -> None:
    _complain(
        f"Front-end process {pid} has ended with exit code {exit_code}: its requests are aborted and another "
        "takes its place."
    )


def say_giving_up(num_ended: int, window_s: float) -> None:
    _complain(f"{num_ended} front-end processes have ended within {window_s:.0f} s; the server stops.")


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
