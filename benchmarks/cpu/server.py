"""Starts one server in separate processes, times it until it answers, and stops it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.cpu.caller import Caller
from benchmarks.cpu.contender import PORT, Contender
from benchmarks.cpu.memory import Resident, resident
from eval.errors import ServerError

POLL_S = 0.05
STOP_TIMEOUT_S = 20.0
FIRST_PROMPT = tuple(range(300, 308))


class Server:
    """The server of one contender, from ``start`` to ``stop``."""

    def __init__(self, contender: Contender, log_folder: Path) -> None:
        self.contender = contender
        self._log = log_folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', contender.name)}.log"
        port = str(_free_port())
        self._command = [part.replace(PORT, port) for part in contender.command]
        self.caller = Caller(contender.base_url.replace(PORT, port), contender.model_name)
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> float:
        """Returns the seconds from its command to its first answer of a token. Raises ServerError."""
        began = time.perf_counter()
        self._process = self._launch()
        await self._wait_until_ready(self._process, began + self.contender.start_timeout_s)
        return time.perf_counter() - began

    def _launch(self) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            try:
                return subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self.contender.environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError(f"{error.strerror}: {self._command[0]}") from error

    async def _wait_until_ready(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        complaint = "nothing listened"
        while time.perf_counter() < deadline:
            if process.poll() is not None:
                raise ServerError(f"it ended with exit code {process.returncode}{self._last_words()}")
            try:
                async with asyncio.timeout(deadline - time.perf_counter()):
                    if self.contender.ready_path is not None:
                        await self.caller.get(self.contender.ready_path)
                    await self.caller.all_at_once([FIRST_PROMPT], 1)
                return
            except (ServerError, OSError, EOFError) as error:
                complaint = str(error) or "it did not answer"
                self.caller.close()
            await asyncio.sleep(POLL_S)
        limit_s = self.contender.start_timeout_s
        raise ServerError(f"it gave no answer within {limit_s:g} s ({complaint}); see {self._log}")

    def _last_words(self) -> str:
        """Returns the last line of the server's log, and the log's path."""
        lines = self._log.read_text(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), None)
        return f"; see {self._log}" if said is None else f" ({said}); see {self._log}"

    def resident(self) -> Resident | None:
        return resident(self._process.pid) if self._process is not None else None

    def rest(self) -> None:
        """Pauses its processes until ``wake``: some servers spin for seconds after their last answer."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """Ends all its processes: SIGTERM first, then SIGKILL."""
        self.caller.close()
        process = self._process
        if process is None:
            return
        self.wake()
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
