"""What is kept of responses between turns, within bounds: the least recently used make room for newer ones.

The bounds are those of responses that have ended. One that is still being made never makes room: it comes on
top, and how many there are is bounded by ``max_background_responses`` of each process.

``MemoryStore`` is for a server of one process; ``SqliteStore`` is one file for several.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeVar

import msgspec

from engine.api.errors import NotFoundError
from engine.api.openai_responses.input_items import Item
from engine.api.openai_responses.items import (
    ENDED,
    ConversationId,
    OutputItem,
    Response,
    ResponseError,
    ResponseStatus,
)

T = TypeVar("T")

LOCK_TIMEOUT_S, LOCK_POLL_S = 30.0, 0.01
RENEWED_FOR_S = 15.0
"""A turn whose process has not told for so long that it still makes it is lost: its response has failed, and
its conversation is free."""


class StoredResponse(msgspec.Struct, kw_only=True, frozen=True):
    """A response with what it answered. The turns before are kept by themselves."""

    response: Response
    input: list[Item]
    """Of this turn alone, each with an id."""
    previous_id: str | None = None
    """The response before it, also where a conversation was named instead."""
    job_id: str | None = None
    """As the client said it, or as it was inferred: the next turn belongs to it too."""


class PastResponse(msgspec.Struct, kw_only=True, frozen=True):
    """What later turns need of a response; a stored one is read so without its tools and instructions."""

    id: str
    status: ResponseStatus
    created_at: int
    conversation: ConversationId | None
    output: list[OutputItem]
    metadata: dict[str, Any]


class PastTurn(msgspec.Struct, kw_only=True, frozen=True):
    """What later turns need of a stored response."""

    response: PastResponse
    input: list[Item]
    previous_id: str | None
    job_id: str | None


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much is kept of responses that have ended, over all processes."""

    max_responses: int = 10_000
    max_bytes: int = 256 * 2**20


class ResponseNotStoredError(NotFoundError):
    """A request names a response or a conversation that is not stored, or no longer."""

    def __init__(self, what: str, limits: StoreLimits, field: str | None = None) -> None:
        super().__init__(
            f"{what} is not stored: it was never kept, was deleted, or made room for newer ones. This server "
            f"keeps the {limits.max_responses} responses used last, in at most {limits.max_bytes} bytes.",
            field,
        )


