"""Fetches blocks that other servers have leased out, over TCP."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from engine.core.outputs import RemoteReads
from engine.kv_transfer.wire import (
    CHUNK,
    Granted,
    NotYet,
    ReadBlocks,
    Refused,
    chunks,
    receive_answer,
    receive_into,
    send,
)
from engine.records.kv_transfer import RemotePrefix
from engine.worker.kv_tiers.copy_streams import Event
from engine.worker.kv_transfer.block_rows import BlockRows
from engine.worker.kv_transfer.load_threads import LeaseNotBegunError

CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 10.0
"""Seconds that the other server may be silent."""


class RemoteReader:
    """The ``BlockSource`` of leased blocks."""

    def __init__(self, rank: int, fingerprint: str) -> None:
        """``rank``: it reads from the same rank of others. ``fingerprint``: must be equal on both sides."""
        self._rank = rank
        self.fingerprint = fingerprint

    def fetch(self, reads: RemoteReads, rows: BlockRows, after: Sequence[Event]) -> None:
        source = reads.source
        assert isinstance(source, RemotePrefix)
        with socket.create_connection(
            (source.host, source.port + self._rank), CONNECT_TIMEOUT_S
        ) as connection:
            connection.settimeout(READ_TIMEOUT_S)
            send(connection, ReadBlocks(source.lease_id, self.fingerprint, list(reads.names)))
            answer = receive_answer(connection)
            if isinstance(answer, NotYet):
                raise LeaseNotBegunError("the lease has not begun")
            if not isinstance(answer, Granted):
                raise ConnectionError(answer.reason if isinstance(answer, Refused) else "no blocks arrived")
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

    def place_of(self, reads: RemoteReads) -> str:
        assert isinstance(reads.source, RemotePrefix)
        return f"{reads.source.host}:{reads.source.port + self._rank}"
