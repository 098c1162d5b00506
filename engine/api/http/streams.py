"""Asynchronous streams: several merged into one, and one whose first item has been awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

Item = TypeVar("Item")

PATIENCE_S = 5.0
"""Maximum wait while a request is read, rendered and checked."""
PATIENCE_ONCE_ACCEPTED_S = 1.0
"""Maximum wait after the engine has accepted it: clients and proxies close a silent connection."""


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yields items as they arrive, each with the number of its stream. The first error ends all streams."""
    if len(streams) == 1:  # the usual case; a task per item would cost more than the item
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
        for stream in streams:  # one with an item that was not consumed has not been cancelled
            await stream.aclose()


class Patience:
    """How long a response waits for its first output. Until then an error is an HTTP status.

    The engine seldom refuses a request that it has accepted, so from then on the wait is short.
    """

    def __init__(self, most_s: float | None) -> None:
        """``most_s``: the maximum wait; None means the default."""
        most_s = PATIENCE_S if most_s is None else most_s
        self._most_s = min(PATIENCE_S, most_s)
        self._once_accepted_s = min(PATIENCE_ONCE_ACCEPTED_S, most_s)
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False
        """Whether the wait ended without output: the response then begins empty."""

    def accepted(self) -> None:
        """Shortens the wait, since the engine has accepted the request."""
        if not self._accepted.done():
            self._accepted.set_result(None)

    async def wait(self, first: asyncio.Future[Item]) -> None:
        """Waits for the first output, or until the time is over."""
        either: set[asyncio.Future[Any]] = {first, self._accepted}
        await asyncio.wait(either, timeout=self._most_s, return_when=asyncio.FIRST_COMPLETED)
        if self._accepted.done() and not first.done():
            await asyncio.wait({first}, timeout=self._once_accepted_s)
        self.is_over = not first.done()


async def begun(
    stream: AsyncGenerator[Item, None], patience: Patience | None = None
) -> AsyncGenerator[Item, None]:
    """Returns the stream once its first item has arrived; an earlier error is raised here.

    If ``patience`` ends first, the stream is returned without its first item; an error is then raised by the
    stream.
    """
    first = asyncio.ensure_future(anext(stream))
    whole = _behind(first, stream)
    await anext(whole)  # started: from now on closing or dropping it closes the source
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
