"""Asynchronous streams: several read as one, and one whose beginning has been read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Items as they come, each with the number of its stream. The first error ends all streams."""
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                try:
                    item = task.result()
                except StopAsyncIteration:
                    del waiting[task]
                    continue
                index = waiting.pop(task)
                waiting[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:  # one that has given an item nobody took was not cancelled
            await stream.aclose()


async def begun(stream: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """The same stream once its first item is there; an error before that is raised here."""
    first = await anext(stream)
    return _behind(first, stream)


async def _behind(first: Item, rest: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item
