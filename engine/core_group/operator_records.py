"""The record of what operators have changed, and the lock that they take.

There is one per process, or one for all API server processes of a server, in a folder that these share.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from engine.records.operator_record import OperatorRecord

LOCK_POLL_S = 0.02
_decoder = msgspec.json.Decoder(OperatorRecord)

_CHANGES = frozenset(("pause", "resume", "sleep", "wake_up", "update_weights", "switch_trace", "set_door"))


class OperatorRecords:
    """Reads and writes the record; used on one event loop."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder``: shared by the server's processes; None for one process."""
        self._folder = folder
        self._own = OperatorRecord()
        self._lock = asyncio.Lock()

    def read(self) -> OperatorRecord:
        if self._folder is None:
            return self._own
        try:
            return _decoder.decode((self._folder / "operators.json").read_bytes())
        except FileNotFoundError:
            return OperatorRecord()

    def note(self, method: str, args: tuple[object, ...], answer: Any) -> None:
        """Record that a utility with this name has done its work on all cores that are up."""
        if method not in _CHANGES or answer is False or isinstance(answer, str):
            return
        if self._folder is None:
            self._own = _changed(self._own, method, args)
            return
        with (self._folder / "operators.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            record = _changed(self.read(), method, args)
            written = self._folder / "operators.new"
            written.write_bytes(msgspec.json.encode(record))
            written.replace(self._folder / "operators.json")

    @asynccontextmanager
    async def operating(self) -> AsyncIterator[None]:
        """Held by one operator at a time, for as long as a call takes, and by a core that joins."""
        async with self._lock:
            if self._folder is None:
                yield
                return
            with (self._folder / "operating.lock").open("w") as lock:
                is_held = False
                while not is_held:
                    is_held = _locked(lock.fileno())
                    await asyncio.sleep(0 if is_held else LOCK_POLL_S)
                yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _changed(record: OperatorRecord, method: str, args: tuple[Any, ...]) -> OperatorRecord:
    change = partial(msgspec.structs.replace, record, version=record.version + 1)
    match method, args:
        case "pause", (running_too,):
            return change(paused=running_too)
        case "resume", ():
            return change(paused=None)
        case "set_door", (door,):
            return change(door=door)
        case "sleep", (level,):
            return change(level=max(level, record.level))
        case "wake_up", ():
            return change(level=0)
        case "update_weights", (folder,):
            return change(weights=folder)
        case "switch_trace", (enabled, name):
            return change(trace=(enabled, name))
    raise AssertionError(f"{method} with {len(args)} arguments")
