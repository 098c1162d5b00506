"""Where blocks are kept outside of the engine: a folder, or a store that others bring."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from engine.config.kv_transfer import KVTransferConfig
from engine.kv_transfer.kv_store import KVStore, StoreConfig, load_store
from engine.kv_transfer.saved_blocks import SavedBlocks

logger = logging.getLogger(__name__)

PAUSE_S = 5.0
"""Seconds for which a store is not asked what it holds after it failed, or was slow."""
SLOW_S = 1.0
"""Longest answer after which a store is asked again at once: requests wait for it on their arrival."""

CLOSE_S = 5.0
"""Seconds for which a store is kept open for calls that are in it; then it is left open."""


class BlockStore(Protocol):
    """Keeps the blocks of one rank of one model. Thread-safe."""

    place: Path
    """The model, the layout and the rank: what is kept for others is not found."""

    def num_held(self, names: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, are probably here."""

    def read(self, names: Sequence[bytes], buffer: memoryview) -> None:
        """Fill a buffer with blocks. Raises if one cannot be read."""

    def write(self, names: Sequence[bytes], content: memoryview) -> int:
        """Keep blocks, unless they are here already. Returns the bytes written; raises if one cannot be."""

    def delete(self, names: Sequence[bytes]) -> None:
        """Delete those of these blocks that are here."""

    def shrink(self, max_bytes: int) -> None:
        """Delete the least recently used blocks beyond a limit."""

    def delete_unused(self) -> None:
        """Delete the blocks that nobody has used for a day."""

    def at(self, place: Path) -> BlockStore:
        """The same store for another model."""

    def close(self) -> None:
        """Nothing is called after it."""


class _Open:
    """A store of others while it is open: it is closed once, when no call is in it."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._num_calls = 0
        self._is_closed = False

    @contextmanager
    def call(self) -> Iterator[KVStore]:
        """Holds the store open; OSError if it is closed."""
        with self._changed:
            if self._is_closed:
                raise OSError("the store is closed")
            self._num_calls += 1
        try:
            yield self._store
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            was_closed = self._is_closed
            self._is_closed = True
            is_idle = self._changed.wait_for(lambda: not self._num_calls, CLOSE_S)
        if is_idle and not was_closed:
            self._store.close()


class OutsideBlocks:
    """Blocks in a store that others bring. It keeps to its own limits."""

    def __init__(self, store: _Open, place: Path) -> None:
        self.place = place
        self._store = store
        self._prefix = f"{place.parent.name}-{place.name}-"
        self._asked_from = 0.0
        """When to ask what it holds again."""
        self._logged: set[str] = set()

    def num_held(self, names: Sequence[bytes]) -> int:
        begun = time.monotonic()
        if not names or begun < self._asked_from:
            return 0
        try:
            with self._store.call() as store:
                held = int(store.num_held(self._keys(names)))
        except Exception as error:
            self._pause(str(error) or repr(error))
            return 0
        if time.monotonic() - begun > SLOW_S:
            self._pause(f"it took over {SLOW_S:.0f} s to say what it holds")
        return max(0, min(held, len(names)))

    def _pause(self, reason: str) -> None:
        self._asked_from = time.monotonic() + PAUSE_S
        if reason not in self._logged and len(self._logged) < 100:
            self._logged.add(reason)
            logger.warning("KV is not looked for in the store for %.0f s: %s.", PAUSE_S, reason)

    def read(self, names: Sequence[bytes], buffer: memoryview) -> None:
        with self._store.call() as store:
            store.read(self._keys(names), buffer)

    def write(self, names: Sequence[bytes], content: memoryview) -> int:
        with self._store.call() as store:
            store.write(self._keys(names), content)
        return len(content)

    def delete(self, names: Sequence[bytes]) -> None:
        with self._store.call() as store:
            store.delete(self._keys(names))

    def shrink(self, max_bytes: int) -> None:
        pass

    def delete_unused(self) -> None:
        pass

    def at(self, place: Path) -> OutsideBlocks:
        return OutsideBlocks(self._store, place)

    def close(self) -> None:
        self._store.close()

    def _keys(self, names: Sequence[bytes]) -> list[str]:
        return [self._prefix + name.hex() for name in names]


def open_blocks(
    transfer: KVTransferConfig, place: Path, role: str, rank: int = 0, block_bytes: int = 0
) -> BlockStore:
    """The blocks that are kept in this place. ConfigError if a store of others cannot be used."""
    if transfer.store_module is None:
        return SavedBlocks(place, block_bytes)
    config = StoreConfig(transfer.kv_connector_extra_config.options, role, rank, block_bytes)
    return OutsideBlocks(_Open(load_store(transfer.store_module, transfer.kv_connector, config)), place)
