"""Background responses, which outlive the request that started them.

Their number is bounded, and so is the memory of their events.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from copy import copy

from engine.api.errors import OverloadedError
from engine.api.openai_responses.conversation_lock import RENEW_S
from engine.api.openai_responses.events import Event
from engine.api.openai_responses.store import ResponseStore
from engine.api.openai_responses.turn import ResponseTurn
from engine.errors import RequestError

MAX_LOG_BYTES = 64 * 2**20
"""Maximum total bytes of events of ended runs; the least recently used are dropped."""


class EventLog:
    """The events of a response, for readers that start late or wait for more."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self._has_ended = False
        self.num_bytes = 0

    def add(self, event: bytes) -> None:
        self._events.append(event)
        self.num_bytes += len(event)
        self._wake()

    def end(self) -> None:
        """There are no more events."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, first: int) -> AsyncGenerator[bytes, None]:
        """Yields the events from number ``first`` to the last."""
        while True:
            changed = self._changed
            for event in self._events[first:]:
                yield event
                first += 1
            if self._has_ended:
                return
            if first >= len(self._events):
                await changed.wait()


class _Run:
    """A running response."""

    def __init__(self, turn: ResponseTurn, store: ResponseStore, log: EventLog | None) -> None:
        self._turn = turn
        self._store = store
        self.log = log
        self.stored = asyncio.Event()
        """Set once the response is stored, or never will be."""
        self.task = asyncio.create_task(self._make())

    async def _make(self) -> None:
        making = asyncio.create_task(self._read())
        try:
            while not making.done():
                await asyncio.wait({making}, timeout=RENEW_S)
                if not making.done() and not await self._store.renew(self._turn.response.id):
                    break
        finally:
            if making.cancel():
                await asyncio.wait({making})
                self._log(await self._turn.cancelled())
            self.stored.set()
            if self.log is not None:
                self.log.end()

    async def _read(self) -> None:
        async with aclosing(self._turn.to_the_end(self._turn.events())) as events:
            async for event in events:
                self.stored.set()  # the response is stored before its first event
                self._log([event])

    def _log(self, events: list[Event]) -> None:
        if self.log is not None:
            for event in events:
                self.log.add(event.encode())


_RunKey = tuple[str | None, str]
"""The owner, and the id of the response."""


class BackgroundRuns:
    """The background runs of this process, as one owner sees them; other owners' are not found."""

    def __init__(self, store: ResponseStore, max_running: int) -> None:
        self._store = store
        self._owner: str | None = None
        self._max_running = max_running
        self._running: dict[_RunKey, _Run] = {}
        self._logs: OrderedDict[_RunKey, EventLog] = OrderedDict()
        """Events of ended runs, oldest first."""

    def of(self, owner: str | None) -> BackgroundRuns:
        view = copy(self)
        view._owner, view._store = owner, self._store.of(owner)
        return view

    def _may_start(self) -> bool:
        """Whether the owner may start one more run. At the limit, only an owner with less than an equal share
        may."""
        owners = [owner for owner, _ in self._running]
        if len(owners) < self._max_running:
            return True
        num_owners = len({*owners, self._owner})
        return (owners.count(self._owner) + 1) * num_owners <= self._max_running

    async def start(self, turn: ResponseTurn, *, logs_events: bool) -> None:
        """Starts a response and waits until it is stored; OverloadedError at the limit."""
        if not self._may_start():
            raise OverloadedError(
                f"This server already runs {self._max_running} background responses, the maximum."
            )
        key = (self._owner, turn.response.id)
        run = _Run(turn, self._store, EventLog() if logs_events else None)
        self._running[key] = run
        run.task.add_done_callback(lambda _: self._retire(key))
        await run.stored.wait()

    def follow(self, response_id: str, first: int = 0) -> AsyncGenerator[bytes, None]:
        """Yields encoded events from number ``first``; RequestError if this process does not have them."""
        key = (self._owner, response_id)
        run = self._running.get(key)
        log = self._logs.get(key) if run is None else run.log
        if log is None:
            raise RequestError(
                "The events of this response are not stored: it was created without background and stream, "
                "ended long ago, or ran in another process. Retrieve it without stream.",
                "stream",
            )
        return log.follow(first)

    async def cancel(self, response_id: str) -> None:
        """Ends a run of this process at once. A run of another process is cancelled through the store, and
        ends within seconds."""
        run = self._running.get((self._owner, response_id))
        if run is None:
            await self._store.cancel(response_id)
            return
        run.task.cancel()
        await asyncio.wait({run.task})

    def _retire(self, key: _RunKey) -> None:
        log = self._running.pop(key).log
        if log is None:
            return
        self._logs[key] = log
        while sum(kept.num_bytes for kept in self._logs.values()) > MAX_LOG_BYTES:
            self._logs.popitem(last=False)
