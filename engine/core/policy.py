"""What a scheduling policy is asked: by the queue, by the pin manager, and by those who list jobs.

The scheduler owns the mechanism (queues, blocks, budgets) and asks; a policy owns the reasons and never
touches a block. Each question has a default answer, which is what FCFS does: a policy answers those that it
cares about. FCFS and PRIORITY are policies like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.request import Request
from engine.kv_cache_groups import (
    ONE_FULL_GROUP,
    KVCacheGroup,
    attention_groups,
    blocks_per_state,
    num_blocks_held,
)
from engine.messages import JobStatus, PastTurn, Signal, TurnReceipt
from engine.process.lessons import Lesson
from engine.reported_stats import JobStats

if TYPE_CHECKING:
    from tracing.tracer import Tracer

WaitingKey = tuple[float | int | str, ...]
CachedTokens = Callable[[Request], tuple[int, int]]
"""Tokens of a waiting request that need not be computed: those that the device has cached now, and how many
more are worth loading from another tier."""


class PinEnd(StrEnum):
    """The one way in which a pin ended."""

    HANDED_OVER = "handed_over"
    EXPIRED = "expired"
    REVOKED = "revoked"
    RELEASED = "released"
    SUPERSEDED = "superseded"
    """Its job went on without these blocks."""


AS_MANY_AS_ITS_PREFIX = -1
"""Blocks of a pin that does not say how many; 0 is a number."""


@dataclass(slots=True, eq=False)
class Pin:
    """A tip whose blocks are held after its turn ended. Compared by identity.

    The policy creates it and may move ``deadline_s`` when a signal comes; the scheduler holds the blocks
    until the pin ends, fewer after a partial revocation.
    """

    pin_id: int
    job_id: str
    request_id: str
    block_hashes: list[BlockHash]
    """Hashes of the tip's full blocks, first to last."""
    deadline_s: float
    num_blocks: int = AS_MANY_AS_ITS_PREFIX
    """Blocks of the pool that it holds, over all groups: ``PolicyContext.blocks_of_pin`` of its prefix, which
    the scheduler fills in when it is held."""
    num_wanted_blocks: int | None = None
    """To how many blocks of its tokens it is cut as soon as it is held; None: to none fewer."""
    num_needed_blocks: int | None = None
    """When it has ended: how many of its blocks would have been evicted without it; None where that is not
    known."""
    num_prefix_blocks: int = field(init=False)
    """Blocks of its tokens, from the first on: what a turn that comes back finds."""

    def __post_init__(self) -> None:
        self.num_prefix_blocks = len(self.block_hashes)
        if self.num_blocks == AS_MANY_AS_ITS_PREFIX:
            self.num_blocks = self.num_prefix_blocks

    @property
    def held_hashes(self) -> Sequence[BlockHash]:
        """Those of its hashes that are of tokens whose blocks it holds."""
        num_held, hashes = self.num_prefix_blocks, self.block_hashes
        return hashes if num_held == len(hashes) else hashes[:num_held]


