"""The interface of a scheduling policy: for the queue, for the pin manager, and for lists of jobs.

The scheduler owns the mechanism (queues, blocks, budgets) and calls the policy; a policy owns the reasons and
never touches a block. Each method has a default, which is what FCFS does: a policy overrides those that it
cares about. FCFS and PRIORITY are policies like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.request import Request
from engine.records.capacity import Capacity
from engine.records.kv_cache_groups import (
    ONE_FULL_GROUP,
    KVCacheGroup,
    attention_groups,
    blocks_per_state,
    num_blocks_held,
)
from engine.records.lessons import Lesson
from engine.records.messages import JobStatus, PastTurn, Signal, TurnReceipt
from engine.records.reported_stats import JobStats
from tracing.events import MovedTurn

if TYPE_CHECKING:
    from tracing.tracer import Tracer

WaitingKey = tuple[float | int | str, ...]
CachedTokens = Callable[[Request], tuple[int, int]]
"""Tokens of a waiting request that need not be computed: those that the device has cached now, and how many
more are worth loading from another tier."""


class PinEnd(StrEnum):
    """The way in which a pin ended; each pin ends in exactly one."""

    HANDED_OVER = "handed_over"
    EXPIRED = "expired"
    REVOKED = "revoked"
    RELEASED = "released"
    SUPERSEDED = "superseded"
    """The job went on without these blocks."""


AS_MANY_AS_ITS_PREFIX = -1
"""Default of ``Pin.num_blocks``: as many as its prefix has. 0 would be a number."""


@dataclass(slots=True, eq=False)
class Pin:
    """A branch tip whose blocks are held after its turn ended. Compared by identity.

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
    """Number of blocks of its tokens to which it is cut as soon as it is held; None: it is not cut."""
    num_needed_blocks: int | None = None
    """When it has ended: how many of its blocks would have been evicted without it; None where that is not
    known."""
    num_prefix_blocks: int = field(init=False)
    """Blocks of its tokens, from the first on, that the job's next turn can hit."""

    def __post_init__(self) -> None:
        self.num_prefix_blocks = len(self.block_hashes)
        if self.num_blocks == AS_MANY_AS_ITS_PREFIX:
            self.num_blocks = self.num_prefix_blocks

    @property
    def held_hashes(self) -> Sequence[BlockHash]:
        """Its hashes of the blocks of tokens that it holds."""
        num_held = self.num_prefix_blocks
        hashes = self.block_hashes
        return hashes if num_held == len(hashes) else hashes[:num_held]


@dataclass(frozen=True, slots=True)
class StalePrefix:
    """The last blocks of a branch tip, which no turn will hit any more: its job went on without them."""

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
    """Usable blocks in the pool, without the null block."""
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
        """The whole of which budget and price are shares: all blocks, and all states counted in blocks."""
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
        """Blocks of the pool that a context of ``num_blocks`` blocks of tokens keeps.

        A group of full attention keeps all of them, other groups those of the last window or the current
        chunk.
        """
        groups = self.kv_cache_groups
        if len(groups) == 1 and groups[0].is_full:
            return num_blocks
        return num_blocks_held(attention_groups(groups), self.block_size, num_blocks)

    def blocks_of_pin(self, num_blocks: int) -> int:
        """Blocks that a pin of ``num_blocks`` blocks of tokens counts as, a state included."""
        return self.blocks_for(num_blocks) + blocks_per_state(self.kv_cache_groups) * (num_blocks > 0)


@dataclass(frozen=True, slots=True)
class PolicyDescription:
    """What a policy was made from: enough to create it again."""

    name: str
    """The name as a command line gives it."""
    options: dict[str, float | int | str | bool | None] = field(default_factory=dict)
    """All options by name, defaults included."""
    estimator_state: str | None = None
    """What it has learned of tools so far, in the format of its state file (JSON); None: nothing."""


