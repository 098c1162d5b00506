"""Promises of merged streams: all items, the first error, and no source left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from engine.api.http.streams import begun, merge


async def count(limit: int, closed: list[int], fail: bool = False) -> AsyncGenerator[int, None]:
    try:
        for number in range(limit):
            await asyncio.sleep(0)
            yield number
        if fail:
            raise ValueError("broken")
    finally:
        closed.append(limit)


async def test_merged_streams_keep_their_order() -> None:
    """Every item arrives once, in order within its stream."""
    closed: list[int] = []
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    async for index, item in merge([count(3, closed), count(0, closed), count(5, closed)]):
        got[index].append(item)
    assert got == {0: [0, 1, 2], 1: [], 2: [0, 1, 2, 3, 4]}
    assert sorted(closed) == [0, 3, 5]


async def test_an_error_ends_all_streams() -> None:
    """The first error is raised, and the other sources are closed."""
    closed: list[int] = []
    merged = merge([count(2, closed, fail=True), count(10**9, closed)])
    with pytest.raises(ValueError, match="broken"):
        [item async for item in merged]
    assert sorted(closed) == [2, 10**9]


async def test_leaving_early_ends_all_streams() -> None:
    """If a consumer stops reading, nothing keeps running."""
    closed: list[int] = []
    async with aclosing(merge([count(10**9, closed), count(10**8, closed)])) as merged:
        async for _ in merged:
            break
    assert sorted(closed) == [10**8, 10**9]


async def test_a_begun_stream_loses_nothing() -> None:
    """Reading the first items early only changes when an error is raised."""
    closed: list[int] = []
    assert [item async for item in await begun(count(3, closed))] == [0, 1, 2]
    with pytest.raises(ValueError, match="broken"):
        await begun(count(0, closed, fail=True))
    async with aclosing(await begun(count(10**9, closed))) as stream:
        assert await anext(stream) == 0
    assert closed == [3, 0, 10**9]