class ResponseStore(Protocol):
    """Where responses are kept. Each use of a response makes it the most recently used."""

    limits: StoreLimits

    async def put(self, stored: StoredResponse) -> None:
        """Keep it, in place of an earlier state of it; if it ended, it is its conversation's newest, and the
        conversation is free for the next turn."""

    async def update(self, stored: StoredResponse) -> bool:
        """Keep a later state of it; False, and nothing is kept, if it was deleted or has made room."""

    async def get(self, response_id: str) -> StoredResponse | None:
        """None if it is not kept (any more)."""

    async def chain(self, response_id: str, field: str) -> list[PastTurn]:
        """It and all before it, oldest first; ResponseNotStoredError, blaming ``field``, if one is gone."""

    async def delete(self, response_id: str) -> bool:
        """Forget it; False if there is nothing to forget."""

    async def newest(self, conversation_id: str) -> str | None:
        """The response that a conversation goes on from; None if there is no such conversation."""

    async def cancel(self, response_id: str) -> None:
        """Ask the process that runs it to end it."""

    async def renew(self, response_id: str) -> bool:
        """The caller still makes it. False if it shall not, and of one that was never put."""

    async def lock(self, conversation_id: str, response_id: str) -> bool:
        """Let no other turn work on this conversation until this response has ended, is unlocked, or was not
        renewed for long; False if there is one already."""

    async def unlock(self, response_id: str) -> None:
        """Its conversation, if it still has it locked, is free."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StoredResponse)
_turn_decoder = msgspec.msgpack.Decoder(PastTurn)


def _conversation_of(stored: StoredResponse) -> str | None:
    conversation = stored.response.conversation
    return None if conversation is None else conversation.id


def _alive_until(stored: StoredResponse, now: float) -> float:
    """When a response is lost unless it is renewed; 0 of one that has ended."""
    return 0.0 if stored.response.status in ENDED else now + RENEWED_FOR_S


def _goes_on_from(stored: StoredResponse) -> bool:
    """Whether the next turn of a conversation builds on this response."""
    return stored.response.status in ("completed", "incomplete")


def _missing(link: str, response_id: str, limits: StoreLimits, field: str) -> ResponseNotStoredError:
    """The error of a chain that begins at ``response_id`` and breaks at ``link``."""
    what = f"Response {response_id[:100]!r}"
    if link != response_id:
        what = f"Response {link!r}, which {response_id!r} goes back to,"
    return ResponseNotStoredError(what, limits, field)


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
        response_id, conversation_id = stored.response.id, _conversation_of(stored)
        before = self._remove(response_id)
        entry = _Entry(
            _encoder.encode(stored),
            conversation_id,
            _alive_until(stored, self._clock()),
            before is not None and before.is_cancelled,
        )
        self._add(response_id, entry)
        if conversation_id is not None and _goes_on_from(stored):
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
        return _as_it_stands(_decoder.decode(entry.data), entry.alive_until, self._clock())

    async def chain(self, response_id: str, field: str) -> list[PastTurn]:
        turns: list[PastTurn] = []
        link: str | None = response_id
        while link is not None:
            entry = self._entries.get(link)
            if entry is None:
                raise _missing(link, response_id, self.limits, field)
            self._entries.move_to_end(link)
            turns.append(_turn_decoder.decode(entry.data))
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


_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, previous TEXT, conversation TEXT, size INTEGER NOT NULL, used INTEGER NOT NULL,
    alive_until REAL NOT NULL, cancelled INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS bodies (id TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS responses_used ON responses (used);
CREATE INDEX IF NOT EXISTS responses_in_progress ON responses (alive_until, size) WHERE alive_until > 0;
CREATE TABLE IF NOT EXISTS locks (
    conversation TEXT PRIMARY KEY, response TEXT NOT NULL, alive_until REAL NOT NULL);
CREATE TABLE IF NOT EXISTS newest (conversation TEXT PRIMARY KEY, response TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS total (num INTEGER NOT NULL, size INTEGER NOT NULL);
INSERT INTO total SELECT 0, 0 WHERE NOT EXISTS (SELECT 1 FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    UPDATE total SET num = num + 1, size = size + new.size; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE total SET num = num - 1, size = size - old.size;
    DELETE FROM newest WHERE conversation = old.conversation AND response = old.id;
    DELETE FROM bodies WHERE id = old.id; END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF size ON responses BEGIN
    UPDATE total SET size = size + new.size - old.size; END;
"""
_PUT = """
INSERT INTO responses (id, previous, conversation, size, used, alive_until) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    size = excluded.size, used = excluded.used, alive_until = excluded.alive_until
"""
_ALIVE = """
SELECT count(*), coalesce(sum(size), 0) FROM responses WHERE alive_until > 0 AND alive_until >= ?
"""
_FORGET_LEAST_RECENTLY_USED = """
DELETE FROM responses WHERE id = (SELECT id FROM responses WHERE alive_until < ? ORDER BY used LIMIT 1)
"""
_RENEW = """
UPDATE responses SET alive_until = CASE WHEN alive_until > 0 THEN ? ELSE 0 END WHERE id = ?
RETURNING cancelled
"""
_CHAIN = """
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM responses WHERE id = ?
    UNION ALL
    SELECT responses.id, responses.previous, depth + 1 FROM responses, chain
    WHERE responses.id = chain.previous)
SELECT depth, id, previous, data FROM chain JOIN bodies USING (id)
"""


def _begin_log(db: sqlite3.Connection) -> None:
    """Of processes that begin at once all but one are refused: for this SQLite does not wait itself."""
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(LOCK_POLL_S)
        else:
            return


