"""Operators' actions on a running engine: pause, sleep, exchange adapters and weights."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from engine.records.adapters import Adapter
from engine.records.door import Door

T = TypeVar("T")

REST_POLL_S = 0.05
"""Seconds between checks whether a core has come to rest."""


class EngineOperations(ABC):
    """Calls of the core's utilities. On a group of cores each call applies to all of them."""

    @abstractmethod
    def _operating(self) -> AbstractAsyncContextManager[None]:
        """A lock that only one operator holds at a time, over all API servers."""

    @abstractmethod
    async def _utility(self, method: str, result_type: type[T], *args: object) -> T:
        """Calls a utility; EngineGenerateError if it fails."""

    async def reset_encoder_cache(self) -> None:
        """Drops cached embeddings of pictures and clips that no request needs."""
        await self._utility("reset_encoder_cache", type(None))

    async def pause(self, *, running_too: bool = False) -> None:
        """Stops admission; with ``running_too`` nothing is scheduled at all."""
        await self._utility("pause", type(None), running_too)

    async def set_door(self, door: Door) -> None:
        """Changes which requests the cores take."""
        await self._utility("set_door", type(None), door.value)

    async def door(self) -> Door:
        """Which requests the cores take."""
        return await self._utility("door", Door)

    async def resume(self) -> None:
        await self._utility("resume", type(None))

    async def sleep(self, level: int) -> None:
        """Frees memory once running requests have ended: that of the KV pool (1), or of the weights, too (2).
        Further requests are accepted and wait. EngineGenerateError if the model cannot sleep."""
        await self._at_rest("sleep", level)

    async def wake_up(self) -> None:
        """Ends the sleep: waiting requests run."""
        async with self._operating():
            await self._utility("wake_up", type(None))

    async def sleep_level(self) -> int:
        """The level of sleep; 0 means awake."""
        return await self._utility("sleep_level", int)

    async def update_weights(self, folder: str) -> None:
        """Serves the weights of another folder, with an empty cache, once running requests have ended.
        EngineGenerateError if they cannot be served; then the previous ones stay."""
        await self._at_rest("update_weights", folder)

    async def why_paused(self) -> list[str]:
        """The reasons why nothing is admitted; empty if requests are admitted."""
        return await self._utility("why_paused", list[str])

    async def _at_rest(self, method: str, *args: object) -> None:
        """Lets all cores come to rest, and runs the method once on each, or on none; then they continue, even
        if the caller no longer waits."""
        async with self._operating():
            await self._utility("check_operation", type(None), method, *args)
            try:
                is_done = False
                while not is_done:
                    rests = await self._utility("rest", bool)
                    is_done = rests and await self._utility(method, bool, *args)
                    await asyncio.sleep(0 if is_done else REST_POLL_S)
            except BaseException:
                if method == "update_weights":
                    await self._utility("undo_weights", type(None), *args)
                raise
            finally:
                await self._utility("stop_resting", type(None))

    async def load_adapter(self, adapter: Adapter) -> None:
        """Loads an adapter on all cores; EngineGenerateError if it cannot be served."""
        await self._utility("load_adapter", type(None), adapter.name, adapter.path, adapter.digest)

    async def unload_adapter(self, key: str) -> None:
        """Drops an adapter once no request uses it."""
        await self._utility("unload_adapter", type(None), key)
