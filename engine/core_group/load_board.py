"""The load of each core of a group, in memory that all API server processes of a server share.

A core reports its load with its outputs to one of the processes, which writes it here. Each process counts
its open requests in a separate row. Nothing is locked: a sum may miss concurrent changes.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

from engine.process.shared_memory import mapped
from engine.records.reported_stats import SchedulerStats
from engine.routing import EngineLoad

_WORD_BYTES = 8


class Drain(IntEnum):
    """How far a core's drain is."""

    NONE = 0
    LEAVING = 1
    """New jobs go elsewhere; turns of its own jobs still come."""
    CLOSED = 2
    """All turns go elsewhere."""
    DONE = 3
    """All turns go elsewhere; it has no requests, and what its pins held was handed over."""


class _Column(IntEnum):
    """A number that is kept for each core."""

    DRAIN = 0
    RUNNING = 1
    WAITING = 2
    BLOCKS = 3
    FREE_BLOCKS = 4
    PINNED_BLOCKS = 5


class LoadBoard:
    """The board of one API server process; processes that are given the same folder share its numbers."""

    def __init__(
        self, num_engines: int, *, num_processes: int = 1, process: int = 0, folder: Path | None = None
    ) -> None:
        """``process``: this one's number among ``num_processes``."""
        self._num_engines = num_engines
        self._num_processes = num_processes
        self._own = (len(_Column) + process) * num_engines
        size = (len(_Column) + num_processes) * num_engines * _WORD_BYTES
        memory = bytearray(size) if folder is None else mapped(folder / "engines", size)
        self._cells = memoryview(memory).cast("q")

    def report(self, engine: int, stats: SchedulerStats) -> None:
        """Write the load that a core has reported."""
        self._set(_Column.RUNNING, engine, stats.num_running_reqs)
        self._set(_Column.WAITING, engine, stats.num_waiting_reqs)
        self._set(_Column.BLOCKS, engine, stats.num_total_blocks)
        self._set(_Column.FREE_BLOCKS, engine, stats.num_free_blocks)
        self._set(_Column.PINNED_BLOCKS, engine, stats.num_pinned_blocks)

    def count_open(self, engine: int, number: int) -> None:
        """Change the number of this process's open requests of a core."""
        self._cells[self._own + engine] += number

    def forget(self, engine: int) -> None:
        """Clear the load of a core that has died."""
        for column in (_Column.RUNNING, _Column.WAITING, _Column.PINNED_BLOCKS):
            self._set(column, engine, 0)
        self._set(_Column.FREE_BLOCKS, engine, self._get(_Column.BLOCKS, engine))

    def set_drain(self, engine: int, drain: Drain) -> None:
        """Set how far the core's drain is."""
        self._set(_Column.DRAIN, engine, drain)

    def drain_of(self, engine: int) -> Drain:
        return Drain(self._get(_Column.DRAIN, engine))

    def load_of(self, engine: int) -> EngineLoad:
        """The latest known load of a core."""
        first = len(_Column) * self._num_engines + engine
        return EngineLoad(
            num_open=sum(self._cells[first :: self._num_engines]),
            num_running=self._get(_Column.RUNNING, engine),
            num_waiting=self._get(_Column.WAITING, engine),
            num_blocks=self._get(_Column.BLOCKS, engine),
            num_free_blocks=self._get(_Column.FREE_BLOCKS, engine),
            num_pinned_blocks=self._get(_Column.PINNED_BLOCKS, engine),
        )

    def clear_process(self, process: int) -> None:
        """Clear the open requests of a process that has ended."""
        first = (len(_Column) + process) * self._num_engines
        for engine in range(self._num_engines):
            self._cells[first + engine] = 0

    def _get(self, column: _Column, engine: int) -> int:
        return self._cells[column * self._num_engines + engine]

    def _set(self, column: _Column, engine: int, value: int) -> None:
        self._cells[column * self._num_engines + engine] = value
