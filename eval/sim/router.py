"""Chooses the replica of a turn, as a router in front of several engines would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from eval.errors import UsageError
from eval.sim.replica import Replica

ROUTERS = ("session", "least-loaded", "round-robin")


class Router(Protocol):
    """Answers for one simulation."""

    def choose(self, job_id: str, replicas: Sequence[Replica]) -> int:
        """Index of the replica that serves the next turn of this job."""


class RoundRobinRouter:
    """Each turn goes to the next replica."""

    def __init__(self) -> None:
        self._next = -1

    def choose(self, job_id: str, replicas: Sequence[Replica]) -> int:
        self._next = (self._next + 1) % len(replicas)
        return self._next


class LeastLoadedRouter:
    """Each turn goes where fewest requests are unfinished, the first of equals."""

    def choose(self, job_id: str, replicas: Sequence[Replica]) -> int:
        return min(range(len(replicas)), key=lambda index: replicas[index].num_unfinished)


class SessionRouter:
    """A job stays where its first turn went, which was where fewest jobs lived."""

    def __init__(self) -> None:
        self._home: dict[str, int] = {}
        self._num_jobs: list[int] = []

    def choose(self, job_id: str, replicas: Sequence[Replica]) -> int:
        self._num_jobs += [0] * (len(replicas) - len(self._num_jobs))
        home = self._home.get(job_id)
        if home is None:
            load = [
                (replica.num_unfinished, jobs) for replica, jobs in zip(replicas, self._num_jobs, strict=True)
            ]
            home = self._home[job_id] = load.index(min(load))
            self._num_jobs[home] += 1
        return home


def make_router(name: str) -> Router:
    """The router of this name."""
    if name == "round-robin":
        return RoundRobinRouter()
    if name == "least-loaded":
        return LeastLoadedRouter()
    if name == "session":
        return SessionRouter()
    raise UsageError(f"router must be one of {', '.join(ROUTERS)}, got {name!r}.")
