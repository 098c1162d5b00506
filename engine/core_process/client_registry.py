"""The clients of one core (API server processes), and which of them sent each request. Knows no sockets.

Client 0 is the process that started the core and cannot leave; others join later. An index is never reused,
so late messages of a client that has left are recognized.
"""

from __future__ import annotations

import threading

from engine.records.messages import EngineCoreOutput, EngineCoreOutputs

FIRST_CLIENT = 0

Addressed = tuple[int, EngineCoreOutputs]
"""A client's index and the message for it."""


class ClientRegistry:
    """Thread-safe: requests come in on one thread, and outputs go out on another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._joined: set[int] = set()
        self._left: set[int] = set()
        self._owners: dict[str, int] = {}
        """The client of each unfinished request. Requests of client 0 are not stored: a single client costs
        nothing."""

    @property
    def indexes(self) -> list[int]:
        with self._lock:
            return [FIRST_CLIENT, *self._joined]

    def knows(self, index: int) -> bool:
        return index == FIRST_CLIENT or index in self._joined

    def join(self, index: int) -> None:
        """Add a client, unless it has left: its first message may arrive late."""
        with self._lock:
            if index not in self._left:
                self._joined.add(index)

    def leave(self, index: int) -> list[str]:
        """Remove a client; returns its unfinished requests."""
        with self._lock:
            self._joined.discard(index)
            self._left.add(index)
            return [request_id for request_id, owner in self._owners.items() if owner == index]

    def take(self, request_id: str, index: int) -> None:
        """Record which client sent a request."""
        if index != FIRST_CLIENT:
            with self._lock:
                self._owners[request_id] = index

    def split(self, message: EngineCoreOutputs) -> list[Addressed]:
        """Split a step's message by client. Exactly one part carries the statistics, as they must be counted
        once; if possible one that is sent anyway, so that no client is woken for them."""
        with self._lock:
            if not self._joined and not self._owners:
                return [(FIRST_CLIENT, message)]
            shares: dict[int, list[EngineCoreOutput]] = {}
            for output in message.outputs:
                shares.setdefault(self._owner(output), []).append(output)
            recorder = min(shares.keys() & self._joined, default=min(self._joined, default=FIRST_CLIENT))
            if message.scheduler_stats is not None:
                shares.setdefault(recorder, [])
            return [
                (index, _share(message, outputs, with_stats=index == recorder))
                for index, outputs in shares.items()
                if self.knows(index)
            ]

    def _owner(self, output: EngineCoreOutput) -> int:
        if output.finished:
            return self._owners.pop(output.request_id, FIRST_CLIENT)
        return self._owners.get(output.request_id, FIRST_CLIENT)


def _share(
    message: EngineCoreOutputs, outputs: list[EngineCoreOutput], *, with_stats: bool
) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        outputs=outputs,
        scheduler_stats=message.scheduler_stats if with_stats else None,
        timestamp=message.timestamp,
    )