class QueuePolicy:
    """Decides admission order and preemption.

    The defaults are FCFS: first come, first served; the request admitted last is preempted. A new order
    overrides ``waiting_key`` and ``victim``.
    """

    lets_pass: bool = False
    """Whether ``may_pass`` is called; if not, the queue stops at the first request that does not fit."""
    orders_by_priority: bool = False
    """Whether requests of a lower ``priority`` are served first."""

    def see_cache(self, cached_tokens: CachedTokens) -> None:
        """Receive the scheduler's look-up of cached tokens, which takes longer the longer the hit is."""

    def on_arrival(self, request: Request, now: float) -> None:
        """Called when a request has come in."""

    def late_by_s(self, request: Request, now: float) -> float | None:
        """Seconds by which a request that has just been queued is expected to start too late: it is then
        refused. None: it may be in time. This changes nothing, since a replay does not ask."""
        return None

    def goes_on(self, request: Request) -> bool:
        """Whether a request that has just been queued is a turn of a job that this core knows, or of one that
        such a job waits for. This changes nothing, since a replay does not ask."""
        return False

    def made_useless(self, request: Request) -> Iterable[str]:
        """The ids of requests that need not go on, as this one has just been queued. This changes nothing,
        since a replay does not ask."""
        return ()

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        """Place in the waiting queue, smaller first; ties keep arrival order. Called whenever the request is
        put there, and at no other time: a policy may note it."""
        return ()

    def changed_keys(self, now: float) -> Iterable[Request]:
        """Requests whose key changed since the last call; the scheduler queues those that wait again."""
        return ()

    def may_admit(self, request: Request, num_free_blocks: int, now: float) -> bool:
        """Whether a waiting request may start now. If not, it is set aside and later ones are tried; with
        ``lets_pass``, only those that may pass."""
        return True

    def may_pass(self, request: Request, now: float) -> bool:
        """Whether a waiting request may start although one ahead of it does not fit.

        Called in the queue's order. The first request that may not ends the search, unless it was preempted.
        """
        return False

    def is_overdue(self, request: Request) -> bool:
        """Whether a waiting request has waited for so long that its tenant's share no longer matters."""
        return False

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        """The pins that a request takes over as it has got its blocks; these pins end now."""
        return ()

    def on_request_gone(self, request: Request, now: float) -> None:
        """Called when a request was aborted or failed; for one that ends by itself, see ``on_turn_end``."""

    def victim(self, running: Sequence[Request], requester: Request, now: float) -> Request:
        """The running request to preempt, which may be the requester."""
        return running[-1]


