"""Renews the leases of requests that still wait here, and releases those that are no longer needed."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from engine.config.engine_config import EngineConfig
from engine.core_process.core_part import CorePart
from engine.kv_transfer.wire import Asked, ReleaseLease, RenewLease, receive_answer, send
from engine.records.kv_transfer import RemotePrefix
from engine.records.messages import EngineCoreOutput, EngineCoreRequest

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0
RENEWALS_PER_LEASE = 3
MAX_PAUSED = 1000
PAUSE_S = 5.0
"""How long no messages are sent to a server that did not answer."""


@dataclass(slots=True)
class _Lease:
    source: RemotePrefix
    renew_at: float
    request_ids: set[str] = field(default_factory=set)


_Key = tuple[str, int, str]


def _key(source: RemotePrefix) -> _Key:
    return source.host, source.port, source.lease_id


class LeaseKeeper(CorePart):
    """Tracks which requests have a lease at another server; a thread sends the messages there."""

    def __init__(self) -> None:
        self._leases: dict[_Key, _Lease] = {}
        self._by_request: dict[str, _Lease] = {}
        self._to_release: list[RemotePrefix] = []
        self._changed = threading.Condition()
        self._closing = False
        self._paused_until: dict[tuple[str, int], float] = {}
        self._thread = threading.Thread(target=self._run, name="kv-lease-keeper", daemon=True)
        self._thread.start()

    def opened(self, message: EngineCoreRequest) -> None:
        """Note the lease of a request that names a prefix to fetch."""
        request_id = message.request_id
        source = message.kv_transfer
        if not isinstance(source, RemotePrefix):
            return
        with self._changed:
            renew_at = time.monotonic() + source.lease_s / RENEWALS_PER_LEASE
            lease = self._leases.setdefault(_key(source), _Lease(source, renew_at))
            lease.request_ids.add(request_id)
            self._by_request[request_id] = lease
            self._changed.notify()

    def answered(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Release the leases of requests that have a token or have ended. Many are unknown here."""
        if not self._by_request:
            return
        with self._changed:
            for output in outputs:
                request_id = output.request_id
                lease = self._by_request.pop(request_id, None)
                if lease is None:
                    continue
                lease.request_ids.discard(request_id)
                if not lease.request_ids:
                    del self._leases[_key(lease.source)]
                    self._to_release.append(lease.source)
                    self._changed.notify()

    def stop(self) -> None:
        """Release what is still leased, and stop."""
        with self._changed:
            self._closing = True
            self._to_release += [lease.source for lease in self._leases.values()]
            self._changed.notify()
        self._thread.join(TIMEOUT_S)

    # ---- the thread ----

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._say(*job)

    def _next(self) -> tuple[RemotePrefix, Asked] | None:
        """The next message, and its receiver; None when closed and all are sent."""
        with self._changed:
            while True:
                now = time.monotonic()
                due = min(self._leases.values(), key=lambda lease: lease.renew_at, default=None)
                if due is not None and due.renew_at <= now and not self._closing:
                    due.renew_at = now + due.source.lease_s / RENEWALS_PER_LEASE
                    return due.source, RenewLease(due.source.lease_id)
                if self._to_release:
                    source = self._to_release.pop()
                    return source, ReleaseLease(source.lease_id)
                if self._closing:
                    return None
                self._changed.wait(None if due is None else due.renew_at - now)

    def _say(self, source: RemotePrefix, message: Asked) -> None:
        """Send a message. If that fails, the lease just ends by itself."""
        address = source.host, source.port
        if self._paused_until.get(address, 0.0) > time.monotonic():
            return
        try:
            with socket.create_connection(address, TIMEOUT_S) as connection:
                connection.settimeout(TIMEOUT_S)
                send(connection, message)
                receive_answer(connection)
            self._paused_until.pop(address, None)
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("The KV server %s:%d does not answer: %s.", *address, error)
            while len(self._paused_until) >= MAX_PAUSED:
                del self._paused_until[next(iter(self._paused_until))]
            self._paused_until[address] = time.monotonic() + PAUSE_S


class LeasePlace(CorePart):
    """Adds to outputs where the KV that is leased out can be fetched."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    def answered(self, outputs: Sequence[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.kv_leased is not None:
                leased = msgspec.structs.replace(output.kv_leased, host=self._host, port=self._port)
                output.kv_leased = leased


def lease_place(config: EngineConfig) -> LeasePlace | None:
    """The place of this engine's leases; None for an engine that moves no KV."""
    transfer = config.kv_transfer
    return None if transfer is None else LeasePlace(transfer.kv_ip, config.kv_transfer_port)


def open_lease_keeper(config: EngineConfig) -> LeaseKeeper | None:
    """The keeper of an engine that fetches KV from others; None for other engines."""
    transfer = config.kv_transfer
    return LeaseKeeper() if transfer is not None and transfer.fetches else None