class SqliteStore:
    """Keeps responses in a file that several processes of this machine share. It need not survive a crash."""

    def __init__(self, folder: Path, limits: StoreLimits, clock: Callable[[], float] = time.time) -> None:
        self.limits = limits
        self._clock = clock
        self._lock = Lock()
        self._db = sqlite3.connect(
            folder / "responses.sqlite", timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        _begin_log(self._db)
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    async def put(self, stored: StoredResponse) -> None:
        await self._in_transaction(lambda: self._put(stored))

    async def update(self, stored: StoredResponse) -> bool:
        return await self._in_transaction(lambda: self._update(stored))

    async def get(self, response_id: str) -> StoredResponse | None:
        return await self._in_transaction(lambda: self._get(response_id))

    async def chain(self, response_id: str, field: str) -> list[PastTurn]:
        return await self._in_transaction(lambda: self._chain(response_id, field))

    async def delete(self, response_id: str) -> bool:
        return await self._in_transaction(lambda: self._delete(response_id))

    async def newest(self, conversation_id: str) -> str | None:
        return await self._in_transaction(lambda: self._newest(conversation_id))

    async def cancel(self, response_id: str) -> None:
        await self._in_transaction(lambda: self._cancel(response_id))

    async def renew(self, response_id: str) -> bool:
        return await self._in_transaction(lambda: self._renew(response_id))

    async def lock(self, conversation_id: str, response_id: str) -> bool:
        return await self._in_transaction(lambda: self._lock_for(conversation_id, response_id))

    async def unlock(self, response_id: str) -> None:
        await self._in_transaction(lambda: self._unlock(response_id))

    async def _in_transaction(self, work: Callable[[], T]) -> T:
        """On another thread: it may have to wait for another process."""

        def run() -> T:
            with self._lock, closing(self._db.cursor()) as cursor:
                cursor.execute("BEGIN IMMEDIATE")
                try:
                    return work()
                finally:
                    cursor.execute("COMMIT")

        return await asyncio.to_thread(run)

    def _put(self, stored: StoredResponse) -> None:
        response_id, conversation_id = stored.response.id, _conversation_of(stored)
        data = _encoder.encode(stored)
        alive_until, now = _alive_until(stored, self._clock()), time.monotonic_ns()
        self._db.execute(
            _PUT, (response_id, stored.previous_id, conversation_id, len(data), now, alive_until)
        )
        self._db.execute("INSERT OR REPLACE INTO bodies VALUES (?, ?)", (response_id, data))
        if conversation_id is not None and _goes_on_from(stored):
            self._db.execute("INSERT OR REPLACE INTO newest VALUES (?, ?)", (conversation_id, response_id))
        if stored.response.status in ENDED:
            self._unlock(response_id)
        self._make_room()

    def _update(self, stored: StoredResponse) -> bool:
        kept = self._db.execute("SELECT 1 FROM responses WHERE id = ?", (stored.response.id,)).fetchone()
        if kept is None:
            return False
        self._put(stored)
        return True

    def _make_room(self) -> None:
        now = self._clock()
        num_alive, size_alive = self._db.execute(_ALIVE, (now,)).fetchone()
        max_responses = self.limits.max_responses + num_alive
        max_bytes = self.limits.max_bytes + size_alive
        while True:
            num, size = self._db.execute("SELECT num, size FROM total").fetchone()
            if num <= max_responses and size <= max_bytes:
                return
            self._db.execute(_FORGET_LEAST_RECENTLY_USED, (now,))

    def _get(self, response_id: str) -> StoredResponse | None:
        row = self._db.execute(
            "SELECT data, alive_until FROM responses JOIN bodies USING (id) WHERE id = ?", (response_id,)
        ).fetchone()
        if row is None:
            return None
        self._use([response_id])
        data, alive_until = row
        return _as_it_stands(_decoder.decode(data), alive_until, self._clock())

    def _chain(self, response_id: str, field: str) -> list[PastTurn]:
        rows = sorted(self._db.execute(_CHAIN, (response_id,)), reverse=True)  # by depth: oldest first
        missing = rows[0][2] if rows else response_id
        if missing is not None:
            raise _missing(missing, response_id, self.limits, field)
        self._use([row[1] for row in rows])
        return [_turn_decoder.decode(data) for *_, data in rows]

    def _use(self, response_ids: list[str]) -> None:
        """They are the most recently used; the bodies, which are large, are not touched."""
        now = time.monotonic_ns()
        self._db.executemany("UPDATE responses SET used = ? WHERE id = ?", [(now, i) for i in response_ids])

    def _delete(self, response_id: str) -> bool:
        return self._db.execute("DELETE FROM responses WHERE id = ?", (response_id,)).rowcount == 1

    def _newest(self, conversation_id: str) -> str | None:
        found = self._db.execute(
            "SELECT response FROM newest WHERE conversation = ?", (conversation_id,)
        ).fetchone()
        return None if found is None else str(found[0])

    def _cancel(self, response_id: str) -> None:
        self._db.execute("UPDATE responses SET cancelled = 1 WHERE id = ?", (response_id,))

    def _renew(self, response_id: str) -> bool:
        alive_until = self._clock() + RENEWED_FOR_S
        self._db.execute("UPDATE locks SET alive_until = ? WHERE response = ?", (alive_until, response_id))
        row = self._db.execute(_RENEW, (alive_until, response_id)).fetchone()
        return row is not None and not row[0]

    def _lock_for(self, conversation_id: str, response_id: str) -> bool:
        now = self._clock()
        self._db.execute("DELETE FROM locks WHERE alive_until < ?", (now,))
        lock = (conversation_id, response_id, now + RENEWED_FOR_S)
        return self._db.execute("INSERT OR IGNORE INTO locks VALUES (?, ?, ?)", lock).rowcount == 1

    def _unlock(self, response_id: str) -> None:
        self._db.execute("DELETE FROM locks WHERE response = ?", (response_id,))


def _as_it_stands(stored: StoredResponse, alive_until: float, now: float) -> StoredResponse:
    """The response; one whose maker is gone has failed: nobody else will say so."""
    if stored.response.status in ENDED or alive_until >= now:
        return stored
    error = ResponseError(code="server_error", message="The server process that ran this response has ended.")
    response = msgspec.structs.replace(stored.response, status="failed", error=error)
    return msgspec.structs.replace(stored, response=response)