class RetentionPolicy:
    """Decides what is kept after a turn, for how long, and for whom it is revoked.

    The scheduler calls it where turns end and signals arrive, and the pin manager does. The defaults keep
    nothing. A policy that returns pins also overrides ``due``, ``next_due_s``, ``revocable_for``, ``pins``
    and ``on_pin_ended``.
    """

    wants_signals: bool = False
    """Whether tool-call signals are of any use to this policy."""

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        """The pin of a turn that ended by itself (stop or length); None unpins all its blocks."""
        return None

    def replaced_at_end(self, request: Request, now: float) -> Iterable[Pin]:
        """Pins that end before ``on_turn_end``, since the pin that it returns holds their blocks, too."""
        return ()

    def take_receipt(self, request: Request) -> TurnReceipt | None:
        """The receipt of the turn that just ended, for its client; called once, right after the end."""
        return None

    def on_signal(self, signal: Signal, now: float) -> TurnReceipt | None:
        """Handle a change of a tool call or a job; returns the new decision on the turn, for the client."""
        return None

    def revocable_for(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        """Pins that may be revoked for this requester, cheapest first.

        ``last_resort``: nothing else runs, so all of them may be revoked.
        """
        return iter(())

    def due(self, now: float) -> Iterator[tuple[Pin, PinEnd]]:
        """Pins that end now, past their deadline or released, with the cause; called often, so cheap."""
        return iter(())

    def next_due_s(self) -> float | None:
        """When ``due`` will next have something, for an idle loop to wake up."""
        return None

    def on_pin_ended(self, pin: Pin, cause: PinEnd, now: float, by: str | None = None) -> None:
        """Called exactly once for each pin, when it has ended. ``by``: the request it was revoked for, or
        whose prompt superseded it; None where it ended for no other request."""
        raise NotImplementedError("a policy that pins is told when a pin ends")

    def on_pin_shrunk(
        self, pin: Pin, num_blocks_lost: int, cause: PinEnd, now: float, by: str | None = None
    ) -> None:
        """Called when the pin lost its last blocks and lives on: it was revoked or superseded in part."""

    def take_superseded(self) -> Iterable[StalePrefix]:
        """Prefixes that were superseded since the last call: their pins are cut there, and their blocks are
        evicted before any other that caches something."""
        return ()

    def pins(self) -> Iterable[Pin]:
        """All live pins, for a reset of the prefix cache and for checks."""
        return ()

    def moved_turn(self, pin: Pin, now: float) -> MovedTurn | None:
        """What another core should know of the turn whose blocks a pin holds, as it gets the next one."""
        return None


class JobDirectory:
    """Reports jobs: for metrics, for the trace, and for lists of jobs. By default it knows only what a client
    says."""

    def job_of(self, request: Request) -> str | None:
        """The job of an open request; None if the policy knows of no job."""
        return None if request.job is None else request.job.job_id

    def take_job_stats(self) -> JobStats | None:
        """Statistics of jobs since the last call, for metrics; None: it knows no jobs."""
        return None

    def capacity(self) -> Capacity | None:
        """How many more jobs fit; None: it knows no jobs."""
        return None

    def jobs(self, limit: int, now: float, owner: str | None = None) -> Sequence[JobStatus]:
        """The known jobs that were active last, or those of one owner; at most ``limit``."""
        return ()

    def job(self, job_id: str, now: float) -> JobStatus | None:
        """The status of one job; None: there is no such job."""
        return None

    def past_turns(self, job_id: str, now: float) -> Sequence[PastTurn]:
        """The remembered turns of a job, which may have finished; oldest first."""
        return ()


class SchedulingPolicy(QueuePolicy, RetentionPolicy, JobDirectory):
    """The interface of a policy. Inherit from ``FcfsPolicy`` and override what you decide differently."""

    name: str
    """The name as a command line gives it."""
    trainer: str | None = None
    """Module that learns its lessons in a separate process; None: it has none."""

    def take_lesson(self) -> Lesson | None:
        """The next lesson of its trainer; None while there is not enough news. What is learned returns as a
        signal (``engine.records.lessons.ModelLearned``)."""
        return None

    def describe(self) -> PolicyDescription:
        """Its name and options, for the header of a trace."""
        return PolicyDescription(self.name)

    def close(self) -> None:
        """Persist what must survive; the engine stops."""


PolicyFactory = Callable[[PolicyContext], SchedulingPolicy]
"""Makes a policy in the core process: picklable, called there once."""


class FcfsPolicy(SchedulingPolicy):
    """First come, first served; the youngest running request is preempted. Keeps nothing."""

    name = "fcfs"

    def __init__(self, context: PolicyContext | None = None) -> None:
        """Take a context, so that the class is a PolicyFactory."""


class PriorityPolicy(FcfsPolicy):
    """Lower ``priority`` first, ties by arrival; the worst running request is preempted."""

    name = "priority"
    orders_by_priority = True

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        return (request.priority, request.arrival_time)

    def victim(self, running: Sequence[Request], requester: Request, now: float) -> Request:
        # Of equal ones the last admitted is preempted: otherwise two could take turns forever.
        return max(reversed(running), key=lambda r: (r.priority, r.arrival_time))


def fcfs(context: PolicyContext) -> SchedulingPolicy:
    return FcfsPolicy()


def priority(context: PolicyContext) -> SchedulingPolicy:
    return PriorityPolicy()
