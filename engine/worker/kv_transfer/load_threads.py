"""Runs loads of blocks that come from elsewhere, on threads beside the steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec
import torch

from engine.core.outputs import RemoteReads
from engine.worker.kv_tiers.copy_streams import Event
from engine.worker.kv_tiers.disk_pool import TransferReports
from engine.worker.kv_transfer.block_rows import BlockRows

logger = logging.getLogger(__name__)

NUM_THREADS = 4
MAX_LOGGED = 100


class BlockSource(Protocol):
    """Where blocks come from."""

    def fetch(self, reads: RemoteReads, rows: BlockRows, after: Sequence[Event]) -> None:
        """Fetch blocks, and write them to the device once these events are done. Called on several threads,
        each with its own ``rows``. Raises if not all could be had."""

    def place_of(self, reads: RemoteReads) -> str:
        """Where these come from, for a log."""


class LoadThreads:
    """Runs loads from one source. No call waits for it."""

    def __init__(self, device_pool: torch.Tensor, source: BlockSource) -> None:
        """``device_pool``: [num_blocks, ...], block-major."""
        self._device_pool = device_pool
        self._source = source
        self._lock = threading.Lock()
        self._reports = TransferReports()
        self._logged: set[str] = set()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kv-loads")
        self._local = threading.local()

    def start(self, load_id: int, reads: RemoteReads, after: Sequence[Event]) -> None:
        """Fetch blocks, and write them to the device once these events are done."""
        self._threads.submit(self._load, load_id, reads, after)

    def take_reports(self) -> TransferReports:
        """The loads that have ended since the last call."""
        with self._lock:
            reports, self._reports = self._reports, TransferReports()
        return reports

    def close(self) -> None:
        """Drop loads that have not started. Repeatable."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- the threads ----

    def _load(self, load_id: int, reads: RemoteReads, after: Sequence[Event]) -> None:
        try:
            rows: BlockRows | None = getattr(self._local, "rows", None)
            if rows is None:
                rows = self._local.rows = BlockRows(self._device_pool)
            self._source.fetch(reads, rows, after)
            worked = True
        except Exception as error:
            self._log(reads, error)
            worked = False
        with self._lock:
            (self._reports.finished_loads if worked else self._reports.failed_loads).append(load_id)

    def _log(self, reads: RemoteReads, error: Exception) -> None:
        """A failure costs no more than recomputing; the first of each kind is logged."""
        reason = str(error) if isinstance(error, (OSError, msgspec.DecodeError)) else repr(error)
        with self._lock:
            is_new = reason not in self._logged and len(self._logged) < MAX_LOGGED
            self._logged.add(reason)
        if is_new:
            logger.warning("KV could not be fetched from %s: %s.", self._source.place_of(reads), reason)