@dataclass(frozen=True, slots=True)
class StalePrefix:
    """The last blocks of a tip, which no turn will ask for any more: its job went on without them."""

    block_hashes: Sequence[BlockHash]
    """Hashes of the stale blocks, first to last."""
    num_kept_blocks: int
    """How many blocks of the tip come before them."""
    pin: Pin | None
    """The tip's pin, if it had one when this was decided."""
    by: str
    """Request that went on without them."""


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy knows of the engine it decides for."""

    block_size: int
    num_blocks: int
    """Usable blocks in the pool (the null block not counted)."""
    tracer: Tracer | None = None
    num_host_blocks: int = 0
    """Blocks that fit in host memory, to which computed blocks are offloaded; 0: there is no host tier."""
    kv_cache_groups: tuple[KVCacheGroup, ...] = ONE_FULL_GROUP
    """Layers that share a block table. A block of the pool is of one group."""
    num_states: int = 0
    """Usable state slots, of a model that has layers with states."""
    engine_index: int = 0
    """Number of the engine core among those of its server."""

    @property
    def num_countable_blocks(self) -> int:
        """What budget and price are shares of: all blocks, and all states as the blocks they count as."""
        return self.num_blocks + self.num_states * blocks_per_state(self.kv_cache_groups)

    @property
    def has_host_tier(self) -> bool:
        return self.num_host_blocks > 0

    @property
    def has_windows(self) -> bool:
        """Whether the model has layers with a sliding window or chunks."""
        return not all(group.is_full for group in self.kv_cache_groups)

    @property
    def blocks_per_block(self) -> int:
        """Blocks of the pool that a block of tokens keeps: one per group of full attention."""
        return sum(group.is_full for group in self.kv_cache_groups)

    def blocks_for(self, num_blocks: int) -> int:
        """Blocks of the pool that a context of so many blocks of tokens keeps.

        All of them in a group of full attention, in others those of the last window, or of the chunk that
        goes on.
        """
        groups = self.kv_cache_groups
        if len(groups) == 1 and groups[0].is_full:
            return num_blocks
        return num_blocks_held(attention_groups(groups), self.block_size, num_blocks)

    def blocks_of_pin(self, num_blocks: int) -> int:
        """As how many blocks a pin of so many blocks of tokens counts: those of its context, and a state."""
        return self.blocks_for(num_blocks) + blocks_per_state(self.kv_cache_groups) * (num_blocks > 0)


@dataclass(frozen=True, slots=True)
class PolicyDescription:
    """What a policy was made from: enough to create it again."""

    name: str
    """The name as a command line gives it."""
    options: dict[str, float | int | str | bool | None] = field(default_factory=dict)
    """All options by name, defaults included."""
    estimator_state: str | None = None
    """What it has learned of tools by now, as its state file has it (JSON); None: nothing."""


class QueuePolicy:
    """Who runs next, and who gives way: asked by the scheduler.

    The defaults are FCFS: first come, first served; the request admitted last is preempted. A new order
    answers ``waiting_key`` and ``victim``.
    """

    lets_pass: bool = False
    """Whether ``may_pass`` is asked; if not, the queue stops at the first request that does not fit."""

    def see_cache(self, cached_tokens: CachedTokens) -> None:
        """The scheduler is made: how to look a prompt up in its cache. That takes as long as a hit is."""

    def on_arrival(self, request: Request, now: float) -> None:
        """A request came in."""

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        """Place in the waiting queue, smaller first; ties keep arrival order. Asked whenever the request is
        put there, and at no other time: a policy may note it."""
        return ()

    def changed_keys(self, now: float) -> Iterable[Request]:
        """Requests whose key changed since the last call; the scheduler queues those that wait again."""
        return ()

    def may_admit(self, request: Request, num_free_blocks: int, now: float) -> bool:
        """Whether a waiting request may start now; if not it is set aside and those behind it are tried: all
        of them, or where some may pass (``lets_pass``) those."""
        return True

    def may_pass(self, request: Request, now: float) -> bool:
        """Whether a waiting request may start although one ahead of it does not fit.

        Asked in the queue's order; but for preempted ones, the first that may not ends the search.
        """
        return False

    def is_overdue(self, request: Request) -> bool:
        """Whether a waiting request has waited for so long that its tenant's share is no reason any more."""
        return False

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        """The request got its blocks: the pins it takes over, which now end."""
        return ()

    def on_request_gone(self, request: Request, now: float) -> None:
        """A request was aborted or failed. For one that ends by itself ``on_turn_end`` is called instead."""

    def victim(self, running: Sequence[Request], requester: Request, now: float) -> Request:
        """Which running request to preempt (it may be the requester)."""
        return running[-1]


