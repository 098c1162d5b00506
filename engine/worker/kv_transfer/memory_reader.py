"""Fetches blocks that other servers have leased out, directly from memory to memory."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from engine.core.outputs import RemoteReads
from engine.kv_transfer.wire import (
    ConfirmLease,
    LocateBlocks,
    Located,
    Noted,
    NotYet,
    Refused,
    receive_answer,
    send,
)
from engine.records.kv_transfer import RemotePrefix
from engine.worker.kv_tiers.copy_streams import Event
from engine.worker.kv_transfer.block_rows import BlockRows
from engine.worker.kv_transfer.load_threads import LeaseNotBegunError
from engine.worker.kv_transfer.peer_memory import PeerMemory
from engine.worker.kv_transfer.remote_reader import CONNECT_TIMEOUT_S, READ_TIMEOUT_S


class MemoryReader:
    """The ``BlockSource`` of leased blocks that a library reads from the other server's memory.

    The other server does not notice the read. So the reader asks after the read whether the lease still
    exists, and discards the blocks if it has ended meanwhile.
    """

    def __init__(self, rank: int, fingerprint: str, memory: PeerMemory) -> None:
        """``rank``: it reads from the same rank of others. ``fingerprint``: must be equal on both sides."""
        self._rank = rank
        self.fingerprint = fingerprint
        self._memory = memory

    def fetch(self, reads: RemoteReads, rows: BlockRows, after: Sequence[Event]) -> None:
        source = reads.source
        assert isinstance(source, RemotePrefix)
        address = source.host, source.port + self._rank
        with socket.create_connection(address, CONNECT_TIMEOUT_S) as connection:
            connection.settimeout(READ_TIMEOUT_S)
            there = self._locate(connection, source.lease_id, reads)
            if there.block_bytes != rows.block_bytes or len(there.block_ids) != len(reads):
                raise ConnectionError("its blocks are not the requested ones")
            for event in after:
                event.synchronize()
            self._memory.read(there, reads.block_ids)
            send(connection, ConfirmLease(source.lease_id))
            if not isinstance(receive_answer(connection), Noted):
                raise ConnectionError("the lease has ended")

    def _locate(self, connection: socket.socket, lease_id: str, reads: RemoteReads) -> Located:
        names = list(reads.names)
        send(connection, LocateBlocks(lease_id, self.fingerprint, names, self._memory.library))
        answer = receive_answer(connection, len(names))
        if isinstance(answer, Located):
            return answer
        if isinstance(answer, NotYet):
            raise LeaseNotBegunError("the lease has not begun")
        raise ConnectionError(answer.reason if isinstance(answer, Refused) else "no blocks arrived")

    def place_of(self, reads: RemoteReads) -> str:
        assert isinstance(reads.source, RemotePrefix)
        return f"{reads.source.host}:{reads.source.port + self._rank}"
