"""The page of a server with several API server processes: what all of them have written into files."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from time import monotonic

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that names the folder of multi-process metrics."""
SHARE = 0.01
"""How much of a core may be spent on pages, where scrapes come faster than that allows."""
SAVED_S = 30.0
"""The time without scrapes after which no more is saved up: scrapes by hand always get a new page."""


def shared_metrics_environment(folder: Path) -> dict[str, str]:
    """The environment that a process must start with for its metrics to be stored in this folder."""
    return {METRICS_FOLDER: str(_files_in(folder))}


def _files_in(folder: Path) -> Path:
    files = folder / "metrics"
    files.mkdir(exist_ok=True)
    return files


class SharedPage:
    """Adding up the files takes some 20 ms, so it is done in a thread, once for all who wait, and, when it
    is asked for twenty times a second, about once in two seconds: between, the last page is given."""

    def __init__(self, folder: Path) -> None:
        self._sums = CollectorRegistry()
        MultiProcessCollector(self._sums, str(_files_in(folder)))  # type: ignore[no-untyped-call]
        self._making: asyncio.Task[bytes] | None = None
        self._bytes = b""
        self._paid_until = -math.inf
        """The time at which the pages so far will have taken the share of a core."""

    async def exposition(self) -> bytes:
        """The page; it may be some seconds old."""
        if self._making is None and self._paid_until > monotonic():
            return self._bytes
        if self._making is None:
            self._making = asyncio.create_task(self._make())
        return await asyncio.shield(self._making)

    async def _make(self) -> bytes:
        begin = monotonic()
        try:
            self._bytes = await asyncio.to_thread(generate_latest, self._sums)
        finally:
            self._making = None
            now = monotonic()
            self._paid_until = max(self._paid_until, begin - SAVED_S) + (now - begin) / SHARE
        return self._bytes