class RetentionPolicy:
    """What is kept after a turn, for how long, and for whom it is revoked: asked by the scheduler where turns
    end and signals arrive, and by the pin manager.

    The defaults keep nothing. A policy that returns pins answers ``due``, ``next_due_s``, ``revocable_for``
    and ``pins``, too, and implements ``on_pin_ended``.
    """

    wants_signals: bool = False
    """Whether tool-call signals are of any use to this policy."""

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        """A turn ended by itself (stop or length): pin its blocks, or None to unpin them all."""
        return None

    def take_receipt(self, request: Request) -> TurnReceipt | None:
        """What to tell the client about the turn that just ended; asked once, right after ``on_turn_end``."""
        return None

    def on_signal(self, signal: Signal, now: float) -> TurnReceipt | None:
        """A tool call or a job changed state: the new decision about the turn, for the client."""
        return None

    def revocable_for(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        """Pins that may be revoked for this requester, cheapest first.

        With ``last_resort`` nothing else runs: then all of them.
        """
        return iter(())

    def due(self, now: float) -> Iterator[tuple[Pin, PinEnd]]:
        """Pins that end now, past their deadline or released, with the cause; asked often, so cheap."""
        return iter(())

    def next_due_s(self) -> float | None:
        """When ``due`` will next have something, for an idle loop to wake up."""
        return None

    def on_pin_ended(self, pin: Pin, cause: PinEnd, now: float, by: str | None = None) -> None:
        """The scheduler ended this pin; called exactly once for each. ``by``: the request it was revoked
        for, or whose prompt superseded it; None where it ended for no other request."""
        raise NotImplementedError("a policy that pins is told when a pin ends")

    def on_pin_shrunk(
        self, pin: Pin, num_blocks_lost: int, cause: PinEnd, now: float, by: str | None = None
    ) -> None:
        """The pin lost its last blocks and lives on: it was revoked or superseded in part."""

    def take_superseded(self) -> Iterable[StalePrefix]:
        """What jobs went on without since the last call: its pins end there, and its blocks are evicted
        before any other that caches something."""
        return ()

    def pins(self) -> Iterable[Pin]:
        """All pins alive, for a reset of the prefix cache and for checks."""
        return ()


class JobDirectory:
    """What is known of jobs: asked for metrics, for the trace, and by those who list jobs. By default nothing
    but what a client says."""

    def job_of(self, request: Request) -> str | None:
        """Whose turn an open request is; None if the policy knows of no job."""
        return None if request.job is None else request.job.job_id

    def take_job_stats(self) -> JobStats | None:
        """What became of jobs since the last call, for metrics; None: it knows no jobs."""
        return None

    def jobs(self, limit: int, now: float, owner: str | None = None) -> Sequence[JobStatus]:
        """The jobs it knows that were active last, or those of one owner; at most ``limit``."""
        return ()

    def job(self, job_id: str, now: float) -> JobStatus | None:
        """What it knows of one job; None: there is no such job."""
        return None

    def past_turns(self, job_id: str, now: float) -> Sequence[PastTurn]:
        """Turns that ended of a job, which may have finished: oldest first, as far as they are remembered."""
        return ()


class SchedulingPolicy(QueuePolicy, RetentionPolicy, JobDirectory):
    """All that a policy is asked. Inherit from ``FcfsPolicy`` and answer what you decide differently."""

    name: str
    """The name as a command line gives it."""
    trainer: str | None = None
    """Module that learns its lessons, in a process of its own; None: it has none."""

    def take_lesson(self) -> Lesson | None:
        """What its trainer is to learn now; None while there is not enough news. What is learned comes
        back as a signal (``engine.process.lessons.ModelLearned``)."""
        return None

    def describe(self) -> PolicyDescription:
        """What it is, for the head of a trace."""
        return PolicyDescription(self.name)

    def close(self) -> None:
        """The engine stops: persist what must survive."""


PolicyFactory = Callable[[PolicyContext], SchedulingPolicy]
"""How a policy crosses into the core process: picklable, called there once."""


class FcfsPolicy(SchedulingPolicy):
    """First come, first served; the youngest running request is preempted. Keeps nothing."""

    name = "fcfs"

    def __init__(self, context: PolicyContext | None = None) -> None:
        """A class that takes a context is its own PolicyFactory."""


class PriorityPolicy(FcfsPolicy):
    """Lower ``priority`` first, ties by arrival; the worst running request is preempted."""

    name = "priority"

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        return (request.priority, request.arrival_time)

    def victim(self, running: Sequence[Request], requester: Request, now: float) -> Request:
        # Of equals the one admitted last goes: else two could take turns for ever.
        return max(reversed(running), key=lambda r: (r.priority, r.arrival_time))


def fcfs(context: PolicyContext) -> SchedulingPolicy:
    return FcfsPolicy()


def priority(context: PolicyContext) -> SchedulingPolicy:
    return PriorityPolicy()
