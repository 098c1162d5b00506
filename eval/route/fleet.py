"""The servers of a route: which are up, and the load of each."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from engine.routing import EngineLoad
from eval.say import say

ASK_EVERY_S = 1.0
ANSWERS_WITHIN_S = 5.0
MAX_PAGE_BYTES = 4 * 2**20
MOST = 1e12
"""Counts above this are clamped."""
logger = logging.getLogger(__name__)
_METRIC = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)", re.MULTILINE)
_NUM_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')


@dataclass(slots=True)
class Backend:
    """A server and its load."""

    url: str
    is_up: bool = True
    load: EngineLoad = field(default_factory=EngineLoad)


class Fleet:
    """Polls health and metrics of each server once a second; V1's metrics have the same names."""

    def __init__(self, urls: Sequence[str], http: httpx.AsyncClient) -> None:
        self.backends = [Backend(url.rstrip("/")) for url in urls]
        self._http = http

    async def watch(self, on_lost: asyncio.Queue[int]) -> None:
        """Polls until it is cancelled. Puts the index of each server that goes down into the queue."""
        await asyncio.gather(*(self._watch_one(index, on_lost) for index in range(len(self.backends))))

    async def _watch_one(self, index: int, on_lost: asyncio.Queue[int]) -> None:
        """Polls one server by itself: a slow server delays no other, and no answer ends the polling."""
        has_failed = False
        while True:
            try:
                await self._ask(index, on_lost)
            except Exception:
                if not has_failed:
                    logger.exception("Watching %s failed.", self.backends[index].url)
                has_failed = True
            await asyncio.sleep(ASK_EVERY_S)

    def lost(self, index: int) -> bool:
        """Marks a server that does not answer as down; returns False if it was down already."""
        backend = self.backends[index]
        was_up = backend.is_up
        backend.is_up = False
        if was_up:
            say(f"{backend.url} does not answer: its jobs go to other servers.")
        return was_up

    def loads(self, without: Sequence[int] = ()) -> list[EngineLoad | None]:
        """Returns the loads of the servers that are up, except for some."""
        return [
            backend.load if backend.is_up and index not in without else None
            for index, backend in enumerate(self.backends)
        ]

    async def _ask(self, index: int, on_lost: asyncio.Queue[int]) -> None:
        backend = self.backends[index]
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                status, _ = await self._page(f"{backend.url}/health")
                _, metrics = await self._page(f"{backend.url}/metrics")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
            status = None
            metrics = ""
        if status != 200:
            if self.lost(index):
                on_lost.put_nowait(index)
            return
        if not backend.is_up:
            say(f"{backend.url} is back.")
        backend.is_up = True
        read_metrics(metrics, backend.load)

    async def _page(self, url: str) -> tuple[int, str]:
        """Returns the status and text of a page, of which it reads at most MAX_PAGE_BYTES."""
        page = bytearray()
        async with self._http.stream("GET", url, timeout=ANSWERS_WITHIN_S) as answer:
            async for part in answer.aiter_bytes():
                page += part
                if len(page) > MAX_PAGE_BYTES:
                    break
        return answer.status_code, page[:MAX_PAGE_BYTES].decode("utf-8", "replace")


def _number(text: str) -> float:
    """Parses a count of a page; invalid values count as 0."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return min(value, MOST) if value >= 0 else 0.0


def read_metrics(text: str, load: EngineLoad) -> None:
    """Reads a page of Prometheus metrics, of our server or V1's, into sums over a server's cores."""
    sums = {"vllm:num_requests_running": 0.0, "vllm:num_requests_waiting": 0.0}
    pinned = num_blocks = 0
    usage: list[float] = []
    alone: list[float] = []
    for found in _METRIC.finditer(text):
        name = found["name"]
        value = found["value"]
        if name in sums:
            sums[name] += _number(value)
        elif name == "continuum:pinned_blocks":
            pinned += int(_number(value))
        elif name == "vllm:kv_cache_usage_perc":
            usage.append(min(1.0, _number(value)))
        elif name == "continuum:pinned_share":
            alone.append(min(1.0, _number(value)))
        elif name == "vllm:cache_config_info" and (blocks := _NUM_BLOCKS.search(found["labels"] or "")):
            num_blocks += int(_number(blocks[1]))
    load.num_running, load.num_waiting = (int(value) for value in sums.values())
    load.num_blocks = num_blocks
    load.num_pinned_blocks = pinned
    taken = _mean(usage) + _mean(alone)  # blocks that only pins retain are not in use, yet not free
    load.num_free_blocks = max(0, round(num_blocks * (1 - taken)))


def _mean(shares: list[float]) -> float:
    return sum(shares) / len(shares) if shares else 0.0
