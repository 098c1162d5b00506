"""The load of each API server process in shared memory: one row of counters per process.

Each process writes only its own row, so nothing is locked; a sum may miss concurrent changes.
"""

from __future__ import annotations

from enum import IntEnum

from engine.api.processes.server_group import ALONE, ServerGroup
from engine.process.shared_memory import mapped


class Tally(IntEnum):
    """A counter of the table."""

    LIVE = 0
    """Running requests."""
    QUEUED_REQS = 1
    QUEUED_TOKENS = 2
    VIEWERS = 3
    """Viewers of the dashboard."""


NAMED_SHARES = 256
OTHER_SHARES = 256
"""Number of shares: for owners of keys, and for other tenants by hash."""
_SHARES = NAMED_SHARES + OTHER_SHARES
_SHARED = (Tally.QUEUED_REQS, Tally.QUEUED_TOKENS)
"""Counters that are also kept per share, after all others."""
_COLUMNS = len(Tally) + len(_SHARED) * _SHARES
_WORD_BYTES = 8


class SharedLoad:
    """Rows of ``Tally``: in memory for a single process, in a mapped file for several."""

    def __init__(self, siblings: ServerGroup = ALONE) -> None:
        self._count = siblings.count
        self._own = siblings.index * _COLUMNS
        size = siblings.count * _COLUMNS * _WORD_BYTES
        if siblings.folder is None:
            self._cells = memoryview(bytearray(size)).cast("q")
        else:
            self._cells = memoryview(mapped(siblings.folder / "load", size)).cast("q")

    def add(self, tally: Tally, number: int, share: int | None = None) -> None:
        """Adds to this process's counter; a negative number subtracts. ``share``: the tenant's share, for
        counters that have shares."""
        self._cells[self._own + tally] += number
        if share is not None:
            self._cells[self._own + _column(tally) + share] += number

    def total(self, tally: Tally) -> int:
        """The sum over all processes."""
        return sum(self._cells[tally::_COLUMNS])

    def held(self, tally: Tally, share: int) -> int:
        """The sum of one share over all processes."""
        return sum(self._cells[_column(tally) + share :: _COLUMNS])

    def num_sharing(self, tally: Tally) -> int:
        """Number of shares above zero."""
        first = _column(tally)
        rows = [
            self._cells[row * _COLUMNS + first : row * _COLUMNS + first + _SHARES].tolist()
            for row in range(self._count)
        ]
        return sum(1 for held in zip(*rows, strict=True) if any(held))

    def clear(self, index: int) -> None:
        """Clears the row of a process that has ended."""
        for column in range(_COLUMNS):
            self._cells[index * _COLUMNS + column] = 0


def _column(tally: Tally) -> int:
    """The first column of the counter's shares."""
    return len(Tally) + _SHARED.index(tally) * _SHARES
