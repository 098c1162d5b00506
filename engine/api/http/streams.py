"""Asynchronous streams: several read as one, and one whose beginning has been read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

Item = TypeVar("Item")

PATIENCE_S = 5.0
"""For a request that is still read, rendered and checked."""
PATIENCE_ONCE_TAKEN_S = 1.0
"""For one that the engine has: clients and proxies cut a connection that says nothing."""


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Items as they come, each with the number of its stream. The first error ends all streams."""
    if len(streams) == 1:  # as a rule; a task for each item would cost more than the item
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
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


class Patience:
    """How long an answer waits for its first words: so long an error is an HTTP status.

    What the engine has taken is seldom refused any more, so from then on it is not long.
    """

    def __init__(self, most_s: float | None) -> None:
        """``most_s``: it never waits for longer; None for a default."""
        most_s = PATIENCE_S if most_s is None else most_s
        self._most_s = min(PATIENCE_S, most_s)
        self._once_taken_s = min(PATIENCE_ONCE_TAKEN_S, most_s)
        self._taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False
        """It has waited in vain: the answer begins without a word."""

    def taken(self) -> None:
        """The engine has the request."""
        if not self._taken.done():
            self._taken.set_result(None)

    async def wait(self, first: asyncio.Future[Item]) -> None:
        """Until the first words are there, or it is over."""
        either: set[asyncio.Future[Any]] = {first, self._taken}
        await asyncio.wait(either, timeout=self._most_s, return_when=asyncio.FIRST_COMPLETED)
        if self._taken.done() and not first.done():
            await asyncio.wait({first}, timeout=self._once_taken_s)
        self.is_over = not first.done()


async def begun(
    stream: AsyncGenerator[Item, None], patience: Patience | None = None
) -> AsyncGenerator[Item, None]:
    """The same stream once its first item is there; an error before that is raised here.

    When its ``patience`` is over it is given back as it is: its error, if there is one, comes later.
    """
    first = asyncio.ensure_future(anext(stream))
    whole = _behind(first, stream)
    await anext(whole)  # it has begun: from now on it ends what it stands for when it is closed or forgotten
    try:
        await (asyncio.wait({first}) if patience is None else patience.wait(first))
        if first.done():
            first.result()
    except BaseException:
        await whole.aclose()
        raise
    return cast(AsyncGenerator[Item, None], whole)


async def _behind(
    first: asyncio.Future[Item], rest: AsyncGenerator[Item, None]
) -> AsyncGenerator[Item | None, None]:
    try:
        yield None
        yield await first
        async for item in rest:
            yield item
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await rest.aclose()
