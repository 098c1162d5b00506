"""Lets other servers read leased blocks. Does not know which request uses which block."""

from __future__ import annotations

import logging
import socketserver
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec
import torch

from engine.core.outputs import NewKVLease
from engine.errors import ConfigError
from engine.kv_transfer.wire import (
    CHUNK,
    GONE,
    HELLO_BYTES,
    Asked,
    ConfirmLease,
    Granted,
    LocateBlocks,
    Located,
    Noted,
    NotYet,
    ReadBlocks,
    Refused,
    ReleaseLease,
    RenewLease,
    chunks,
    receive_asked,
    send,
)
from engine.worker.kv_tiers.disk_pool import TransferReports
from engine.worker.kv_transfer.block_rows import BlockRows
from engine.worker.kv_transfer.peer_memory import PeerMemory

logger = logging.getLogger(__name__)

Serve = Callable[[socketserver.BaseRequestHandler], None]

MAX_CONNECTIONS = 256
MAX_STRANGERS = 128
"""Connections that have not yet sent a valid first message."""
HELLO_S = 2.0
"""Seconds in which a connection must send its first message."""
IDLE_TIMEOUT_S = 120.0
"""Seconds that a connection may be silent after its first message."""
MESSAGE_BYTES_PER_BLOCK = 64
"""Limits messages: no reader names more blocks than the pool has, nor longer names than this."""
MAX_ENDED = 4096
"""Leases that are remembered after their end, so that their readers are refused immediately."""


class LeaseServer:
    """Listens on a separate port; each connection is served by a thread.

    When ``end`` returns, no one reads the lease any more: its blocks may be overwritten.
    """

    def __init__(
        self,
        device_pool: torch.Tensor,
        host: str,
        port: int,
        fingerprint: str,
        memory: PeerMemory | None = None,
    ) -> None:
        """``device_pool``: [num_blocks, ...], block-major. ``memory``: the pool as a library reads it; None:
        blocks are sent over the connection. ConfigError if it cannot listen on this port."""
        self._device_pool = device_pool
        self._memory = memory
        self.fingerprint = fingerprint
        self._leases: dict[str, NewKVLease] = {}
        self._ended: dict[str, None] = {}
        self._changed = threading.Condition()
        self._reports = TransferReports()
        self._most_bytes = HELLO_BYTES + MESSAGE_BYTES_PER_BLOCK * len(device_pool)
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        try:
            self._server = _Server((host, port), self._serve)
        except OSError as error:
            raise ConfigError(
                f"kv_transfer_config: cannot listen on {host}:{port}: {error.strerror or error}."
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="kv-leases")
        self._thread.daemon = True
        self._thread.start()

    # ---- called by the worker ----

    def begin(self, leases: Iterable[NewKVLease]) -> None:
        """Make these leases readable from now on."""
        with self._changed:
            self._leases |= {lease.lease_id: lease for lease in leases}
            self._changed.notify_all()

    def end(self, lease_ids: Iterable[str]) -> None:
        """End leases; waits for the chunk that is being copied."""
        with self._changed:
            for lease_id in lease_ids:
                self._leases.pop(lease_id, None)
                self._ended[lease_id] = None
            while len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
            self._changed.notify_all()

    def end_all(self) -> None:
        """End all leases, because the pool is about to change."""
        with self._changed:
            lease_ids = list(self._leases)
        self.end(lease_ids)

    def take_reports(self) -> TransferReports:
        """Return the leases that readers have released or renewed since the last call."""
        with self._changed:
            reports = self._reports
            self._reports = TransferReports()
        return reports

    def close(self) -> None:
        """Stop listening. Repeatable."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # ---- the threads ----

    def _serve(self, handler: socketserver.BaseRequestHandler) -> None:
        if not self._strangers.acquire(blocking=False):
            return
        asked: Asked | None = None
        try:
            with suppress(OSError, msgspec.DecodeError):
                handler.request.settimeout(HELLO_S)
                asked = receive_asked(handler.request, self._most_bytes, HELLO_S)
        finally:
            self._strangers.release()
        if asked is None or not self._slots.acquire(blocking=False):
            return
        try:
            handler.request.settimeout(IDLE_TIMEOUT_S)
            with suppress(OSError, msgspec.DecodeError):
                while asked is not None:
                    self._answer(handler, asked)
                    asked = receive_asked(handler.request, self._most_bytes)
        finally:
            self._slots.release()

    def _answer(self, handler: socketserver.BaseRequestHandler, asked: Asked) -> None:
        match asked:
            case ReadBlocks():
                self._send_blocks(handler, asked)
            case LocateBlocks():
                send(handler.request, self._locate(asked))
            case ConfirmLease(lease_id):
                with self._changed:
                    goes_on = lease_id in self._leases
                send(handler.request, Noted() if goes_on else Refused("the lease has ended"))
            case RenewLease(lease_id):
                with self._changed:
                    if lease_id in self._leases and lease_id not in self._reports.renewed_leases:
                        self._reports.renewed_leases.append(lease_id)
                send(handler.request, Noted())
            case ReleaseLease(lease_id):
                with self._changed:
                    if lease_id in self._leases and lease_id not in self._reports.released_leases:
                        self._reports.released_leases.append(lease_id)
                send(handler.request, Noted())

    def _send_blocks(self, handler: socketserver.BaseRequestHandler, asked: ReadBlocks) -> None:
        answer, block_ids = self._look_up(asked)
        if answer is not None:
            send(handler.request, answer)
            return
        rows = BlockRows(self._device_pool)
        send(handler.request, Granted(rows.block_bytes))
        for some in chunks(block_ids, rows.block_bytes):
            with self._changed:
                content = rows.gather(some) if asked.lease_id in self._leases else None
            if content is None:
                handler.request.sendall(GONE)
                return
            handler.request.sendall(CHUNK)
            handler.request.sendall(content)

    def _locate(self, asked: LocateBlocks) -> Located | NotYet | Refused:
        if self._memory is None or self._memory.library != asked.library:
            return Refused(f"the kv_connector of this server is another one, without {asked.library}")
        answer, block_ids = self._look_up(asked)
        return self._memory.locate(block_ids) if answer is None else answer

    def _look_up(self, asked: ReadBlocks | LocateBlocks) -> tuple[NotYet | Refused | None, Sequence[int]]:
        """Returns why the blocks cannot be read, or their ids. It does not wait: a reader requests again."""
        if asked.fingerprint != self.fingerprint:
            reason = f"this one is {self.fingerprint}, the one that reads is {asked.fingerprint}"
            return Refused(f"the servers are incompatible: {reason}"), ()
        with self._changed:
            lease = self._leases.get(asked.lease_id)
            has_ended = asked.lease_id in self._ended
        if lease is None:
            return Refused("the lease has ended") if has_ended else NotYet(), ()
        block_ids = [lease.blocks.get(name) for name in asked.names]
        known = [block_id for block_id in block_ids if block_id is not None]
        if len(known) < len(block_ids):
            return Refused("the lease does not have all of these blocks"), ()
        return None, known


class _Server(socketserver.ThreadingTCPServer):
    """Calls a function with each connection."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], serve: Serve) -> None:
        super().__init__(address, _Handler)
        self.serve = serve

    def handle_error(self, request: object, client_address: object) -> None:
        logger.exception("Serving leased KV to %s failed.", client_address)


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        self.server.serve(self)
