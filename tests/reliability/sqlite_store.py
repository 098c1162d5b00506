"""A ``KVStore`` in one file of SQLite, with faults that tests order.

Options: ``file``; ``fault``: a file, whose text is the fault in force while it exists (``ask``: what is held
cannot be said | ``all``: more is said to be held than is | ``read``, ``write``: raises).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from engine.kv_transfer.kv_store import StoreConfig


class SqliteStore:
    def __init__(self, config: StoreConfig) -> None:
        config.check_names("file", "fault")
        self._file = config.text("file")
        self._fault = Path(config.text("fault", self._file + ".fault"))
        self._block_bytes = config.block_bytes
        with closing(self._open()) as file:
            file.execute("PRAGMA journal_mode=WAL")
            file.execute("CREATE TABLE IF NOT EXISTS blocks (key TEXT PRIMARY KEY, content BLOB)")

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._file, timeout=30, isolation_level=None)

    def _is(self, fault: str) -> bool:
        return self._fault.exists() and self._fault.read_text() == fault

    def num_held(self, keys: Sequence[str]) -> int:
        if self._is("ask"):
            raise ConnectionError("an ordered fault")
        if self._is("all"):
            return 2 * len(keys)
        with closing(self._open()) as file:
            for index, key in enumerate(keys):
                if not file.execute("SELECT 1 FROM blocks WHERE key = ?", (key,)).fetchone():
                    return index
        return len(keys)

    def read(self, keys: Sequence[str], into: memoryview) -> None:
        size = self._block_bytes
        with closing(self._open()) as file:
            for index, key in enumerate(keys):
                found = file.execute("SELECT content FROM blocks WHERE key = ?", (key,)).fetchone()
                if found is None or self._is("read"):
                    raise KeyError(key)
                into[index * size : (index + 1) * size] = found[0]

    def write(self, keys: Sequence[str], content: memoryview) -> None:
        if self._is("write"):
            raise RuntimeError("an ordered fault")
        size = self._block_bytes
        rows = [(key, content[index * size : (index + 1) * size]) for index, key in enumerate(keys)]
        with closing(self._open()) as file:
            file.execute("BEGIN")
            file.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?)", rows)
            file.execute("COMMIT")

    def delete(self, keys: Sequence[str]) -> None:
        with closing(self._open()) as file:
            file.executemany("DELETE FROM blocks WHERE key = ?", [(key,) for key in keys])

    def close(self) -> None:
        pass
