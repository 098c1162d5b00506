"""Writes a trace without ever blocking a step: a bounded queue to a thread; what does not fit is counted.

Knows nothing of what the events mean. A slow or failing disk costs events, never time.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import BinaryIO, Self

import msgspec

from tracing.events import TraceEnd, TraceEvent

BATCH_EVENTS = 1024
"""Written in one go; also the most that is in memory beyond ``capacity``."""


class TraceWriter:
    """One thread emits; a daemon thread encodes and writes JSON lines.

    The caller gives an event away: neither it nor the lists and dicts in it may be changed after ``emit``.
    Floats must be finite (JSON has no infinity). The first event should be the ``TraceHeader``.
    """

    def __init__(self, file: BinaryIO, *, capacity: int = 65536) -> None:
        self.error: Exception | None = None
        """Why the file took no more, if it did not: all later events count as dropped."""
        self._file = file
        self._capacity = capacity
        self._pending: deque[TraceEvent | threading.Event] = deque()
        self._wake = threading.Event()
        self._closing = False
        # One counter per thread that counts, so that neither needs a lock.
        self._num_refused = 0
        self._num_lost = 0
        self._num_written = 0
        self._encoder = msgspec.json.Encoder()
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: str, *, capacity: int = 65536) -> Self:
        """Start a new trace at ``path``, replacing what is there; OSError if it cannot be written."""
        return cls(open(path, "wb"), capacity=capacity)

    @property
    def dropped(self) -> int:
        """Events that did not reach the file: no room, not encodable, or the file failed."""
        return self._num_refused + self._num_lost

    @property
    def written(self) -> int:
        return self._num_written

    def emit(self, event: TraceEvent) -> None:
        """Hand an event over; never waits, never raises."""
        if len(self._pending) >= self._capacity:
            self._num_refused += 1
            return
        self._pending.append(event)
        if not self._wake.is_set():
            self._wake.set()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was emitted before is in the file; False if that took too long."""
        if self._closing:
            return True
        done = threading.Event()
        self._pending.append(done)
        self._wake.set()
        return done.wait(timeout_s)

    def close(self, timeout_s: float | None = 10.0) -> None:
        """Write what is pending and the closing ``TraceEnd``. Given up, and counted, if the disk hangs."""
        self._capacity = 0  # from now on emit only counts
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        while self._pending:
            self._num_refused += self._drop_first()

    def _drop_first(self) -> int:
        """Events dropped: 0 where the thread was quicker or a waiting ``flush`` was let go."""
        with contextlib.suppress(IndexError):
            item = self._pending.popleft()
            if not isinstance(item, threading.Event):
                return 1
            item.set()
        return 0

    def _run(self) -> None:
        while True:
            self._wake.wait()
            # Cleared before the queue is read: an event appended later sets it again, so none is forgotten.
            self._wake.clear()
            closing = self._closing
            while self._pending:
                self._write_batch()
            if closing:
                return self._finish()

    def _write_batch(self) -> None:
        lines: list[bytes] = []
        flushes: list[threading.Event] = []
        with contextlib.suppress(IndexError):
            while len(lines) < BATCH_EVENTS:
                item = self._pending.popleft()
                if isinstance(item, threading.Event):
                    flushes.append(item)
                else:
                    self._encode(item, lines)
        self._write(lines)
        for flush in flushes:
            flush.set()

    def _encode(self, event: TraceEvent, lines: list[bytes]) -> None:
        try:
            lines.append(self._encoder.encode(event))
        except Exception:  # one bad event must not end the trace
            self._num_lost += 1

    def _write(self, lines: list[bytes]) -> None:
        """After a failed write nothing more is written: the file may end in half a line."""
        if self.error is None:
            try:
                self._file.write(b"".join(line + b"\n" for line in lines))
                self._file.flush()
                self._num_written += len(lines)
                return
            except (OSError, ValueError) as error:
                self.error = error
        self._num_lost += len(lines)

    def _finish(self) -> None:
        end = TraceEnd(written=self._num_written, dropped=self.dropped)
        if self.error is None:
            with contextlib.suppress(OSError, ValueError):
                self._file.write(self._encoder.encode(end) + b"\n")
        with contextlib.suppress(OSError, ValueError):
            self._file.close()
