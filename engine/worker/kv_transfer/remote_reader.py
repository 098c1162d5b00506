"""Fetches blocks that other servers have leased out, on threads beside the steps."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from engine.core.outputs import RemoteReads
from engine.kv_transfer.wire import (
    CHUNK,
    Granted,
    ReadBlocks,
    Refused,
    chunks,
    receive_answer,
    receive_into,
    send,
)
from engine.worker.kv_tiers.copy_streams import Event
from engine.worker.kv_tiers.disk_pool import TransferReports
from engine.worker.kv_transfer.block_rows import BlockRows

logger = logging.getLogger(__name__)

NUM_THREADS = 4
CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 10.0
"""How long the other server may be silent."""


class RemoteReader:
    """Runs loads from other servers. No call waits for the network."""

    def __init__(self, device_pool: torch.Tensor, rank: int, fingerprint: str) -> None:
        """``device_pool``: [num_blocks, ...], block-major. ``rank``: reads from the same of the others."""
        self._device_pool = device_pool
        self._rank = rank
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._reports = TransferReports()
        self._logged: set[str] = set()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kv-remote")
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
            self._fetch(reads, after)
            worked = True
        except Exception as error:
            self._log(reads, error)
            worked = False
        with self._lock:
            (self._reports.finished_loads if worked else self._reports.failed_loads).append(load_id)

    def _fetch(self, reads: RemoteReads, after: Sequence[Event]) -> None:
        rows: BlockRows | None = getattr(self._local, "rows", None)
        if rows is None:
            rows = self._local.rows = BlockRows(self._device_pool)
        address = reads.source.host, reads.source.port + self._rank
        with socket.create_connection(address, CONNECT_TIMEOUT_S) as connection:
            connection.settimeout(READ_TIMEOUT_S)
            send(connection, ReadBlocks(reads.source.lease_id, self._fingerprint, list(reads.names)))
            answer = receive_answer(connection)
            if not isinstance(answer, Granted):
                raise ConnectionError(answer.reason if isinstance(answer, Refused) else "no blocks came")
            if answer.block_bytes != rows.block_bytes:
                raise ConnectionError(f"its blocks have {answer.block_bytes} bytes, not {rows.block_bytes}")
            for event in after:
                event.synchronize()
            status = bytearray(1)
            for some in chunks(reads.block_ids, rows.block_bytes):
                receive_into(connection, memoryview(status))
                if status != CHUNK:
                    raise ConnectionError("the lease has ended")
                receive_into(connection, rows.buffer_of(len(some)))
                rows.scatter(some)

    def _log(self, reads: RemoteReads, error: Exception) -> None:
        """A failure costs no more than recomputing; the first of each kind is logged."""
        reason = str(error) if isinstance(error, (OSError, msgspec.DecodeError)) else repr(error)
        with self._lock:
            is_new = reason not in self._logged and len(self._logged) < 100
            self._logged.add(reason)
        if is_new:
            source = reads.source
            logger.warning(
                "KV could not be fetched from %s:%d: %s.", source.host, source.port + self._rank, reason
            )
