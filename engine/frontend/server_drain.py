"""Drains a server: new jobs are refused, known jobs' turns are awaited, and what is left is handed over.

Each core keeps its own door, as only it knows its jobs; see ``engine.core_group.drains`` for one core of
several, whose jobs the others take.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from engine.core.scheduler_report import SchedulerStatistics
from engine.records.door import Door
from engine.records.handed_over import HandedOver

POLL_S = 0.1
"""How often it is looked whether the server is quiet."""
SAVES_S = 600.0
"""How long the cores may save what their pins hold."""


class Drained(Protocol):
    """All cores of a server."""

    async def set_door(self, door: Door) -> None:
        """Change which requests they take."""

    async def door(self) -> Door:
        """Which requests they take."""

    async def statistics(self) -> SchedulerStatistics:
        """What they have, added up."""

    async def hand_over(self, timeout_s: float) -> HandedOver | None:
        """Save what pins hold, and what later turns leave; None if no folder takes it."""

    async def end_hand_over(self) -> None:
        """Save no more."""


class ServerDrain:
    """The drain that this process was asked for. Several processes of a server see the cores' doors."""

    def __init__(self, engine: Drained) -> None:
        self._engine = engine
        self._task: asyncio.Task[HandedOver | None] | None = None

    async def begin(self, deadline_s: float) -> asyncio.Task[HandedOver | None]:
        """Begin to drain, in place of an earlier drain: new jobs are refused from now on. The task ends when
        no request is left and what pins hold has been saved, if a folder takes it; with None, if the drain
        was ended in another process."""
        self._stop()
        await self._engine.set_door(Door.LEAVING)
        self._task = asyncio.create_task(self._drain(time.monotonic() + deadline_s))
        return self._task

    async def end(self) -> None:
        """Take new requests again."""
        self._stop()
        await self._engine.set_door(Door.OPEN)
        await self._engine.end_hand_over()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _drain(self, until_s: float) -> HandedOver | None:
        await _until(self._is_quiet, until_s)
        # Before turns go elsewhere, so that they find it; then what the last requests have left.
        await self._engine.hand_over(SAVES_S)
        if await self._was_ended():
            await self._engine.end_hand_over()
            return None
        await self._engine.set_door(Door.CLOSED)
        await _until(self._has_no_requests)
        if await self._was_ended():
            return None
        return await self._engine.hand_over(SAVES_S)

    async def _was_ended(self) -> bool:
        """Whether the drain was ended, perhaps in another process."""
        return await self._engine.door() is Door.OPEN

    async def _has_no_requests(self) -> bool:
        now = await self._engine.statistics()
        return not now.num_running + now.num_waiting + now.num_loading + now.num_compiling

    async def _is_quiet(self) -> bool:
        if await self._was_ended():
            return True
        return await self._has_no_requests() and not (await self._engine.statistics()).num_pins


async def _until(is_so: Callable[[], Awaitable[bool]], until_s: float = math.inf) -> None:
    """Wait for the cores; until a time by ``time.monotonic`` at the latest."""
    while True:
        if time.monotonic() >= until_s or await is_so():
            return
        await asyncio.sleep(POLL_S)
