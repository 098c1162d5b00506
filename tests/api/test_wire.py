"""What a stream writes in silence does not overtake its events."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from engine.api.http import connection
from engine.api.http.connection import _Wire

Message = MutableMapping[str, Any]


async def test_an_event_waits_for_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sign of life takes a number of the stream's events. While a client does not read, it waits, and the
    next event behind it."""
    monkeypatch.setattr(connection, "EVENT_S", 0.0)
    reads = asyncio.Event()
    waits = asyncio.Event()
    written: list[bytes] = []

    async def send(message: Message) -> None:
        if message["body"] == b"sign":
            waits.set()
            await reads.wait()
        written.append(message["body"])

    wire = _Wire(send, b"", lambda: b"sign")
    await wire.send({"type": "http.response.body", "body": b"first", "more_body": True})
    keeping = asyncio.create_task(wire.keep_alive(0.0))
    await waits.wait()
    event = asyncio.create_task(
        wire.send({"type": "http.response.body", "body": b"second", "more_body": False})
    )
    await asyncio.sleep(0)
    reads.set()
    await event
    keeping.cancel()
    assert written[:3] == [b"first", b"sign", b"second"]
