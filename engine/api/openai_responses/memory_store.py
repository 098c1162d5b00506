"""Responses in the memory of one process."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine.api.openai_responses.items import ENDED
from engine.api.openai_responses.store import (
    RENEWED_FOR_S,
    PastTurn,
    StoredResponse,
    StoreLimits,
    alive_until_of,
    as_it_stands,
    broken_chain,
    conversation_of,
    decoder,
    encoder,
    goes_on_from,
    turn_decoder,
)


@dataclass(slots=True)
class _Entry:
    data: bytes
    conversation_id: str | None
    alive_until: float
    is_cancelled: bool = False


@dataclass(slots=True)
class _Lock:
    conversation_id: str
    alive_until: float


class MemoryStore:
    """Keeps responses in this process, encoded: objects would take ten times the memory."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.num_bytes = 0
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """Least recently used first."""
        self._in_progress: dict[str, _Entry] = {}
        """Of these, those that have not ended."""
        self._newest: dict[str, str] = {}
        self._locks: dict[str, _Lock] = {}
        """By the response whose turn it is."""

    def __len__(self) -> int:
        return len(self._entries)

    async def put(self, stored: StoredResponse) -> None:
        response_id, conversation_id = stored.response.id, conversation_of(stored)
        before = self._remove(response_id)
        entry = _Entry(
            encoder.encode(stored),
            conversation_id,
            alive_until_of(stored, self._clock()),
            before is not None and before.is_cancelled,
        )
        self._add(response_id, entry)
        if conversation_id is not None and goes_on_from(stored):
            self._newest[conversation_id] = response_id
        if stored.response.status in ENDED:
            self._locks.pop(response_id, None)
        self._make_room()

    def _make_room(self) -> None:
        now = self._clock()
        alive = [entry for entry in self._in_progress.values() if entry.alive_until >= now]
        max_responses = self.limits.max_responses + len(alive)
        max_bytes = self.limits.max_bytes + sum(len(entry.data) for entry in alive)
        while len(self._entries) > max_responses or self.num_bytes > max_bytes:
            self._forget(next(name for name, entry in self._entries.items() if entry.alive_until < now))

    async def update(self, stored: StoredResponse) -> bool:
        if stored.response.id not in self._entries:
            return False
        await self.put(stored)
        return True

    async def get(self, response_id: str) -> StoredResponse | None:
        entry = self._entries.get(response_id)
        if entry is None:
            return None
        self._entries.move_to_end(response_id)
        return as_it_stands(decoder.decode(entry.data), entry.alive_until, self._clock())

    async def chain(self, response_id: str, field: str) -> list[PastTurn]:
        turns: list[PastTurn] = []
        link: str | None = response_id
        while link is not None:
            entry = self._entries.get(link)
            if entry is None:
                raise broken_chain(link, response_id, self.limits, field)
            self._entries.move_to_end(link)
            turns.append(turn_decoder.decode(entry.data))
            link = turns[-1].previous_id
        return turns[::-1]

    async def delete(self, response_id: str) -> bool:
        return self._forget(response_id)

    async def newest(self, conversation_id: str) -> str | None:
        return self._newest.get(conversation_id)

    async def cancel(self, response_id: str) -> None:
        if entry := self._entries.get(response_id):
            entry.is_cancelled = True

    async def renew(self, response_id: str) -> bool:
        alive_until = self._clock() + RENEWED_FOR_S
        if response_id in self._locks:
            self._locks[response_id].alive_until = alive_until
        if response_id in self._in_progress:
            self._in_progress[response_id].alive_until = alive_until
        entry = self._entries.get(response_id)
        return entry is not None and not entry.is_cancelled

    async def lock(self, conversation_id: str, response_id: str) -> bool:
        now = self._clock()
        self._locks = {name: lock for name, lock in self._locks.items() if lock.alive_until >= now}
        if any(lock.conversation_id == conversation_id for lock in self._locks.values()):
            return False
        self._locks[response_id] = _Lock(conversation_id, now + RENEWED_FOR_S)
        return True

    async def unlock(self, response_id: str) -> None:
        self._locks.pop(response_id, None)

    def _forget(self, response_id: str) -> bool:
        entry = self._remove(response_id)
        if entry is None:
            return False
        named = entry.conversation_id
        if named is not None and self._newest.get(named) == response_id:
            del self._newest[named]
        return True

    def _add(self, response_id: str, entry: _Entry) -> None:
        self._entries[response_id] = entry
        self.num_bytes += len(entry.data)
        if entry.alive_until:
            self._in_progress[response_id] = entry

    def _remove(self, response_id: str) -> _Entry | None:
        self._in_progress.pop(response_id, None)
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self.num_bytes -= len(entry.data)
        return entry
