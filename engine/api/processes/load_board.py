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


NAMED_SHARES, OTHER_SHARES = 256, 256
"""Tenants that are told apart: those that keys name, then those by hash that are only said."""
_SHARES = NAMED_SHARES + OTHER_SHARES
_SHARED = (Tally.QUEUED_REQS, Tally.QUEUED_TOKENS)
"""Columns of which it is also known who has how much, behind all the others."""
_COLUMNS = len(Tally) + len(_SHARED) * _SHARES
_WORD_BYTES = 8


class LoadBoard:
    """Rows of ``Tally``: in memory for a process alone, in a mapped file for several."""

    def __init__(self, siblings: Siblings = ALONE) -> None:
        self._count = siblings.count
        self._own = siblings.index * _COLUMNS
        size = siblings.count * _COLUMNS * _WORD_BYTES
        if siblings.folder is None:
            self._cells = memoryview(bytearray(size)).cast("q")
        else:
            self._cells = memoryview(_mapped(siblings.folder / "load", size)).cast("q")

    def add(self, tally: Tally, number: int, share: int | None = None) -> None:
        """To this process's own; a negative number takes away. ``share``: the tenant's, where that counts."""
        self._cells[self._own + tally] += number
        if share is not None:
            self._cells[self._own + _column(tally) + share] += number

    def total(self, tally: Tally) -> int:
        """Over all processes."""
        return sum(self._cells[tally::_COLUMNS])

    def held(self, tally: Tally, share: int) -> int:
        """By one tenant, over all processes."""
        return sum(self._cells[_column(tally) + share :: _COLUMNS])

    def num_sharing(self, tally: Tally) -> int:
        """Tenants that have any."""
        first = _column(tally)
        rows = [
            self._cells[row * _COLUMNS + first : row * _COLUMNS + first + _SHARES].tolist()
            for row in range(self._count)
        ]
        return sum(1 for held in zip(*rows, strict=True) if any(held))

    def clear(self, index: int) -> None:
        """The process at this place has gone, and with it all that it had in hand."""
        for column in range(_COLUMNS):
            self._cells[index * _COLUMNS + column] = 0


def _column(tally: Tally) -> int:
    """Where the shares of it begin."""
    return len(Tally) + _SHARED.index(tally) * _SHARES


def _mapped(path: Path, size: int) -> mmap.mmap:
    """Of this size, zeros if it is new. The mapping outlives the file's handle."""
    with path.open("a+b") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)
