"""What each key has used, in memory that all API server processes share: one row of counters per process.

Each process writes only its own row, so nothing is locked, and a sum is exact once all have written. A
process that is restarted continues its row. A window is a minute or a day of UTC: a counter of an earlier
window counts as 0.
"""

from __future__ import annotations

import fcntl
from enum import IntEnum
from hashlib import sha256
from pathlib import Path

from engine.api.processes.server_group import ALONE, ServerGroup
from engine.process.shared_memory import mapped

NUM_SLOTS = 4096
"""Names that may have had a key since the start, in all versions of the file."""
_WORD_BYTES = 8


class Used(IntEnum):
    """What is counted."""

    REQUESTS = 0
    PROMPT_TOKENS = 1
    OUTPUT_TOKENS = 2
    COMPUTED_TOKENS = 3

    @property
    def word(self) -> str:
        """Its name in the key file."""
        return self.name.lower()


class Window(IntEnum):
    """The time over which a quota counts; its value is its seconds."""

    MINUTE = 60
    DAY = 86_400

    @property
    def word(self) -> str:
        """Its name in the key file."""
        return f"per_{self.name.lower()}"


_WINDOWS = tuple(Window)
_RUNNING = 0
_TOTALS = 1
_FIRST_WINDOW = _TOTALS + len(Used)
_WINDOW_CELLS = 1 + len(Used)
"""A window's number, and the counts in it."""
_SLOT_CELLS = _FIRST_WINDOW + len(_WINDOWS) * _WINDOW_CELLS
_ROW_CELLS = NUM_SLOTS * _SLOT_CELLS


class UsageBoard:
    """The counters of one server."""

    def __init__(self, siblings: ServerGroup = ALONE) -> None:
        names_size, size = NUM_SLOTS * _WORD_BYTES, siblings.count * _ROW_CELLS * _WORD_BYTES
        self._folder = siblings.folder
        self._count = siblings.count
        self._own = siblings.index * _ROW_CELLS
        self._names = _memory(siblings.folder, "key-names", names_size)
        self._cells = _memory(siblings.folder, "key-usage", size)
        self._slots: dict[str, int] = {}
        for slot in range(NUM_SLOTS):  # what a process that ended had running has ended
            if self._names[slot]:
                self._cells[self._own + slot * _SLOT_CELLS + _RUNNING] = 0

    def slot_of(self, name: str) -> int:
        """The slot of a key, which it keeps; RuntimeError if all are taken."""
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = self._claim(name)
        return slot

    def _claim(self, name: str) -> int:
        mark = int.from_bytes(sha256(name.encode()).digest()[:7], "big") + 1
        if self._folder is None:
            return self._first_of(mark)
        with (self._folder / "key-names").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return self._first_of(mark)

    def _first_of(self, mark: int) -> int:
        for slot in range(NUM_SLOTS):
            if self._names[slot] in (0, mark):
                self._names[slot] = mark
                return slot
        raise RuntimeError("more names of keys than a server can count")

    def run(self, slot: int, number: int) -> None:
        """Counts requests that begin to run; a negative number: that end."""
        self._cells[self._own + slot * _SLOT_CELLS + _RUNNING] += number

    def running(self, slot: int) -> int:
        """Requests that run, over all processes."""
        return self._sum(slot * _SLOT_CELLS + _RUNNING)

    def add(self, slot: int, what: Used, number: int, now: float) -> None:
        """Counts what a key has used, at a Unix time."""
        first = self._own + slot * _SLOT_CELLS
        self._cells[first + _TOTALS + what] += number
        for place, window in enumerate(_WINDOWS):
            at = first + _FIRST_WINDOW + place * _WINDOW_CELLS
            current = int(now // window)
            if self._cells[at] != current:
                for used in Used:
                    self._cells[at + 1 + used] = 0
                self._cells[at] = current
            self._cells[at + 1 + what] += number

    def total(self, slot: int, what: Used) -> int:
        """What a key has used since the server's start."""
        return self._sum(slot * _SLOT_CELLS + _TOTALS + what)

    def in_window(self, slot: int, window: Window, what: Used, now: float) -> int:
        """What a key has used in the current window."""
        at = slot * _SLOT_CELLS + _FIRST_WINDOW + _WINDOWS.index(window) * _WINDOW_CELLS
        current = int(now // window)
        rows = range(0, self._count * _ROW_CELLS, _ROW_CELLS)
        return sum(self._cells[row + at + 1 + what] for row in rows if self._cells[row + at] == current)

    def _sum(self, at: int) -> int:
        return sum(self._cells[at::_ROW_CELLS])


def _memory(folder: Path | None, name: str, size: int) -> memoryview:
    """Words of 64 bits, zeros at first."""
    return memoryview(bytearray(size) if folder is None else mapped(folder / name, size)).cast("q")
