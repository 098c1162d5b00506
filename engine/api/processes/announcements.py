"""What a server tells who started it, on its output and its error output."""

from __future__ import annotations

import socket
import sys

from engine.api.config import ServerConfig
from engine.api.processes.listener import address_of


def say_ready(config: ServerConfig, sock: socket.socket) -> None:
    print(f"Serving {config.served_model_names[0]} at {address_of(config, sock)}", flush=True)

    if config.is_open_to_all:
        _complain(
            "Warning: the server listens on all interfaces without an API key: whoever reaches this machine "
            "may use it. --host 127.0.0.1 keeps it to this machine; CONTINUUM_API_KEY asks for a key."
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
