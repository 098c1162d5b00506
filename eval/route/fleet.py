"""The servers behind a route: which are up, and what each has to do."""

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
"""No count is larger."""
logger = logging.getLogger(__name__)
_METRIC = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)", re.MULTILINE)
_NUM_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')


@dataclass(slots=True)
class Backend:
    """A server."""

    url: str
    is_up: bool = True
    load: EngineLoad = field(default_factory=EngineLoad)


class Fleet:
    """Asks each server once a second whether it lives, and for its metrics: V1 has the same names."""

    def __init__(self, urls: Sequence[str], http: httpx.AsyncClient) -> None:
        self.backends = [Backend(url.rstrip("/")) for url in urls]
        self._http = http

    async def watch(self, on_lost: asyncio.Queue[int]) -> None:
        """Until it is cancelled. Numbers of servers that go down are put into the queue."""
        await asyncio.gather(*(self._watch_one(index, on_lost) for index in range(len(self.backends))))

    async def _watch_one(self, index: int, on_lost: asyncio.Queue[int]) -> None:
        """Each server is asked by itself: a slow one holds up nobody, and nothing that one says ends it."""
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
        """A server does not answer; False if that is known."""
        backend = self.backends[index]
        was_up, backend.is_up = backend.is_up, False
        if was_up:
            say(f"{backend.url} does not answer: its jobs go to other servers.")
        return was_up

    def loads(self, without: Sequence[int] = ()) -> list[EngineLoad | None]:
        """Of the servers that are up, but for some."""
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
        """The status and the text of a page, of which only so much is read as a server's metrics may have."""
        page = bytearray()
        async with self._http.stream("GET", url, timeout=ANSWERS_WITHIN_S) as answer:
            async for part in answer.aiter_bytes():
                page += part
                if len(page) > MAX_PAGE_BYTES:
                    break
        return answer.status_code, page[:MAX_PAGE_BYTES].decode("utf-8", "replace")


def _number(text: str) -> float:
    """A count of a page; what is none counts as 0."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return min(value, MOST) if value >= 0 else 0.0


def read_metrics(text: str, load: EngineLoad) -> None:
    """Take a page of Prometheus, as our server and V1's have it: sums over a server's cores."""
    sums = {"vllm:num_requests_running": 0.0, "vllm:num_requests_waiting": 0.0}
    pinned = num_blocks = 0
    usage: list[float] = []
    alone: list[float] = []
    for found in _METRIC.finditer(text):
        name, value = found["name"], found["value"]
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
    load.num_blocks, load.num_pinned_blocks = num_blocks, pinned
    taken = _mean(usage) + _mean(alone)  # what pins hold alone is not in use, yet not free
    load.num_free_blocks = max(0, round(num_blocks * (1 - taken)))


def _mean(shares: list[float]) -> float:
    return sum(shares) / len(shares) if shares else 0.0
