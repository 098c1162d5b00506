"""Serves a model folder for an agent, and stops the server with the program."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from eval.load.server_process import ServerProcess, unwound_by_sigterm

MODEL_NAME = "agent"
"""The model's name on that server."""


@contextmanager
def served(model: str, flags: Sequence[str] = ()) -> Iterator[str]:
    """Yields the address of a server on a free port of this machine. Raises ServerError if it cannot start.

    It ignores Ctrl-C, which stops a response and not the server; it ends with the ``with`` block.
    """
    arguments = [
        model,
        *("--host", "127.0.0.1"),
        *("--port", "0"),
        *("--served-model-name", MODEL_NAME),
        *flags,
    ]
    with tempfile.TemporaryDirectory(prefix="agent-server-") as folder, unwound_by_sigterm():
        log = Path(folder, "server.log")
        with ServerProcess(arguments, log, hears_ctrl_c=False) as server:
            yield server.base_url
