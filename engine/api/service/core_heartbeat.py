"""A heartbeat of the engine core: a request, once a second, that it answers if it still makes progress.

A core that has died reports that itself. A stalled one reports nothing: a stopped process, a step that hangs
in a device driver, a machine that swaps.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from engine.api.errors import CoreStalledError
from engine.errors import EngineError
from engine.frontend.async_llm import AsyncLLM

ASK_EVERY_S = 1.0


class CoreHeartbeat:
    """The state of the last heartbeat."""

    def __init__(self, engine: AsyncLLM, silence_s: float, step_s: float) -> None:
        """``silence_s``: the maximum time for an answer; ``step_s``: the maximum time of one step."""
        self._engine = engine
        self._silence_s = silence_s
        self._step_s = step_s
        self._asked_at: float | None = None
        """The time when the unanswered heartbeat was sent; None if there is none."""
        self._step_took_s = 0.0

    def check(self) -> None:
        """Raises CoreStalledError if the core makes no progress."""
        silence_s = 0.0 if self._asked_at is None else _now() - self._asked_at
        if silence_s > self._silence_s:
            raise CoreStalledError(f"The engine core has not answered for {silence_s:.0f} s.")
        if self._step_took_s > self._step_s:
            raise CoreStalledError(f"The engine core has been in one step for {self._step_took_s:.0f} s.")

    async def run(self) -> None:
        """Sends heartbeats until it is cancelled or the core has died."""
        with suppress(EngineError):
            while True:
                self._asked_at = _now()
                self._step_took_s = await self._engine.step_age_s()
                self._asked_at = None
                await asyncio.sleep(ASK_EVERY_S)


def _now() -> float:
    return asyncio.get_running_loop().time()
