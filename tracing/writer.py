"""Writes a trace without ever blocking a step: a bounded queue to a thread; events that do not fit are
counted.

It does not know the meaning of the events. A slow or failing disk loses events, but never delays a step.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from tracing.events import TraceEnd, TraceEvent, TraceGap, TraceHeader
from tracing.parts import TraceFiles

logger = logging.getLogger(__name__)

DEFAULT_CAPACITY = 65536
BATCH_EVENTS = 1024
"""Number of events written at once; also the maximum in memory beyond ``capacity``."""
GATHER_S = 0.2
"""Seconds for which events are gathered before they are written. A killed process loses these; in return the
emitting thread seldom has to wake the writing one."""


class TraceWriter:
    """Writes the events of one emitting thread; a daemon thread encodes and writes JSON lines.

    After ``emit`` neither the event nor the lists and dicts in it may be changed. Floats must be finite (JSON
    has no infinity). The first event should be the ``TraceHeader``, which each later part of the trace
    repeats.
    """

    def __init__(self, file: BinaryIO | TraceFiles, *, capacity: int = DEFAULT_CAPACITY) -> None:
        self.error: Exception | None = None
        """The error after which nothing more is written: all later events count as dropped."""
        self._file = file
        self._capacity = capacity
        self._hurry_at = capacity // 4
        self._pending: deque[TraceEvent | threading.Event] = deque()
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._hurry.set()  # the first events are written at once: a reader may wait for the header
        self._closing = False
        # Each thread has its own counter, so that neither needs a lock.
        self._num_refused = 0
        self._num_lost = 0
        self._num_written = 0
        self._gap = 0
        """Number of events refused since the last accepted one."""
        self._header: TraceHeader | None = None
        self._encoder = msgspec.json.Encoder()
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        capacity: int = DEFAULT_CAPACITY,
        max_bytes: int | None = None,
        max_files: int | None = None,
        replace: bool = True,
    ) -> Self:
        """Starts a new trace at ``path``, compressed if its name ends in ``.zst``.

        A new part begins after about ``max_bytes``; only the last ``max_files`` parts are kept. An existing
        trace is replaced, or with ``replace`` false raises FileExistsError; OSError if it cannot be written.
        """
        files = TraceFiles(Path(path), max_bytes=max_bytes, max_files=max_files, replace=replace)
        return cls(files, capacity=capacity)

    @property
    def dropped(self) -> int:
        """Number of events missing from the file: the queue was full, encoding failed, or the file failed."""
        return self._num_refused + self._num_lost

    @property
    def written(self) -> int:
        return self._num_written

    @property
    def part(self) -> int:
        """Number of the file of the trace that is being written."""
        return self._file.number if isinstance(self._file, TraceFiles) else 1

    @property
    def finished(self) -> bool:
        """Whether nothing will be written any more."""
        return not self._thread.is_alive()

    def emit(self, event: TraceEvent) -> None:
        """Queues an event; never waits, never raises."""
        num_pending = len(self._pending)
        if num_pending >= self._capacity:
            self._refuse()
            return
        if num_pending >= self._hurry_at:
            self._hurry.set()  # a simulator emits more in that time than fits in the queue
        if self._gap:
            self._pending.append(TraceGap(dropped=self._gap))
            self._gap = 0
        self._pending.append(event)
        if not self._wake.is_set():
            self._wake.set()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all events emitted before are in the file; False if that took too long."""
        if self._closing:
            return True
        done = threading.Event()
        self._pending.append(done)
        self._hurry.set()
        self._wake.set()
        return done.wait(timeout_s)

    def finish(self) -> None:
        """Accepts no more events; the thread writes those pending and the closing ``TraceEnd``, see
        ``finished``. Does not wait."""
        self._capacity = 0  # from now on emit only counts
        self._closing = True
        self._hurry.set()
        self._wake.set()

    def close(self, timeout_s: float | None = 10.0) -> None:
        """Finishes and waits for it; if the disk hangs, gives up and counts the pending events as dropped."""
        self.finish()
        self._thread.join(timeout_s)
        while self._pending:
            self._num_refused += self._drop_first()

    def _refuse(self) -> None:
        if not self._num_refused and not self._closing:
            # On a separate thread: this one must not wait, and the writing one may be stuck.
            threading.Thread(target=_warn_of_drops, daemon=True).start()
        self._num_refused += 1
        self._gap += 1

    def _drop_first(self) -> int:
        """Returns the number of events dropped: 0 if the thread was faster or a ``flush`` was released."""
        with contextlib.suppress(IndexError):
            item = self._pending.popleft()
            if isinstance(item, threading.Event):
                item.set()
            elif not isinstance(item, TraceGap):
                return 1
        return 0

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._hurry.wait(GATHER_S)
            # Cleared before reading the queue: an event appended later sets it again, so none is missed.
            self._wake.clear()
            self._hurry.clear()
            closing = self._closing
            while self._pending:
                self._write_batch()
            if closing:
                return self._finish()

    def _write_batch(self) -> None:
        lines: list[bytes] = []
        flushes: list[threading.Event] = []
        num_events = 0
        with contextlib.suppress(IndexError):
            while len(lines) < BATCH_EVENTS:
                item = self._pending.popleft()
                if isinstance(item, threading.Event):
                    flushes.append(item)
                else:
                    num_events += self._encode(item, lines)
        self._write(lines, num_events)
        for flush in flushes:
            flush.set()

    def _encode(self, event: TraceEvent, lines: list[bytes]) -> int:
        """Encodes an event; returns the number of events written: 0 for a gap or if it cannot be encoded."""
        try:
            lines.append(self._encoder.encode(event))
        except Exception:  # one bad event must not end the trace
            self._num_lost += 1
            lines.append(self._encoder.encode(TraceGap(dropped=1)))
            return 0
        if self._header is None and isinstance(event, TraceHeader):
            self._header = event
        return not isinstance(event, TraceGap)

    def _write(self, lines: list[bytes], num_events: int) -> None:
        """Writes lines, but none after a failed write, since the file may end in half a line."""
        if self.error is None:
            try:
                self._put(lines, num_events)
                return
            except (OSError, ValueError) as error:
                self.error = error
                logger.error("The trace ends here: %s. What happens from now on is not in it.", error)
        self._num_lost += num_events

    def _put(self, lines: list[bytes], num_events: int) -> None:
        if isinstance(self._file, TraceFiles) and self._file.full:
            self._begin_part(self._file)
        self._file.write(b"".join(line + b"\n" for line in lines))
        self._file.flush()
        self._num_written += num_events

    def _begin_part(self, files: TraceFiles) -> None:
        number = files.begin_part()
        if self._header is not None:
            header = msgspec.structs.replace(
                self._header, from_start=False, part=number, num_events_before=self._num_written
            )
            files.write(self._encoder.encode(header) + b"\n")

    def _finish(self) -> None:
        end = TraceEnd(written=self._num_written, dropped=self.dropped)
        if self.error is None:
            with contextlib.suppress(OSError, ValueError):
                self._file.write(self._encoder.encode(end) + b"\n")
        with contextlib.suppress(OSError, ValueError):
            self._file.close()


def _warn_of_drops() -> None:
    logger.warning(
        "The trace loses events: they come faster than they can be written. Its last line has their number."
    )
