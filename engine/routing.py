"""Chooses which of several engine cores runs a request: the interface of routers, and the simplest one.

A router is pure: it has no clock, no sockets and no processes, and decides by its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RoutedTurn:
    """What a router may know of a request before it runs."""

    request_id: str
    prompt_token_ids: Sequence[int]
    job_id: str | None = None
    """The job, as the client named it; None if it named none."""
    parent_id: str | None = None
    """The job that waits for it; None for none."""
    owner: str | None = None
    """Name of the API key. No other owner can hit what this owner has cached."""
    cache_salt: str | None = None
    """Requests with different salts share no cached prefix."""


@dataclass(slots=True)
class EngineLoad:
    """The load of one core, by its last report and the requests sent since."""

    num_open: int = 0
    """Requests that were sent to it, by any API server process, and have not ended."""
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    """KV blocks of its pool; 0 before its first report."""
    num_free_blocks: int = 0
    """Blocks that no request and no pin holds."""
    num_pinned_blocks: int = 0

    @property
    def queue(self) -> int:
        """A score of the queue: a waiting request counts as four running ones, as in V1's balancer."""
        return 4 * self.num_waiting + max(self.num_running, self.num_open)


SHARED_WORDS = 1 << 20
"""Length of the memory that the routers of a server share, in words of 64 bits."""


@dataclass(frozen=True, slots=True)
class RouterContext:
    """What a router is made from."""

    num_engines: int
    block_size: int
    """Tokens of a KV block."""
    shared_words: memoryview
    """``SHARED_WORDS`` words of 64 bits (format ``Q``), which the routers of all API server processes of a
    server share. They are 0 at first."""


class Router(Protocol):
    """Chooses a core for each request. One per API server process."""

    def place(self, turn: RoutedTurn, loads: Sequence[EngineLoad | None], now: float) -> int:
        """The number of the core that runs the turn.

        ``loads``: of each core; None for one that takes no requests. At least one takes some. ``now``:
        monotonic seconds.
        """

    def home(self, turn: RoutedTurn) -> int | None:
        """The core that has the KV of the job's turns before this one; None for a new job."""

    def lost(self, engine: int) -> None:
        """Note that this core has lost its KV cache: no job is at home there any more."""

    def job_ended(self, job_id: str) -> None:
        """Note that the job has no more turns."""


class LeastLoadedRouter:
    """V1's balancer: chooses the core with the shortest queue; equal ones take turns."""

    def __init__(self, context: RouterContext) -> None:
        self._next = 0

    def place(self, turn: RoutedTurn, loads: Sequence[EngineLoad | None], now: float) -> int:
        count = len(loads)
        order = [(self._next + step) % count for step in range(count)]
        queues = {index: load.queue for index in order if (load := loads[index]) is not None}
        chosen = min(queues, key=queues.__getitem__)
        self._next = (chosen + 1) % count
        return chosen

    def home(self, turn: RoutedTurn) -> int | None:
        return None

    def lost(self, engine: int) -> None:
        pass

    def job_ended(self, job_id: str) -> None:
        pass


RouterFactory = Callable[[RouterContext], Router]
"""Makes the router of one API server process."""
