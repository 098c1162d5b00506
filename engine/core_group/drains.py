"""Drains engine cores: new jobs go elsewhere, known jobs' turns are awaited, and what is left moves.

A drain goes on in the API server process that was asked for it; all processes see its state on the board.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

import msgspec

from engine.core_group.load_board import Drain, LoadBoard
from engine.core_process.core_client import AsyncMPClient
from engine.errors import EngineDeadError, EngineGenerateError
from engine.records.handed_over import END_HANDOVER, HAND_OVER, HandedOver

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""How often it is looked whether the core is quiet."""
SAVES_S = 600.0
"""How long a core may save what its pins hold."""


class Drains:
    """The drains that this process was asked for."""

    def __init__(self, board: LoadBoard, client_of: Callable[[int], AsyncMPClient | None]) -> None:
        """``client_of``: the client of a core; None while it is down."""
        self._board = board
        self._client_of = client_of
        self._tasks: dict[int, asyncio.Task[HandedOver | None]] = {}

    def begin(self, engine: int, deadline_s: float, *, hands_over: bool) -> asyncio.Task[HandedOver | None]:
        """Drain a core, in place of an earlier drain. For up to ``deadline_s`` seconds, as long as it has
        requests or pins, turns of its own jobs still go there. The task ends when it has no requests and,
        with ``hands_over``, has saved what its pins hold."""
        self._stop(engine)
        self._board.set_drain(engine, Drain.LEAVING if hands_over or deadline_s > 0 else Drain.CLOSED)
        task = asyncio.create_task(self._drain(engine, time.monotonic() + deadline_s, hands_over))
        self._tasks[engine] = task
        task.add_done_callback(lambda done: self._forget(engine, done))
        return task

    async def end(self, engine: int, *, hands_over: bool) -> None:
        """End a drain: the core takes new requests again."""
        self._stop(engine)
        self._board.set_drain(engine, Drain.NONE)
        if hands_over:
            await self._end_handover(engine)

    def _stop(self, engine: int) -> None:
        task = self._tasks.pop(engine, None)
        if task is not None:
            task.cancel()

    async def _drain(self, engine: int, deadline_s: float, hands_over: bool) -> HandedOver | None:
        await _until(lambda: self._is_quiet(engine) or self._was_ended(engine), deadline_s)
        # Before turns go elsewhere, so that they find it; then what the last requests have left.
        moved = await self._hand_over(engine) if hands_over else None
        if not self._was_ended(engine):
            self._board.set_drain(engine, Drain.CLOSED)
        await _until(lambda: not self._board.load_of(engine).num_open or self._was_ended(engine))
        if self._was_ended(engine):
            if hands_over:  # it may have begun after that
                await self._end_handover(engine)
            return None
        if hands_over:
            moved = await self._hand_over(engine)
        self._board.set_drain(engine, Drain.DONE)
        return moved

    def _was_ended(self, engine: int) -> bool:
        """Whether the drain was ended, perhaps in another process."""
        return self._board.drain_of(engine) is Drain.NONE

    async def _hand_over(self, engine: int) -> HandedOver | None:
        """What a core has handed over; None if it is down, or dies of it: there is nothing to move then."""
        client = self._client_of(engine)
        if client is None:
            return None
        try:
            return msgspec.convert(await client.call_utility(HAND_OVER, SAVES_S), HandedOver)
        except (EngineDeadError, EngineGenerateError) as error:
            logger.warning("Engine core %d could not hand over its paused turns: %s", engine, error)
            return None

    async def _end_handover(self, engine: int) -> None:
        client = self._client_of(engine)
        if client is not None:
            await client.call_utility(END_HANDOVER)

    def _is_quiet(self, engine: int) -> bool:
        load = self._board.load_of(engine)
        return not load.num_open and not load.num_pinned_blocks

    def _forget(self, engine: int, task: asyncio.Task[HandedOver | None]) -> None:
        if self._tasks.get(engine) is task:
            del self._tasks[engine]


async def _until(is_so: Callable[[], bool], deadline_s: float = math.inf) -> None:
    """Wait for what other processes write on the board; until a time by ``time.monotonic`` at the latest."""
    while True:
        if is_so() or time.monotonic() >= deadline_s:
            return
        await asyncio.sleep(POLL_S)
