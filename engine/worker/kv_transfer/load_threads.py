"""Loads blocks from other servers or a folder, on threads parallel to the steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import torch

from engine.core.outputs import RemoteReads
from engine.process.fair_threads import FairThreads
from engine.worker.kv_tiers.copy_streams import Event
from engine.worker.kv_tiers.disk_pool import TransferReports
from engine.worker.kv_transfer.block_rows import BlockRows

logger = logging.getLogger(__name__)

NUM_THREADS = 8
THREADS_PER_OWNER = 4
"""At most this many loads of one owner run at a time; loads without an owner count by their place."""
BEGIN_TIMEOUT_S = 2.0
"""Seconds in which a lease must begin: a reader may learn of it before the worker that holds it."""
FIRST_RETRY_S = 0.02
PAUSE_S = 5.0
"""Seconds for which a server is skipped after it did not answer in time: its loads fail immediately."""
MAX_LOGGED = 100
MAX_PAUSED = 1000


class LeaseNotBegunError(OSError):
    """The lease does not exist yet."""


class BlockSource(Protocol):
    """A source of blocks: other servers, or a folder."""

    def fetch(self, reads: RemoteReads, rows: BlockRows, after: Sequence[Event]) -> None:
        """Fetch blocks, and write them to the device after these events. Called on several threads, each with
        its own ``rows``. Raises if a block cannot be fetched."""

    def place_of(self, reads: RemoteReads) -> str:
        """The name of the place that these blocks come from, for a log."""


@dataclass(frozen=True, slots=True)
class _Load:
    """A load, and when to stop waiting for its lease."""

    load_id: int
    reads: RemoteReads
    after: Sequence[Event]
    begin_until: float
    retry_s: float


class LoadThreads:
    """Runs loads from one source, fairly between owners. No call waits for a load."""

    def __init__(self, device_pool: torch.Tensor, source: BlockSource) -> None:
        """``device_pool``: [num_blocks, ...], block-major."""
        self._device_pool = device_pool
        self._source = source
        self._lock = threading.Lock()
        self._reports = TransferReports()
        self._logged: set[str] = set()
        self._threads = FairThreads(NUM_THREADS, "kv-loads", most_per_owner=THREADS_PER_OWNER)
        self._local = threading.local()
        self._paused_until: dict[str, float] = {}

    def start(self, load_id: int, reads: RemoteReads, after: Sequence[Event]) -> None:
        """Fetch blocks, and write them to the device after these events."""
        load = _Load(load_id, reads, after, time.monotonic() + BEGIN_TIMEOUT_S, FIRST_RETRY_S)
        self._threads.submit(self._owner_of(reads), lambda: self._run(load))

    def _owner_of(self, reads: RemoteReads) -> str:
        return reads.owner or self._source.place_of(reads)

    def take_reports(self) -> TransferReports:
        """Return the loads that have ended since the last call."""
        with self._lock:
            reports = self._reports
            self._reports = TransferReports()
        return reports

    def close(self) -> None:
        """Drop loads that have not started. Repeatable."""
        self._threads.close()

    # ---- the threads ----

    def _run(self, load: _Load) -> None:
        place = self._source.place_of(load.reads)
        try:
            self._fetch(load, place)
            worked = True
        except LeaseNotBegunError as error:
            if time.monotonic() + load.retry_s < load.begin_until:
                self._ask_again(load)  # a timer waits, not a thread of the pool
                return
            self._log(place, error)
            worked = False
        except Exception as error:
            if isinstance(error, TimeoutError | ConnectionRefusedError):
                self._pause(place)
            self._log(place, error)
            worked = False
        with self._lock:
            (self._reports.finished_loads if worked else self._reports.failed_loads).append(load.load_id)

    def _fetch(self, load: _Load, place: str) -> None:
        if self._paused_until.get(place, 0.0) > time.monotonic():
            raise ConnectionError("it did not answer a moment ago")
        rows: BlockRows | None = getattr(self._local, "rows", None)
        if rows is None:
            rows = self._local.rows = BlockRows(self._device_pool)
        self._source.fetch(load.reads, rows, load.after)

    def _ask_again(self, load: _Load) -> None:
        later = replace(load, retry_s=2 * load.retry_s)
        timer = threading.Timer(
            load.retry_s, self._threads.submit, (self._owner_of(load.reads), lambda: self._run(later))
        )
        timer.daemon = True
        timer.start()

    def _pause(self, place: str) -> None:
        with self._lock:
            while len(self._paused_until) >= MAX_PAUSED:
                del self._paused_until[next(iter(self._paused_until))]
            self._paused_until[place] = time.monotonic() + PAUSE_S

    def _log(self, place: str, error: Exception) -> None:
        """Log the first failure of each kind; a failure only costs recomputing."""
        reason = str(error) if isinstance(error, (OSError, msgspec.DecodeError)) else repr(error)
        with self._lock:
            is_new = reason not in self._logged and len(self._logged) < MAX_LOGGED
            self._logged.add(reason)
        if is_new:
            logger.warning("KV could not be fetched from %s: %s.", place, reason)
