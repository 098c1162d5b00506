"""The front ends of one core, and which of them each request came from. Knows no sockets.

Client 0 is the process that started the core and cannot leave; others join later. An index is never used
again: what a process that has gone still had on its way is known by it.
"""

from __future__ import annotations

import threading

from engine.messages import EngineCoreOutput, EngineCoreOutputs

FIRST_CLIENT = 0

Addressed = tuple[int, EngineCoreOutputs]
"""A client's index and what it is sent."""


class ClientRegistry:
    """Thread safe: requests come in on one thread, and outputs go out on another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._joined: set[int] = set()
        self._left: set[int] = set()
        self._owners: dict[str, int] = {}
        """Of unfinished requests; those of client 0 are not kept, so that alone it costs nothing."""

    @property
    def indexes(self) -> list[int]:
        with self._lock:
            return [FIRST_CLIENT, *self._joined]

    def knows(self, index: int) -> bool:
        return index == FIRST_CLIENT or index in self._joined

    def join(self, index: int) -> None:
        """One that has left stays away, even if its first words arrive only now."""
        with self._lock:
            if index not in self._left:
                self._joined.add(index)

    def leave(self, index: int) -> list[str]:
        """Forget a client; returns its unfinished requests."""
        with self._lock:
            self._joined.discard(index)
            self._left.add(index)
            return [request_id for request_id, owner in self._owners.items() if owner == index]

    def take(self, request_id: str, index: int) -> None:
        """A request has come from this client."""
        if index != FIRST_CLIENT:
            with self._lock:
                self._owners[request_id] = index

    def divide(self, message: EngineCoreOutputs) -> list[Addressed]:
        """A step's message by client. The statistics go with one of the shares: they must be counted once,
        and a client that is told nothing else is not woken for them."""
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
