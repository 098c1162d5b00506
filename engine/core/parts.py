"""Plug-ins of the scheduler: each feature is a part, and all parts are called at the same few moments.

A part overrides the methods that it needs. For each moment a tuple has the parts that override it, so a part
that is off, or has nothing to do, costs nothing. Their order is in ``engine.core.part_order``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeVar

from engine.core.kv_cache.block_pool import KVCacheBlock
from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request
from engine.records.messages import EngineCoreOutput
from engine.records.reported_stats import SchedulerStats

if TYPE_CHECKING:
    from engine.core.fairness.fair_queue import FairQueue
    from engine.core.offload.pending_kv_loads import PendingKVLoads
    from engine.core.step import Step

P = TypeVar("P")
T = TypeVar("T")


class Left(Enum):
    """How a request has left the batch or the queue."""

    PREEMPTED = "preempted"
    """It is queued again, and has no blocks."""
    ENDED = "ended"
    SPOILED = "spoiled"
    """It has ended, and what was computed of it may be wrong."""


class Batch(Protocol):
    """What parts read of a scheduler while it makes a plan."""

    running: list[Request]
    waiting: FairQueue
    loads: PendingKVLoads


class ChunkLimit:
    """One part's limit on what a step may compute of requests. Made for that step."""

    def cut(self, request: Request, start: int, num_tokens: int, hit: Sequence[KVCacheBlock] | None) -> int:
        """How many of ``num_tokens`` tokens from ``start`` on the step may compute. ``hit``: the cached
        blocks of a request that is about to start. Reserves nothing: ``commit`` does."""
        return num_tokens

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        """Note that the step computes these tokens. A request that starts is not ``RUNNING`` yet."""

    def cut_drafts(self, request: Request, num_drafts: int) -> int:
        """How many of the request's drafts the step may verify."""
        return num_drafts

    def commit_drafts(self, request: Request, num_drafts: int) -> None:
        """Note that the step verifies these drafts."""

    def defers(self, request: Request) -> bool:
        """Whether neither this request nor others of its tenant may start in this step."""
        return False

    def sets_aside(self, request: Request) -> bool:
        """Whether this request may not start in this step, though later ones may."""
        return False

    def admitted(self, request: Request) -> None:
        """Note that a request was admitted: it starts, or is loaded first."""


class SchedulerPart:
    """What one feature does in the scheduler, at each moment."""

    def arrived(self, request: Request, now: float) -> None:
        """Called when a request has come in."""

    def left(self, request: Request, how: Left, now: float) -> None:
        """Called when a request leaves the batch or its queue; it still has its blocks."""

    def fill_output(self, request: Request, output: EngineCoreOutput, kv: KVCacheManager) -> None:
        """Add what clients get with a request's last output; it still has its blocks."""

    def limit(self, step: Step, batch: Batch, inner: tuple[ChunkLimit, ...]) -> ChunkLimit | None:
        """Its limit for a step; None: no limit. ``inner``: the limits that cut after it."""
        return None

    def fill(self, plan: SchedulerOutput, requests: Mapping[str, Request], now: float) -> None:
        """Add to a plan what the worker needs; the plan's tokens count as computed."""

    def take(self, plan: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        """Called with the output of a plan, before its tokens are appended."""

    def fill_stats(self, stats: SchedulerStats, running: Sequence[Request]) -> None:
        """Add gauges as they are now, and counts since the last call."""

    def drop_cached(self) -> None:
        """Drop what is kept for later, and used by no request."""

    def check_invariants(self) -> None:
        """Raise AssertionError unless its state is consistent."""


def busy_at(moment: str, parts: Iterable[T], base: type[T]) -> tuple[T, ...]:
    """The parts with something to do at a moment: they override this method of ``base``."""
    nothing = getattr(base, moment)
    return tuple(part for part in parts if getattr(type(part), moment) is not nothing)


class Parts:
    """The parts of one scheduler, in the order in which they are called."""

    def __init__(self, parts: Iterable[SchedulerPart]) -> None:
        self.all = tuple(parts)
        self._arriving = self._with("arrived")
        self._leaving = self._with("left")
        self._answering = self._with("fill_output")
        self._limiting = tuple(reversed(self._with("limit")))
        self._filling = self._with("fill")
        self._taking = self._with("take")
        self._counting = self._with("fill_stats")

    def _with(self, moment: str) -> tuple[SchedulerPart, ...]:
        return busy_at(moment, self.all, SchedulerPart)

    def find(self, kind: type[P]) -> P | None:
        """The part of this kind, if the scheduler has one."""
        return next((part for part in self.all if isinstance(part, kind)), None)

    def arrived(self, request: Request, now: float) -> None:
        for part in self._arriving:
            part.arrived(request, now)

    def left(self, request: Request, how: Left, now: float) -> None:
        for part in self._leaving:
            part.left(request, how, now)

    def fill_output(self, request: Request, output: EngineCoreOutput, kv: KVCacheManager) -> None:
        for part in self._answering:
            part.fill_output(request, output, kv)

    def limits(self, step: Step, batch: Batch) -> tuple[ChunkLimit, ...]:
        """The limits of a step, in the order in which they cut. The last one is made first, as a limit may
        use those that cut after it."""
        limits: tuple[ChunkLimit, ...] = ()
        for part in self._limiting:
            limit = part.limit(step, batch, limits)
            if limit is not None:
                limits = (limit, *limits)
        return limits

    def fill(self, plan: SchedulerOutput, requests: Mapping[str, Request], now: float) -> None:
        for part in self._filling:
            part.fill(plan, requests, now)

    def take(self, plan: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        for part in self._taking:
            part.take(plan, result, now)

    def fill_stats(self, stats: SchedulerStats, running: Sequence[Request]) -> None:
        for part in self._counting:
            part.fill_stats(stats, running)

    def drop_cached(self) -> None:
        for part in self.all:
            part.drop_cached()

    def check_invariants(self) -> None:
        for part in self.all:
            part.check_invariants()
