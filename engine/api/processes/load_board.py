"""What each front-end process has in hand, for all of them to read: one row of numbers per process.

Each process writes its own row only, so there is nothing to lock; a sum may miss what changes meanwhile.
"""

from __future__ import annotations

import mmap
from enum import IntEnum
from pathlib import Path

from engine.api.processes.siblings import ALONE, Siblings


class Tally(IntEnum):
    """A column of the board."""

    LIVE = 0
    """Requests being generated."""
    QUEUED_REQS = 1
    QUEUED_TOKENS = 2
    VIEWERS = 3
    """Of the dashboard."""


_WORD_BYTES = 8


class LoadBoard:
    """Rows of ``Tally``: in memory for a process alone, in a mapped file for several."""

    def __init__(self, siblings: Siblings = ALONE) -> None:
        self._count = siblings.count
        self._own = siblings.index * len(Tally)
        size = siblings.count * len(Tally) * _WORD_BYTES
        if siblings.folder is None:
            self._cells = memoryview(bytearray(size)).cast("q")
        else:
            self._cells = memoryview(_mapped(siblings.folder / "load", size)).cast("q")

    def add(self, tally: Tally, number: int) -> None:
        """To this process's own; a negative number takes away."""
        self._cells[self._own + tally] += number

    def total(self, tally: Tally) -> int:
        """Over all processes."""
        return sum(self._cells[tally :: len(Tally)])

    def clear(self, index: int) -> None:
        """The process at this place has gone, and with it all that it had in hand."""
        for tally in Tally:
            self._cells[index * len(Tally) + tally] = 0


def _mapped(path: Path, size: int) -> mmap.mmap:
    """Of this size, zeros if it is new. The mapping outlives the file's handle."""
    with path.open("a+b") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)
