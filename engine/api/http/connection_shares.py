"""Connections by owner: the owner with the most connections gives way first.

A connection's owner is known from its first request; until then it has none. This module does not know HTTP.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

Connection = TypeVar("Connection")

UNKNOWN = None


class ConnectionShares(Generic[Connection]):
    """Counts connections by owner, and records which are idle. Without owners, all belong to one."""

    def __init__(self, max_connections: int) -> None:
        self._max = max_connections
        self._owners: dict[Connection, str | None] = {}
        self._count: Counter[str | None] = Counter()
        self._idle: dict[str | None, dict[Connection, None]] = {}
        """Idle connections by owner, the longest idle first."""

    def opened(self, connection: Connection) -> None:
        self._owners[connection] = UNKNOWN
        self._count[UNKNOWN] += 1

    def closed(self, connection: Connection) -> None:
        self.works(connection)
        if connection in self._owners:
            self._take(self._owners.pop(connection))

    def is_of(self, connection: Connection, owner: str | None) -> None:
        """Assigns the connection to the owner of its key."""
        before = self._owners.get(connection)
        if connection in self._owners and before != owner:
            self._take(before)
            self._owners[connection] = owner
            self._count[owner] += 1

    def _take(self, owner: str | None) -> None:
        self._count[owner] -= 1
        if not self._count[owner]:
            del self._count[owner]

    def rests(self, connection: Connection) -> None:
        """Records that the connection is idle."""
        owner = self._owners.get(connection)
        self._idle.setdefault(owner, {})[connection] = None

    def works(self, connection: Connection) -> None:
        owner = self._owners.get(connection)
        idle = self._idle.get(owner)
        if idle is not None and idle.pop(connection, connection) is None and not idle:
            del self._idle[owner]

    def longest_idle(self) -> Connection | None:
        """Removes and returns the longest idle connection, of the owner with the most connections among those
        with an idle one."""
        owner = max(self._idle, key=self._count.__getitem__, default=UNKNOWN)
        idle = self._idle.get(owner)
        if idle is None:
            return None
        connection = next(iter(idle))
        self.works(connection)
        return connection

    def is_within_share(self, connection: Connection) -> bool:
        """Whether the owner has no more than an equal share among owners with connections."""
        owner = self._owners.get(connection)
        num_owners = sum(1 for each in self._count if each is not UNKNOWN)
        return num_owners > 1 and self._count[owner] * num_owners <= self._max
