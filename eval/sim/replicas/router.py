"""Chooses the replica of a turn, like a router in front of several engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, Protocol, overload

import numpy as np

from continuum.routing.job_router import JobRouter
from engine.core.kv_cache.block_hash import BlockHash
from engine.routing import SHARED_WORDS, EngineLoad, RoutedTurn, RouterContext
from eval.errors import UsageError
from eval.sim.replicas.replica import SimReplica
from eval.sim.sim_request import SimRequest

ROUTERS = ("jobs", "session", "prefix", "least-loaded", "round-robin")
PREFIX_BLOCKS = 64
"""Blocks at the beginning of a prompt that the prefix router hashes: a system prompt and a task."""


class Router(Protocol):
    """Routes the turns of one simulation."""

    def choose(self, request: SimRequest, job_id: str, replicas: Sequence[SimReplica], now: float) -> int:
        """Returns the index of the replica that serves the next turn of this job."""


class RoundRobinRouter:
    """Sends each turn to the next replica."""

    def __init__(self) -> None:
        self._next = -1

    def choose(self, request: SimRequest, job_id: str, replicas: Sequence[SimReplica], now: float) -> int:
        self._next = (self._next + 1) % len(replicas)
        return self._next


class LeastLoadedRouter:
    """Sends each turn to the replica with the fewest unfinished requests; ties rotate, as in V1's
    balancer."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimRequest, job_id: str, replicas: Sequence[SimReplica], now: float) -> int:
        count = len(replicas)
        order = ((self._next + step) % count for step in range(count))
        chosen = min(order, key=lambda index: replicas[index].num_unfinished)
        self._next = (chosen + 1) % count
        return chosen


class SessionRouter:
    """Keeps a job at the replica of its first turn, which was then the one with the fewest jobs."""

    def __init__(self) -> None:
        self._home: dict[str, int] = {}
        self._num_jobs: list[int] = []

    def choose(self, request: SimRequest, job_id: str, replicas: Sequence[SimReplica], now: float) -> int:
        self._num_jobs += [0] * (len(replicas) - len(self._num_jobs))
        home = self._home.get(job_id)
        if home is None:
            load = [
                (replica.num_unfinished, jobs) for replica, jobs in zip(replicas, self._num_jobs, strict=True)
            ]
            home = self._home[job_id] = load.index(min(load))
            self._num_jobs[home] += 1
        return home


class PrefixRouter:
    """Hashes the beginning of the prompt and uses nothing else."""

    def choose(self, request: SimRequest, job_id: str, replicas: Sequence[SimReplica], now: float) -> int:
        beginning = b"".join(request.block_hashes[:PREFIX_BLOCKS])
        digest = blake2b(beginning, digest_size=8).digest()
        return int.from_bytes(digest, "little") % len(replicas)


class EngineRouter:
    """Our server's router, with the loads that its cores would report."""

    def __init__(self, num_replicas: int, block_size: int) -> None:
        words = memoryview(np.zeros(SHARED_WORDS, dtype=np.uint64).data).cast("B").cast("Q")
        self._router = JobRouter(RouterContext(num_replicas, block_size, words))
        self._block_size = block_size

    def choose(self, request: SimRequest, job_id: str, replicas: Sequence[SimReplica], now: float) -> int:
        turn = RoutedTurn(
            request.request_id,
            _Prompt(request.block_hashes, request.num_prompt_tokens, self._block_size),
            job_id=None if request.job is None else request.job.job_id,
        )
        return self._router.place(turn, _Loads(replicas), now)

    def lost(self, index: int) -> None:
        """Forgets the homes of jobs at a replica that has lost its KV."""
        self._router.lost(index)


class _Prompt(Sequence[int]):
    """A prompt that has only block hashes: a slice returns the hashes of its full blocks as integers."""

    def __init__(self, hashes: Sequence[BlockHash], num_tokens: int, block_size: int) -> None:
        self._hashes = hashes
        self._num_tokens = num_tokens
        self._block_size = block_size

    def __len__(self) -> int:
        return self._num_tokens

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: Any) -> Any:
        size = self._block_size
        if isinstance(place, int):
            return int.from_bytes(self._hashes[place // size], "big")
        blocks = self._hashes[place.start // size : place.stop // size]
        return [int.from_bytes(block, "big") for block in blocks]


class _Loads(Sequence[EngineLoad | None]):
    """The replicas' loads, read on access."""

    def __init__(self, replicas: Sequence[SimReplica]) -> None:
        self._replicas = replicas

    def __len__(self) -> int:
        return len(self._replicas)

    @overload
    def __getitem__(self, place: int) -> EngineLoad | None: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[EngineLoad | None]: ...
    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, int):
            return _load(self._replicas[place])
        return [_load(replica) for replica in self._replicas[place]]

    def __iter__(self) -> Iterator[EngineLoad | None]:
        return map(_load, self._replicas)


def _load(replica: SimReplica) -> EngineLoad | None:
    return replica.load if replica.is_up else None


def make_router(name: str, num_replicas: int, block_size: int) -> Router:
    """Returns the router of this name."""
    if name == "jobs":
        return EngineRouter(num_replicas, block_size)
    if name == "round-robin":
        return RoundRobinRouter()
    if name == "least-loaded":
        return LeastLoadedRouter()
    if name == "session":
        return SessionRouter()
    if name == "prefix":
        return PrefixRouter()
    raise UsageError(f"router must be one of {', '.join(ROUTERS)}, got {name!r}.")
