"""Stores responses in a file, for several processes of one server."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from copy import copy
from pathlib import Path
from threading import Lock
from typing import TypeVar

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
    owned_key,
    turn_decoder,
)

T = TypeVar("T")

LOCK_TIMEOUT_S = 30.0
LOCK_POLL_S = 0.01

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, previous TEXT, conversation TEXT, size INTEGER NOT NULL, used INTEGER NOT NULL,
    alive_until REAL NOT NULL, owner TEXT NOT NULL, cancelled INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS bodies (id TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS responses_used ON responses (owner, used);
CREATE INDEX IF NOT EXISTS responses_in_progress ON responses (alive_until, size) WHERE alive_until > 0;
CREATE TABLE IF NOT EXISTS locks (
    conversation TEXT PRIMARY KEY, response TEXT NOT NULL, alive_until REAL NOT NULL);
CREATE TABLE IF NOT EXISTS newest (conversation TEXT PRIMARY KEY, response TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS total (owner TEXT PRIMARY KEY, num INTEGER NOT NULL, size INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    INSERT OR IGNORE INTO total VALUES (new.owner, 0, 0);
    UPDATE total SET num = num + 1, size = size + new.size WHERE owner = new.owner; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE total SET num = num - 1, size = size - old.size WHERE owner = old.owner;
    DELETE FROM newest WHERE conversation = old.conversation AND response = old.id;
    DELETE FROM bodies WHERE id = old.id; END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF size ON responses BEGIN
    UPDATE total SET size = size + new.size - old.size WHERE owner = new.owner; END;
"""
_PUT = """
INSERT INTO responses (id, previous, conversation, size, used, alive_until, owner)
VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    size = excluded.size, used = excluded.used, alive_until = excluded.alive_until
"""
_ALIVE = """
SELECT count(*), coalesce(sum(size), 0) FROM responses WHERE alive_until > 0 AND alive_until >= ?
"""
_FORGET_LEAST_RECENTLY_USED = """
DELETE FROM responses WHERE id = (
    SELECT id FROM responses WHERE owner = ? AND alive_until < ? ORDER BY used LIMIT 1)
"""
_LARGEST_FIRST = "SELECT owner FROM total WHERE num > 0 ORDER BY CASE ? WHEN 1 THEN num ELSE size END DESC"
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
    """Turns on the write-ahead log. SQLite does not wait here but refuses all concurrent processes but one,
    so they retry."""
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
    """Stores responses in a file that processes of this machine share. It need not survive a crash."""

    def __init__(
        self, folder: Path, limits: StoreLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock``: a monotonic clock that all processes of the machine share."""
        self.limits = limits
        self._clock = clock
        self._owner: str | None = None
        self._lock = Lock()
        self._db = sqlite3.connect(
            folder / "responses.sqlite", timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        _begin_log(self._db)
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")

    def of(self, owner: str | None) -> SqliteStore:
        view = copy(self)
        view._owner = owner
        return view

    def _key(self, name: str) -> str:
        return owned_key(self._owner, name)

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

    async def tip(self, response_id: str, earlier: Sequence[str]) -> PastTurn | None:
        return await self._in_transaction(lambda: self._tip(response_id, earlier))

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
        """Runs on another thread, since it may wait for another process."""

        def run() -> T:
            with self._lock, closing(self._db.cursor()) as cursor:
                cursor.execute("BEGIN IMMEDIATE")
                try:
                    return work()
                finally:
                    cursor.execute("COMMIT")

        return await asyncio.to_thread(run)

    def _put(self, stored: StoredResponse) -> None:
        key = self._key(stored.response.id)
        named = conversation_of(stored)
        previous = None if stored.previous_id is None else self._key(stored.previous_id)
        conversation = None if named is None else self._key(named)
        data = encoded(stored)
        alive_until = alive_until_of(stored, self._clock())
        now = time.monotonic_ns()
        self._db.execute(_PUT, (key, previous, conversation, len(data), now, alive_until, self._owner or ""))
        self._db.execute("INSERT OR REPLACE INTO bodies VALUES (?, ?)", (key, data))
        if conversation is not None and goes_on_from(stored):
            self._db.execute("INSERT OR REPLACE INTO newest VALUES (?, ?)", (conversation, key))
        if stored.response.status in ENDED:
            self._unlock(stored.response.id)
        self._make_room()

    def _update(self, stored: StoredResponse) -> bool:
        key = self._key(stored.response.id)
        kept = self._db.execute("SELECT 1 FROM responses WHERE id = ?", (key,)).fetchone()
        if kept is None:
            return False
        self._put(stored)
        return True

    def _make_room(self) -> None:
        """Evicts responses, those of the owner with the most first."""
        now = self._clock()
        num_alive, size_alive = self._db.execute(_ALIVE, (now,)).fetchone()
        max_responses = self.limits.max_responses + num_alive
        max_bytes = self.limits.max_bytes + size_alive
        while True:
            num, size = self._db.execute("SELECT sum(num), sum(size) FROM total").fetchone()
            if num <= max_responses and size <= max_bytes:
                return
            by_number = int(num > max_responses)
            for (owner,) in self._db.execute(_LARGEST_FIRST, (by_number,)).fetchall():
                if self._db.execute(_FORGET_LEAST_RECENTLY_USED, (owner, now)).rowcount:
                    break
            else:
                return

    def _get(self, response_id: str) -> StoredResponse | None:
        row = self._db.execute(
            "SELECT data, alive_until FROM responses JOIN bodies USING (id) WHERE id = ?",
            (self._key(response_id),),
        ).fetchone()
        if row is None:
            return None
        self._use([self._key(response_id)])
        data, alive_until = row
        return as_it_stands(decoder.decode(data), alive_until, self._clock())

    def _chain(self, response_id: str, field: str) -> list[PastTurn]:
        key = self._key(response_id)
        rows = sorted(self._db.execute(_CHAIN, (key,)), reverse=True)  # by depth: oldest first
        missing = rows[0][2] if rows else key
        if missing is not None:
            raise broken_chain(str(missing).partition("/")[2], response_id, self.limits, field)
        self._use([row[1] for row in rows])
        return [turn_decoder.decode(data) for *_, data in rows]

    def _tip(self, response_id: str, earlier: Sequence[str]) -> PastTurn | None:
        keys = [self._key(link) for link in (response_id, *earlier)]
        if self._use(keys) < len(keys):
            return None
        (data,) = self._db.execute("SELECT data FROM bodies WHERE id = ?", keys[:1]).fetchone()
        return turn_decoder.decode(data)

    def _use(self, keys: list[str]) -> int:
        """Marks responses as used; returns how many exist. The bodies, which are large, are not read."""
        now = time.monotonic_ns()
        used = self._db.executemany(
            "UPDATE responses SET used = ? WHERE id = ?", [(now, key) for key in keys]
        )
        return used.rowcount

    def _delete(self, response_id: str) -> bool:
        key = self._key(response_id)
        return self._db.execute("DELETE FROM responses WHERE id = ?", (key,)).rowcount == 1

    def _newest(self, conversation_id: str) -> str | None:
        found = self._db.execute(
            "SELECT response FROM newest WHERE conversation = ?", (self._key(conversation_id),)
        ).fetchone()
        return None if found is None else str(found[0]).partition("/")[2]

    def _cancel(self, response_id: str) -> None:
        self._db.execute("UPDATE responses SET cancelled = 1 WHERE id = ?", (self._key(response_id),))

    def _renew(self, response_id: str) -> bool:
        alive_until = self._clock() + RENEWED_FOR_S
        key = self._key(response_id)
        self._db.execute("UPDATE locks SET alive_until = ? WHERE response = ?", (alive_until, key))
        row = self._db.execute(_RENEW, (alive_until, key)).fetchone()
        return row is not None and not row[0]

    def _lock_for(self, conversation_id: str, response_id: str) -> bool:
        now = self._clock()
        self._db.execute("DELETE FROM locks WHERE alive_until < ?", (now,))
        lock = (self._key(conversation_id), self._key(response_id), now + RENEWED_FOR_S)
        return self._db.execute("INSERT OR IGNORE INTO locks VALUES (?, ?, ?)", lock).rowcount == 1

    def _unlock(self, response_id: str) -> None:
        self._db.execute("DELETE FROM locks WHERE response = ?", (self._key(response_id),))
