"""Starts and stops ``continuum serve`` in a separate process, as a user would."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from eval.errors import ServerError

_SERVING = re.compile(rb"^Serving .* at (http://\S+)", re.MULTILINE)
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.1
STOP_TIMEOUT_S = 20.0
SAID_EVERY_S = 30.0


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Within the block, SIGTERM unwinds ``with`` blocks, as Ctrl-C does, so that no server is left running.

    So does SIGHUP, when the terminal is closed, unless it is ignored as under ``nohup``.
    """
    taken = [number for number in _ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _exit) for number in taken}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


class ServerProcess:
    """A server with the given ``serve`` arguments; it is ready inside the ``with`` block."""

    def __init__(
        self,
        arguments: list[str],
        log_path: Path,
        *,
        hears_ctrl_c: bool = True,
    ) -> None:
        """``hears_ctrl_c``: whether Ctrl-C in the terminal ends the server. The start has no timeout while
        the process lives: a busy machine compiles kernels for minutes."""
        self._command = [sys.executable, "-m", "continuum.cli", "serve", *arguments]
        self._log_path = log_path
        self._hears_ctrl_c = hears_ctrl_c
        self._process: subprocess.Popen[bytes] | None = None
        self.base_url = ""

    def __enter__(self) -> Self:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=not self._hears_ctrl_c,
            )
        try:
            self.base_url = self._wait_until_serving(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_until_serving(self, process: subprocess.Popen[bytes]) -> str:
        began = told = time.monotonic()
        while True:
            exited = process.poll() is not None
            log = self._log_path.read_bytes()
            if found := _SERVING.search(log):
                return found.group(1).decode()
            if exited:
                last_words = b"\n".join(log.strip().splitlines()[-5:]).decode(errors="replace")
                raise ServerError(f"The server ended with exit code {process.returncode}:\n{last_words}")
            if time.monotonic() - told > SAID_EVERY_S:
                told = time.monotonic()
                elapsed = f"{told - began:.0f} s elapsed"
                print(f"The server is starting: {elapsed}; its log: {self._log_path}.", file=sys.stderr)
            time.sleep(POLL_S)

    def stop(self) -> int | None:
        """Terminates the server, and kills it if it does not end; returns its exit code."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
