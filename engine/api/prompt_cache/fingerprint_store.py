"""Keeps fingerprints of prompts by the ids of their responses, for all processes of one server."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import TypeVar

import msgspec

from engine.api.processes.server_group import ServerGroup
from engine.api.prompt_cache.fingerprint import Fingerprint

T = TypeVar("T")

MAX_BYTES = 64 * 2**20
"""Maximum size of all fingerprints; one of 100,000 tokens has about 20 kB. The oldest are dropped, of the
owner with the most."""
LOCK_TIMEOUT_S = 30.0

_SCHEMA = """
PRAGMA synchronous = OFF;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS fingerprints (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, id TEXT NOT NULL, data BLOB NOT NULL,
    size INTEGER NOT NULL, UNIQUE (owner, id));
CREATE TABLE IF NOT EXISTS total (owner TEXT PRIMARY KEY, size INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON fingerprints BEGIN
    INSERT OR IGNORE INTO total VALUES (new.owner, 0);
    UPDATE total SET size = size + new.size WHERE owner = new.owner; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON fingerprints BEGIN
    UPDATE total SET size = size - old.size WHERE owner = old.owner; END;
COMMIT;
"""
_PUT = "INSERT OR IGNORE INTO fingerprints (owner, id, data, size) VALUES (?, ?, ?, ?)"
_GET = "SELECT data FROM fingerprints WHERE owner = ? AND id = ?"
_DELETE = "DELETE FROM fingerprints WHERE owner = ? AND id = ?"
_DROP = """
DELETE FROM fingerprints WHERE number = (SELECT min(number) FROM fingerprints WHERE owner = (
    SELECT owner FROM total ORDER BY size DESC LIMIT 1))
"""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Fingerprint)


class FingerprintStore:
    """Stores fingerprints in a file if several processes share it, else in memory. Owners see only their
    own."""

    def __init__(self, group: ServerGroup, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._is_shared = group.folder is not None
        where = ":memory:" if group.folder is None else _file_of(group.folder)
        self._db = sqlite3.connect(
            where, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        self._db.executescript(_SCHEMA)

    async def put(self, owner: str | None, response_id: str, kept: Fingerprint) -> None:
        """Stores a fingerprint; the oldest ones are dropped if necessary."""
        data = _encoder.encode(kept)
        await self._run(lambda: self._put(owner or "", response_id, data))

    async def get(self, owner: str | None, response_id: str) -> Fingerprint | None:
        """The fingerprint of that response's prompt; None if none is stored."""
        row = await self._run(lambda: self._db.execute(_GET, (owner or "", response_id)).fetchone())
        return None if row is None else _decoder.decode(row[0])

    async def delete(self, owner: str | None, response_id: str) -> None:
        """Drops the fingerprint, if there is one."""
        await self._run(lambda: self._db.execute(_DELETE, (owner or "", response_id)))

    def _put(self, owner: str, response_id: str, data: bytes) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.execute(_PUT, (owner, response_id, data, len(data)))
            while self._db.execute("SELECT sum(size) FROM total").fetchone()[0] > self._max_bytes:
                self._db.execute(_DROP)
        finally:
            self._db.execute("COMMIT")

    async def _run(self, work: Callable[[], T]) -> T:
        """Runs the work, on another thread if it may wait for another process."""

        def locked() -> T:
            with self._lock:
                return work()

        return await asyncio.to_thread(locked) if self._is_shared else locked()


def _file_of(folder: Path) -> Path:
    return folder / "fingerprints.sqlite"
