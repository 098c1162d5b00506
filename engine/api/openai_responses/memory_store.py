"""Responses in the memory of one process."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
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
    encoded,
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


class _Part:
    """The data of one owner."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        """Entries, the least recently used first."""
        self.in_progress: dict[str, _Entry] = {}
        """Entries whose responses have not ended."""
        self.newest: dict[str, str] = {}
        self.locks: dict[str, _Lock] = {}
        """Locks, by the response that holds them."""

    def add(self, response_id: str, entry: _Entry) -> None:
        self.entries[response_id] = entry
        self.num_bytes += len(entry.data)
        if entry.alive_until:
            self.in_progress[response_id] = entry

    def remove(self, response_id: str) -> _Entry | None:
        self.in_progress.pop(response_id, None)
        entry = self.entries.pop(response_id, None)
        if entry is not None:
            self.num_bytes -= len(entry.data)
        return entry

    def forget(self, response_id: str) -> bool:
        entry = self.remove(response_id)
        if entry is None:
            return False
        named = entry.conversation_id
        if named is not None and self.newest.get(named) == response_id:
            del self.newest[named]
        return True

    def forget_least_recently_used(self, now: float) -> bool:
        """Drops the least recently used ended response; False if there is none."""
        ended = (name for name, entry in self.entries.items() if entry.alive_until < now)
        name = next(ended, None)
        return name is not None and self.forget(name)


class MemoryStore:
    """Stores encoded responses in this process; as objects they would take ten times the memory."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._own = _Part()
        self._parts: dict[str | None, _Part] = {None: self._own}

    def of(self, owner: str | None) -> MemoryStore:
        view = copy(self)
        view._own = self._parts.setdefault(owner, _Part())
        return view

    def __len__(self) -> int:
        """The number of responses of all owners."""
        return sum(len(part.entries) for part in self._parts.values())

    @property
    def num_bytes(self) -> int:
        """The bytes of the responses of all owners."""
        return sum(part.num_bytes for part in self._parts.values())

    async def put(self, stored: StoredResponse) -> None:
        response_id = stored.response.id
        conversation_id = conversation_of(stored)
        before = self._own.remove(response_id)
        entry = _Entry(
            encoded(stored),
            conversation_id,
            alive_until_of(stored, self._clock()),
            before is not None and before.is_cancelled,
        )
        self._own.add(response_id, entry)
        if conversation_id is not None and goes_on_from(stored):
            self._own.newest[conversation_id] = response_id
        if stored.response.status in ENDED:
            self._own.locks.pop(response_id, None)
        self._make_room()

    def _make_room(self) -> None:
        """Evicts responses, those of the owner with the most first."""
        now = self._clock()
        parts = list(self._parts.values())
        alive = [e for part in parts for e in part.in_progress.values() if e.alive_until >= now]
        max_responses = self.limits.max_responses + len(alive)
        max_bytes = self.limits.max_bytes + sum(len(entry.data) for entry in alive)
        while parts and (len(self) > max_responses or self.num_bytes > max_bytes):
            too_many = len(self) > max_responses
            largest = max(parts, key=lambda part: len(part.entries) if too_many else part.num_bytes)
            if not largest.forget_least_recently_used(now):
                parts.remove(largest)

    async def update(self, stored: StoredResponse) -> bool:
        if stored.response.id not in self._own.entries:
            return False
        await self.put(stored)
        return True

    async def get(self, response_id: str) -> StoredResponse | None:
        entry = self._own.entries.get(response_id)
        if entry is None:
            return None
        self._own.entries.move_to_end(response_id)
        return as_it_stands(decoder.decode(entry.data), entry.alive_until, self._clock())

    async def chain(self, response_id: str, field: str) -> list[PastTurn]:
        turns: list[PastTurn] = []
        link: str | None = response_id
        while link is not None:
            entry = self._own.entries.get(link)
            if entry is None:
                raise broken_chain(link, response_id, self.limits, field)
            self._own.entries.move_to_end(link)
            turns.append(turn_decoder.decode(entry.data))
            link = turns[-1].previous_id
        return turns[::-1]

    async def tip(self, response_id: str, earlier: Sequence[str]) -> PastTurn | None:
        entries = self._own.entries
        links = (response_id, *reversed(earlier))
        if not all(link in entries for link in links):
            return None
        for link in links:
            entries.move_to_end(link)
        return turn_decoder.decode(entries[response_id].data)

    async def delete(self, response_id: str) -> bool:
        return self._own.forget(response_id)

    async def newest(self, conversation_id: str) -> str | None:
        return self._own.newest.get(conversation_id)

    async def cancel(self, response_id: str) -> None:
        if entry := self._own.entries.get(response_id):
            entry.is_cancelled = True

    async def renew(self, response_id: str) -> bool:
        alive_until = self._clock() + RENEWED_FOR_S
        if response_id in self._own.locks:
            self._own.locks[response_id].alive_until = alive_until
        if response_id in self._own.in_progress:
            self._own.in_progress[response_id].alive_until = alive_until
        entry = self._own.entries.get(response_id)
        return entry is not None and not entry.is_cancelled

    async def lock(self, conversation_id: str, response_id: str) -> bool:
        now = self._clock()
        own = self._own
        own.locks = {name: lock for name, lock in own.locks.items() if lock.alive_until >= now}
        if any(lock.conversation_id == conversation_id for lock in own.locks.values()):
            return False
        own.locks[response_id] = _Lock(conversation_id, now + RENEWED_FOR_S)
        return True

    async def unlock(self, response_id: str) -> None:
        self._own.locks.pop(response_id, None)
