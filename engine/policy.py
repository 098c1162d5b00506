"""The seam between the scheduler and whoever decides: order, admission, pins, victims.

The scheduler owns the mechanism (queues, blocks, budgets) and asks; a policy owns the reasons and never
touches a block. FCFS and PRIORITY are policies like any other. Every method is told the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from engine.core.block_hash import BlockHash
from engine.messages import JobStats, JobStatus, PastTurn, Signal, TurnReceipt
from engine.request import Request

if TYPE_CHECKING:
    from tracing.tracer import Tracer

WaitingKey = tuple[float | int | str, ...]


class PinEnd(StrEnum):
    """The one way in which a pin ended."""

    HANDED_OVER = "handed_over"
    EXPIRED = "expired"
    BROKEN = "broken"
    RELEASED = "released"
    SUPERSEDED = "superseded"
    """Its job went on without these blocks."""


@dataclass(slots=True, eq=False)
class Pin:
    """A frontier whose blocks are held after its turn ended. Compared by identity.

    The policy creates it and may move ``deadline_s``; the scheduler holds the blocks (``num_blocks`` of them,
    fewer after a partial break) until the pin ends.
    """

    pin_id: int
    job_id: str
    request_id: str
    block_hashes: list[BlockHash]
    """Hashes of the frontier's full blocks, first to last."""
    deadline_s: float
    num_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_blocks = len(self.block_hashes)


