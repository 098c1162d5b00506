"""Whether the engine core still moves: it is asked once a second. Knows no HTTP.

A core that has died tells so by itself. One that stands still says nothing: a process that was stopped, a
step that hangs in the driver of a device, a machine that swaps.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from engine.api.errors import CoreStalledError
from engine.async_llm import AsyncLLM
from engine.errors import EngineError

ASK_EVERY_S = 1.0


class CorePulse:
    """What was last heard of the core."""

    def __init__(self, engine: AsyncLLM, silence_s: float, step_s: float) -> None:
        """``silence_s``: it must answer within so long; ``step_s``: a step takes no longer."""
        self._engine = engine
        self._silence_s = silence_s
        self._step_s = step_s
        self._asked_at: float | None = None
        """When the question was sent that has no answer yet."""
        self._step_took_s = 0.0

    def check(self) -> None:
        """CoreStalledError if it stands still."""
        silence_s = 0.0 if self._asked_at is None else _now() - self._asked_at
        if silence_s > self._silence_s:
            raise CoreStalledError(f"The engine core has not answered for {silence_s:.0f} s.")
        if self._step_took_s > self._step_s:
            raise CoreStalledError(f"The engine core has been in one step for {self._step_took_s:.0f} s.")

    async def listen(self) -> None:
        """Ask until cancelled, or the core has died."""
        with suppress(EngineError):
            while True:
                self._asked_at = _now()
                self._step_took_s = await self._engine.step_age_s()
                self._asked_at = None
                await asyncio.sleep(ASK_EVERY_S)


def _now() -> float:
    return asyncio.get_running_loop().time()
