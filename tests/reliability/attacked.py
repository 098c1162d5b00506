"""A server to attack, its memory, and a normal client during the attack."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from eval.agent_model import folder
from tests.api.server import Server, running_server

POOL = ("--kv-cache-memory-bytes", "64M")
PROBE_EVERY_S = 0.05
MANY_TOKENS = 100
_TOKENS_TOLD = re.compile(rb'"(?:completion|output)_tokens": ?(\d+)')


@contextmanager
def attacked_server(*flags: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """Starts a server with the bundled model."""
    with running_server(folder(), *POOL, *flags, environment=environment) as server:
        yield server


def resident_mib(pid: int, highest: bool = False) -> float:
    """The memory that a process holds, or the most that it has held."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmHWM:" if highest else "VmRSS:")[1].split()[0]) / 1024


def shown(seconds: Sequence[float]) -> str:
    """Formats median, 99th percentile and worst, in milliseconds."""
    if not seconds:
        return "none answered"
    ranked = sorted(seconds)
    median, late = ranked[len(ranked) // 2], ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))]
    return f"p50 {median * 1e3:.0f} p99 {late * 1e3:.0f} worst {ranked[-1] * 1e3:.0f} ms of {len(ranked)}"


def is_long(answer: bytes) -> bool:
    """Whether the answer has so many tokens that generating them takes most of its time."""
    told = [int(number) for number in _TOKENS_TOLD.findall(answer)]
    return max([answer.count(b"data: "), *told]) > MANY_TOKENS


class Probe:
    """Sends a small request again and again, and records how long each takes."""

    def __init__(self, url: str, path: str = "/health", timeout_s: float = 60.0) -> None:
        self.seconds: list[float] = []
        self.failures = 0
        self._url, self._timeout_s = url + path, timeout_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(self._timeout_s)

    def _ask(self) -> None:
        while not self._over.wait(PROBE_EVERY_S):
            started = time.monotonic()
            try:
                answer = httpx.get(self._url, timeout=self._timeout_s)
                self.failures += answer.status_code != 200
            except httpx.HTTPError:
                self.failures += 1
            self.seconds.append(time.monotonic() - started)