@dataclass(frozen=True, slots=True)
class DeadEnd:
    """The last blocks of a frontier, which no turn will ask for any more: its job went on without them."""

    block_hashes: Sequence[BlockHash]
    """Of the dead blocks, first to last."""
    num_kept_blocks: int
    """Of the frontier, before them."""
    pin: Pin | None
    """The frontier's, if it had one when this was decided."""
    by: str
    """Request that went on without them."""


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy is told about the engine it decides for."""

    block_size: int
    num_blocks: int
    """Usable blocks in the pool (the null block not counted)."""
    tracer: Tracer | None = None
    num_host_blocks: int = 0
    """Copies that fit in host memory, where what is computed is also kept to be loaded back; 0: it is not."""

    @property
    def has_host_tier(self) -> bool:
        return self.num_host_blocks > 0


@dataclass(frozen=True, slots=True)
class PolicyDescription:
    """What a policy was made from: enough to make it anew."""

    name: str
    """As command lines have it."""
    options: dict[str, float | int | str | bool | None] = field(default_factory=dict)
    """All of them by name, defaults included."""
    estimator_state: str | None = None
    """What it has learned of tools by now, as its state file has it (JSON); None: nothing."""


class SchedulingPolicy(Protocol):
    """Answers the scheduler's questions; see ``FcfsPolicy`` for the least that works."""

    wants_signals: bool
    """Whether tool-call signals are of any use to this policy."""
    lets_pass: bool
    """Whether ``may_pass`` is worth asking; if not the queue stops at the first request without room."""

    def on_arrival(self, request: Request, now: float) -> None:
        """A turn came in: open or continue its job, close the gap."""

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        """Place in the waiting queue, smaller first; ties keep arrival order. Asked whenever the request is
        put there, and at no other time: a policy may note it."""

    def changed_keys(self) -> Iterable[Request]:
        """Requests whose key changed since the last call; the scheduler queues those that wait anew."""

    def may_admit(self, request: Request, num_free_blocks: int, now: float) -> bool:
        """Whether a waiting request may start now; if not it is set aside and those behind it are tried: all
        of them, or where some may pass (``lets_pass``) those."""

    def is_overdue(self, request: Request) -> bool:
        """Whether a waiting request has waited for so long that its tenant's share is no reason any more."""

    def may_pass(self, request: Request, now: float) -> bool:
        """Whether a waiting request may start although one ahead of it found no room.

        Asked in the queue's order; but for preempted ones, the first that may not ends the search.
        """

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        """The request got its blocks: the pins it takes over, which now end."""

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        """A turn ended by itself (stop or length): hold its frontier, or None to let it go."""

    def on_request_gone(self, request: Request, now: float) -> None:
        """A request was aborted or failed; its turn is not held."""

    def on_signal(self, signal: Signal, now: float) -> TurnReceipt | None:
        """A tool call or a job changed state: the new decision about the turn, for the client."""

    def take_receipt(self, request: Request) -> TurnReceipt | None:
        """What to tell the client about the turn that just ended; asked once, right after ``on_turn_end``."""

    def breakable(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        """Pins this requester may break, cheapest first; all of them if ``last_resort`` (nothing runs)."""

    def victim(self, running: Sequence[Request], requester: Request, now: float) -> Request:
        """Which running request to preempt (it may be the requester)."""

    def due(self, now: float) -> Iterator[tuple[Pin, PinEnd]]:
        """Pins that end now, past their deadline or let go, with the cause; asked often, so cheap."""

    def next_due_s(self) -> float | None:
        """When ``due`` will next have something, for an idle loop to wake up."""

    def on_pin_ended(self, pin: Pin, cause: PinEnd, now: float) -> None:
        """The scheduler ended this pin; said exactly once for each."""

    def on_pin_shrunk(self, pin: Pin, num_blocks_lost: int, now: float) -> None:
        """A partial break took the tail of this pin."""

    def take_superseded(self) -> Iterable[DeadEnd]:
        """What jobs went on without since the last call: its pins end there, and its blocks are reused before
        any other that caches something."""

    def on_superseded(self, dead: DeadEnd, num_unpinned_blocks: int, now: float) -> None:
        """That was done. So many blocks were cut off its pin, which lives on; 0: it had none, or it ended."""

    def pins(self) -> Iterable[Pin]:
        """All pins alive, for a reset of the prefix cache and for checks."""

    def job_of(self, request: Request) -> str | None:
        """Whose turn an open request is; None if the policy knows of no job."""

    def take_job_stats(self) -> JobStats | None:
        """What became of jobs since the last call, for metrics; None: it knows no jobs."""

    def jobs(self, limit: int, now: float, owner: str | None = None) -> Sequence[JobStatus]:
        """At most so many of the jobs it knows, or of those of one owner, those active last first."""

    def job(self, job_id: str, now: float) -> JobStatus | None:
        """What it knows of one; None: of no such job."""

    def past_turns(self, job_id: str, now: float) -> Sequence[PastTurn]:
        """Turns that ended of a job, which may have finished: oldest first, as far as they are remembered."""

    def describe(self) -> PolicyDescription:
        """What it is, for the head of a trace."""

    def close(self) -> None:
        """The engine stops: persist what must survive."""


PolicyFactory = Callable[[PolicyContext], SchedulingPolicy]
"""How a policy crosses into the core process: picklable, called there once."""


class FcfsPolicy:
    """First come, first served; the youngest running request is preempted. Holds nothing."""

    name = "fcfs"
    wants_signals = False
    lets_pass = False

    def on_arrival(self, request: Request, now: float) -> None:
        pass

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        return ()

    def changed_keys(self) -> Iterable[Request]:
        return ()

    def may_admit(self, request: Request, num_free_blocks: int, now: float) -> bool:
        return True

    def is_overdue(self, request: Request) -> bool:
        return False

    def may_pass(self, request: Request, now: float) -> bool:
        return False

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        return ()

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        return None

    def on_request_gone(self, request: Request, now: float) -> None:
        pass

    def on_signal(self, signal: Signal, now: float) -> TurnReceipt | None:
        return None

    def take_receipt(self, request: Request) -> TurnReceipt | None:
        return None

    def breakable(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        return iter(())

    def victim(self, running: Sequence[Request], requester: Request, now: float) -> Request:
        return running[-1]

    def due(self, now: float) -> Iterator[tuple[Pin, PinEnd]]:
        return iter(())

    def next_due_s(self) -> float | None:
        return None

    def on_pin_ended(self, pin: Pin, cause: PinEnd, now: float) -> None:
        raise AssertionError("this policy holds no pins")

    def on_pin_shrunk(self, pin: Pin, num_blocks_lost: int, now: float) -> None:
        raise AssertionError("this policy holds no pins")

    def take_superseded(self) -> Iterable[DeadEnd]:
        return ()

    def on_superseded(self, dead: DeadEnd, num_unpinned_blocks: int, now: float) -> None:
        raise AssertionError("this policy knows no jobs that go on")

    def pins(self) -> Iterable[Pin]:
        return ()

    def job_of(self, request: Request) -> str | None:
        return None if request.job is None else request.job.job_id

    def take_job_stats(self) -> JobStats | None:
        return None

    def jobs(self, limit: int, now: float, owner: str | None = None) -> Sequence[JobStatus]:
        return ()

    def job(self, job_id: str, now: float) -> JobStatus | None:
        return None

    def past_turns(self, job_id: str, now: float) -> Sequence[PastTurn]:
        return ()

    def describe(self) -> PolicyDescription:
        return PolicyDescription(self.name)

    def close(self) -> None:
        pass


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
