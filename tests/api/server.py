"""A real server process for tests: started as a user starts it, with its output kept and its core easy to
find."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx

from tests.child_processes import children_of

_SERVING = re.compile(r"Serving (\S+) at (\S+)")
START_TIMEOUT_S = 90.0


class ServerEnded(AssertionError):
    """The server ended before it was ready."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the server ended before it was ready, with exit code {code}")
        self.code = code


class Server:
    """A running ``continuum serve``."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def core_pid(self) -> int:
        """The process id of the engine core, found among the server's child processes."""
        (core,) = self.core_pids()
        return core

    def core_pids(self) -> list[int]:
        """The process ids of all engine cores."""
        return children_of(self.process.pid, "engine.core_process.core_proc")

    def interrupt(self) -> int:
        """Ends the server as Ctrl-C would; returns its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.wait(15)

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)


@contextmanager
def posting(server: Server) -> Iterator[Callable[..., httpx.Response]]:
    """Returns a function that posts its keyword arguments as a JSON body to a route."""
    with httpx.Client(base_url=server.url, timeout=60) as http:

        def post(route: str, **body: Any) -> httpx.Response:
            return http.post(route, json=body)

        yield post


def only_complaint(stderr: str) -> str:
    """The one line on stderr besides the progress of a start that takes long."""
    [line] = [line for line in stderr.splitlines() if not line.endswith(" s elapsed.")]
    return line


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


_SERVE = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: it is killed when the tests end, however they end
os.execv(sys.executable, [sys.executable, "-m", "continuum.cli", "serve", *sys.argv[1:]])
"""


@contextmanager
def running_server(
    model: Path,
    *flags: str,
    log: Path | None = None,
    environment: dict[str, str] | None = None,
    where: Path | None = None,
) -> Iterator[Server]:
    """Starts a server on a free port of this machine and waits until it is ready; always kills it at the end.

    ``log``: a file for its stderr. ``where``: its working directory.
    """
    command = [
        sys.executable,
        "-c",
        _SERVE,
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    with nullcontext() if log is None else log.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "--served-model-name", "tiny", *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=where,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})},
        )
    try:
        yield Server(process, _url_when_ready(process))
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _url_when_ready(process: subprocess.Popen[str]) -> str:
    """Reads raw bytes as they arrive, so that buffered data after a line blocks nothing."""
    assert process.stdout is not None
    deadline, told = time.monotonic() + START_TIMEOUT_S, b""
    while time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 1.0)[0]:
            news = os.read(process.stdout.fileno(), 65536)
            if not news:
                raise ServerEnded(process.wait(10))
            told += news
            if found := _SERVING.search(told[: told.rfind(b"\n") + 1].decode()):
                return found.group(2)
    raise AssertionError("the server was not ready in time")
